"""What each all-reduce algorithm sends: its transfers as plain data, phase by phase.

The definitions are those of the CUDA form (``csrc/pcie_allreduce/slab.h``): a message travels in
packets of 16 bytes, 128 packets make a tile, block b of a grid of G takes tiles b, b+G, ..., and
does one phase for all of its tiles before the next. A tile is shared among its owners by packets.
What a rank adds up and when it polls is no transfer; ``simulator.py`` gives that its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, AUTO, LOSSY
from spec_kernels.ops.pcie_allreduce.checks import MAX_RANKS, SCALE_GROUP

PACKET_BYTES = 16
TILE_PACKETS = 128
TILE_BYTES = PACKET_BYTES * TILE_PACKETS
MAX_BLOCKS = 64
FLAG_BYTES = 4
SCALE_BYTES = 4
ISLAND_SIZES = (2, 4)

SCHEDULED = tuple(name for name, number in ALGORITHMS.items() if number != AUTO)
# Steps in which a rank waits for others' data.
NUM_PHASES = {
    "one_shot": 1,
    "two_shot": 2,
    "hierarchical": 3,
    "hierarchical_pull": 3,
    "hierarchical_bf16": 3,
    "two_shot_fp8": 2,
    "two_shot_int8": 2,
}


@dataclass(frozen=True)
class Transfer:
    """Bytes that go from ``source``'s memory (or registers) to ``destination``.

    Attributes:
        phase: ``push``, ``scatter``, ``across``, ``gather`` or ``flag``.
        chunk: which part of the message, in the order in which the blocks take their tiles.
        source, destination: ranks; data goes from the first to the second.
        num_bytes: on the wire.
        kind: ``write`` (the source stores), ``read`` (the destination loads) or ``flag`` (a write
            of a word a block, behind a fence).
        needs: indices of transfers that must have arrived before the issuer can begin.
        after: indices of transfers that the issuer must be done with before, by program order: what
            it stores has left, what it loads has come.
    """

    phase: str
    chunk: int
    source: int
    destination: int
    num_bytes: int
    kind: str
    needs: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def issuer(self) -> int:
        return self.destination if self.kind == "read" else self.source


@dataclass(frozen=True)
class Schedule:
    """One call: ``transfers`` in an order in which every one comes behind what it waits for."""

    algorithm: str
    num_ranks: int
    num_bytes: int
    transfers: tuple[Transfer, ...]

    def bytes_between(self) -> dict[tuple[int, int], int]:
        """Bytes from each source to each destination, without flags."""
        total: dict[tuple[int, int], int] = defaultdict(int)
        for t in self.transfers:
            if t.kind != "flag":
                total[t.source, t.destination] += t.num_bytes
        return dict(total)


def owned_packets(num_packets: int, owner: int, num_owners: int) -> int:
    """Packets of a tile's ``num_packets`` that belong to one of its owners: [oP/w, (o+1)P/w)."""
    return (owner + 1) * num_packets // num_owners - owner * num_packets // num_owners


def has_islands(num_ranks: int, island_size: int) -> bool:
    """Whether the hierarchical algorithms take islands of this size (as ``slab.h`` says)."""
    return island_size in ISLAND_SIZES and island_size < num_ranks and num_ranks % island_size == 0


def algorithms_for(num_ranks: int, island_size: int = 0, *, lossy: bool = False) -> tuple[str, ...]:
    """Algorithms that a group can run, in the order of their numbers."""
    return tuple(
        name
        for name in SCHEDULED
        if (lossy or ALGORITHMS[name] not in LOSSY)
        and (has_islands(num_ranks, island_size) or not name.startswith("hierarchical"))
    )


class _Builder:
    """Collects transfers, and for each rank what it has issued last and what came in."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self._issued: dict[tuple[int, str], tuple[int, ...]] = defaultdict(tuple)
        self._came: dict[tuple[str, int, int], list[int]] = defaultdict(list)

    def came(self, phase: str, chunks: Iterable[int], rank: int) -> tuple[int, ...]:
        return tuple(i for chunk in chunks for i in self._came[phase, chunk, rank])

    def issue(
        self,
        rank: int,
        phase: str,
        chunk: int,
        peers: Iterable[tuple[int, int]],
        kind: str = "write",
        needs: tuple[int, ...] = (),
        order: str = "",
    ) -> None:
        """``rank`` issues transfers to (a read: from) each (peer, bytes), all at the same time.

        They go behind what it issued last, of the same ``order``.
        """
        new = []
        issued = self._issued[rank, order] or self._issued[rank, ""]
        for peer, num_bytes in peers:
            if num_bytes == 0:
                continue
            source, destination = (peer, rank) if kind == "read" else (rank, peer)
            self._came[phase, chunk, destination].append(len(self.transfers))
            new.append(len(self.transfers))
            self.transfers.append(
                Transfer(phase, chunk, source, destination, num_bytes, kind, needs, issued)
            )
        if new:
            self._issued[rank, order] = tuple(new)


def _chunks(num_packets: int, num_blocks: int, max_chunks: int) -> list[list[tuple[int, int]]]:
    """Tiles of each chunk as (how many, packets in each): whole turns of the grid together."""
    num_tiles = -(-num_packets // TILE_PACKETS)
    num_turns = -(-num_tiles // num_blocks)
    num_chunks = min(num_turns, max_chunks)
    chunks = []
    for c in range(num_chunks):
        first = c * num_turns // num_chunks * num_blocks
        last = min((c + 1) * num_turns // num_chunks * num_blocks, num_tiles)
        packets = min(last * TILE_PACKETS, num_packets) - first * TILE_PACKETS
        full, rest = divmod(packets, TILE_PACKETS)
        chunks.append([(full, TILE_PACKETS), (1, rest)] if rest else [(full, TILE_PACKETS)])
    return chunks


def build(
    algorithm: str,
    num_bytes: int,
    num_ranks: int,
    *,
    island_size: int = 0,
    itemsize: int = 2,
    num_blocks: int = 32,
    max_chunks: int | None = None,
) -> Schedule:
    """The transfers of one call.

    Args:
        algorithm: one of ``SCHEDULED``.
        num_bytes: of the message.
        num_ranks: 1 to 8.
        island_size: for the hierarchical algorithms, 2 or 4 ranks.
        itemsize: bytes of an element: 2 or 4 (partial sums travel as fp32).
        num_blocks: of the grid, the same on all ranks.
        max_chunks: turns of the grid are put together into at most so many chunks; None for 4, and
            16 for the pull form, where each turn waits for its own loads.

    Raises:
        ValueError: an argument is not as above.
    """
    if algorithm not in SCHEDULED:
        raise _error("algorithm", f"one of {', '.join(SCHEDULED)}", algorithm)
    if num_bytes < 0 or num_bytes % itemsize:
        raise _error("num_bytes", f"a multiple of {itemsize}, at least 0", num_bytes)
    if not 1 <= num_ranks <= MAX_RANKS:
        raise _error("num_ranks", f"1 to {MAX_RANKS}", num_ranks)
    if itemsize not in (2, 4):
        raise _error("itemsize", "2 or 4", itemsize)
    if not 1 <= num_blocks <= MAX_BLOCKS:
        raise _error("num_blocks", f"1 to {MAX_BLOCKS}", num_blocks)
    pull = algorithm == "hierarchical_pull"
    max_chunks = (16 if pull else 4) if max_chunks is None else max_chunks
    if max_chunks < 1:
        raise _error("max_chunks", "at least 1", max_chunks)
    islands = algorithm.startswith("hierarchical")
    if islands and not has_islands(num_ranks, island_size):
        raise _error("island_size", f"2 or 4, dividing {num_ranks} ranks into more", island_size)
    out = _Builder()
    num_packets = -(-num_bytes // PACKET_BYTES)
    chunks = _chunks(num_packets, num_blocks, max_chunks) if num_packets and num_ranks > 1 else []
    if algorithm == "one_shot":
        _one_shot(out, chunks, num_ranks)
    elif islands:
        partial = 2 if itemsize == 2 and algorithm != "hierarchical_bf16" else 1
        blocks = min(num_blocks, -(-num_packets // TILE_PACKETS))
        _hierarchical(out, chunks, num_ranks, island_size, partial, blocks if pull else 0)
    else:
        one_byte = algorithm in ("two_shot_fp8", "two_shot_int8")
        _two_shot(out, chunks, num_ranks, itemsize if one_byte else 0)
    return Schedule(algorithm, num_ranks, num_bytes, tuple(out.transfers))


def _error(name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"schedule: {name}: expected {expected}, got {got!r}")


def _size(tiles: list[tuple[int, int]], owner: int = 0, num_owners: int = 1) -> int:
    """Bytes of a chunk that one owner owns."""
    packets = sum(num * owned_packets(packets, owner, num_owners) for num, packets in tiles)
    return packets * PACKET_BYTES


def _one_shot(out: _Builder, chunks, num_ranks: int) -> None:
    for c, tiles in enumerate(chunks):
        for rank in range(num_ranks):
            peers = [(p, _size(tiles)) for p in range(num_ranks) if p != rank]
            out.issue(rank, "push", c, peers)


def _two_shot(out: _Builder, chunks, num_ranks: int, narrowed: int) -> None:
    """``narrowed``: 0, or bytes of an element that travels as one, with a scale for each group."""
    ranks = range(num_ranks)

    def share(tiles, owner: int) -> int:
        size = _size(tiles, owner, num_ranks)
        if not narrowed:
            return size
        elements = size // narrowed
        size = elements + SCALE_BYTES * -(-elements // SCALE_GROUP)
        return -(-size // PACKET_BYTES) * PACKET_BYTES

    for c, tiles in enumerate(chunks):
        for rank in ranks:
            peers = [(p, share(tiles, p)) for p in ranks if p != rank]
            out.issue(rank, "scatter", c, peers)
    for c, tiles in enumerate(chunks):
        for rank in ranks:
            peers = [(p, share(tiles, rank)) for p in ranks if p != rank]
            out.issue(rank, "gather", c, peers, needs=out.came("scatter", [c], rank))


def _hierarchical(
    out: _Builder, chunks, num_ranks: int, island_size: int, partial: int, pull_blocks: int
) -> None:
    """``partial``: packets of a partial sum for one of data; ``pull_blocks``: 0 for the push form.

    The pull form's flags stand for all of a block's tiles: one fence, then one word a block. Behind
    them, a tile's loads and the stores of its sum alternate: two orders of their own.
    """

    def mates(rank: int) -> list[int]:
        first = rank // island_size * island_size
        return [p for p in range(first, first + island_size) if p != rank]

    def twins(rank: int) -> list[int]:
        return [p for p in range(rank % island_size, num_ranks, island_size) if p != rank]

    def share(tiles, rank: int) -> int:
        return _size(tiles, rank % island_size, island_size)

    ranks, numbers = range(num_ranks), range(len(chunks))
    for c, tiles in enumerate(chunks):
        for rank in ranks:
            out.issue(rank, "scatter", c, [(p, share(tiles, p)) for p in mates(rank)])
    for rank in ranks:
        if pull_blocks and any(share(tiles, rank) for tiles in chunks):
            peers = [(p, FLAG_BYTES * pull_blocks) for p in twins(rank)]
            out.issue(rank, "flag", 0, peers, "flag", out.came("scatter", numbers, rank))
    for c, tiles in enumerate(chunks):
        for rank in ranks:
            peers = [(p, partial * share(tiles, rank)) for p in twins(rank)]
            if pull_blocks:
                needs = out.came("flag", [0], rank)
                out.issue(rank, "across", c, peers, "read", needs, order="loads")
            else:
                out.issue(rank, "across", c, peers, needs=out.came("scatter", [c], rank))
    for c, tiles in enumerate(chunks):
        for rank in ranks:
            peers = [(p, share(tiles, rank)) for p in mates(rank)]
            needs = out.came("across", [c], rank)
            out.issue(rank, "gather", c, peers, needs=needs, order="sums" if pull_blocks else "")
