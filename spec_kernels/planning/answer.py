"""What ``spec-kernels viability`` answers: needed accuracies, predicted speeds, assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec_kernels.planning import viability
from spec_kernels.planning.checks import count, fail, real
from spec_kernels.planning.inputs import Acceptance
from spec_kernels.planning.parts import CycleCost
from spec_kernels.planning.tree_shape import Choice, fastest
from spec_kernels.planning.viability import Estimate

# The published case (8 PCIe GPUs): what is asked when nothing else is.
DEFAULT_TARGETS = (150.0, 200.0)
DEFAULT_CYCLES_MS = (30.0, 15.0)
DEFAULT_NUM_DRAFTS = 2


@dataclass(frozen=True)
class Cycle:
    """Time of a whole cycle of the batch, ms, and where it comes from.

    ``low`` and ``high``: where it may lie; None where nobody says.
    """

    ms: float
    source: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Requirement:
    """What a target takes at a cycle time.

    Attributes:
        target_tok_s: of the whole batch.
        cycle_ms: time of a cycle.
        accept_length: the one needed; below 1, no draft need be right.
        unbounded: constant conditional accuracy by 1 / (1 - p), which has drafts without end.
        bounded: the same by the answer's ``num_drafts``; None where out of reach at any accuracy.
    """

    target_tok_s: float
    cycle_ms: float
    accept_length: float
    unbounded: float
    bounded: float | None

    @property
    def reachable(self) -> bool:
        return self.bounded is not None


@dataclass(frozen=True)
class Prediction:
    """What the given acceptance yields at a cycle time.

    Attributes:
        cycle: time of a cycle.
        accept_length: of the answer's ``num_drafts`` drafts, tokens.
        tok_s: of the whole batch; from the intervals of accept length and cycle.
        speedup: over plain decoding; None where its speed is not known.
        tok_s_per_point: more tok/s for each percentage point of conditional accuracy, every step's.
        tok_s_per_ms: more tok/s for each ms that the cycle gets longer (negative).
        most_tok_s: with every draft right.
    """

    cycle: Cycle
    accept_length: Estimate
    tok_s: Estimate
    speedup: Estimate | None
    tok_s_per_point: float
    tok_s_per_ms: float
    most_tok_s: float


@dataclass(frozen=True)
class Answer:
    """All that is printed, drawn and written.

    Attributes:
        num_drafts: k, drafts of a chain in a cycle; k + 1 tokens are verified.
        batch: requests that go through a cycle together.
        targets: tok/s of the whole batch.
        cycles: the cycle times looked at.
        plain_tok_s: plain decoding of the whole batch; None where not known.
        acceptance: what the drafter does, and who says so; None where not given.
        full_accuracy: of ``num_drafts`` drafts, cut or continued, with an interval (Wilson's) where
            it was counted; empty without ``acceptance``.
        requirements: for each target, for each cycle time.
        break_even: for each cycle time, with plain decoding's speed as the target; may be empty.
        predictions: for each cycle time; empty without ``acceptance``.
        warnings: what must not be overlooked.
        assumptions: what all this stands on.
        costs: parts of a cycle to be shown with it; None where not asked for.
        chains: no drafts, 1, 2, ..., each with its cycle by the same costs; one request's tok/s.
        trees: the fastest tree of each number of nodes, likewise; empty without a trace.
        is_published: whether it is the published case, whose figures are then shown too.
    """

    num_drafts: int
    batch: int
    targets: tuple[float, ...]
    cycles: tuple[Cycle, ...]
    plain_tok_s: float | None
    acceptance: Acceptance | None
    full_accuracy: tuple[Estimate, ...]
    requirements: tuple[Requirement, ...]
    break_even: tuple[Requirement, ...]
    predictions: tuple[Prediction, ...]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]
    costs: CycleCost | None = None
    chains: tuple[Choice, ...] = ()
    trees: tuple[Choice, ...] = ()
    is_published: bool = False

    @property
    def best_chain(self) -> Choice | None:
        """The fastest of ``chains``."""
        return fastest(self.chains) if self.chains else None

    @property
    def best_tree(self) -> Choice | None:
        """The fastest of ``trees``; may be a chain, or no drafts."""
        return fastest(self.trees) if self.trees else None


def requirement(
    target_tok_s: float, cycle_ms: float, num_drafts: int, batch: int = 1
) -> Requirement:
    """What ``target_tok_s`` (of the batch) takes at ``cycle_ms`` with chains of ``num_drafts``."""
    needed = viability.required_accept_length(target_tok_s, cycle_ms, batch)
    bounded = viability.chain_accuracy(max(1.0, needed), num_drafts)
    return Requirement(
        target_tok_s,
        cycle_ms,
        needed,
        viability.unbounded_accuracy(max(1.0, needed)),
        None if math.isnan(bounded) else bounded,
    )


def with_drafts(
    acceptance: Acceptance, num_drafts: int, tail: float | None = None
) -> tuple[np.ndarray, Estimate, list[str]]:
    """(full accuracies ``[num_drafts]``, accept length, what had to be assumed).

    Fewer drafts than were measured cut the list: a chain's later drafts do not change its earlier
    ones, if a little where its next cycle starts. More continue it with a constant conditional
    accuracy: ``tail``, or the last measured one. Where the source knows the accept length alone,
    one conditional accuracy stands for all steps.
    """
    name = "with_drafts"
    count(name, "num_drafts", num_drafts, maximum=viability.MOST_DRAFTS)
    full = np.array(acceptance.full_accuracy)
    if not len(full):
        steps = acceptance.num_drafts
        if steps is None:
            raise fail(
                name, "acceptance", "a source that knows how many drafts it ran", acceptance.source
            )

        def chain(length: float) -> float:
            return viability.chain_accuracy(length, steps)

        accuracy = chain(acceptance.accept_length.value)
        length = acceptance.accept_length
        if num_drafts != steps:
            length = length.through(lambda x: viability.chain_accept_length(chain(x), num_drafts))
        return (
            accuracy ** np.arange(1, num_drafts + 1),
            length,
            [f"one conditional accuracy, {accuracy:.3f}, at all steps: {acceptance.source} says "
             f"no more than the accept length of {steps} drafts"],
        )  # fmt: skip
    assumed = []
    if num_drafts > len(full):
        ratio = float(viability.conditional_from_full(full)[-1]) if tail is None else tail
        assumed.append(
            f"beyond draft {len(full)}, which is the last measured, a constant conditional "
            f"accuracy of {ratio:.3f}" + (" (that of the last)" if tail is None else "")
        )
        full = viability.extend(full, num_drafts, ratio)
    full = full[:num_drafts]
    if acceptance.num_cycles is None:
        return full, Estimate.exact(viability.accept_length(full)), assumed
    return full, viability.accept_length_estimate(full, acceptance.num_cycles), assumed


def make_answer(
    targets: Sequence[float] = DEFAULT_TARGETS,
    cycles: Sequence[Cycle] = (),
    num_drafts: int | None = None,
    batch: int | None = None,
    plain_tok_s: float | None = None,
    acceptance: Acceptance | None = None,
    tail: float | None = None,
    costs: CycleCost | None = None,
    chains: Sequence[Choice] = (),
    trees: Sequence[Choice] = (),
) -> Answer:
    """Works out everything that ``Answer`` holds.

    Args:
        targets: tok/s of the whole batch.
        cycles: cycle times; the source's own is added, and without any the published 30 and 15 ms.
        num_drafts: k; None = as many as the source has, else 2.
        batch: None = the source's, else 1.
        plain_tok_s: None = the source's.
        acceptance: what the drafter does.
        tail: conditional accuracy beyond the last measured draft; see ``with_drafts``.
        costs: parts of a cycle; their sum is added to the cycle times.
        chains, trees: see ``Answer``.

    Raises:
        ValueError: a number that cannot be; names function, argument, expected, got.
    """
    name = "make_answer"
    if not len(targets):
        raise fail(name, "targets", "at least one target in tok/s", list(targets))
    for target in targets:
        real(name, "targets", target, above=0)
    if tail is not None:
        real(name, "tail", tail, at_least=0, at_most=1)
    all_cycles = list(cycles)
    if num_drafts is None:
        num_drafts = (acceptance and acceptance.num_drafts) or DEFAULT_NUM_DRAFTS
    count(name, "num_drafts", num_drafts, maximum=viability.MOST_DRAFTS)
    if acceptance is not None:
        if batch is not None and acceptance.batch != batch:
            # Rates carry over to another batch size; times and speeds do not.
            same_batch = False
        else:
            same_batch, batch = True, acceptance.batch
        if same_batch and acceptance.cycle_ms is not None:
            all_cycles.append(Cycle(acceptance.cycle_ms, f"measured: {acceptance.source}"))
        if same_batch and plain_tok_s is None:
            plain_tok_s = acceptance.plain_tok_s
    batch = count(name, "batch", 1 if batch is None else batch)
    if costs is not None:
        low, high = costs.interval()
        modelled = Cycle(costs.total, costs.title or "cost model", low, high)
        # The same measured run may be given for the drafter and for the costs.
        if not any(math.isclose(cycle.ms, modelled.ms, rel_tol=1e-9) for cycle in all_cycles):
            all_cycles.append(modelled)
    if not all_cycles:
        all_cycles = [Cycle(ms, "published case") for ms in DEFAULT_CYCLES_MS]

    requirements = [
        requirement(target, cycle.ms, num_drafts, batch)
        for target in targets
        for cycle in all_cycles
    ]
    break_even = (
        [requirement(plain_tok_s, cycle.ms, num_drafts, batch) for cycle in all_cycles]
        if plain_tok_s is not None
        else []
    )
    full, predictions, assumed = np.zeros(0), [], []
    if acceptance is not None:
        full, length, assumed = with_drafts(acceptance, num_drafts, tail)
        predictions = [_predict(c, length, full, batch, plain_tok_s) for c in all_cycles]
        if acceptance.cycle_ms is not None and num_drafts != acceptance.num_drafts:
            assumed.append(
                f"the measured cycle is that of {acceptance.num_drafts} drafts; with {num_drafts} "
                "it takes another time"
            )
    return Answer(
        num_drafts,
        batch,
        tuple(map(float, targets)),
        tuple(all_cycles),
        plain_tok_s,
        acceptance,
        tuple(_rates(full, acceptance)),
        tuple(requirements),
        tuple(break_even),
        tuple(predictions),
        tuple(_warnings(num_drafts, batch, requirements, break_even, predictions)),
        tuple(_assumptions(acceptance, all_cycles, batch, assumed)),
        costs,
        tuple(chains),
        tuple(trees),
    )


def _rates(full: np.ndarray, acceptance: Acceptance | None) -> list[Estimate]:
    rates = [Estimate.exact(rate) for rate in full.tolist()]
    if acceptance is not None and (num := acceptance.num_cycles) is not None:
        for step in range(min(len(full), len(acceptance.full_accuracy))):
            interval = viability.wilson(round(num * full[step]), num)
            rates[step] = replace(interval, value=rates[step].value)
    return rates


def _predict(
    cycle: Cycle, length: Estimate, full: np.ndarray, batch: int, plain_tok_s: float | None
) -> Prediction:
    longest = cycle.ms if cycle.high is None else cycle.high
    shortest = cycle.ms if cycle.low is None else cycle.low
    speed = Estimate(
        viability.tok_s(length.value, cycle.ms, batch),
        viability.tok_s(length.low, longest, batch),
        viability.tok_s(length.high, shortest, batch),
    )
    conditional = viability.conditional_from_full(full)
    return Prediction(
        cycle,
        length,
        speed,
        None if plain_tok_s is None else speed.through(lambda x: x / plain_tok_s),
        viability.per_point(conditional, cycle.ms, batch),
        viability.per_ms(length.value, cycle.ms, batch),
        viability.tok_s(len(full) + 1, cycle.ms, batch),
    )


def _warnings(num_drafts, batch, requirements, break_even, predictions) -> list[str]:
    """Targets that no accuracy reaches, and cycles that lose to plain decoding."""
    lines = []
    most, drafts = num_drafts + 1, f"{num_drafts} draft{'s' * (num_drafts > 1)}"
    for ms in dict.fromkeys(r.cycle_ms for r in requirements if not r.reachable):
        lost = [r for r in requirements if r.cycle_ms == ms and not r.reachable]
        lines.append(
            ", ".join(f"{r.target_tok_s:g}" for r in lost)
            + f" tok/s at {ms:.3g} ms: out of reach at any accuracy. {drafts} give at most accept "
            f"length {most}, {viability.tok_s(most, ms, batch):.3g} tok/s; the unbounded formula "
            "1/(1-p) would say p = " + ", ".join(f"{r.unbounded:.2f}" for r in lost)
        )
    for r in break_even:
        if not r.reachable:
            lines.append(
                f"at {r.cycle_ms:.3g} ms, plain decoding ({r.target_tok_s:.3g} tok/s) beats "
                f"{drafts} at any accuracy"
            )
    for p in predictions:
        if p.speedup is not None and p.speedup.value < 1:
            sure = "" if p.speedup.high < 1 or p.speedup.is_exact else ", by the interval perhaps"
            lines.append(
                f"at {p.cycle.ms:.3g} ms this drafter is slower than plain decoding{sure}: "
                f"{p.speedup.value:.2f}x"
            )
    return lines


def _assumptions(acceptance, cycles, batch, assumed) -> list[str]:
    lines = [
        "tok/s = accept length / cycle time"
        + (f" x {batch} requests" if batch > 1 else "")
        + "; a cycle is everything between two verify forwards, drafting and host included",
        "the accuracy needed is one conditional accuracy at all steps",
    ]
    for source in dict.fromkeys(cycle.source for cycle in cycles):
        times = ", ".join(f"{cycle.ms:.3g}" for cycle in cycles if cycle.source == source)
        lines.append(f"{times} ms: {source}")
    if acceptance is not None:
        if acceptance.num_cycles is not None:
            lines.append(
                f"intervals hold 95 % for {acceptance.num_cycles} cycles counted as independent; "
                "other texts differ by more"
            )
        elif acceptance.accept_length.is_exact:
            lines.append("no interval: the source gives rates without counts (--counts)")
        lines += acceptance.notes
    return lines + assumed
