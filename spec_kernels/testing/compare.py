"""How a result is judged: its error against float64, beside that of plain PyTorch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

import torch

from spec_kernels import _library
from spec_kernels.ops.common import EXTRA_BACKENDS


def assert_as_accurate(
    got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, factor: float = 2.0
) -> None:
    """Fails unless the error of ``got`` is at most ``factor`` times that of ``plain``.

    Args:
        got: the kernel's result.
        exact: the same quantity computed in float64.
        plain: the obvious PyTorch expression in the kernel's own dtype.
        factor: how much worse than ``plain`` is still accepted (the largest error counts). One eps
            of the largest value is always granted, since ``plain`` may happen to be exact.
    """
    assert got.shape == exact.shape == plain.shape, (got.shape, exact.shape, plain.shape)
    assert got.dtype == plain.dtype, (got.dtype, plain.dtype)
    if got.numel() == 0:
        return
    # Equality covers infinities of equal sign, whose difference is NaN.
    same = (got.double() == exact) | (got.isnan() & exact.isnan())
    error = torch.where(same, 0.0, (got.double() - exact).abs()).max().item()
    plain_same = (plain.double() == exact) | (plain.isnan() & exact.isnan())
    allowed = torch.where(plain_same, 0.0, (plain.double() - exact).abs()).max().item()
    finite = exact[exact.isfinite()]
    grain = torch.finfo(got.dtype).eps * (finite.abs().max().item() if finite.numel() else 0.0)
    assert error <= factor * allowed + grain, (
        f"largest error {error:.3e}; PyTorch in {plain.dtype}: {allowed:.3e} (x {factor} allowed)"
    )


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bit patterns, so that equality tells -0.0 from 0.0 and compares NaN payloads."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(integers[t.element_size()])


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    different = bits(a) != bits(b)
    assert not different.any(), (
        f"{int(different.sum())} of {a.numel()} elements differ in their bits"
    )


def poisoned(*shape: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """NaN (floats) or huge values (integers): what is not written, or wrongly read, shows."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max // 2
    return torch.full(shape, value, dtype=dtype, device=device)


def raw_op(op: str, backend: str) -> Callable[..., None]:
    """What a compiled ``backend`` registers for ``op``, past the checks of the Python face."""
    return getattr(getattr(torch.ops, EXTRA_BACKENDS.get(backend, _library.NAMESPACE)), op).default


def value_checks(backend: str) -> tuple[bool, ...]:
    """How calls with a value out of range (index, length, page) end on ``backend``: True, raising.

    Backends that can read values at no cost raise. On a device reading them would synchronise: the
    value is taken for absent and the call goes through (False); CUDA kernels also raise, after the
    fact, where ``SPEC_KERNELS_CHECK=1`` asks for it. A test goes through all of them.
    """
    kind = backend.removesuffix("_on_device")
    return {"reference": (True,), "cpu": (True,), "triton": (False,)}.get(kind, (False, True))


@contextlib.contextmanager
def value_out_of_range(match: str, raises: bool) -> Iterator[None]:
    """For a call with a value out of range, in one of the ways of ``value_checks``."""
    before = os.environ.get("SPEC_KERNELS_CHECK")
    os.environ["SPEC_KERNELS_CHECK"] = str(int(raises))
    try:
        yield
    except ValueError as error:
        assert raises and re.search(match, str(error)), error
    else:
        assert not raises, f"no error {match!r}"
    finally:
        if before is None:
            del os.environ["SPEC_KERNELS_CHECK"]
        else:
            os.environ["SPEC_KERNELS_CHECK"] = before
