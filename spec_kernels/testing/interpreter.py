"""Triton's interpreter for tests: quicker, and able to say what a kernel read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator

import numpy as np
import torch
from triton.runtime import interpreter


@functools.cache
def speed_up() -> None:
    """Patches ``triton.language`` once for good instead of at every call of a device function,
    makes what a tensor knows of its type once a type instead of once a tensor, and leaves out the
    overflow checks of every integer operation (``overflow_checks`` has them back).

    The kernels compute the same: a whole suite takes a quarter of the time.
    """
    patch, patched, seen = interpreter._patch_lang, set(), set()

    def patch_once(function):
        if function not in seen:
            seen.add(function)
            modules = {id(v) for v in function.__globals__.values() if inspect.ismodule(v)}
            key = frozenset(modules & {id(interpreter.tl), id(interpreter.tl.core)})
            if key not in patched:
                patched.add(key)
                patch(function)
        return nothing_to_restore

    nothing_to_restore = interpreter._LangPatchScope()
    interpreter._patch_lang = patch_once
    _make_once(
        interpreter.tl.block_type,
        lambda element_ty, shape: (element_ty.name, *(getattr(s, "value", s) for s in shape)),
        lambda element_ty, shape: {"element_ty": element_ty},
    )
    _make_once(
        interpreter.tl.tensor,
        lambda handle, type: type.name,
        lambda handle, type: {"handle": handle, "type": type, "dtype": type.scalar},
    )
    _check_overflow(False)


def _make_once(cls: type, key: Callable, own: Callable) -> None:
    """Objects of ``cls`` whose arguments have one ``key`` share all attributes but their ``own``.

    For attributes that nobody changes once they are set.
    """
    make, known = cls.__init__, {}

    def init(self, *args):
        attributes = known.get(key(*args))
        if attributes is None:
            make(self, *args)
            known[key(*args)] = dict(vars(self))
        else:
            vars(self).update(attributes, **own(*args))

    cls.__init__ = init


def _check_overflow(value: bool) -> None:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=value)


@contextlib.contextmanager
def overflow_checks() -> Iterator[None]:
    """Integer arithmetic that overflows raises."""
    before = interpreter.interpreter_builder.options.sanitize_overflow
    _check_overflow(True)
    try:
        yield
    finally:
        _check_overflow(before)


@dataclasses.dataclass
class Reads:
    """Elements read from a tensor's storage, and the loads that read any."""

    num_elements: int = 0
    num_loads: int = 0


@contextlib.contextmanager
def count_reads(*tensors: torch.Tensor) -> Iterator[list[Reads]]:
    """Counts what kernels read of each tensor, by address."""
    counts = [Reads() for _ in tensors]
    spans = [_span(t) for t in tensors]

    def count(addresses):
        for reads, (begin, end) in zip(counts, spans, strict=True):
            num = int(((addresses >= begin) & (addresses < end)).sum())
            reads.num_elements += num
            reads.num_loads += num > 0

    with _watch_loads(count):
        yield counts


@contextlib.contextmanager
def only_reads(*tensors: torch.Tensor) -> Iterator[None]:
    """A load from none of ``tensors``, nor from memory allocated inside, raises IndexError."""
    spans = [_span(t) for t in tensors]
    empty = torch.empty

    def remember(*args, **kwargs):
        t = empty(*args, **kwargs)
        spans.append(_span(t))
        return t

    def check(addresses):
        inside = np.zeros_like(addresses, dtype=bool)
        for begin, end in spans:
            inside |= (addresses >= begin) & (addresses < end)
        if not inside.all():
            raise IndexError(f"a kernel read {int((~inside).sum())} elements of no tensor")

    torch.empty = remember
    try:
        with _watch_loads(check):
            yield
    finally:
        torch.empty = empty


def _span(t: torch.Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@contextlib.contextmanager
def _watch_loads(see: Callable[[np.ndarray], None]) -> Iterator[None]:
    """Calls ``see`` with the addresses of every load before it is made."""
    builder = interpreter.interpreter_builder
    load = builder.create_masked_load

    def watched(ptrs, mask, *rest):
        see(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
        return load(ptrs, mask, *rest)

    builder.create_masked_load = watched
    try:
        yield
    finally:
        del builder.create_masked_load
