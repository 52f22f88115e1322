"""What choosing each cycle's size is worth: the loop's rule on traces, against fixed sizes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from spec_kernels.decode.adaptive import Adapter, CostTable
from spec_kernels.planning.checks import fail
from spec_kernels.planning.traces import Run, Text, Trace, replay, replay_best, right_drafts
from spec_kernels.planning.tree_shape import Path


class _Decoding:
    """A request on its way through a text."""

    def __init__(self, text: Text, paths: Sequence[Path], form: str):
        self.text, self.place = text, 0
        # A chain's confidences are conditional; a tree's are those of whole paths.
        self.confidence = text.confidence[:, : len(paths)].copy()
        if form == "cumulative":
            columns = {path: i for i, path in enumerate(paths)}
            for i, path in enumerate(paths):
                if len(path) > 1:
                    self.confidence[:, i] *= self.confidence[:, columns[path[:-1]]]
        sizes = range(1, len(paths) + 2)
        self.accepted_by = {n: right_drafts(text, paths[: n - 1]).tolist() for n in sizes}
        self.unread: deque[tuple[int, int, list[float], int]] = deque()

    def run(self, rung: int, nodes: int, kept: int) -> None:
        accepted = self.accepted_by[kept][self.place]
        confidence = self.confidence[self.place, : nodes - 1].tolist()
        self.unread.append((rung, kept, confidence, accepted))
        self.place += accepted + 1

    @property
    def is_done(self) -> bool:
        return self.place >= len(self.text)


def replay_adaptive(
    texts: Sequence[Text],
    adapter: Adapter,
    paths: Sequence[Path],
    batch: int = 1,
    delay: int = 1,
) -> Run:
    """The loop's rule chooses rungs and nodes, and learns of a cycle ``delay`` choices later.

    Up to ``batch`` texts are decoded together; the next one joins when one is done.

    Args:
        adapter: whose rungs are leading parts of ``paths``; it keeps what it learns.
        paths: of the texts' confidences.
        delay: cycles that are chosen before an earlier one's result is read: 0 = none.
    """
    waiting, active = deque(enumerate(texts)), {}
    cycles, ms = 0, 0.0
    while waiting or active:
        while waiting and len(active) < batch:
            name, text = waiting.popleft()
            active[name] = _Decoding(text, paths, adapter.form)
            adapter.join(name)
        choice = adapter.choose(list(active), len(active))
        nodes, num_drafts = adapter.rungs[choice.rung], sum(choice.max_nodes) - len(active)
        ms += adapter.costs.cycle(len(active), nodes, num_drafts)
        cycles += 1
        for (name, request), kept in zip(list(active.items()), choice.max_nodes, strict=True):
            request.run(choice.rung, nodes, kept)
            if len(request.unread) > delay:
                adapter.observe(name, *request.unread.popleft())
            if request.is_done:
                adapter.leave(name)
                del active[name]
    return Run(sum(map(len, texts)), cycles, ms)


def replay_together(
    texts: Sequence[Text], paths: Sequence[Path], nodes: int, costs: CostTable, batch: int
) -> Run:
    """A fixed size of ``nodes`` for up to ``batch`` texts decoded together."""
    lengths = deque(replay(text, paths[: nodes - 1], 0.0).num_cycles for text in texts)
    left: list[int] = []
    cycles, ms = 0, 0.0
    while lengths or left:
        while lengths and len(left) < batch:
            left.append(lengths.popleft())
        ms += costs.cycle(len(left), nodes, len(left) * (nodes - 1))
        cycles += 1
        left = [count - 1 for count in left if count > 1]
    return Run(sum(map(len, texts)), cycles, ms)


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
    _check_rungs("judge", trace, rungs)
    texts, paths = trace.texts, trace.paths
    sizes = {n: (paths[: n - 1], costs.cycle(1, n, n - 1)) for n in rungs}
    adapter = Adapter(rungs, costs, **options)
    adaptive = [replay_adaptive([text], adapter, paths, delay=delay) for text in texts]
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


@dataclasses.dataclass(frozen=True)
class BatchVerdict:
    """Tokens a second of a batch together, in the texts' own order, and what adapting gains.

    Attributes:
        fixed: by number of nodes a request.
        adaptive: the loop's rule.
        gain: ``adaptive`` over the best of ``fixed``: median, and 5th and 95th percentile, of the
            texts in shuffled orders.
    """

    fixed: dict[int, float]
    adaptive: float
    gain: tuple[float, float, float]

    @property
    def best_fixed(self) -> int:
        return max(self.fixed, key=lambda n: (self.fixed[n], -n))


def judge_batch(
    trace: Trace,
    rungs: Sequence[int],
    costs: CostTable,
    batch: int,
    *,
    delay: int = 1,
    num_orders: int = 20,
    seed: int = 0,
    **options,
) -> BatchVerdict:
    """As ``judge``, for ``batch`` texts at a time; the rule begins anew for each order.

    ValueError: rungs beyond the trace's paths, a batch that has no cost, or as from ``Adapter``.
    """
    _check_rungs("judge_batch", trace, rungs)

    def speeds(texts: Sequence[Text]) -> tuple[dict[int, float], float]:
        fixed = {n: replay_together(texts, trace.paths, n, costs, batch) for n in rungs}
        adapter = Adapter(rungs, costs, **options)
        ours = replay_adaptive(texts, adapter, trace.paths, batch, delay)
        return {n: r.num_tokens * 1e3 / r.ms for n, r in fixed.items()}, (
            ours.num_tokens * 1e3 / ours.ms
        )

    generator, ratios = np.random.default_rng(seed), []
    for _ in range(num_orders):
        order = generator.permutation(len(trace.texts))
        fixed, adaptive = speeds([trace.texts[i] for i in order])
        ratios.append(adaptive / max(fixed.values()))
    low, median, high = np.percentile(ratios, [5, 50, 95])
    return BatchVerdict(*speeds(trace.texts), (float(median), float(low), float(high)))


def _check_rungs(function: str, trace: Trace, rungs: Sequence[int]) -> None:
    most = len(trace.paths) + 1
    if max(rungs) > most:
        raise fail(function, "rungs", f"at most {most} nodes, which the trace has", list(rungs))
