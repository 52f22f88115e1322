"""Tensors in nests of containers and objects, by where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class _Slots:
    """Attributes of an object that has no dictionary, to be read like one."""

    def __init__(self, value: object):
        self._value = value
        names = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = [n for own in names for n in ((own,) if isinstance(own, str) else own)]
        self._names = [name for name in names if hasattr(value, name)]

    def items(self) -> Iterator[tuple[str, object]]:
        return ((name, getattr(self._value, name)) for name in self._names)

    def __getitem__(self, name: str) -> object:
        return getattr(self._value, name)


def children(value: object) -> Iterator[tuple[str, object, object, object]]:
    """What ``value`` holds: how it is written after the holder's name, ``where`` and ``key``, with
    ``where[key]`` being the item as long as it is not replaced, and the item.

    Items of containers, parameters, buffers and children of modules, and the public attributes of
    other objects. A leading underscore marks what an object keeps for itself: buffers, caches.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", value, key, item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", value, index, item
    elif not isinstance(value, (Tensor, *_CODE)):
        parts = [getattr(value, "__dict__", {}), _Slots(value)]
        if isinstance(value, torch.nn.Module):
            parts += [value._parameters, value._buffers, value._modules]
        for part in parts:
            for key, item in part.items():
                if not key.startswith("_"):
                    yield f".{key}", part, key, item


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in ``value``, once, and how Python would write where it stands."""
    seen: set[int] = set()
    rest = [(name, value)]
    while rest:
        name, value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield name, value
            continue
        rest += reversed([(name + written, item) for written, _, _, item in children(value)])
