"""How many drafts a cycle verifies, from what earlier cycles showed and what cycles cost.

Few sizes of a cycle, rungs, are captured: rung 0 verifies the root alone, a higher one more nodes.
``Adapter.choose`` names the rung of the next cycle and how many of its nodes each request keeps, so
as to decode the most tokens a millisecond (arXiv 2605.00342 cuts the draft by the same quotient);
a request whose drafts do not pay is left out, and tried again at growing intervals (arXiv
2506.20675).

**The output keeps the target's distribution.** Verification is exact for a number of drafts that is
settled independently of the coins that draw and judge them. Which drafts are verified must
therefore not depend on these drafts: keeping only likely ones would favour likely tokens. Nor is it
enough that the drafts are drawn after the choice. A coin belongs to a position of the text, so a
draft beyond the first wrong one was drawn with the coin that will draw the next cycle's draft at
its place, and its probability tells about that coin. ``observe`` looks at drafts up to the first
wrong one only: the next cycle starts behind it, with coins that no choice has seen. Drafts that are
no draws (the likeliest tokens, under any sampling of the target) need none of this: there the
target's own coins alone make the text, however many drafts are verified.
Coins are the request's own, so requests that sample should have different seeds.

**All ranks choose alike.** A choice is a function of what was passed to ``join``, ``leave``,
``choose`` and ``observe``, in their order, and of the cost table, which all ranks have from one. It
is made with +, -, *, / and comparisons of float64 in a fixed order: the same bits on any machine.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence

FORMS = ("conditional", "cumulative")
# (requests, nodes a request, nodes that each of them keeps) -> milliseconds of one cycle.
CycleClock = Callable[[int, int, int], float]

_NUM_BINS = 10
# How much a guess weighs, in observations: one from nowhere, and that a request is like others.
_GUESS, _LIKENESS = 4.0, 8.0
_LEAST, _MOST = 1e-3, 1 - 1e-3


# ---------------------------------------------------------------------------------------- costs


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence next to ``values`` in least squares: violators are pooled."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] * count > total * blocks[-1][1]:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


class CostTable:
    """Milliseconds of one cycle by requests and nodes a request, the drafter's work included.

    A cycle costs what it costs with copies of the root in place of all drafts, and what as many
    different tokens as there are add to that, whatever the rung. Both are smoothed to rise with
    the nodes and with the requests, and interpolated linearly.

    Args:
        full: ``{(num_requests, nodes): ms}`` of cycles in which every request keeps all its nodes;
            a full grid that has cycles of one node (rung 0).
        evicted: the same grid for cycles in which every request keeps its root alone, and copies
            of it stand in place of the other nodes. If None, such copies are taken to be free.

    Raises:
        ValueError: the grid has gaps or no cycle of one node, or a cost is not a positive number.
    """

    def __init__(
        self,
        full: Mapping[tuple[int, int], float],
        evicted: Mapping[tuple[int, int], float] | None = None,
    ):
        self.buckets = sorted({bucket for bucket, _ in full})
        self.nodes = sorted({nodes for _, nodes in full})
        grid = [(bucket, nodes) for bucket in self.buckets for nodes in self.nodes]
        if not grid or self.nodes[0] != 1 or self.buckets[0] < 1:
            raise ValueError(
                "cost table: full: expected costs of >= 1 requests and of 1 and more nodes, got "
                f"{self.buckets} requests and {self.nodes} nodes"
            )
        if evicted is None:
            evicted = {(bucket, nodes): full.get((bucket, 1)) for bucket, nodes in grid}
        for name, table in (("full", full), ("evicted", evicted)):
            if table.keys() != set(grid):
                gap = sorted(set(grid) ^ table.keys())[0]
                raise ValueError(
                    f"cost table: {name}: expected a cost for each of {self.buckets} requests and "
                    f"{self.nodes} nodes, got a gap or a surplus at {gap}"
                )
            for key, ms in table.items():
                if not (isinstance(ms, int | float) and 0 < ms <= sys.float_info.max):
                    raise ValueError(
                        f"cost table: {name}: expected positive milliseconds at {key}, got {ms}"
                    )
        most, least = self._smoothed(full), self._smoothed(evicted)
        # A cycle of one node has no copies, and copies never cost more than different tokens do.
        self._copies = [
            [row[0], *map(min, row[1:], below[1:])] for row, below in zip(most, least, strict=True)
        ]
        self._added = [
            isotonic([a - b for a, b in zip(row, below, strict=True)])
            for row, below in zip(most, self._copies, strict=True)
        ]
        self._curves: dict[int, list[float]] = {}

    @classmethod
    def measure(
        cls,
        clock: CycleClock,
        buckets: Sequence[int],
        rungs: Sequence[int],
        num_repeats: int = 5,
    ) -> CostTable:
        """The least times of ``clock``, sizes in turns so that a drift hits all of them.

        The least, because what else runs on the machine only ever adds: of few times on a busy one
        most may hold a slice of another process.

        The clock's requests must hold tokens as different as those of a real batch: equal ones go
        to the same experts and look too cheap.
        """
        keys = [
            (bucket, nodes, kept)
            for bucket in buckets
            for nodes in rungs
            for kept in sorted({1, nodes})
        ]
        times: dict[tuple[int, int, int], list[float]] = {key: [] for key in keys}
        for _ in range(num_repeats):
            for key in keys:
                times[key].append(clock(*key))
        least = {key: min(samples) for key, samples in times.items()}
        grid = [(bucket, nodes) for bucket in buckets for nodes in rungs]
        full = {(b, n): least[b, n, n] for b, n in grid}
        return cls(full, {(b, n): least[b, n, 1] for b, n in grid})

    @classmethod
    def from_curve(
        cls,
        curve: Callable[[int], float],
        buckets: Sequence[int],
        rungs: Sequence[int],
        draft_ms: Callable[[int], float] = lambda nodes: 0.0,
    ) -> CostTable:
        """From the milliseconds of a forward of so many different tokens, for all requests.

        ``draft_ms`` of the nodes a request is added, whether they are kept or not.
        """
        grid = [(bucket, nodes) for bucket in buckets for nodes in rungs]
        return cls(
            {(b, n): curve(b * n) + draft_ms(n) for b, n in grid},
            {(b, n): curve(b) + draft_ms(n) for b, n in grid},
        )

    def as_dict(self) -> dict[str, list]:
        """Lists and numbers that survive JSON exactly, for ``from_dict`` on another rank."""
        return {
            "buckets": self.buckets,
            "nodes": self.nodes,
            "copies": self._copies,
            "added": self._added,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, list]) -> CostTable:
        table = cls.__new__(cls)
        table.buckets, table.nodes = list(data["buckets"]), list(data["nodes"])
        table._copies = [list(row) for row in data["copies"]]
        table._added = [list(row) for row in data["added"]]
        table._curves = {}
        return table

    def copies(self, bucket: int, nodes: int) -> float:
        """Milliseconds of a cycle of ``nodes`` that keeps no draft."""
        return self._at(self._copies, bucket, nodes)

    def added(self, bucket: int) -> list[float]:
        """Milliseconds that 0, 1, ... drafts of all requests together add."""
        if bucket not in self._curves:
            drafts = range(bucket * (self.nodes[-1] - 1) + 1)
            self._curves[bucket] = [
                self._at(self._added, bucket, 1 + count / bucket) for count in drafts
            ]
        return self._curves[bucket]

    def cycle(self, bucket: int, nodes: int, num_drafts: int) -> float:
        """Milliseconds of a cycle in which all requests together keep ``num_drafts`` drafts."""
        most = bucket * (nodes - 1)
        if not 0 <= num_drafts <= most:
            raise ValueError(f"cost table: num_drafts: expected 0 to {most}, got {num_drafts}")
        return self.copies(bucket, nodes) + self.added(bucket)[num_drafts]

    def _smoothed(self, table: Mapping[tuple[int, int], float]) -> list[list[float]]:
        rows = [isotonic([float(table[b, n]) for n in self.nodes]) for b in self.buckets]
        for above, row in zip(rows, rows[1:], strict=False):
            row[:] = [max(a, b) for a, b in zip(above, row, strict=True)]
        return rows

    def _at(self, rows: list[list[float]], bucket: int, nodes: float) -> float:
        low, high, share = _between(self.buckets, bucket, "requests")
        left, right, part = _between(self.nodes, nodes, "nodes")

        def along(row: list[float]) -> float:
            return row[left] + (row[right] - row[left]) * part

        return along(rows[low]) + (along(rows[high]) - along(rows[low])) * share


def _between(points: list[int], at: float, what: str) -> tuple[int, int, float]:
    """Neighbours of ``at`` and how far it is from the first to the second."""
    if not points[0] <= at <= points[-1]:
        raise ValueError(
            f"cost table: {what}: expected {points[0]} to {points[-1]}, which have costs, got {at}"
        )
    high = bisect_left(points, at)
    if points[high] == at:
        return high, high, 0.0
    low = high - 1
    return low, high, (at - points[low]) / (points[high] - points[low])


# ------------------------------------------------------------------------------- what was learnt


class Calibration:
    """What a drafter's confidence in a draft is worth: the share of such drafts that were right.

    Counted by depth and by tenths of the confidence. A cell starts from all depths' share, and that
    from the confidence itself; what a cell saw fades over ``memory`` of its drafts.
    """

    def __init__(self, max_depth: int, memory: float = 256.0):
        self._keep = 1 - 1 / memory
        # Row 0 is for all depths.
        self._seen = [[0.0] * _NUM_BINS for _ in range(max_depth + 1)]
        self._right = [[0.0] * _NUM_BINS for _ in range(max_depth + 1)]

    def __call__(self, depth: int, confidence: float) -> float:
        """Probability that the draft at ``depth`` (from 1) is right, given that its parent was."""
        cell = _bin(confidence)
        guess = confidence
        for row in (0, depth):
            seen, right = self._seen[row][cell], self._right[row][cell]
            guess = (right + _GUESS * guess) / (seen + _GUESS)
        return guess

    def update(self, depth: int, confidence: float, is_right: bool) -> None:
        cell = _bin(confidence)
        for row in (0, depth):
            self._seen[row][cell] = self._seen[row][cell] * self._keep + 1
            self._right[row][cell] = self._right[row][cell] * self._keep + is_right


def _bin(confidence: float) -> int:
    return min(int(confidence * _NUM_BINS), _NUM_BINS - 1)


class _Averages:
    """Fading averages of a value for each draft, and how far they were off.

    ``weight``: of guesses, in observations.
    """

    def __init__(self, num_drafts: int, memory: float, weight: float):
        self._keep, self._weight = 1 - 1 / memory, weight
        self.count, self.total = [0.0] * num_drafts, [0.0] * num_drafts
        self.expected = self.found = 0.0

    def add(self, values: Sequence[float], expected: float, found: float) -> None:
        """One cycle: ``values`` of the first drafts; ``found`` were accepted of ``expected``."""
        self.count = [x * self._keep for x in self.count]
        self.total = [x * self._keep for x in self.total]
        self.expected *= self._keep
        self.found *= self._keep
        for draft, value in enumerate(values):
            self.count[draft] += 1
            self.total[draft] += value
        self.expected += expected
        self.found += found

    def shrunk(self, draft: int, guess: float) -> float:
        return (self.total[draft] + self._weight * guess) / (self.count[draft] + self._weight)

    def truth(self, guess: float = 1.0) -> float:
        """What to multiply expectations with: accepted drafts over expected ones."""
        return (self.found + self._weight * guess) / (self.expected + self._weight)


# ------------------------------------------------------------------------------------- the rule


@dataclasses.dataclass(frozen=True)
class Choice:
    """The next cycle: which rung, and how many of its nodes, the root included, a request keeps."""

    rung: int
    max_nodes: list[int]


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A cycle that was chosen for a request and not observed yet; ``price`` in tokens."""

    rung: int
    num_nodes_kept: int
    price: float
    is_trial: bool


@dataclasses.dataclass(eq=False)
class _Request:
    """``num_idle``: cycles without drafts since the last one with any; ``interval`` of them pass
    before the next trial, of which ``trial_left`` cycles are to come and ``trial_balance`` is what
    it brought in so far, in tokens, as is ``account``."""

    averages: _Averages
    account: float
    interval: int
    speculative: bool
    num_idle: int = 0
    trial_left: int = 0
    trial_balance: float = 0.0
    pending: deque[_Pending] = dataclasses.field(default_factory=deque)

    @property
    def may_draft(self) -> bool:
        return self.speculative and self.account >= 0


class Adapter:
    """Chooses each cycle's rung and nodes; one for an engine, the same on every rank.

    The expected number of accepted drafts of a request comes from the drafter's confidences in the
    cycles before: calibrated (``Calibration``), averaged over about ``memory`` cycles for each
    draft, corrected by how many the request accepted of those expected. What a request has not
    shown is taken from all requests, and what none has shown from the draft before.

    For each rung and each number of drafts the likeliest ones of all requests are the best; of
    these sets the one with the most expected tokens a millisecond is taken, unless the last rung
    comes within ``margin`` of it.

    A request without drafts is tried again, with the nodes of rung 1, after ``interval`` cycles,
    then after twice as many, up to ``max_interval``; a trial goes on while it pays. A request also
    has an account, in tokens: drafts are paid for at their cost over that of a token without
    drafts, accepted ones and ``overhead`` times all tokens are paid in, and it is cut at
    ``credit``. Below zero a request gets no drafts. So from any cycle on, the batch takes at most
    ``1 + overhead`` times as long as rung 0 would have taken for the same tokens, plus the time of
    ``credit`` tokens a request, plus that of the cycle in which an account ran out and of those
    already chosen.

    Between ``join`` and ``leave`` a request's choices are observed once each, in order; later
    choices may come before (results are read one or two cycles behind). Cycles that ``leave``
    overtakes are not observed.

    Args:
        rungs: nodes a request, root included, rising; the first is 1.
        costs: of these rungs.
        form: of confidences. "conditional": a chain's, in order of depth, each the probability of a
            draft given the drafts before it. "cumulative": a tree's, whose nodes are ordered best
            first with parents before children, each the probability of a node and its ancestors
            together; for drafts that are no draws.
        overhead: share of its time that a request may lose.
        margin: by how much another rung must be better.
        memory: cycles over which a request's past fades.
        interval, max_interval: cycles before the first trial, and at most.
        trial_cycles: of a trial.
        credit: tokens.
        prior: probability that a draft is right before anything was seen.

    Raises:
        ValueError: from the constructor and from calls: an argument out of range, an unknown
            request, or an observation that was not the next one.
    """

    def __init__(
        self,
        rungs: Sequence[int],
        costs: CostTable,
        *,
        form: str = "conditional",
        overhead: float = 0.05,
        margin: float = 0.02,
        memory: float = 32.0,
        interval: int = 16,
        max_interval: int = 128,
        trial_cycles: int = 2,
        credit: float = 8.0,
        prior: float = 0.6,
    ):
        self.rungs, self.costs, self.form = list(rungs), costs, form
        if self.rungs[:1] != [1] or any(
            a >= b for a, b in zip(self.rungs, self.rungs[1:], strict=False)
        ):
            raise ValueError(f"adapter: rungs: expected 1 and rising numbers, got {self.rungs}")
        if self.rungs[-1] > costs.nodes[-1]:
            raise ValueError(
                f"adapter: rungs: expected at most {costs.nodes[-1]} nodes, which have a cost, got "
                f"{self.rungs[-1]}"
            )

        def check(name: str, value: object, ok: bool, expected: str) -> None:
            if not ok:
                raise ValueError(f"adapter: {name}: expected {expected}, got {value!r}")

        check("form", form, form in FORMS, f"one of {FORMS}")
        check("overhead", overhead, 0 <= overhead < math.inf, "a finite number >= 0")
        check("margin", margin, 0 <= margin < math.inf, "a finite number >= 0")
        check("memory", memory, 1 < memory < math.inf, "a finite number > 1")
        check("interval", interval, interval >= 1, "at least 1")
        check("max_interval", max_interval, max_interval >= interval, f"at least {interval}")
        check("trial_cycles", trial_cycles, trial_cycles >= 1, "at least 1")
        check("credit", credit, 0 <= credit < math.inf, "a finite number >= 0")
        check("prior", prior, 0 < prior < 1, "a number in (0, 1)")
        self.overhead, self.margin, self.memory, self.credit = overhead, margin, memory, credit
        self.interval, self.max_interval = interval, max_interval
        self.trial_cycles, self.prior = trial_cycles, prior
        self.num_drafts = self.rungs[-1] - 1
        self.calibration = Calibration(self.num_drafts)
        self._everyone = _Averages(self.num_drafts, 16 * memory, _GUESS)
        self._requests: dict[Hashable, _Request] = {}
        self._rung: int | None = None

    def join(self, request_id: Hashable, speculative: bool = True) -> None:
        """``speculative``: False for a request that only counts, since it waits for the others."""
        if request_id in self._requests:
            raise ValueError(f"adapter: join: request {request_id!r} is here already")
        averages = _Averages(self.num_drafts, self.memory, _LIKENESS)
        self._requests[request_id] = _Request(averages, self.credit, self.interval, speculative)

    def leave(self, request_id: Hashable) -> None:
        self._request("leave", request_id)
        del self._requests[request_id]

    def choose(self, active: Sequence[Hashable], bucket: int) -> Choice:
        """The next cycle's rung, and the nodes that each of ``active`` keeps, in their order.

        Args:
            active: the requests of the cycle, in the same order on all ranks.
            bucket: how many requests the captured cycle holds, ``len(active)`` at least.
        """
        if not 1 <= len(active) <= bucket or len(set(active)) != len(active):
            raise ValueError(
                f"adapter: choose: active: expected 1 to {bucket} different requests, got "
                f"{list(active)}"
            )
        requests = [self._request("choose", request_id) for request_id in active]
        gains = self._gains(requests)
        best, kept = self._best(gains, requests, bucket, 0)
        trying = self._trying(requests, kept)
        if trying:
            forced = [self.rungs[1] - 1 if request in trying else 0 for request in requests]
            rung, kept = self._best(gains, requests, bucket, 1, forced)
        else:
            # A trial is no reason to stay where it leads.
            rung = self._rung = best
        self._charge(requests, rung, kept, gains, trying, bucket)
        return Choice(rung, [1 + count for count in kept])

    def observe(
        self,
        request_id: Hashable,
        rung: int,
        num_nodes_kept: int,
        confidences: Sequence[float],
        accepted: int,
    ) -> None:
        """What came of the oldest choice for the request that was not observed yet.

        Args:
            rung, num_nodes_kept: as chosen.
            confidences: of the drafted nodes in node order, the root left out: of all that were
                drafted, kept or not, or of the kept ones; none for rung 0.
            accepted: drafts accepted.
        """
        request = self._request("observe", request_id)
        chosen = None
        if request.pending:
            chosen = (request.pending[0].rung, request.pending[0].num_nodes_kept)
        if chosen != (rung, num_nodes_kept):
            raise ValueError(
                f"adapter: observe: request {request_id!r}: expected (rung, nodes kept) as chosen, "
                f"{chosen}, got {(rung, num_nodes_kept)}"
            )
        num_kept = num_nodes_kept - 1
        if not 0 <= accepted <= num_kept:
            raise ValueError(
                f"adapter: observe: accepted: expected 0 to {num_kept}, got {accepted}"
            )
        if not num_kept <= len(confidences) <= self.rungs[rung] - 1:
            raise ValueError(
                f"adapter: observe: confidences: expected {num_kept} to {self.rungs[rung] - 1}, "
                f"got {len(confidences)}"
            )
        if not all(0 <= confidence <= 1 for confidence in confidences):
            raise ValueError(
                "adapter: observe: confidences: expected probabilities in [0, 1], got "
                f"{list(confidences)}"
            )
        cycle = request.pending.popleft()
        change = accepted - cycle.price + self.overhead * (1 + accepted)
        request.account = min(self.credit, request.account + change)
        if cycle.is_trial:
            request.trial_balance += accepted - cycle.price
            if request.trial_balance > 0:
                request.trial_left = max(request.trial_left, 1)
        if num_kept:
            self._learn(request, num_kept, [float(c) for c in confidences], accepted)

    # ------------------------------------------------------------------------------- estimates

    def _learn(
        self, request: _Request, num_kept: int, confidences: list[float], accepted: int
    ) -> None:
        if self.form == "conditional":
            # Up to the first wrong one, and no further: see the module's docstring.
            values = [
                self.calibration(depth, confidence)
                for depth, confidence in enumerate(confidences[: accepted + 1], 1)
            ]
            judged = min(accepted + 1, num_kept)
            for depth, confidence in enumerate(confidences[:judged], 1):
                self.calibration.update(depth, confidence, depth <= accepted)
        else:
            values, judged = confidences, num_kept
        expected = 0.0
        for value in values[:judged]:
            expected += value
        for averages in (request.averages, self._everyone):
            averages.add(values, expected, accepted)

    def _gains(self, requests: list[_Request]) -> list[list[float]]:
        """For each request, the probability of each draft that it would be accepted."""
        common = self._common()
        # A chain's confidences were calibrated one by one.
        truth = self._everyone.truth() if self.form == "cumulative" else 1.0
        gains = []
        for request in requests:
            averages, scale, gain = request.averages, request.averages.truth(truth), 1.0
            gains.append([])
            for draft, guess in enumerate(common):
                value = min(max(averages.shrunk(draft, guess) * scale, _LEAST), _MOST)
                # A node of a tree is never likelier than those before it.
                gain = gain * value if self.form == "conditional" else min(gain, value)
                gains[-1].append(gain)
        return gains

    def _common(self) -> list[float]:
        """What all requests showed: for each draft, what its confidence is worth on average."""
        worth, guess = [], self.prior
        for draft in range(self.num_drafts):
            if self.form == "cumulative" and draft:
                guess = worth[-1] * draft / (draft + 1)
            value = self._everyone.shrunk(draft, guess)
            worth.append(min(max(value, _LEAST), _MOST))
            guess = worth[-1]
        return worth

    # ------------------------------------------------------------------------------ the choice

    def _best(
        self,
        gains: list[list[float]],
        requests: list[_Request],
        bucket: int,
        lowest: int,
        forced: list[int] | None = None,
    ) -> tuple[int, list[int]]:
        """The best rung from ``lowest`` on, and how many drafts each request keeps in it.

        ``forced`` drafts of each request are kept in any case.
        """
        forced = forced or [0] * len(requests)
        base, free = float(len(requests)), []
        for i, (request, count) in enumerate(zip(requests, forced, strict=True)):
            for gain in gains[i][:count]:
                base += gain
            if request.may_draft and not count:
                free += [(-gain, i, draft) for draft, gain in enumerate(gains[i])]
        # Likeliest first; equal ones in order of request and node, parents before children.
        free.sort()
        num_forced, added = sum(forced), self.costs.added(bucket)
        found = []
        for nodes in self.rungs[lowest:]:
            copies, tokens, num = self.costs.copies(bucket, nodes), base, num_forced
            best, best_num = tokens / (copies + added[num]), num
            for loss, _, draft in free:
                if draft < nodes - 1:
                    tokens, num = tokens - loss, num + 1
                    rate = tokens / (copies + added[num])
                    if rate > best:
                        best, best_num = rate, num
            found.append((best, best_num - num_forced))
        top = max(range(len(found)), key=lambda i: found[i][0])
        if self._rung is not None and self._rung >= lowest:
            last = self._rung - lowest
            if found[last][0] * (1 + self.margin) >= found[top][0]:
                top = last
        kept = list(forced)
        fitting = [i for _, i, draft in free if draft < self.rungs[lowest + top] - 1]
        for i in fitting[: found[top][1]]:
            kept[i] += 1
        return (lowest + top if any(kept) else 0), kept

    def _trying(self, requests: list[_Request], kept: list[int]) -> list[_Request]:
        """Requests without drafts that are to be tried in this cycle."""
        if len(self.rungs) == 1:
            return []
        off = [r for r, count in zip(requests, kept, strict=True) if not count and r.may_draft]
        return [r for r in off if r.trial_left or r.num_idle >= r.interval]

    def _charge(
        self,
        requests: list[_Request],
        rung: int,
        kept: list[int],
        gains: list[list[float]],
        trying: list[_Request],
        bucket: int,
    ) -> None:
        """Notes what the cycle costs each request, in tokens of rung 0, and who is off."""
        plain = self.costs.copies(bucket, 1)
        token = plain / len(requests)
        # What the drafts add is shared by their number, which is what a request could have spared,
        # and what drafting costs by what was hoped for.
        num_drafts, hopes = sum(kept), [0.0] * len(requests)
        for i, count in enumerate(kept):
            for gain in gains[i][:count]:
                hopes[i] += gain
        hope = sum(hopes)
        drafting = self.costs.copies(bucket, self.rungs[rung]) - plain
        added = self.costs.added(bucket)[num_drafts]
        for i, (request, count) in enumerate(zip(requests, kept, strict=True)):
            price = 0.0
            if count:
                price = (drafting * hopes[i] / hope + added * count / num_drafts) / token
            is_trial = request in trying
            request.pending.append(_Pending(rung, 1 + count, price, is_trial))
            request.num_idle = 0 if count else request.num_idle + 1
            if is_trial and not request.trial_left:
                request.trial_left, request.trial_balance = self.trial_cycles, 0.0
                request.interval = min(2 * request.interval, self.max_interval)
            if is_trial:
                request.trial_left -= 1
            elif count:
                request.trial_left, request.interval = 0, self.interval

    def _request(self, call: str, request_id: Hashable) -> _Request:
        if request_id not in self._requests:
            raise ValueError(f"adapter: {call}: request {request_id!r} has not joined")
        return self._requests[request_id]
