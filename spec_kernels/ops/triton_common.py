"""What the Triton kernels share: the interpreter's two gaps, fp8, and where they may run.

Triton's interpreter multiplies the bit patterns of bf16 and truncates where a device rounds. What
mends that is compiled in under the interpreter alone (``INTERPRET``); on a device the operands of a
dot stay 16-bit.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from spec_kernels.ops.common import fail

# Chosen when this is first imported, as Triton itself does.
INTERPRETED = bool(triton.knobs.runtime.interpret)
INTERPRET = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 to ``dtype``, to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        word = x.to(tl.uint32, bitcast=True).to(tl.uint64)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, word.to(tl.uint32).to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def finite_or_nan(x):
    return tl.where(tl.abs(x) == float("inf"), float("nan"), x)


@triton.jit
def operand(x):
    """An operand of ``tl.dot``."""
    if INTERPRET and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def from_cache(x, dtype: tl.constexpr, FP8: tl.constexpr):
    """Cache elements as ``dtype``; fp8 arrives as bytes, and e4m3 is exact in bf16 and fp16.

    ``FP8``: "" (it is no fp8), "native" (the device converts), "bits" (it cannot: see
    ``fp8_conversion``).
    """
    if FP8 == "native":
        x = x.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FP8 == "bits":
        # The bits of e4m3 in an fp16, which has another bias, are 2**-8 of the value, subnormals
        # included.
        wide = x.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = (half.to(tl.float16, bitcast=True) * 256.0).to(tl.float32)
        x = round_to(tl.where((wide & 0x7F) == 0x7F, float("nan"), value), dtype)
    return x


def fp8_conversion(dtype: torch.dtype, arch: int) -> str:
    """How ``from_cache`` converts a cache of ``dtype`` on ``arch``: e4m3 came with sm_89."""
    if dtype != torch.float8_e4m3fn:
        return ""
    return "native" if arch >= 89 and not INTERPRETED else "bits"


def check_device(op: str, device: torch.device) -> None:
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        expected = "tensors on cuda for backend 'triton' (on cpu: set TRITON_INTERPRET=1 first)"
        fail(op, "backend", expected, device)


@functools.cache
def device_facts(device: torch.device) -> tuple[int, int]:
    """Architecture as ``10 * major + minor``, and number of multiprocessors.

    Under the interpreter: the strictest architecture, and so few that a program takes several
    items of work.
    """
    if INTERPRETED:
        return 120, 2
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count
