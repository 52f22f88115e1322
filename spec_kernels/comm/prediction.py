"""What a machine's all-reduces would take by the simulator, and how far that can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from spec_kernels.comm.bench import SUMS_A_STEP, Row, fastest, predicted
from spec_kernels.comm.schedules import algorithms_for
from spec_kernels.comm.selection import Selection
from spec_kernels.comm.simulator import Box, entries
from spec_kernels.comm.tuning import HIDDEN, TOKENS, tune_by_simulation
from spec_kernels.comm.validation import TOLERANCE, Comparison, compare, table
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS, LOSSY

_LOSSY_NAMES = frozenset(name for name, number in ALGORITHMS.items() if number in LOSSY)


@dataclass(frozen=True)
class Prediction:
    """Of one machine; every number in ``rows`` is a prediction, in microseconds a call."""

    box: Box
    num_ranks: int
    hidden: int
    island_size: int
    rows: tuple[Row, ...]
    selection: Selection
    comparisons: tuple[Comparison, ...]

    def as_dict(self) -> dict:
        return {
            "box": self.box.name,
            "origin": "predicted",
            "ranks": self.num_ranks,
            "hidden": self.hidden,
            "island_size": self.island_size,
            "rows": [row.as_dict() for row in self.rows],
            "selection": self.selection.as_dict(),
            "comparisons": [
                asdict(c) | {"error": c.error, "misfit": c.misfit, "reason": c.reason}
                for c in self.comparisons
            ],
        }


def predict(
    box: Box, num_ranks: int, tokens: Sequence[int] = TOKENS, hidden: int = HIDDEN
) -> Prediction:
    """Rows for ``tokens`` bf16 rows of ``hidden``, the table that would be used, and comparisons.

    Ranks are the box's first. The comparisons are the published measurements of this very box; none
    for other machines.
    """
    if num_ranks < box.num_ranks:
        box = box.select(range(num_ranks))
    island_size = box.island_size
    rows = predicted(box, [2 * hidden * n for n in tokens], num_ranks, island_size)
    selection, _ = tune_by_simulation(box, num_ranks, island_size)
    mine = tuple(c for c in compare() if c.box == box.name)
    return Prediction(box, num_ranks, hidden, island_size, tuple(rows), selection, mine)


def render(p: Prediction) -> list[str]:
    """Lines of text for people."""
    about = entries().get(p.box.name, {}).get("about", "links as measured")
    names = algorithms_for(p.num_ranks, p.island_size, lossy=True)
    lines = [
        f"{p.box.name}: {about}",
        f"PREDICTED by the simulator: microseconds a call, {p.num_ranks} ranks, bf16 rows of "
        f"{p.hidden}; * fastest exact algorithm",
        "",
        f"{'rows':>4} {'bytes':>8} | "
        + " ".join(f"{_short(name):>10}" for name in names)
        + f" | {SUMS_A_STEP} a step",
    ]
    best = fastest(p.rows, _LOSSY_NAMES)
    for size, winner in best.items():
        cells = []
        for row in p.rows:
            if row.num_bytes == size:
                star = "*" if row is winner else " "
                cells.append(f"{row.us[1]:>9.1f}{star}")
        step = SUMS_A_STEP * winner.us[1] / 1e3
        lines.append(f"{size // (2 * p.hidden):>4} {size:>8} | {' '.join(cells)} | {step:6.2f} ms")
    lossy = [_short(name) for name in names if name in _LOSSY_NAMES]
    if lossy:
        lines.append(f"{', '.join(lossy)}: rounded more than once, only by name")
    lines += ["", "The table that a group would use:"]
    lines += [f"  {line}" for line in p.selection.lines()]
    if p.comparisons:
        free = [c for c in p.comparisons if c.origin == "prediction"]
        fits = sum(not c.misfit for c in free)
        lines += [
            "",
            f"The model against what was measured on this box: {fits} of {len(free)} figures that "
            f"set no parameter within {TOLERANCE:.0%}",
            *(f"  {line}" for line in table(p.comparisons)),
        ]
    return lines


def _short(name: str) -> str:
    return name.replace("hierarchical", "hier").replace("two_shot_", "two_")
