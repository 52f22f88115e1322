"""Acceptance traces: what the drafter would propose at every place of a text, and what was right.

A cycle's drafts depend on the text before them and on nothing else, and what is accepted depends on
the text after them, which is the target's own whatever was drafted. So one record for each place
where a cycle may start is enough to replay any static tree, and any rule that chooses between
trees, exactly: jump by the accepted drafts + 1.

A file is JSON lines. The first is the header: ``format``, ``version``, ``paths`` (the drafts whose
confidences follow, as paths of ranks, likeliest first), ``num_ranks``, and under ``source`` what
was recorded and how. ``{"text": name, "temperature": t}`` begins a text; a line for each of its
places follows, in order:

- ``ranks``: for each depth, the rank of the text's token among the drafter's candidates there,
  given the text's tokens before; -1 = not among the first ``num_ranks``. A draft of path p is
  right iff ``ranks`` begins with p.
- ``confidence``: for each of ``paths``, the drafter's probability of that draft given the drafts
  above it, in thousandths.

Drafts are the drafter's likeliest tokens, not draws.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as File

import numpy as np

from spec_kernels.ops.tree_build import tree_from_paths
from spec_kernels.planning.checks import is_number, parse_json
from spec_kernels.planning.tree_shape import Path

FORMAT, VERSION = "spec-kernels acceptance trace", 1
_THOUSAND = 1000
# Ranks are kept in 8 bits.
_MOST_RANKS = 127


@dataclasses.dataclass(frozen=True)
class Text:
    """One text's records.

    Attributes:
        name: of the prompt.
        temperature: at which the target wrote it; 0 = greedily.
        ranks: ``[T, D]`` int8, see the module.
        confidence: ``[T, M]`` float64 in [0, 1].
    """

    name: str
    temperature: float
    ranks: np.ndarray
    confidence: np.ndarray

    def __len__(self) -> int:
        return len(self.ranks)


@dataclasses.dataclass(frozen=True)
class Trace:
    """See the module.

    Raises:
        ValueError: paths that are no tree or texts that do not fit them.
    """

    paths: tuple[Path, ...]
    num_ranks: int
    texts: tuple[Text, ...]
    source: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        tree_from_paths(self.paths)
        for text in self.texts:
            depth, drafts = text.ranks.shape[1], text.confidence.shape[1]
            if len(text.ranks) != len(text.confidence) or drafts != len(self.paths):
                raise ValueError(
                    f"trace: {text.name}: expected confidences of {len(text)} places and "
                    f"{len(self.paths)} drafts, got {text.confidence.shape}"
                )
            if depth != self.texts[0].ranks.shape[1]:
                raise ValueError(
                    f"trace: {text.name}: expected ranks of {self.texts[0].ranks.shape[1]} depths "
                    f"as in the first text, got {depth}"
                )
            if depth < max(map(len, self.paths), default=0):
                raise ValueError(f"trace: {text.name}: expected ranks to the deepest path's depth")

    def at(self, temperature: float) -> Trace:
        """The texts of one temperature; ValueError if there is none."""
        texts = tuple(t for t in self.texts if t.temperature == temperature)
        if not texts:
            known = sorted({t.temperature for t in self.texts})
            raise ValueError(f"trace: temperature: expected one of {known}, got {temperature}")
        return dataclasses.replace(self, texts=texts)

    def keep(self, paths: Sequence[Path]) -> Trace:
        """The same with these of its paths only, in this order; ValueError if one is none of it."""
        unknown = [path for path in paths if path not in self.paths]
        if unknown:
            raise ValueError(f"trace: paths: expected some of those recorded, got {unknown[0]}")
        columns = [self.paths.index(path) for path in paths]
        texts = (dataclasses.replace(t, confidence=t.confidence[:, columns]) for t in self.texts)
        return dataclasses.replace(self, paths=tuple(paths), texts=tuple(texts))

    @property
    def temperatures(self) -> list[float]:
        return sorted({t.temperature for t in self.texts})

    def save(self, path: str | File) -> None:
        header = {
            "format": FORMAT,
            "version": VERSION,
            "paths": [list(p) for p in self.paths],
            "num_ranks": self.num_ranks,
            "source": self.source,
        }
        lines = [json.dumps(header)]
        for text in self.texts:
            lines.append(json.dumps({"text": text.name, "temperature": text.temperature}))
            thousandths = np.rint(text.confidence * _THOUSAND).astype(int).tolist()
            for ranks, confidence in zip(text.ranks.tolist(), thousandths, strict=True):
                record = {"ranks": ranks, "confidence": confidence}
                lines.append(json.dumps(record, separators=(",", ":")))
        File(path).write_text("\n".join(lines) + "\n")

    @classmethod
    def load(cls, path: str | File) -> Trace:
        """ValueError naming file and line if it is no such trace; OSError if it cannot be read."""
        try:
            lines = File(path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected UTF-8 text, got: {error}") from error

        def fail(number: int, expected: str, got: object) -> None:
            raise ValueError(f"{path}: line {number}: expected {expected}, got {str(got)[:80]}")

        texts: list[tuple[str, float, list, list]] = []
        header: dict = {}
        num_depths = 0
        for number, line in enumerate(lines, 1):
            record = parse_json(f"{path}: line {number}", line)
            if not isinstance(record, dict):
                fail(number, "an object", line)
            if number == 1:
                if record.get("format") != FORMAT or record.get("version") != VERSION:
                    fail(number, f"the header of a {FORMAT}, version {VERSION}", line)
                header, paths = record, record.get("paths")
                if not _are_paths(paths):
                    fail(number, "paths, at least one, each a list of ranks >= 0", paths)
                if not _are_integers([record.get("num_ranks")], 1, _MOST_RANKS):
                    fail(number, f"num_ranks of 1 to {_MOST_RANKS}", record.get("num_ranks"))
                try:
                    tree_from_paths(paths)
                except ValueError as error:
                    raise ValueError(f"{path}: line {number}: {error}") from error
                depth = max(map(len, paths))
            elif "text" in record:
                name, temperature = record["text"], record.get("temperature")
                if not isinstance(name, str):
                    fail(number, "a text's name", name)
                if not is_number(temperature) or temperature < 0:
                    fail(number, "a temperature >= 0", temperature)
                texts.append((name, float(temperature), [], []))
            else:
                if not texts:
                    fail(number, "a text before its records", line)
                ranks, confidence = record.get("ranks"), record.get("confidence")
                if not _are_integers(ranks, -1, header["num_ranks"] - 1) or len(ranks) < depth:
                    fail(number, f"ranks of {depth} depths below {header['num_ranks']}", ranks)
                if not _are_integers(confidence, 0, _THOUSAND) or (
                    len(confidence) != len(header["paths"])
                ):
                    fail(number, f"{len(header['paths'])} thousandths", confidence)
                num_depths = num_depths or len(ranks)
                if len(ranks) != num_depths:
                    fail(number, f"{num_depths} ranks as in the lines before", ranks)
                texts[-1][2].append(ranks)
                texts[-1][3].append(confidence)
        if not texts or not all(ranks for _, _, ranks, _ in texts):
            fail(max(1, len(lines)), "texts and their records", "none")
        return cls(
            tuple(tuple(p) for p in header["paths"]),
            header["num_ranks"],
            tuple(
                Text(name, t, np.array(ranks, np.int8), np.array(confidence) / _THOUSAND)
                for name, t, ranks, confidence in texts
            ),
            header.get("source", {}),
        )


def _are_paths(values: object) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(_are_integers(path, 0, _MOST_RANKS) for path in values)
    )


def _are_integers(values: object, low: int, high: int) -> bool:
    return isinstance(values, list) and all(type(x) is int and low <= x <= high for x in values)


def chain_paths(depth: int) -> list[Path]:
    """Of a chain: the likeliest draft of each depth."""
    return [(0,) * d for d in range(1, depth + 1)]


def right_drafts(text: Text, paths: Iterable[Path]) -> np.ndarray:
    """``[T]``: drafts that a static tree of these paths would have accepted at each place."""
    accepted = np.zeros(len(text), np.int64)
    for path in paths:
        if len(path) > text.ranks.shape[1]:
            raise ValueError(
                f"right_drafts: paths: expected depths of at most {text.ranks.shape[1]}, got {path}"
            )
        right = (text.ranks[:, : len(path)] == np.array(path)).all(1)
        accepted[right] = np.maximum(accepted[right], len(path))
    return accepted


def path_rates(texts: Sequence[Text], num_ranks: int):
    """Rates for ``tree_shape`` as a function of the parent's path: shares of all places.

    Places count alike, while decoding starts cycles at some of them only: a shape's accept length
    by these rates is near that of its replay, not equal to it.
    """
    ranks = np.concatenate([text.ranks for text in texts])

    def rates(path: Path) -> list[float]:
        depth = len(path)
        if depth >= ranks.shape[1]:
            return []
        here = ranks[(ranks[:, :depth] == np.array(path, np.int8)).all(1), depth]
        return [float((here == r).mean()) if len(here) else 0.0 for r in range(num_ranks)]

    return rates


def rates_by_depth(texts: Sequence[Text], num_ranks: int) -> list[list[float]]:
    """Rates by depth and rank, given that every draft above was among the first ``num_ranks``."""
    ranks = np.concatenate([text.ranks for text in texts])
    rates = []
    for depth in range(ranks.shape[1]):
        reached = (ranks[:, :depth] >= 0) & (ranks[:, :depth] < num_ranks)
        here = ranks[reached.all(1), depth]
        rates.append([float((here == r).mean()) if len(here) else 0.0 for r in range(num_ranks)])
    return rates


@dataclasses.dataclass(frozen=True)
class Run:
    """One text decoded by one rule.

    Attributes:
        num_tokens: the text's places: what the last cycle emits beyond them is cut, as by
            ``max_new_tokens``, for every rule alike.
        num_cycles: that it took.
        ms: that they took.
    """

    num_tokens: int
    num_cycles: int
    ms: float


def accepted_by_cycle(text: Text, paths: Sequence[Path]) -> list[int]:
    """Drafts that each cycle of a static tree accepts, from the first place to the last."""
    accepted = right_drafts(text, paths).tolist()
    place, found = 0, []
    while place < len(accepted):
        found.append(accepted[place])
        place += accepted[place] + 1
    return found


def replay(text: Text, paths: Sequence[Path], cycle_ms: float) -> Run:
    """A static tree from the first place on, until the places are over."""
    cycles = len(accepted_by_cycle(text, paths))
    return Run(len(text), cycles, cycles * cycle_ms)


def replay_best(text: Text, sizes: Mapping[int, tuple[Sequence[Path], float]]) -> Run:
    """The fastest choice of a size for each cycle, made by one who knows the text.

    Dynamic programming from the end of the text; ``sizes`` are paths and ms by number of nodes.
    """
    accepted = {n: right_drafts(text, paths).tolist() for n, (paths, _) in sizes.items()}
    count = len(text)
    best = [(0.0, 0)] * (count + 1)
    for place in range(count - 1, -1, -1):
        ways = []
        for n, (_, ms) in sizes.items():
            then, cycles = best[min(count, place + accepted[n][place] + 1)]
            ways.append((ms + then, cycles + 1))
        best[place] = min(ways)
    ms, cycles = best[0]
    return Run(count, cycles, ms)
