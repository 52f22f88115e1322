"""The collectives, checked with all ranks in one process: streams of one device.

No call of one rank has a result without the others' calls, so these have no ``Call`` of their own
(``calls.py``). What is checked here is what every rank must keep to (``DeviceGroup``) on the device
at hand; links between devices take part in none of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from spec_kernels.comm.device_group import DeviceGroup
from spec_kernels.comm.selection import Entry, Selection
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, LOSSY
from spec_kernels.ops.pcie_allreduce.checks import CODED, SCALE_GROUP
from spec_kernels.ops.pcie_allreduce.reference import lossy_sum, ordered_sum
from spec_kernels.testing.compare import assert_same_bits, poisoned

OPS = (
    "pcie_allreduce",
    "pcie_allreduce_norm",
    "pcie_all_gather",
    "pcie_broadcast",
    "pcie_barrier",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
Replay = Callable[[], None]


class Streams:
    """A CUDA stream for each rank. ``tests`` put the emulated machine's in its place."""

    def __init__(self, num_ranks: int):
        self._streams = [torch.cuda.Stream() for _ in range(num_ranks)]

    def on(self, rank: int) -> contextlib.AbstractContextManager:
        """Calls in this scope are rank ``rank``'s."""
        return torch.cuda.stream(self._streams[rank])

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def record(self, rank: int, function: Callable[[], object]) -> Replay:
        """A graph of what ``function`` launches; what is returned replays it, for this rank."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._streams[rank]):
            function()

        def replay():
            with self.on(rank):
                graph.replay()

        return replay


class LocalRanks:
    """``num_ranks`` groups (``DeviceGroup.local``) on ``device``, a stream each. A context manager.

    Algorithms by name are run with ``num_blocks`` blocks.
    """

    def __init__(
        self,
        num_ranks: int,
        device="cuda:0",
        streams: Streams | None = None,
        *,
        num_blocks: int = 2,
        platform=None,
        **options,
    ):
        self.num_ranks = num_ranks
        islands = next((size for size in (4, 2) if num_ranks % size == 0 and size < num_ranks), 0)
        selection = Selection((Entry(1 << 40, "one_shot", num_blocks),), islands)
        self.island_size = islands
        self.streams = streams or Streams(num_ranks)
        self.groups = DeviceGroup.local(
            num_ranks, device, platform=platform, selection=selection, **options
        )
        self.device = self.groups[0].device

    def algorithms(self, *, lossy: bool = False) -> list[str]:
        """Those that these ranks can run, by name."""
        found = [n for n, number in ALGORITHMS.items() if (number in LOSSY) == lossy and number]
        return [n for n in found if self.island_size or not n.startswith("hierarchical")]

    def call(self, what: str, *arguments, num: int | None = None, **options) -> None:
        """``group.what(...)`` on all ranks (the first ``num``), then waits for the device.

        A list is one argument for each rank. Outputs must be given: a rank that runs waits for the
        next ranks' calls, and an allocation may wait for it.
        """
        self.streams.synchronize()
        for rank in range(self.num_ranks if num is None else num):
            with self.streams.on(rank):
                self._one(what, rank, arguments, options)
        self.streams.synchronize()

    def record(self, what: str, *arguments, times: int = 1, **options) -> Replay:
        """A graph of ``times`` calls for each rank; what is returned replays all and waits."""
        return self.record_each(lambda rank: self._one(what, rank, arguments, options), times)

    def record_each(self, function: Callable[[int], None], times: int = 1) -> Replay:
        """The same of ``function(rank)``."""
        self.streams.synchronize()

        def all_times(rank: int) -> None:
            for _ in range(times):
                function(rank)

        replays = [
            self.streams.record(rank, functools.partial(all_times, rank))
            for rank in range(self.num_ranks)
        ]

        def replay() -> None:
            self.streams.synchronize()
            for one in replays:
                one()
            self.streams.synchronize()

        return replay

    def _one(self, what: str, rank: int, arguments: tuple, options: dict) -> None:
        def own(value):
            return value[rank] if isinstance(value, list) else value

        own_options = {name: own(value) for name, value in options.items()}
        getattr(self.groups[rank], what)(*map(own, arguments), **own_options)

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One for each rank, on the device."""
        return [t.to(self.device, copy=True) for t in tensors]

    def close(self) -> None:
        for group in self.groups:
            group.close()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error) -> None:
        self.close()


def integers(shape: Sequence[int], dtype: torch.dtype, num_ranks: int) -> list[torch.Tensor]:
    """Parts whose sums are exact in any order."""
    g = torch.Generator().manual_seed(7)
    return [torch.randint(-8, 9, shape, generator=g).to(dtype) for _ in range(num_ranks)]


def revealing(shape: Sequence[int], dtype: torch.dtype, num_ranks: int, seed: int = 0):
    """Parts with large terms that cancel between ranks, and small ones that one order keeps."""
    g = torch.Generator().manual_seed(seed)
    signs = [1, -1, 1, -1, -1, 1, 1, -1]
    big = [torch.randint(0, 3, shape, generator=g) * sign * 2.0**12 for sign in signs]
    return [(b + torch.randn(shape, generator=g)).to(dtype) for b in big[:num_ranks]]


def expected_sum(ranks: LocalRanks, parts: list[torch.Tensor], algorithm: str) -> torch.Tensor:
    number = ALGORITHMS[algorithm]
    return lossy_sum(parts, number, ranks.island_size) if number in LOSSY else ordered_sum(parts)


def _same_everywhere(got: Sequence[torch.Tensor], want: torch.Tensor, what: str) -> None:
    for rank, tensor in enumerate(got):
        try:
            assert_same_bits(tensor.cpu(), want)
        except AssertionError as error:
            raise AssertionError(f"{what}, rank {rank}: {error}") from None


def check_sums(
    ranks: LocalRanks,
    sizes: Sequence[int],
    algorithms: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Iterator[str]:
    """Algorithms (all), dtypes and sizes, in place and not, against the definition.

    Where elements share a scale, sizes are rounded up to whole groups.
    """
    for algorithm in algorithms or [*ranks.algorithms(), *ranks.algorithms(lossy=True)]:
        group = SCALE_GROUP if ALGORITHMS[algorithm] in CODED else 1
        for dtype in dtypes:
            for num in sorted({-(-num // group) * group for num in sizes}):
                for make in (integers, revealing):
                    parts = make((num,), dtype, ranks.num_ranks)
                    want = expected_sum(ranks, parts, algorithm)
                    x = ranks.copies(parts)
                    out = ranks.copies([poisoned(num, dtype=dtype)] * ranks.num_ranks)
                    name = f"{algorithm}, {make.__name__} {num} {dtype}"
                    ranks.call("all_reduce", x, out, algorithm=algorithm)
                    _same_everywhere(out, want, name)
                    ranks.call("all_reduce", x, x, algorithm=algorithm)
                    _same_everywhere(x, want, f"{name}, in place")
        yield algorithm


def check_fused(
    ranks: LocalRanks,
    shapes: Sequence[tuple[int, int]],
    algorithms: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Iterator[str]:
    """The fused form is the all-reduce followed by ``hidden_capture``, bit for bit."""
    for algorithm in algorithms or ranks.algorithms():
        for (rows, hidden), dtype in itertools.product(shapes, dtypes):
            f = Fused(ranks, rows, hidden, dtype)
            f.at_once(algorithm)
            together = [f.residual, f.capture, f.out]
            g = Fused(ranks, rows, hidden, dtype)
            g.apart(algorithm)
            name = f"{algorithm}, {rows} x {hidden} {dtype}"
            for what, ones, others in zip(
                ("residual", "capture", "out"), together, (g.residual, g.capture, g.out),
                strict=True,
            ):  # fmt: skip
                _same_everywhere(ones, others[0].cpu(), f"{name}, {what}")
                _same_everywhere(others, others[0].cpu(), f"{name}, {what} of the two ops")
        yield algorithm


class Fused:
    """Tensors of a fused call, and both ways to make it."""

    def __init__(self, ranks: LocalRanks, rows: int, hidden: int, dtype: torch.dtype):
        self.ranks = ranks
        g = torch.Generator().manual_seed(3)
        start = torch.randn(rows, hidden, generator=g).to(dtype)
        self.weight = torch.rand(hidden, generator=g).to(dtype).to(ranks.device)
        self.x = ranks.copies(revealing((rows, hidden), dtype, ranks.num_ranks))
        self.residual = ranks.copies([start] * ranks.num_ranks)
        self.capture = ranks.copies([poisoned(rows, 2, hidden, dtype=dtype)] * ranks.num_ranks)
        self.out = ranks.copies([poisoned(rows, hidden, dtype=dtype)] * ranks.num_ranks)
        self.sums = ranks.copies(self.out)
        self.fused = (self.x, self.residual, self.weight, EPS)
        self.options = dict(capture=self.capture, slot=1, out=self.out)

    def at_once(self, algorithm: str) -> None:
        self.ranks.call("all_reduce_norm", *self.fused, **self.options, algorithm=algorithm)

    def apart(self, algorithm: str) -> None:
        self.ranks.call("all_reduce", self.x, self.sums, algorithm=algorithm)
        for rank in range(self.ranks.num_ranks):
            with self.ranks.streams.on(rank):
                self.normalise(rank)
        self.ranks.streams.synchronize()

    def normalise(self, rank: int) -> None:
        """The second of the two ops, on the sum."""
        self.ranks.groups[rank].platform.ops.hidden_capture.default(
            self.sums[rank], self.residual[rank], self.weight, EPS, self.out[rank],
            self.capture[rank], 1,
        )  # fmt: skip


def check_moves(ranks: LocalRanks, sizes: Sequence[int]) -> Iterator[str]:
    """Gather and broadcast move bytes of any kind; barriers in between change nothing."""
    for num in sizes:
        g = torch.Generator().manual_seed(num)
        parts = torch.randint(-128, 128, (ranks.num_ranks, num), generator=g, dtype=torch.int8)
        x = ranks.copies(list(parts))
        out = ranks.copies([torch.zeros_like(parts)] * ranks.num_ranks)
        ranks.call("all_gather", x, out)
        _same_everywhere(out, parts, f"all_gather of {num} bytes")
        for src in (0, ranks.num_ranks - 1):
            same = ranks.copies(x)
            ranks.call("barrier")
            ranks.call("broadcast", same, src)
            _same_everywhere(same, parts[src], f"broadcast of {num} bytes from rank {src}")
        yield f"{num} bytes"


def check_replays(ranks: LocalRanks, sizes: Sequence[int], num_replays: int = 3) -> Iterator[str]:
    """Graphs of different sizes and algorithms, interleaved with each other and eager calls."""
    algorithms = ranks.algorithms()
    work = []
    for k, num in enumerate(sizes):
        algorithm = algorithms[k % len(algorithms)]
        x = ranks.copies([torch.zeros(num, dtype=torch.bfloat16)] * ranks.num_ranks)
        out = ranks.copies(x)
        # Once eagerly: what a first call sets up is not to be recorded.
        ranks.call("all_reduce", x, out, algorithm=algorithm)
        replay = ranks.record("all_reduce", x, out, algorithm=algorithm)
        work.append((num, algorithm, x, out, replay))
    for turn in range(num_replays):
        for num, algorithm, x, out, replay in work:
            parts = revealing((num,), torch.bfloat16, ranks.num_ranks, seed=turn + num)
            for target, part in zip(x, parts, strict=True):
                target.copy_(part)
            replay()
            name = f"replay {turn} of {num} elements by {algorithm}"
            _same_everywhere(out, ordered_sum(parts), name)
            ranks.call("all_reduce", x, x)
            _same_everywhere(x, ordered_sum(parts), f"a call after {name}")
        yield f"replay {turn}"


def check_missing_rank(ranks: LocalRanks, num: int = 1000, algorithm: str = "one_shot") -> str:
    """The last rank stays away: the others end in time, poison what they write, and say who.

    The group is of no further use. Returns what a rank says that waited in vain: which one that is
    depends on the schedule, and the others only say that it gave up.
    """
    last = ranks.num_ranks - 1
    x = ranks.copies([torch.ones(num)] * ranks.num_ranks)
    out = ranks.copies([torch.zeros(num)] * ranks.num_ranks)
    ranks.call("all_reduce", x, out, algorithm=algorithm, num=last)
    said = []
    for rank in range(last):
        bits = out[rank].cpu().view(torch.int32)
        assert bool((bits == -1).all()), f"rank {rank}: {int((bits != -1).sum())} not poisoned"
        for what, arguments in (("check", ()), ("all_reduce", (x, out))):
            try:
                with ranks.streams.on(rank):
                    ranks._one(what, rank, arguments, {})
            except RuntimeError as error:
                said.append(str(error))
            else:
                raise AssertionError(f"{what} of rank {rank}: no word of rank {last}'s absence")
    in_vain = [text for text in said if f"rank {last} did not arrive" in text]
    assert in_vain, said
    return in_vain[0]
