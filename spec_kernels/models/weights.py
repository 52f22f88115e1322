"""Streaming reads of safetensors checkpoints: each rank reads only the rows or columns it keeps.

Every text tensor of a checkpoint must be asked for exactly once; ``Checkpoint.finish`` refuses the
leftovers by name, so that a weight that no layer uses is never ignored.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from spec_kernels.ops.moe_experts import INT4_GROUP, INT4_PER_WORD

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}

# First match wins; the right side is the name that the layers ask for.
TARGET_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.language_model.", "model."),
    ("model.", "model."),
    ("lm_head.", "lm_head."),
    ("", "model."),
)
DRAFTER_PREFIXES = (
    ("model.midlayer.", "midlayer."),
    ("model.layers.0.", "midlayer."),
    ("layers.0.", "midlayer."),
    ("model.", ""),
    ("", ""),
)
SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
_MAX_NAMED = 8
# Of an INT4 matrix in the pack-quantized format. The third is not read: in a shard it still gives
# the shape of the whole.
PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"


@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's share of a dimension that is split evenly over ``size`` ranks."""

    rank: int = 0
    size: int = 1

    def of(self, total: int, what: str, unit: int = 1) -> slice:
        """This rank's contiguous range, of whole units.

        ValueError naming ``what`` if ranks do not divide it so.
        """
        if total % (self.size * unit):
            units = f" into multiples of {unit}" if unit > 1 else ""
            raise ValueError(
                f"tensor parallelism: {what} = {total} does not divide by {self.size}{units}"
            )
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


class Checkpoint:
    """The tensors of a directory: one safetensors file, or shards under an index.

    Args:
        directory: holds ``model.safetensors.index.json`` and its shards, or one ``*.safetensors``.
        prefixes: (published prefix, own prefix) pairs; the first that matches renames a tensor.
        skipped: tensors under these prefixes belong to other modalities and are not looked at.
        device: where ``read`` puts what it returns.

    Raises:
        ValueError: a file is missing, truncated or not safetensors, or two tensors have one name.
    """

    def __init__(
        self,
        directory: str | Path,
        prefixes: tuple[tuple[str, str], ...] = TARGET_PREFIXES,
        skipped: tuple[str, ...] = SKIPPED_PREFIXES,
        device: torch.device | str = "cpu",
    ):
        self.device = torch.device(device)
        self.directory = Path(directory)
        self._handles: dict[Path, safe_open] = {}
        self._where: dict[str, tuple[Path, str]] = {}
        self._unused: set[str] = set()
        for path, published in self._list():
            if published.startswith(skipped):
                continue
            own = next(
                new + published[len(old) :] for old, new in prefixes if published.startswith(old)
            )
            if own in self._where:
                other = self._where[own][1]
                raise ValueError(f"{path}: {published}: the same tensor as {other}")
            self._where[own] = (path, published)
        self._unused = set(self._where)

    def _list(self):
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                pairs = [(self.directory / file, name) for name, file in weight_map.items()]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{index}: expected JSON with a weight_map, got: {error!r}"
                ) from error
            for path in {path for path, _ in pairs}:
                held = set(self._open(path).keys())
                for name in (name for where, name in pairs if where == path):
                    if name not in held:
                        raise ValueError(f"{path}: {name}: listed in the index, not in the file")
            return pairs
        files = sorted(self.directory.glob("*.safetensors"))
        if len(files) != 1:
            got = ", ".join(f.name for f in files) or "none"
            raise ValueError(
                f"{self.directory}: expected one safetensors file or model.safetensors.index.json, "
                f"got {got}"
            )
        return [(files[0], name) for name in self._open(files[0]).keys()]

    def _open(self, path: Path):
        if path not in self._handles:
            if not path.is_file():
                raise ValueError(f"{path}: expected a safetensors file, got none")
            try:
                self._handles[path] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: truncated or not safetensors: {error}") from error
        return self._handles[path]

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        """Tensor ``name`` of full shape ``shape``, or its ``rows`` and ``columns``, as ``dtype``.

        Floating tensors convert among float32, bfloat16 and float16; others must match ``dtype``.

        Raises:
            ValueError: the tensor is absent or was read before; its shape or dtype is another.
        """
        path, published, view = self._find(name)
        if name not in self._unused:
            raise ValueError(f"{path}: {published}: asked for twice")
        self._unused.discard(name)
        if tuple(view.get_shape()) != tuple(shape):
            raise ValueError(
                f"{path}: {published}: expected shape {list(shape)}, got {view.get_shape()}"
            )
        stored = view.get_dtype()
        known = _DTYPES if dtype.is_floating_point else _INTEGERS
        if stored not in known or not (dtype.is_floating_point or known[stored] == dtype):
            expected = "/".join(_DTYPES) if dtype.is_floating_point else dtype
            raise ValueError(f"{path}: {published}: expected dtype {expected}, got {stored}")
        if rows is None and columns is None:
            part = view[:]
        elif columns is None:
            part = view[rows]
        else:
            part = view[slice(None) if rows is None else rows, columns]
        return part.to(device=self.device, dtype=dtype)

    def _find(self, name: str):
        """File, published name and contents of tensor ``name``."""
        if name not in self._where:
            packed = name.removesuffix(".weight") + PACKED
            if name.endswith(".weight") and packed in self._where:
                path, published = self._where[packed]
                raise ValueError(
                    f"{path}: {published}: expected {name}: INT4 is read for all routed experts "
                    "of a layer or for none, and for nothing else"
                )
            raise ValueError(f"{self.directory}: missing tensor {name}")
        path, published = self._where[name]
        return path, published, self._open(path).get_slice(published)

    def holds_int4(self, name: str) -> bool:
        """Whether the matrix of module ``name`` is there as packed INT4."""
        return name + PACKED in self._where

    def int4_group(self, name: str, num_columns: int) -> int:
        """Neighbouring elements that share a scale in the INT4 matrix of module ``name``.

        Raises:
            ValueError: there is no such matrix; its groups are of no multiple of 32 elements; its
                scales are no bfloat16, to which they would have to be rounded.
        """
        path, published, view = self._find(name + SCALE)
        if view.get_dtype() != "BF16":
            raise ValueError(f"{path}: {published}: expected dtype BF16, got {view.get_dtype()}")
        shape = view.get_shape()
        num_groups = max(1, shape[-1]) if len(shape) == 2 else 1
        group = num_columns // num_groups
        if len(shape) != 2 or group * num_groups != num_columns or group % INT4_GROUP:
            raise ValueError(
                f"{path}: {published}: expected groups of a multiple of {INT4_GROUP} among "
                f"{num_columns} columns, got shape {shape}"
            )
        return group

    def read_int4(
        self,
        name: str,
        shape: tuple[int, int],
        group: int,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The INT4 matrix of module ``name``, of full shape ``shape``, or a part, still packed.

        Returns:
            words ``[rows, columns / 8]`` int32 and scales ``[rows, columns / group]`` bfloat16, as
            ``moe_experts`` takes them.

        Raises:
            ValueError: as ``read`` and ``int4_group``; columns are not cut between groups.
        """

        def cut(size: int) -> slice | None:
            return columns and slice(columns.start // size, columns.stop // size)

        if columns and (columns.start % group or columns.stop % group):
            raise ValueError(
                f"{self.directory}: {name}: expected columns cut at multiples of the group of "
                f"{group}, got {columns.start}:{columns.stop}"
            )
        self.int4_group(name, shape[1])
        of_words, of_scales = ((shape[0], shape[1] // size) for size in (INT4_PER_WORD, group))
        words = self.read(
            name + PACKED, of_words, torch.int32, rows=rows, columns=cut(INT4_PER_WORD)
        )
        scales = self.read(name + SCALE, of_scales, torch.bfloat16, rows=rows, columns=cut(group))
        self._unused.discard(name + SHAPE)
        return words, scales

    def finish(self) -> None:
        """Closes the files. ValueError that names tensors which nothing read."""
        self._handles.clear()
        left = sorted(self._where[name][1] for name in self._unused)
        if left:
            more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
            raise ValueError(
                f"{self.directory}: {len(left)} tensors that no layer uses: "
                f"{', '.join(left[:_MAX_NAMED])}{more}"
            )
