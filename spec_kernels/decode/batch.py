"""Continuous batching: requests join, run one cycle after the other together, and leave.

Per step the host launches one captured cycle and reads what the one before gave. Requests stand in
rows 0 .. n - 1 of the static buffers, and the smallest captured bucket that holds n of them runs.

On several ranks each one makes the same calls in the same order. They compare the requests that
join, and never have to agree on anything else: what they decide by is tokens, which are the same
bits on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import torch

from spec_kernels.decode.adaptive import Adapter, Choice, CostTable
from spec_kernels.decode.captured import CapturedCycles, Kind
from spec_kernels.decode.cycle import Cycle, CycleResult, PlainCycle
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.graph import Recorder
from spec_kernels.decode.kv_cache import KVCache
from spec_kernels.decode.measure import measure_costs
from spec_kernels.decode.prefill import Prefill
from spec_kernels.decode.readback import Pending, Readback
from spec_kernels.decode.sampling import SamplingOptions, SamplingParams, integers
from spec_kernels.decode.state import MAX_STOP_IDS, BatchState
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.target import Target
from spec_kernels.ops.tree_verify import VerifyStatus

MAX_REQUESTS = 64
# Chains of up to so many nodes are captured in every length.
_SHORT = 8


@dataclasses.dataclass(frozen=True)
class Request:
    """What to continue, and how far.

    Args:
        prompt: ids, at least one.
        max_new_tokens: at least 1.
        sampling: how tokens are chosen.
        stop_ids: at most ``MAX_STOP_IDS`` ids; the one that ends the text is part of it.
        speculative: whether drafts are made; the tokens are the same, unless drafts are drawn
            (``DraftPlan.sampled``): then their distribution is.

    Ids are kept as they were when this was made, whatever becomes of the caller's list.

    Raises:
        ValueError: ids or max_new_tokens are no integers, sampling no ``SamplingParams``.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: Sequence[int] = ()
    speculative: bool = True

    def __post_init__(self):
        for name in ("prompt", "stop_ids"):
            object.__setattr__(self, name, integers(f"batch: {name}", getattr(self, name)))
        number = integers("batch: max_new_tokens", [self.max_new_tokens])
        object.__setattr__(self, "max_new_tokens", number[0])
        if not isinstance(self.sampling, SamplingParams):
            got = type(self.sampling).__name__
            raise ValueError(f"batch: sampling: expected SamplingParams, got {got}")


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Adaptive verification: every cycle verifies as many drafts as pay, see ``decode.adaptive``.

    Args:
        rungs: numbers of nodes that are captured, from 1 to the plan's; None = each of them for
            short chains, else 1, 2, 4, ... and the plan's.
        costs: of cycles of those sizes; None = measured when the batch is made.
        options: of ``Adapter``.
    """

    rungs: Sequence[int] | None = None
    costs: CostTable | None = None
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Emitted:
    """What one cycle gave one request.

    Attributes:
        request: as ``Batch.join`` named it.
        tokens: emitted, at least one but where ``error`` is set.
        num_accepted: drafts that the target agreed with; None for the token that the prompt gave.
        is_done: whether the request has left.
        error: why it could not go on.
    """

    request: int
    tokens: list[int]
    num_accepted: int | None
    is_done: bool
    error: Exception | None = None


@dataclasses.dataclass
class _Member:
    """A request in the batch, as far as its tokens have been read."""

    name: int
    request: Request
    num_tokens: int = 0
    is_gone: bool = False


@dataclasses.dataclass
class _Flight:
    """Results that are on their way, and whose they are, row by row.

    ``choice`` is the adapter's, if it made one.
    """

    pending: Pending | None
    members: list[_Member]
    num_places: int
    num_nodes: int
    is_first: bool = False
    choice: Choice | None = None


def _in_order(method: Callable) -> Callable:
    """Without gradients or autocast, and on the batch's own stream, whichever thread calls:
    prompts, cycles, copies and what the host writes between them run one after the other, and so do
    batches over one target."""

    @functools.wraps(method)
    def call(self: Batch, *args, **kwargs):
        stream, target = self._stream, self.target
        is_set = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        plainly = torch.autocast(target.device.type, enabled=False)
        with target.lock, torch.inference_mode(), plainly, is_set:
            return method(self, *args, **kwargs)

    return call


class Batch:
    """Decodes up to ``max_requests`` requests together, with one target and, if given, one drafter.

    A request's tokens depend on itself alone, not on who else is there or when results are read.
    With ``adaptive`` and drawn drafts together it is their distribution alone that stays: how many
    drafts are drawn, which others have a say in, changes the text. Requests that sample should
    have different seeds there.

    On a GPU everything runs on the stream that is current where the batch is made. Batches over one
    target, in whatever threads, take turns: its buffers are theirs in common. Make them on one
    stream.

    Args:
        target: this rank's part; every rank makes the same calls in the same order.
        drafter: needed for speculative decoding.
        plan: which drafts are made.
        max_tokens: longest prompt plus its continuation.
        max_requests: 1 to 64.
        page_size, num_pages: of the caches, see ``KVCache``.
        chunk: most prompt tokens in one forward, at most 1024.
        sampling: what requests may ask for beyond their parameters.
        read_behind: results that may be under way when ``step`` returns: with 1, the default on
            CUDA, a cycle's tokens are read while the next one runs; with 0, the default on a CPU,
            where nothing runs meanwhile, at once.
        adaptive: verify as many drafts a cycle as pay; None = always all of the plan's. For chains
            and dynamic trees.
        record: how cycles are recorded (``GraphRunner``); None = as graphs on a GPU. With
            ``graph.eagerly`` they run op by op there too.

    Raises:
        ValueError: an argument is out of range, or two of them do not go together.
        OutOfPages: costs are to be measured, and ``num_pages`` are too few for ``max_requests``
            short requests.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | AbsentDrafter | None = None,
        plan: DraftPlan | None = None,
        *,
        max_tokens: int,
        max_requests: int = 1,
        page_size: int = 16,
        num_pages: int | None = None,
        chunk: int = 256,
        sampling: SamplingOptions | None = None,
        read_behind: int | None = None,
        adaptive: Adaptive | None = None,
        record: Recorder | None = None,
    ):
        if read_behind is None:
            read_behind = 1 if target.device.type == "cuda" else 0
        for name, value in (
            ("max_tokens", max_tokens),
            ("max_requests", max_requests),
            ("page_size", page_size),
            ("num_pages", 0 if num_pages is None else num_pages),
            ("chunk", chunk),
            ("read_behind", read_behind),
        ):
            integers(f"batch: {name}", [value])
        if max_tokens < 2:
            raise ValueError(
                f"batch: max_tokens: expected at least 2, a prompt and a token, got {max_tokens}"
            )
        if not 1 <= chunk <= 1024:
            raise ValueError(f"batch: chunk: expected 1 <= chunk <= 1024, got {chunk}")
        if not 1 <= max_requests <= MAX_REQUESTS:
            raise ValueError(
                f"batch: max_requests: expected 1 to {MAX_REQUESTS}, got {max_requests}"
            )
        if read_behind < 0:
            raise ValueError(f"batch: read_behind: expected at least 0, got {read_behind}")
        plan = plan or DraftPlan()
        if sampling is not None and sampling.typical is not None and plan.sampled:
            raise ValueError(
                "batch: sampling: expected no typical acceptance beside drawn drafts, got both"
            )
        self.target, self.drafter, self.plan = target, drafter, plan
        self.max_requests, self.read_behind = max_requests, read_behind
        is_cuda = target.device.type == "cuda"
        self._stream = torch.cuda.current_stream(target.device) if is_cuda else None
        # Rows in flight past the committed ones: the tree, the drafted rows, the extended rows.
        self.slack = 1
        if drafter is not None:
            plan.check(drafter)
            self.slack = max(plan.num_nodes, plan.num_draft_rows, plan.steps + 1)
        most = max_tokens + self.slack
        self.cache = KVCache(target, drafter, max_requests, most, page_size, num_pages)
        self.state = BatchState.allocate(self.cache, drafter, target.config.vocab_size, sampling)
        self.prefill = Prefill(target, drafter, self.state, chunk)
        self.cycles = CapturedCycles(target, drafter, plan, self.state, record)
        self.clock = self.cycles.clock
        # By the result they copy, which is kept so that no other comes to bear its id.
        self._readbacks: dict[int, tuple[CycleResult, Readback]] = {}
        self._members: list[_Member] = []
        self._flights: deque[_Flight] = deque()
        # Read, and not returned yet: whatever fails in between, it is not lost.
        self._emitted: list[Emitted] = []
        self._num_joined = 0
        # For who wants to know where time goes.
        self.cycles_by_nodes: Counter[int] = Counter()
        self.seconds_joining = 0.0
        self.adapter = None
        if adaptive is not None:
            self.adapter = self._make_adapter(adaptive)

    # ----------------------------------------------------------------------------- requests

    @property
    def num_requests(self) -> int:
        """Requests that have joined and not left."""
        return len(self._members)

    def num_pages(self, request: Request) -> int:
        """Pages that ``request`` will hold; ValueError if it cannot be served at all."""
        self._check(request)
        return self.cache.num_pages(len(request.prompt) + request.max_new_tokens + self.slack)

    def has_room(self, request: Request) -> bool:
        """Whether ``join`` would find a row and pages; ValueError as there."""
        num_pages = self.num_pages(request)
        return self.num_requests < self.max_requests and num_pages <= self.cache.pool.num_free

    @_in_order
    def join(self, request: Request) -> int:
        """Reserves pages for all that the request may come to hold, and runs its prompt.

        Returns:
            Its name in what ``step`` returns.

        Raises, and nothing was reserved or written:
            ValueError: an empty prompt, an id outside the vocabulary, too many tokens for the
                model's positions or the cache, or no free row.
            OutOfPages: too few pages are free.
            RuntimeError: another rank lets another request in; the group is closed.
        """
        begun = time.perf_counter()
        self._check(request)
        row = self.num_requests
        if row == self.max_requests:
            raise ValueError(f"batch: expected at most {row} requests at a time, got another one")
        self._agree(request)
        prompt, new = request.prompt, request.max_new_tokens
        self.cache.reserve(row, len(prompt) + new + self.slack)
        member = _Member(self._num_joined, request)
        try:
            self.state.set(row, request.sampling, request.stop_ids, len(prompt) + new - 1)
            result = self.prefill.run(row, prompt, request.speculative)
            self._send(result, _Flight(None, [member], 1, 1, is_first=True))
        except BaseException:
            self._clear(row)
            raise
        self._num_joined += 1
        self._members.append(member)
        if self.adapter is not None:
            self.adapter.join(member.name, request.speculative)
        self.seconds_joining += time.perf_counter() - begun
        return member.name

    @_in_order
    def leave(self, name: int) -> None:
        """Takes a request out, wherever its decoding stands; its pages are free at once.

        ValueError if there is none of that name.
        """
        row = next((r for r, m in enumerate(self._members) if m.name == name), None)
        if row is None:
            raise ValueError(f"batch: expected the name of a request that decodes, got {name}")
        self._members[row].is_gone = True
        if self.adapter is not None:
            self.adapter.leave(name)
        last = self.num_requests - 1
        # What was launched before still runs before these writes: one stream, in order.
        self._clear(row)
        if row != last:
            self.cache.move(last, row)
            self.state.move(last, row)
            self.state.clear(last)
            self._members[row] = self._members[last]
        self._members.pop()

    @_in_order
    def logits_after(self, ids: Sequence[int]) -> torch.Tensor:
        """``[V]`` logits of the token after ``ids``, from a forward of its own in a free row.

        ValueError for no ids, one outside the vocabulary, more than one request may hold, or a full
        batch; OutOfPages.
        """
        ids = integers("batch: logits_after", ids)
        if not ids:
            raise ValueError("batch: logits_after: expected at least one id, got none")
        self._check_ids("logits_after", ids)
        row = self.num_requests
        if row == self.max_requests:
            raise ValueError("batch: logits_after: expected a free row, got a full batch")
        self.cache.reserve(row, len(ids) + self.slack)
        try:
            return self.prefill.logits(row, ids)
        finally:
            self._clear(row)

    def _agree(self, request: Request) -> None:
        """Where shapes are the same, ranks that decode different texts would sum up nonsense."""
        if self.target.comm.world_size > 1:
            ids = repr(request.prompt).encode()
            prompt = f"{len(request.prompt)} ids, {hashlib.sha256(ids).hexdigest()[:16]}"
            rest = dataclasses.asdict(dataclasses.replace(request, prompt=()))
            self.target.comm.agree(rest | {"request": self._num_joined, "prompt": prompt})

    def _clear(self, row: int) -> None:
        self.cache.release(row)
        self.state.clear(row)

    def _check(self, request: Request) -> None:
        config, prompt = self.target.config, request.prompt
        if request.speculative and self.drafter is None:
            raise ValueError("batch: speculative decoding: expected a drafter, got none")
        if not len(prompt):
            raise ValueError("batch: prompt: expected at least one token, got none")
        if request.max_new_tokens < 1:
            raise ValueError(
                f"batch: max_new_tokens: expected at least 1, got {request.max_new_tokens}"
            )
        self._check_ids("prompt", prompt)
        self._check_ids("stop_ids", request.stop_ids)
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"batch: stop_ids: expected at most {MAX_STOP_IDS}, got {len(request.stop_ids)}"
            )
        total = len(prompt) + request.max_new_tokens
        if total > config.max_position_embeddings:
            raise ValueError(
                f"batch: prompt of {len(prompt)} + {request.max_new_tokens} new tokens: expected "
                f"at most max_position_embeddings = {config.max_position_embeddings}, got {total}"
            )
        self.state.sampling.check(request.sampling, config.vocab_size)

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        vocab_size = self.target.config.vocab_size
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"batch: {what}: expected ids in [0, {vocab_size}), got {wrong}")

    # ------------------------------------------------------------------------------- cycles

    @_in_order
    def step(self) -> list[Emitted]:
        """Launches one cycle for all requests and reads what came before it.

        Requests that are done have left when this returns. Where nobody decodes it reads what is
        still under way; it returns nothing once there is nothing left.
        """
        self._read(self.read_behind)
        if self._members:
            self._launch()
        self._read(self.read_behind if self._members else 0)
        emitted, self._emitted = self._emitted, []
        return emitted

    @_in_order
    def warm_up(self, speculative: bool = True, draws: bool = False) -> None:
        """Captures now, and not when they are first needed, the cycles of every size that requests
        go through, for every bucket.

        Args:
            speculative: of requests that draft; without, of plain decoding.
            draws: of requests that sample, where the plan draws their drafts.
        """
        sizes = [self.plan.num_nodes if speculative else 0]
        if speculative and self.adapter is not None:
            sizes = self.adapter.rungs
        for num_nodes in sizes:
            drawn = draws and self.plan.sampled and num_nodes > 1
            self.cycles.runner(Kind(num_nodes, drawn))
            if self.adapter is not None and num_nodes > 1:
                self.cycles.runner(Kind(num_nodes, drawn, evicts=True))

    @_in_order
    def cycle(
        self, num_requests: int = 1, speculative: bool = True, draws: bool = False
    ) -> Cycle | PlainCycle:
        """The cycle that serves ``num_requests``, for those who want to look into it."""
        kind = Kind(self.plan.num_nodes if speculative else 0, draws)
        return self.cycles.cycle(kind, num_requests)

    def _launch(self) -> None:
        members = list(self._members)
        drafting = [m.request.speculative for m in members]
        num_nodes, choice = self.plan.num_nodes if any(drafting) else 0, None
        max_nodes = [num_nodes if drafts else 1 for drafts in drafting]
        if self.adapter is not None and any(drafting):
            places = self.cycles.num_places(Kind(num_nodes), len(members))
            choice = self.adapter.choose([m.name for m in members], places)
            num_nodes, max_nodes = self.adapter.rungs[choice.rung], choice.max_nodes
        draws = self.plan.sampled and any(
            m.request.speculative and m.request.sampling.temperature > 0 for m in members
        )
        evicts = min(max_nodes) < num_nodes
        kind = Kind(num_nodes, draws and num_nodes > 1, evicts)
        result = self.cycles.replay(kind, len(members), max_nodes if evicts else None)
        self.cycles_by_nodes[num_nodes] += 1
        places = self.cycles.num_places(kind, len(members))
        self._send(result, _Flight(None, members, places, kind.num_rows, choice=choice))

    # ------------------------------------------------------------------------------ adapting

    def _make_adapter(self, adaptive: Adaptive) -> Adapter:
        plan = self.plan
        if self.drafter is None or plan.kind == "static":
            raise ValueError(
                "batch: adaptive: expected a drafter, and a chain or a dynamic tree, whose best "
                f"nodes are known, got {'no drafter' if self.drafter is None else plan.kind}"
            )
        rungs = list(adaptive.rungs or _rungs(plan.num_nodes, plan.kind))
        if rungs[-1] != plan.num_nodes:
            raise ValueError(
                f"batch: adaptive: rungs: expected the plan's {plan.num_nodes} nodes as the last "
                f"one, got {rungs}"
            )
        costs = adaptive.costs
        if costs is None:
            with torch.inference_mode():
                parts = (self.cycles, self.prefill, self.cache, self.slack)
                costs = measure_costs(*parts, rungs)
        if costs.buckets[0] > 1 or costs.buckets[-1] < self.max_requests:
            raise ValueError(
                f"batch: adaptive: costs: expected those of cycles of 1 to {self.max_requests} "
                f"requests, got {costs.buckets}"
            )
        form = "conditional" if plan.kind == "chain" else "cumulative"
        return Adapter(rungs, costs, form=form, **adaptive.options)

    # ------------------------------------------------------------------------------ results

    def _send(self, result: CycleResult, flight: _Flight) -> None:
        if id(result) not in self._readbacks:
            # Between two steps every request may join: each has a first token under way.
            depth = self.read_behind + 1 + (self.max_requests if flight.is_first else 0)
            self._readbacks[id(result)] = (result, Readback(result.block, depth))
        flight.pending = self._readbacks[id(result)][1].send()
        self._flights.append(flight)

    def _read(self, num_left: int) -> None:
        while len(self._flights) > num_left:
            self._read_one(self._flights.popleft())

    def _read_one(self, flight: _Flight) -> None:
        host = CycleResult.of(flight.pending.wait(), flight.num_places, flight.num_nodes)
        verified = host.verified
        tokens, accepted = verified.tokens.tolist(), verified.num_accepted.tolist()
        status = verified.status.tolist()
        confidence = host.confidence.tolist() if flight.choice else None
        found = self._emitted
        for row, member in enumerate(flight.members):
            if member.is_gone:
                continue
            if status[row]:
                found.append(Emitted(member.name, [], 0, True, _fault(member.name, status[row])))
                self.leave(member.name)
                continue
            if flight.choice:
                kept = flight.choice.max_nodes[row]
                sure = [min(max(c, 0.0), 1.0) for c in confidence[row][1:]]
                if self.adapter.form == "cumulative":
                    # Where all nodes of a tree are kept they come level by level.
                    sure.sort(reverse=True)
                self.adapter.observe(member.name, flight.choice.rung, kept, sure, accepted[row])
            emitted = tokens[row][: accepted[row] + 1]
            request = member.request
            emitted = emitted[: request.max_new_tokens - member.num_tokens]
            ends = [i + 1 for i, token in enumerate(emitted) if token in request.stop_ids]
            emitted = emitted[: ends[0]] if ends else emitted
            member.num_tokens += len(emitted)
            is_done = bool(ends) or member.num_tokens == request.max_new_tokens
            num_accepted = None if flight.is_first else accepted[row]
            found.append(Emitted(member.name, emitted, num_accepted, is_done))
            if is_done:
                self.leave(member.name)


def _rungs(num_nodes: int, kind: str) -> list[int]:
    if kind == "chain" and num_nodes <= _SHORT:
        return list(range(1, num_nodes + 1))
    return [*(1 << i for i in range((num_nodes - 1).bit_length())), num_nodes]


def _fault(name: int, status: int) -> RuntimeError:
    what = {
        VerifyStatus.NO_TOKEN: "the target's logits are not numbers, or it allows no id",
        VerifyStatus.BAD_DRAFT: "the drafter's logits are not numbers",
    }.get(VerifyStatus(status), "the draft tree or a sampling parameter is unsound")
    return RuntimeError(f"request {name}: {what} ({VerifyStatus(status)!r})")
