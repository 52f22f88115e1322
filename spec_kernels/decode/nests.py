"""Tensors in nests of containers and objects, by where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor


def children(value: object) -> Iterator[tuple[str, object, object]]:
    """What ``value`` holds: how it is written after the holder's name, where it stands (to be read
    again by ``look``), and itself.

    Items of containers, parameters, buffers and children of modules, and the public attributes of
    other objects. A leading underscore marks what an object keeps for itself: buffers, caches.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", key, item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", index, item
    elif isinstance(value, torch.nn.Module):
        for part in (value._parameters, value._buffers, value._modules):
            for key, item in part.items():
                yield f".{key}", key, item
    elif not isinstance(value, Tensor | type | ModuleType) and not callable(value):
        for key, item in getattr(value, "__dict__", {}).items():
            if not key.startswith("_"):
                yield f".{key}", key, item


def look(holder: object, key: object) -> object:
    """What now stands where ``children`` found something; None if nothing does."""
    if isinstance(holder, Mapping):
        return holder.get(key)
    if isinstance(holder, list | tuple):
        return holder[key] if key < len(holder) else None
    return getattr(holder, key, None)


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
        rest += reversed([(name + written, item) for written, _, item in children(value)])
