"""What choosing each cycle's size is worth: the loop's rule on traces, against fixed sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec_kernels.decode.adaptive import Adapter, CostTable
from spec_kernels.planning.traces import Run, Text, Trace, replay, replay_best, right_drafts
from spec_kernels.planning.tree_shape import Path


def replay_adaptive(
    text: Text, name: object, adapter: Adapter, paths: Sequence[Path], delay: int = 1
) -> Run:
    """The loop's rule: it chooses a rung, and learns of a cycle ``delay`` choices later than soon.

    Args:
        name: of the request.
        adapter: whose rungs are leading parts of ``paths``; it keeps what it learns.
        paths: of the text's confidences.
        delay: cycles that are chosen before an earlier one's result is read: 0 = none.
    """
    columns = {path: i for i, path in enumerate(paths)}
    # A chain's confidences are conditional; a tree's are those of whole paths.
    confidence = text.confidence[:, : len(paths)].copy()
    if adapter.form == "cumulative":
        for i, path in enumerate(paths):
            if len(path) > 1:
                confidence[:, i] *= confidence[:, columns[path[:-1]]]
    kept_by = {n: right_drafts(text, paths[: n - 1]).tolist() for n in range(1, len(paths) + 2)}
    waiting: list[tuple[int, int, list[float], int]] = []
    place, cycles, ms = 0, 0, 0.0
    adapter.join(name)
    while place < len(text):
        choice = adapter.choose([name], 1)
        nodes, kept = adapter.rungs[choice.rung], choice.max_nodes[0]
        accepted = kept_by[kept][place]
        ms += adapter.costs.cycle(1, nodes, kept - 1)
        waiting.append((choice.rung, kept, confidence[place, : nodes - 1].tolist(), accepted))
        if len(waiting) > delay:
            adapter.observe(name, *waiting.pop(0))
        place += accepted + 1
        cycles += 1
    adapter.leave(name)
    return Run(len(text), cycles, ms)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Tokens a second of one request at a time, over all texts together, and what adapting gains.

    Attributes:
        fixed: by number of nodes; 1 = the root alone, the drafter kept in step.
        adaptive: the loop's rule.
        best_possible: every cycle's size chosen by one who knows the text.
        gain: ``adaptive`` over the best of ``fixed``, as it is and its 5th and 95th percentile over
            texts drawn again with replacement, prompt by prompt. The best fixed size is chosen on
            the very texts, and anew each time, so that the comparison favours it.
    """

    fixed: dict[int, float]
    adaptive: float
    best_possible: float
    gain: tuple[float, float, float]

    @property
    def best_fixed(self) -> int:
        return max(self.fixed, key=lambda n: (self.fixed[n], -n))


def judge(
    trace: Trace,
    rungs: Sequence[int],
    costs: CostTable,
    *,
    delay: int = 1,
    num_resamples: int = 1000,
    seed: int = 0,
    **options,
) -> Verdict:
    """Replays the texts with each fixed size of ``rungs``, with the loop's rule, and at best.

    Args:
        trace: its texts are decoded in their order, and the rule keeps what it learns; its paths
            are those of the largest tree, the likeliest first (see ``Trace.keep``).
        rungs: numbers of nodes, the first 1; a rung of n nodes has the first n - 1 paths.
        costs: milliseconds of a cycle of one request, used by the rule and counted alike.
        delay: see ``replay_adaptive``.
        options: further arguments of ``Adapter``.

    Raises:
        ValueError: rungs beyond the trace's paths, or as from ``Adapter``.
    """
    texts, paths = trace.texts, trace.paths
    if max(rungs) > len(paths) + 1:
        raise ValueError(
            f"judge: rungs: expected at most {len(paths) + 1} nodes, which the trace has, got "
            f"{list(rungs)}"
        )
    sizes = {n: (paths[: n - 1], costs.cycle(1, n, n - 1)) for n in rungs}
    adapter = Adapter(rungs, costs, **options)
    adaptive = [
        replay_adaptive(text, number, adapter, paths, delay) for number, text in enumerate(texts)
    ]
    names = sorted({text.name for text in texts})

    def by_prompt(runs: Sequence[Run]) -> np.ndarray:
        """``[prompts, 2]``: tokens and milliseconds."""
        sums = np.zeros((len(names), 2))
        for text, run in zip(texts, runs, strict=True):
            sums[names.index(text.name)] += run.num_tokens, run.ms
        return sums

    rules = {n: by_prompt([replay(t, *size) for t in texts]) for n, size in sizes.items()}
    ours, best = by_prompt(adaptive), by_prompt([replay_best(t, sizes) for t in texts])

    def speed(sums: np.ndarray) -> np.ndarray:
        return 1e3 * sums[..., 0] / sums[..., 1]

    fixed = {n: float(speed(sums.sum(0))) for n, sums in rules.items()}
    drawn = np.random.default_rng(seed).integers(len(names), size=(num_resamples, len(names)))
    rivals = np.stack([speed(sums[drawn].sum(1)) for sums in rules.values()])
    ratios = speed(ours[drawn].sum(1)) / rivals.max(0)
    total = float(speed(ours.sum(0)))
    low, high = np.percentile(ratios, [5, 95])
    return Verdict(
        fixed,
        total,
        float(speed(best.sum(0))),
        (total / max(fixed.values()), float(low), float(high)),
    )
