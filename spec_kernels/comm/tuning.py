"""Refines the all-reduce table by timing, agrees on it across ranks, and keeps it on disk.

The cost model (``selection.py``) serves until there is something better; how fast calls are inside
a graph is what counts. All ranks choose from the slowest rank's times, so they choose alike, and
they compare digests before anybody uses the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spec_kernels.comm.schedules import TILE_BYTES, algorithms_for
from spec_kernels.comm.selection import (
    DEFAULT_BLOCKS,
    DEFAULT_MAX_BYTES,
    TIE,
    Entry,
    Selection,
    candidates,
    first_of_the_best,
)
from spec_kernels.comm.simulator import Box, predict_us

HIDDEN = 7168
TOKENS = (1, 2, 3, 4, 8, 16, 64)
# What is timed: a decode step's messages (bf16 rows of the hidden size), and the ends of the range.
TUNED_BYTES = tuple(
    sorted({256, 2048, 8192, *(2 * HIDDEN * n for n in TOKENS), 1 << 19, DEFAULT_MAX_BYTES})
)
TUNED_BLOCKS = (8, 16, 32, 64)
FORMAT = 1
_MAX_FILE_BYTES = 1 << 16

# (algorithm, number of blocks, bytes) -> microseconds of single calls; all ranks call it alike.
Clock = Callable[[str, int, int], Sequence[float]]
Warn = Callable[[str], None]


def to_stderr(text: str) -> None:
    print(f"spec-kernels: {text}", file=sys.stderr)


@dataclass(frozen=True)
class Key:
    """What timings hold for, and nothing else: the same devices in the same places and order.

    Attributes:
        uuids, pci_paths: of the devices in rank order; a path names every bridge above a device.
        driver: its version.
        version: of this package.
        island_size: of the group, which its kernels are laid out for.
    """

    uuids: tuple[str, ...]
    pci_paths: tuple[str, ...]
    driver: str
    version: str
    island_size: int = 0

    @property
    def digest(self) -> str:
        return _digest({"format": FORMAT, **asdict(self)})


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# The choice.


@dataclass(frozen=True)
class Timed:
    """Microseconds of one way to do one message: the slowest rank's median."""

    num_bytes: int
    algorithm: str
    num_blocks: int
    us: float


def tune(
    clock: Clock,
    num_ranks: int,
    *,
    island_size: int = 0,
    sizes: Iterable[int] = TUNED_BYTES,
    blocks: Sequence[int] = TUNED_BLOCKS,
    slowest: Callable[[float], float] = lambda us: us,
    algorithms: Sequence[str] | None = None,
    origin: str = "measured",
) -> tuple[Selection, list[Timed]]:
    """Times every algorithm at every size, then the best one's grids; returns table and timings.

    Args:
        clock: what times; every rank calls it with the same arguments in the same order.
        num_ranks, island_size: of the group.
        sizes: bytes to time; sizes in between go with the next longer one.
        blocks: other grids to try for the best algorithm.
        slowest: the most of all ranks' values of a number; every rank gets the same.
        algorithms: to choose from; all exact ones of the group if None.
        origin: of the table.

    Raises:
        ValueError: no sizes, or the clock gave no times or impossible ones.
    """
    names = tuple(algorithms or algorithms_for(num_ranks, island_size))
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"tune: sizes: expected at least one, all positive, got {sizes}")
    timed: list[Timed] = []

    def take(size: int, name: str, num_blocks: int) -> Timed:
        samples = list(clock(name, num_blocks, size))
        if not samples or not all(0 < us < float("inf") for us in samples):
            raise ValueError(f"tune: clock: expected positive times, got {samples}")
        timed.append(Timed(size, name, num_blocks, slowest(statistics.median(samples))))
        return timed[-1]

    entries: list[Entry] = []
    for size in sizes:
        first = [take(size, name, DEFAULT_BLOCKS) for name in names]
        best = first[first_of_the_best([t.us for t in first], TIE)]
        # A grid of more blocks than tiles is cut down to a block a tile.
        num_tiles = -(-size // TILE_BYTES)
        grids = {min(DEFAULT_BLOCKS, num_tiles): DEFAULT_BLOCKS}
        for num in blocks:
            grids.setdefault(min(num, num_tiles), num)
        others = [num for num in grids.values() if num != DEFAULT_BLOCKS]
        again = [best, *(take(size, best.algorithm, num) for num in others)]
        best = again[first_of_the_best([t.us for t in again], TIE)]
        if entries and (entries[-1].algorithm, entries[-1].num_blocks) == (
            best.algorithm,
            best.num_blocks,
        ):
            entries.pop()
        entries.append(Entry(size, best.algorithm, best.num_blocks))
    return Selection(tuple(entries), island_size, origin), timed


def simulated_clock(box: Box, num_ranks: int, island_size: int) -> Clock:
    """What the simulator says, as a clock."""

    def clock(algorithm: str, num_blocks: int, num_bytes: int) -> list[float]:
        options = dict(island_size=island_size, num_blocks=num_blocks)
        return [predict_us(box, algorithm, num_bytes, num_ranks, **options)]

    return clock


def tune_by_simulation(box: Box, num_ranks: int, island_size: int, **options):
    """``tune`` with the simulator for a clock: a prediction, and labelled so.

    The simulator knows nothing of what a block costs, so grids stay as they are by default.
    """
    return tune(
        simulated_clock(box, num_ranks, island_size),
        num_ranks,
        island_size=island_size,
        blocks=(),
        algorithms=candidates(box, num_ranks, island_size),
        origin="predicted",
        **options,
    )


# The cache.


def cache_directory() -> Path:
    """``spec-kernels/allreduce`` below XDG_CACHE_HOME, which must be absolute, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "spec-kernels" / "allreduce"


def cache_path(key: Key, directory: Path | None = None) -> Path:
    return (directory or cache_directory()) / f"{key.digest[:32]}.json"


def load(key: Key, directory: Path | None = None, warn: Warn = to_stderr) -> Selection | None:
    """The table kept for ``key``; None if there is none, or (with a warning) none that is sound."""
    try:
        path = cache_path(key, directory)
        # A pipe in its place must not make this wait.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
            about = os.fstat(f.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("it is no regular file")
            if about.st_uid != os.geteuid():
                raise ValueError("it belongs to another user")
            text = f.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise ValueError(f"it is longer than {_MAX_FILE_BYTES} bytes")
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if data.get("key") != json.loads(json.dumps(asdict(key))):
            raise ValueError("it was made for other devices, another driver or another version")
        if data.get("checksum") != _digest([data["key"], data.get("selection")]):
            raise ValueError("its checksum is wrong")
        selection = Selection.from_dict(data["selection"])
        names = algorithms_for(len(key.uuids), key.island_size)
        unfit = {e.algorithm for e in selection.entries} - set(names)
        if unfit or selection.island_size != key.island_size:
            raise ValueError(
                f"a group of these devices has no {', '.join(unfit) or 'such islands'}"
            )
        return selection
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, RecursionError) as error:
        warn(f"ignored the all-reduce table kept in {_shown(key, directory)}: {error}")
        return None


def store(
    key: Key, selection: Selection, directory: Path | None = None, warn: Warn = to_stderr
) -> Path | None:
    """Keeps a table; readers see the old file or the new one, whoever writes at the same time.

    Returns its path; None, with a warning, where it cannot be kept.
    """
    temporary = None
    try:
        path = cache_path(key, directory)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        body = [asdict(key), selection.as_dict()]
        data = {"format": FORMAT, "key": body[0], "selection": body[1], "checksum": _digest(body)}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "w") as f:
            json.dump(data, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        return path
    except (OSError, RuntimeError) as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warn(f"could not keep the all-reduce table in {_shown(key, directory)}: {error}")
        return None


def _shown(key: Key, directory: Path | None) -> str:
    try:
        return str(cache_path(key, directory))
    except RuntimeError:  # there is no home directory
        return "the cache"


# Together.


def tune_group(
    comm,
    key: Key,
    clock: Clock,
    *,
    refresh: bool = False,
    directory: Path | None = None,
    warn: Warn = to_stderr,
    **options,
) -> Selection:
    """The table of a group: rank 0's cached one, else a newly timed one; all ranks call this.

    Args:
        comm: the ranks' ``Communicator``.
        key: what the table is kept under; ranks whose keys differ all raise.
        clock: see ``tune``.
        refresh: time again even if a table is kept.
        directory: where tables are kept (``cache_directory()``).
        options: as for ``tune``.

    Raises:
        RuntimeError: ranks differ in their keys or in the table; on all ranks, naming what differs.
    """
    comm.agree({"all-reduce key": key.digest, "refresh": refresh, **_named(asdict(key))})
    kept = load(key, directory, warn) if comm.rank == 0 and not refresh else None
    found = comm.exchange(None if kept is None else kept.as_dict())[0]
    if found is not None:
        selection = Selection.from_dict(found)
    else:
        selection, _ = tune(
            clock,
            comm.world_size,
            island_size=key.island_size,
            slowest=lambda us: max(comm.exchange(us)),
            **options,
        )
    comm.agree({"all-reduce table": json.dumps(selection.as_dict())})
    if found is None and comm.rank == 0:
        store(key, selection, directory, warn)
    return selection


def _named(fields: dict) -> dict[str, object]:
    return {f"all-reduce key, {name}": value for name, value in fields.items()}
