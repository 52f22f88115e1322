"""The simulator beside every measurement that it can be held against, misfits included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spec_kernels.comm.schedules import algorithms_for
from spec_kernels.comm.simulator import Box, boxes, entries, flows_of, predict_us

# How far the model may be from a measurement before it is called a misfit.
TOLERANCE = 0.15

# Latencies of boxes.json: which pair of ranks stands for each, and what is measured.
_LATENCIES = {
    "write": (0, 1, "write"),
    "write_same_numa": (0, 1, "write"),
    "write_cross_numa": (0, 4, "write"),
    "read_128B_same_switch": (0, 1, "read"),
    "read_128B_same_leaf": (0, 1, "read"),
    "read_128B_cross_leaf": (0, 2, "read"),
    "read_128B_same_numa": (0, 2, "read"),
    "read_128B_across": (0, 4, "read"),
    "read_128B_cross_root": (0, 4, "read"),
    "read_128B_cross_numa": (0, 4, "read"),
}
# Rows beyond the tolerance, by box and beginning of their text, with what is known of them;
# nothing was bent to make them fit.
KNOWN_MISFITS = {
    ("asus-esc8000a-broadcom", "read 0>4, 2>6"): "two concurrent loads from two switches share "
    "something that neither the links nor other flows show",
    (
        "asus-esc8000a-broadcom",
        "read 0>4, 1>6",
    ): "loads exceed what their uplink carries of stores; "
    "fits (53.5) if the pair is meant as reader and owner",
    ("asus-esc8000a-broadcom", "one-shot, 8 ranks"): "the collapse, measured with two flows, is "
    "deeper with eight",
    (
        "wrx90-two-switches",
        "one-shot, 4 ranks",
    ): "that prototype sends 13 GB/s a GPU, on both boards alike, where links and fan-out allow 32",
    ("wrx90-root-and-leaves", "one-shot, 4 ranks"): "the same prototype",
    (
        "wrx90-two-switches",
        "latency, write",
    ): "without the reader's polling, which the model has in",
    ("wrx90-root-and-leaves", "latency, write"): "without the reader's polling",
    ("dual-turin-direct", "latency"): "a root complex without switches is faster than one behind "
    "them; the model has one figure for both",
    ("dual-genoa-direct", "write 0>4, 4>0"): "the two directions share something there",
    ("any", "one GPU stores to three"): "the figure for two or more destinations is 32",
}
_BOTH_WAYS = ("cross_chip_bidirectional", "cross_socket_bidirectional")


@dataclass(frozen=True)
class Comparison:
    """A published measurement (a range, or a point where ``low == high``) beside the model.

    ``origin``: ``"parameter"`` where this very figure set a parameter, so that agreement says
    nothing; ``"prediction"`` where it did not.
    """

    box: str
    what: str
    unit: str
    low: float
    high: float
    predicted: float
    origin: str

    @property
    def error(self) -> float:
        """Relative, against the nearest value that was measured."""
        return self.predicted / min(max(self.predicted, self.low), self.high) - 1

    @property
    def misfit(self) -> bool:
        return abs(self.error) > TOLERANCE

    @property
    def reason(self) -> str:
        """What is known of a misfit; empty for a row within the tolerance, or a new misfit."""
        if not self.misfit:
            return ""
        known = (
            reason
            for (box, start), reason in KNOWN_MISFITS.items()
            if box == self.box and self.what.startswith(start)
        )
        return next(known, "")


def compare() -> list[Comparison]:
    """Every flow, latency and one-shot all-reduce of ``boxes.json``, then figures of no one box."""
    rows: list[Comparison] = []
    for name, box in boxes().items():
        rows += _flows(name, box)
        rows += _latencies(name, box)
        rows += _allreduces(name, box)
    return rows + list(_general())


def _row(box, what, unit, measured, predicted, parameter=False) -> Comparison:
    low, high = measured if isinstance(measured, list | tuple) else (measured, measured)
    origin = "parameter" if parameter else "prediction"
    return Comparison(box, what, unit, float(low), float(high), predicted, origin)


def table(rows: Iterable[Comparison]) -> list[str]:
    """Lines of text: every row, then what is known of the misfits."""
    lines = [f"{'figure':46} {'measured':>15} {'model':>8} {'error':>6}"]
    notes: list[str] = []
    for r in rows:
        measured = f"{r.low:g}" if r.low == r.high else f"{r.low:g}-{r.high:g}"
        measured = f"{measured} {r.unit}"
        verdict = "parameter" if r.origin == "parameter" else ""
        if r.misfit:
            if r.reason not in notes:
                notes.append(r.reason)
            verdict = f"MISFIT ({notes.index(r.reason) + 1})"
        lines.append(
            f"{r.what:46} {measured:>15} {r.predicted:8.4g} {r.error:+6.0%}  {verdict}".rstrip()
        )
    return lines + [f"({k}) {note}" for k, note in enumerate(notes, 1)]


def _total(box: Box, kind: str, *pairs: tuple[int, int]) -> float:
    return sum(box.rates([(*pair, kind) for pair in pairs]))


def _flows(name: str, box: Box) -> Iterable[Comparison]:
    links = entries()[name]["links_gb_s"]
    # from_entry takes these two from the flows themselves.
    fitted = {box.collapse_gb_s, None if "uplink" in links else box.links_gb_s.get("uplink")}
    for f in flows_of(entries()[name]):
        for kind, value in (("write", f.write), ("read", f.read)):
            if value is not None:
                what = f"{kind} " + ", ".join(f"{s}>{d}" for s, d in f.flows)
                parameter = kind == "write" and value in fitted
                yield _row(name, what, "GB/s", value, _total(box, kind, *f.flows), parameter)
    for key in _BOTH_WAYS:
        if key in links:
            both = _total(box, "write", (0, 4), (4, 0))
            yield _row(name, "write 0>4, 4>0", "GB/s", links[key], both)
    if "any_pair" in links:
        pairs = [_total(box, "write", (0, other)) for other in range(1, box.num_ranks)]
        yield _row(name, "write, slowest pair", "GB/s", links["any_pair"], min(pairs))
    if "cross_socket_pair" in links:
        across = _total(box, "write", (0, 4))
        yield _row(name, "write 0>4", "GB/s", links["cross_socket_pair"], across, parameter=True)


def _trip_us(box: Box, reader: int, owner: int) -> float:
    return 2 * box.latency_us(owner, reader, "read")


def _latencies(name: str, box: Box) -> Iterable[Comparison]:
    for key, value in entries()[name]["latency_us"].items():
        if key in _LATENCIES:
            i, j, kind = _LATENCIES[key]
            predicted = _trip_us(box, i, j) if kind == "read" else box.latency_us(i, j, kind)
            what = f"latency, {key.replace('_', ' ')}"
            yield _row(name, what, "us", value, predicted, parameter=kind == "read")
        elif key == "all_read_all":
            # One remote load after another from each of the seven others.
            loads = [sum(_trip_us(box, i, j) for j in range(8) if j != i) for i in range(8)]
            yield _row(name, "latency, all read all", "us", value, max(loads))


def _allreduces(name: str, box: Box) -> Iterable[Comparison]:
    for group, times in entries()[name]["allreduce_us"].items():
        ranks, kind = group.removeprefix("ranks").split("_")
        if kind == "custom":  # a one-shot prototype
            for size, us in times.items():
                predicted = predict_us(box, "one_shot", int(size), int(ranks))
                yield _row(name, f"one-shot, {ranks} ranks, {size} B", "us", us, predicted)


def best_us(box: Box, num_bytes: int, num_ranks: int = 8, **options) -> float:
    """The fastest exact algorithm, islands of any size that the box offers."""
    times = []
    for island_size in (0, *(len(islands[0]) for islands in box.topology.islands())):
        for algorithm in algorithms_for(num_ranks, island_size):
            options["island_size"] = island_size
            times.append(predict_us(box, algorithm, num_bytes, num_ranks, **options))
    return min(times)


def _general() -> Iterable[Comparison]:
    """Figures published for gen5 boxes in general, on the plainest box: two switches."""
    name = "wrx90-two-switches"
    box = boxes()[name]
    both = _total(box, "write", (0, 1), (1, 0))
    yield _row("any", "write 0>1, 1>0", "GB/s", (103, 111), both)
    three = [(0, 1), (0, 2), (0, 3)]
    yield _row("any", "one GPU stores to three", "GB/s", 25.4, _total(box, "write", *three))
    loads = _total(box, "read", *((d, s) for s, d in three))
    yield _row("any", "one GPU loads from three", "GB/s", 20.6, loads, parameter=True)
    yield _row(
        "any", "flag below a switch", "us", (0.63, 0.73), box.latency_us(0, 1, "write"), True
    )
    yield _row("any", "flag across", "us", (1.06, 1.12), box.latency_us(0, 4, "write"), True)
    yield _row("any", "128 B read below a switch", "us", 0.71, _trip_us(box, 0, 1), True)
    across = _trip_us(box, 0, 4)
    yield _row("any", "128 B read across", "us", (1.14, 1.36), across, True)
    token = 2 * 7168
    one_shot = predict_us(box, "one_shot", token, 8)
    yield _row("any", "one-shot, 8 ranks, one token", "us", (9, 12), one_shot)
    step = 122 * best_us(box, 4 * token) / 1e3
    yield _row("any", "122 all-reduces of four tokens, 8 ranks", "ms", 122 * 16e-3, step)
