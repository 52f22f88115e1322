"""Argument checks and the ``backend=`` switch shared by every op's ``api.py``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

from spec_kernels import _library

BACKENDS = ("reference", "cpu", "triton", "cuda")
# Backends that the tests add: name -> namespace of torch.ops where the same ops, for CPU tensors,
# are defined.
EXTRA_BACKENDS: dict[str, str] = {}
INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.bfloat16)
FLOATS_AND_HALF = (*FLOATS, torch.float16)
FP8 = (torch.float8_e4m3fn,)


def fail(op: str, argument: str, expected: object, got: object) -> None:
    """Raises the one form of error for bad arguments."""
    raise ValueError(f"spec_kernels::{op}: {argument}: expected {expected}, got {got}")


def check_tensor(op: str, name: str, t: object, shape: tuple, dtypes: tuple, device=None) -> None:
    """Checks type, shape (``None`` matches any size), dtype and, if given, device of ``t``."""
    if not isinstance(t, torch.Tensor):
        fail(op, name, "a tensor", type(t).__name__)
    got = t.shape
    # One comparison settles the usual case; this function is most of an op's fixed cost.
    if got == shape and t.dtype in dtypes and (device is None or t.device == device):
        return
    if len(got) != len(shape) or any(
        w is not None and w != g for w, g in zip(shape, got, strict=True)
    ):
        want = ", ".join("*" if w is None else str(w) for w in shape)
        fail(op, name, f"shape [{want}]", list(got))
    if t.dtype not in dtypes:
        fail(op, name, " or ".join(str(d).removeprefix("torch.") for d in dtypes), t.dtype)
    if device is not None and t.device != device:
        fail(op, name, f"device {device}", t.device)


def check_last_dim(op: str, name: str, t: torch.Tensor) -> None:
    """Rows may be strided; the elements of the last dimension must be adjacent."""
    if t.dim() and t.stride(-1) != 1 and t.shape[-1] > 1:
        fail(op, name, "stride 1 in the last dimension", t.stride(-1))


def check_contiguous(op: str, name: str, t: torch.Tensor) -> None:
    if not t.is_contiguous():
        fail(op, name, "a contiguous tensor", f"strides {list(t.stride())}")


def check_finite(op: str, name: str, value: float) -> None:
    """By comparison, which torch.compile can trace where the number depends on a shape."""
    if not -math.inf < value < math.inf:
        fail(op, name, "a finite number", value)


def check_no_overlap(op: str, name: str, t: torch.Tensor) -> None:
    """What is written must not hold one element at two indices."""
    if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
        fail(op, name, "rows that do not overlap", f"strides {list(t.stride())}")


def check_cache_scale(op: str, name: str, scale, cache: torch.Tensor, num: int):
    """``[num]`` fp32 factors of what ``cache`` holds; a single one is expanded."""
    if cache.dtype not in FP8:
        if scale is not None:
            fail(op, name, "None for a cache that is not float8_e4m3fn", "a tensor")
        return None
    if scale is None:
        fail(op, name, "a tensor for a cache of float8_e4m3fn", None)
    if isinstance(scale, torch.Tensor) and scale.dim() < 2 and scale.numel() == 1:
        scale = scale.reshape(1).expand(num)
    check_tensor(op, name, scale, (num,), (torch.float32,), cache.device)
    return scale


def check_scale_values(op: str, scales: dict[str, torch.Tensor | None]) -> None:
    """For the references; waits for the device."""
    for name, scale in scales.items():
        wrong = [] if scale is None else (~(scale.isfinite() & (scale > 0))).nonzero().flatten()
        if len(wrong):
            i = int(wrong[0])
            fail(op, f"{name}[{i}]", "a positive finite number", float(scale[i]))


def asked_to_check(device: torch.device) -> bool:
    """Whether ``SPEC_KERNELS_CHECK=1`` asks to wait for the device and to raise for wrong values.

    Not while a graph is captured, which the wait would break.
    """
    if os.environ.get("SPEC_KERNELS_CHECK") != "1":
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


# Inputs that an output may be, element for element: each is read before it is written.
_MAY_BE_OUTPUT = {
    "hidden_capture": ("x",),
    "moe_experts": ("x",),
    "pcie_allreduce": ("input",),
    "pcie_allreduce_norm": ("input",),
    "rope_append": ("q",),
    "rope_append_mla": ("q_rope",),
}


def check_outputs_apart(op: str, args: tuple) -> None:
    """What ``op`` writes must overlap neither itself nor anything else that it is given.

    For the references, which would otherwise read half-written inputs; compiled kernels check it
    themselves, and more strictly where views interleave.
    """
    outputs, others = [], []
    for argument, value in zip(_library.arguments(op), args, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        many = isinstance(value, list | tuple)
        for i, t in enumerate(value if many else (value,)):
            if isinstance(t, torch.Tensor) and t.numel() and t.device.type != "meta":
                name = f"{argument.name}[{i}]" if many else argument.name
                (outputs if written else others).append((name, t))
    for i, (name, out) in enumerate(outputs):
        check_no_overlap(op, name, out)
        for other_name, other in outputs[i + 1 :] + others:
            if not _share_memory(out, other):
                continue
            same = out.data_ptr() == other.data_ptr() and out.stride() == other.stride()
            if not (same and other_name in _MAY_BE_OUTPUT.get(op, ())):
                fail(op, name, f"memory apart from {other_name}", "an overlap")


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dense views surely overlap, or any two views start at one address."""
    if a.device != b.device:
        return False
    if a.data_ptr() == b.data_ptr():
        return True
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def run(
    op: str,
    backend: str | None,
    device: torch.device,
    args: tuple,
    reference: Callable[..., None],
) -> None:
    """Calls op ``op`` on ``args`` through ``backend``; ``None`` leaves it to torch's dispatcher.

    Values that only the kernel reads (indices, lengths, pages) are refused there with the same
    wording, and arrive here as the ``ValueError`` they are.
    """
    if backend is None:
        function = getattr(torch.ops.spec_kernels, op).default
    elif backend == "reference":
        function = torch.no_grad()(reference)
        if not torch.compiler.is_compiling():
            check_outputs_apart(op, args)
    elif backend in ("cpu", "cuda"):
        if device.type != backend:
            fail(op, "backend", f"tensors on {backend} for backend {backend!r}", device)
        if not _library.has_kernel(op, backend):
            reason = _library.LIBRARIES[backend].reason
            fail(op, "backend", f"a compiled kernel for {backend!r}", f"none (library: {reason})")
        function = getattr(torch.ops.spec_kernels, op).default
    elif backend == "triton":
        reason = _library.why_no_triton(op)
        if reason:
            fail(op, "backend", "a Triton kernel", reason)
        function = _library.triton_kernel(op)
        if not torch.compiler.is_compiling():
            check_outputs_apart(op, args)
    elif backend in EXTRA_BACKENDS:
        if device.type != "cpu":
            fail(op, "backend", f"tensors on cpu for backend {backend!r}", device)
        function = getattr(getattr(torch.ops, EXTRA_BACKENDS[backend]), op).default
    else:
        fail(op, "backend", f"None or one of {BACKENDS}", repr(backend))
    try:
        function(*args)
    except RuntimeError as error:
        message = str(error)
        if message.startswith("spec_kernels::"):
            raise ValueError(message.split("\nException raised from", 1)[0]) from None
        raise
