"""What the links between the GPUs of one machine do: whether peers reach each other, and how fast.

A driver may report peer access and yet drop, tear or delay writes, so nothing here is taken from
what it says: data is sent and compared. Times are measured on the devices' own clocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from spec_kernels.comm.cuda_driver import Device, DeviceName, Driver
from spec_kernels.comm.meeting import Steps, run_together, stage
from spec_kernels.comm.sysfs import Machine

Matrix = list[list[float | None]]
_MATRICES = ("pair_write_gb_s", "pair_read_gb_s", "flag_us", "read_128b_us")


@dataclass(frozen=True)
class GpuId:
    """A GPU by names that no setting renumbers."""

    uuid: str
    pci: str  # domain:bus:device.function, lower case


@dataclass(frozen=True)
class FlowMeasurement:
    """Copies that ran at the same time, and what they moved together.

    ``flows``: (source, destination) pairs of data, as indices of ``LinkMeasurements.gpus``. With
    ``write`` the source stores into the destination's memory, with ``read`` the destination loads
    from the source's: GB/s (1e9 bytes) summed over the flows, None where not measured.
    """

    flows: tuple[tuple[int, int], ...]
    write: float | None = None
    read: float | None = None


@dataclass
class LinkMeasurements:
    """Measured properties of every link; None is a number that was not measured.

    Attributes:
        gpus: in rank order; what the indices below mean.
        pair_write_gb_s: ``[i][j]``, i alone stores a stream into j's memory.
        pair_read_gb_s: ``[i][j]``, i alone loads a stream from j's memory.
        flag_us: ``[i][j]``, from a store by i until j, polling its own memory, sees it.
        read_128b_us: ``[i][j]``, i loads 128 bytes from j's memory and has them.
        flows: concurrent copies: fan-out of one source, and several pairs at once.
    """

    gpus: list[GpuId]
    pair_write_gb_s: Matrix = field(default_factory=list)
    pair_read_gb_s: Matrix = field(default_factory=list)
    flag_us: Matrix = field(default_factory=list)
    read_128b_us: Matrix = field(default_factory=list)
    flows: list[FlowMeasurement] = field(default_factory=list)

    def __post_init__(self):
        """Matrices left out are filled with None. ValueError for one that fits no machine."""
        num = len(self.gpus)
        for name in _MATRICES:
            matrix = getattr(self, name) or [[None] * num for _ in range(num)]
            if len(matrix) != num or any(len(row) != num for row in matrix):
                sizes = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})}"
                raise ValueError(f"LinkMeasurements: {name}: expected [{num}][{num}], got {sizes}")
            for row in matrix:
                for value in row:
                    _check_number(name, value)
            setattr(self, name, matrix)
        for f in self.flows:
            pairs = list(f.flows)
            sound = all(0 <= s < num and 0 <= d < num and s != d for s, d in pairs)
            if not pairs or not sound:
                raise ValueError(
                    f"LinkMeasurements: flows: expected pairs of different GPUs below {num}, "
                    f"got {pairs}"
                )
            _check_number("flows", f.write)
            _check_number("flows", f.read)

    def to_json(self) -> str:
        """A dict of the fields above; ``flows`` as ``{flows: [[s, d], ...], write, read}``."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> LinkMeasurements:
        """The inverse of ``to_json``. ValueError for anything else."""
        try:
            data = json.loads(text)
            gpus = [GpuId(str(g["uuid"]), str(g["pci"])) for g in data.pop("gpus")]
            flows = [
                FlowMeasurement(
                    tuple((int(s), int(d)) for s, d in f["flows"]), f.get("write"), f.get("read")
                )
                for f in data.pop("flows", [])
            ]
            return LinkMeasurements(gpus, flows=flows, **data)
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            json.JSONDecodeError,
        ) as error:
            raise ValueError(
                f"LinkMeasurements: expected what to_json wrote, got {type(error).__name__}: "
                f"{error}"
            ) from None


def _check_number(name: str, value) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and math.isfinite(value) and value >= 0):
        raise ValueError(f"LinkMeasurements: {name}: expected numbers >= 0 or None, got {value!r}")


# csrc/pcie_allreduce/p2p.h

_NUM_BLOCKS, _PACKET_BYTES, _RECORD_BYTES = 32, 16, 32
_u32, _u64, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_FUNCTIONS = {
    "open": [ctypes.POINTER(_pointer)],
    "close": [_pointer],
    "wait": [_pointer],
    "fill": [_pointer, _pointer, _u64, _u32],
    "expect": [_pointer, _pointer, _u64, _u32, _u32, _u64, _pointer],
    "ping": [_pointer, _pointer, _pointer, ctypes.c_bool, _u32, _u64, _pointer],
    "chase": [_pointer, _pointer, _u64, _u32, _pointer],
    "stream": [_pointer, _pointer, _u64, ctypes.c_bool, _pointer, _u64, _u64, _pointer],
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """``library`` with the types of the functions that are called here."""
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, f"spec_kernels_p2p_{name}")
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_int32, *arguments]
    return library


class _Worker:
    """A stream of ``device``, and records that kernels on it write."""

    def __init__(self, library: ctypes.CDLL, device: Device, num_records: int):
        self._library, self._device = library, device
        self._stream, self.records = None, None
        stream = _pointer()
        self.call("open", ctypes.byref(stream))
        self._stream = stream.value
        try:
            self.records, self.records_mapped = device.allocate_host(num_records * _RECORD_BYTES)
        except RuntimeError:
            self.close()
            raise

    def call(self, name: str, *arguments) -> None:
        function = getattr(self._library, f"spec_kernels_p2p_{name}")
        if name != "open":
            arguments = (self._stream, *arguments)
        text = function(self._device.name.ordinal, *arguments)
        if text is not None:
            raise RuntimeError(f"{self._device.name}: {text.decode()}")

    def place(self, index: int) -> int:
        """The device's address of record ``index``."""
        return self.records_mapped + index * _RECORD_BYTES

    def read(self, index: int, num: int = 1) -> list[tuple[int, int, int, int]]:
        kind = _u64 * 4 * num
        return [tuple(r) for r in kind.from_address(self.records + index * _RECORD_BYTES)]

    def close(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self._library.spec_kernels_p2p_close(self._device.name.ordinal, stream)
        if self.records is not None:
            records, self.records = self.records, None
            self._device.free_host(records)


@dataclass
class PeerReport:
    """What came of trying every pair of ranks with data, in both directions.

    Attributes:
        ranks: each rank's device, for people.
        write: ``[i][j]``, why what i stores into j's memory cannot be relied on; None if it can.
        read: ``[i][j]``, the same for what i loads from j's memory.
    """

    ranks: list[str]
    write: list[list[str | None]]
    read: list[list[str | None]]

    @property
    def sound(self) -> bool:
        return not any(reason for row in (*self.write, *self.read) for reason in row)

    def __str__(self) -> str:
        if self.sound:
            return f"all pairs of {len(self.ranks)} ranks reach each other"
        lines = []
        for table, verb in ((self.write, "stores to"), (self.read, "loads from")):
            for i, row in enumerate(table):
                lines += [
                    f"rank {i} ({self.ranks[i]}) {verb} rank {j} ({self.ranks[j]}): {reason}"
                    for j, reason in enumerate(row)
                    if reason
                ]
        return (
            "peer access fails when tried with data (an IOMMU, or access control on a switch, may "
            "redirect it; see `spec-kernels topology`): " + "; ".join(lines)
        )


VERIFY_BYTES = 256 << 10
VERIFY_TIMEOUT_MS = 500
_NUM_ROUNDS = 2  # in the second, what stands there still is the first one's


def _seed(round_: int, source: int, target: int) -> int:
    """Of a pattern: another one for each round and pair."""
    return (0x51ED2705 * (1 + 4096 * round_ + 64 * source + target)) & 0xFFFFFFFF


def verify(
    library: ctypes.CDLL,
    device: Device,
    rank: int,
    slabs: Sequence[int],
    share_bytes: int,
    timeout_ms: int = VERIFY_TIMEOUT_MS,
    unreachable: Mapping[tuple[int, int], str] | None = None,
) -> Steps[PeerReport]:
    """Tries all pairs with data: every rank runs these steps at the same time (``meeting``).

    Each rank stores a pattern of its own into every peer's memory, and loads one from there; each
    word differs from its neighbours' and from the round before, so that what is missing, stale, or
    partly there is told apart. A kernel waits for at most ``timeout_ms``.

    Args:
        library: the op library, after ``declare``.
        device: this rank's.
        slabs: memory of every rank as mapped here, ``len(slabs) * share_bytes`` each, overwritten.
            Part s of a slab belongs to rank s.
        unreachable: why rank i must not touch rank j's memory, by (i, j), the same on all ranks.
    """
    unreachable = unreachable or {}
    num, ranks = min(share_bytes, VERIFY_BYTES) // _PACKET_BYTES, range(len(slabs))
    peers = [r for r in ranks if r != rank]
    with contextlib.ExitStack() as stack:
        worker: list[_Worker] = []

        def start() -> str:
            worker.append(_Worker(library, device, 2 * len(slabs) * _NUM_BLOCKS))
            stack.callback(worker[0].close)
            device.fill(slabs[rank], 0xA5, len(slabs) * share_bytes)
            device.synchronize()
            return f"{device.name.uuid}, {device.name.pci}"

        def part(owner: int, source: int) -> int:
            return slabs[owner] + source * share_bytes

        def send(round_: int) -> None:
            for target in ranks:  # its own part is what peers load
                if (rank, target) not in unreachable:
                    worker[0].call("fill", part(target, rank), num, _seed(round_, rank, target))
            worker[0].call("wait")

        def expect(round_: int) -> list[list[str | None]]:
            """Why not: [what of each rank's stores, what of the loads from it]."""
            sources = [(part(rank, s), s, rank) for s in peers if (s, rank) not in unreachable]
            num_stores = len(sources)
            sources += [(part(s, s), s, s) for s in peers if (rank, s) not in unreachable]
            for k, (address, source, target) in enumerate(sources):
                seeds = _seed(round_, source, target), _seed(round_ - 1, source, target)
                record = worker[0].place(k * _NUM_BLOCKS)
                worker[0].call("expect", address, num, *seeds, timeout_ms * 1000_000, record)
            worker[0].call("wait")
            found: list[list[str | None]] = [[None] * len(slabs) for _ in range(2)]
            for k, (_, source, _) in enumerate(sources):
                blocks = worker[0].read(k * _NUM_BLOCKS, _NUM_BLOCKS)
                counts = [sum(column) for column in zip(*blocks, strict=True)]
                found[k >= num_stores][source] = _reason(counts, timeout_ms)
            return found

        what = "verifying peer access"
        names = yield from stage(what, start)
        known = [[unreachable.get((i, j)) for j in ranks] for i in ranks]
        report = PeerReport(names, known, [row[:] for row in known])
        for round_ in range(_NUM_ROUNDS):
            yield from stage(what, lambda r=round_: send(r))
            found = yield from stage(what, lambda r=round_: expect(r))
            for i, j in itertools.permutations(ranks, 2):
                report.write[i][j] = report.write[i][j] or found[j][0][i]
                report.read[i][j] = report.read[i][j] or found[i][1][j]
    return report


def _reason(counts: Sequence[int], timeout_ms: int) -> str | None:
    right, stale, wrong, _ = counts
    if not stale and not wrong:
        return None
    total = right + stale + wrong
    if right == 0 and wrong == total:
        return f"nothing arrived in {timeout_ms} ms"
    if stale == total:
        return f"only what was there before, after {timeout_ms} ms"
    return f"{right} of {total} words arrived in {timeout_ms} ms, {stale} were old, {wrong} wrong"


class Links:
    """All links between devices of this process, to be tried and measured; a context manager.

    Args:
        library: the op library, after ``declare``.
        driver: the driver.
        devices: as ``Driver.find`` takes them, in rank order; None: all visible ones.
        num_bytes: of each device's buffer. A stream goes over all of it again and again, so it
            should be larger than a device's L2 cache.

    Attributes:
        duration_ms: of a stream.
        num_trips: of a flag, and loads one after another, that a time is the mean of.
        timeout_ms: how long a kernel waits for another.

    Raises:
        RuntimeError: memory or a device cannot be had. Pairs without peer access are not an error:
            ``reasons`` says of which, and they are not measured.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        driver: Driver,
        devices: Iterable | None = None,
        num_bytes: int = 256 << 20,
    ):
        self.duration_ms, self.num_trips, self.timeout_ms = 10.0, 1000, 2000.0
        self._library = library
        self._num_bytes = num_bytes // (_NUM_BLOCKS * _PACKET_BYTES) * _NUM_BLOCKS * _PACKET_BYTES
        self._stack = contextlib.ExitStack()
        self.names = [driver.find(d) for d in devices or driver.devices]
        self.reasons: dict[tuple[int, int], str] = {}
        with contextlib.ExitStack() as stack:
            self._devices = [stack.enter_context(driver.open(name.ordinal)) for name in self.names]
            self._buffers, self._workers = [], []
            for device in self._devices:
                self._buffers.append(device.allocate(self._num_bytes))
                stack.callback(device.free, self._buffers[-1])
                self._workers.append(_Worker(library, device, 2 * len(self.names) * _NUM_BLOCKS))
                stack.callback(self._workers[-1].close)
            self._gate, self._gate_mapped = self._devices[0].allocate_host(4)
            stack.callback(self._devices[0].free_host, self._gate)
            for i, j in itertools.permutations(range(len(self.names)), 2):
                self._reach(driver, i, j)
            self._stack = stack.pop_all()

    def _reach(self, driver: Driver, i: int, j: int) -> None:
        if self.names[i].ordinal == self.names[j].ordinal:
            return
        try:
            if not driver.can_access_peer(self.names[i], self.names[j]):
                raise RuntimeError("the driver says that it cannot")
            self._devices[i].enable_peer_access(self._devices[j])
        except RuntimeError as error:
            self.reasons[i, j] = str(error)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def gpus(self) -> list[GpuId]:
        return [GpuId(name.uuid, name.pci) for name in self.names]

    def verify(self, timeout_ms: int = VERIFY_TIMEOUT_MS) -> PeerReport:
        """``p2p.verify``; for pairs without peer access, ``reasons``."""
        num = len(self.names)
        share = min(self._num_bytes // num, VERIFY_BYTES) // _PACKET_BYTES * _PACKET_BYTES
        return run_together(
            [
                verify(self._library, device, rank, self._buffers, share, timeout_ms, self.reasons)
                for rank, device in enumerate(self._devices)
            ]
        )[0]

    def flag_us(self, i: int, j: int) -> float | None:
        """One way of a flag's round trips between ``i`` and ``j``: half of each."""
        for rank in (i, j):
            self._devices[rank].fill(self._buffers[rank], 0, 4)
            self._devices[rank].synchronize()
        for rank, peer in ((j, i), (i, j)):
            worker = self._workers[rank]
            worker.call(
                "ping", self._buffers[rank], self._buffers[peer], rank == i, self.num_trips + 1,
                int(self.timeout_ms * 1e6), worker.place(0),
            )  # fmt: skip
        self._wait(i, j)
        begin, end, trips, _ = self._workers[i].read(0)[0]
        return (end - begin) / trips / 2e3 if trips else None

    def read_128b_us(self, i: int, j: int) -> float:
        """``i`` loads 128 bytes of ``j``'s memory, one after another."""
        worker = self._workers[i]
        num_lines = self._num_bytes // 128
        worker.call("chase", self._buffers[j], num_lines, self.num_trips, worker.place(0))
        self._wait(i)
        begin, end, loads, _ = worker.read(0)[0]
        return (end - begin) / loads / 1e3

    def flow_gb_s(self, flows: Sequence[tuple[int, int]], write: bool) -> float:
        """GB/s of all ``flows`` (source, destination of the data) together, while all of them run.

        The source stores, or the destination loads. Flows into one device use parts of its buffer.
        """
        ctypes.memset(self._gate, 0, 4)
        used: dict[int, int] = {}
        at = []
        part = self._num_bytes // max(len(flows), 1) // (_NUM_BLOCKS * _PACKET_BYTES)
        for k, (source, target) in enumerate(flows):
            doer, owner = (source, target) if write else (target, source)
            worker, index = self._workers[doer], used.get(doer, 0)
            used[doer] = index + 1
            at.append((worker, index))
            worker.call(
                "stream", self._buffers[owner] + k * part * _NUM_BLOCKS * _PACKET_BYTES, part,
                write, self._gate_mapped, int(self.duration_ms * 1e6), int(self.timeout_ms * 1e6),
                worker.place(index * _NUM_BLOCKS),
            )  # fmt: skip
        ctypes.memset(self._gate, 1, 4)
        self._wait(*used)
        total = 0.0
        for worker, index in at:
            blocks = worker.read(index * _NUM_BLOCKS, _NUM_BLOCKS)
            begin, end = min(b[0] for b in blocks), max(b[1] for b in blocks)
            total += sum(b[2] for b in blocks) / max(end - begin, 1)
        return total

    def _wait(self, *ranks: int) -> None:
        for rank in ranks:
            self._workers[rank].call("wait")

    def measure(
        self, groups: Sequence[Sequence[int]] = (), report: PeerReport | None = None
    ) -> LinkMeasurements:
        """Everything, pair by pair and then ``flow_sets``.

        A pair that has no access, or that cannot be relied on by ``report``, stays None.
        """
        num = len(self.names)
        pairs = [p for p in itertools.permutations(range(num), 2) if p not in self.reasons]
        if report is not None:
            pairs = [(i, j) for i, j in pairs if not (report.write[i][j] or report.read[i][j])]
        table = LinkMeasurements(self.gpus())
        for i, j in pairs:
            table.pair_write_gb_s[i][j] = self.flow_gb_s([(i, j)], write=True)
            table.pair_read_gb_s[i][j] = self.flow_gb_s([(j, i)], write=False)
            table.read_128b_us[i][j] = self.read_128b_us(i, j)
            if (j, i) in pairs:
                table.flag_us[i][j] = self.flag_us(i, j)
        for flows in flow_sets(num, groups):
            reached = all((s, d) in pairs and (d, s) in pairs for s, d in flows)
            if reached:
                table.flows.append(
                    FlowMeasurement(
                        flows, self.flow_gb_s(flows, write=True), self.flow_gb_s(flows, write=False)
                    )
                )
        return table


def groups_of(machine: Machine, names: Sequence[DeviceName]) -> list[list[int]]:
    """Indices of the GPUs behind one switch, for ``flow_sets``; a GPU of its own is in none."""
    behind: dict[str, list[int]] = {}
    for k, name in enumerate(names):
        if name.pci in machine.devices:
            above = machine.chain(name.pci)[:-1]
            # A switch is an upstream port with downstream ports below it; the last is the nearest.
            switches = [d for d in above if d.port_type == "upstream"]
            if switches:
                behind.setdefault(switches[-1].address, []).append(k)
    return [group for group in behind.values() if len(group) > 1]


def render(table: LinkMeasurements) -> str:
    """``table`` for people."""
    num = len(table.gpus)
    lines = [f"{i}  {gpu.pci}  {gpu.uuid}" for i, gpu in enumerate(table.gpus)]
    for title, matrix in (
        ("write, GB/s: row stores into column", table.pair_write_gb_s),
        ("read, GB/s: row loads from column", table.pair_read_gb_s),
        ("flag, us: from row to column", table.flag_us),
        ("read of 128 bytes, us: row from column", table.read_128b_us),
    ):
        lines += ["", title, "   " + "".join(f"{j:8}" for j in range(num))]
        for i, row in enumerate(matrix):
            lines.append(f"{i:3}" + "".join(f"{_cell(value):>8}" for value in row))
    if table.flows:
        lines += ["", "at the same time, GB/s together    write    read"]
    for flow in table.flows:
        pairs = " ".join(f"{s}>{d}" for s, d in flow.flows)
        lines.append(f"{pairs:32}{_cell(flow.write):>8}{_cell(flow.read):>8}")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def flow_sets(num: int, groups: Sequence[Sequence[int]] = ()) -> list[tuple[tuple[int, int], ...]]:
    """Concurrent copies worth measuring among ``num`` GPUs.

    Fan-out of each GPU to 2, 3 and 7 others; all copies of one half of the ranks to the other half;
    and two GPUs of one group to two that are in other groups, which is where posted writes collapse
    on some boards. ``groups``: GPUs behind one switch; ranks 2k and 2k + 1 when it is empty.
    """
    groups = [list(g) for g in groups] or [[k, k + 1] for k in range(0, num - 1, 2)]
    sets: list[tuple[tuple[int, int], ...]] = []
    for i in range(num):
        others = [(i + k) % num for k in range(1, num)]
        sets += [tuple((i, j) for j in others[:k]) for k in (2, 3, 7) if k < num]
    half = num // 2
    if half >= 2:
        low, high = range(half), range(half, 2 * half)
        sets += [tuple(zip(low, high, strict=True)), tuple(zip(high, low, strict=True))]
    for group in groups:
        outside = [j for j in range(num) if j not in group]
        for pair in itertools.combinations(group, 2):
            for targets in itertools.permutations(outside, 2):
                sets.append(tuple(zip(pair, targets, strict=True)))
    return list(dict.fromkeys(sets))
