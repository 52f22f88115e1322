"""The cycles of a batch, captured: one graph for each kind of cycle and number of requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from spec_kernels.decode.cycle import Cycle, CycleResult, PhaseClock, PlainCycle
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.graph import (
    GraphRunner,
    Plan,
    Recorder,
    request_buckets,
    shared_recorder,
)
from spec_kernels.decode.kv_cache import INERT, pinned
from spec_kernels.decode.state import BatchState
from spec_kernels.models.drafter import AbsentDrafter, Drafter
from spec_kernels.models.target import Target


@dataclasses.dataclass(frozen=True)
class Kind:
    """A cycle that is captured apart: by what the host decides in it.

    ``num_nodes`` of each request's tree, 0 for plain decoding; ``draws``: drafts of requests that
    sample are drawn; ``evicts``: ``BatchState.max_nodes`` is heeded.
    """

    num_nodes: int
    draws: bool = False
    evicts: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that a request takes in the target's forward."""
        return max(self.num_nodes, 1)


class CapturedCycles:
    """Makes and captures each kind of cycle at its first use, for buckets of 1, 2, 4, ... requests.

    All stand on the same state, and on a GPU in one memory pool. Attributes: ``clock``, the seconds
    of all cycles by phase. ``record`` is how they are recorded, where not as the device has it.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | AbsentDrafter | None,
        plan: DraftPlan,
        state: BatchState,
        record: Recorder | None = None,
    ):
        self.target, self.drafter, self.plan, self.state = target, drafter, plan, state
        self.max_requests = len(state.limits)
        self.clock = PhaseClock(target.device)
        self._record = record or shared_recorder(target.device)
        self._runners: dict[Kind, GraphRunner] = {}
        self._cycles: dict[tuple[Kind, int], Cycle | PlainCycle] = {}

    def num_places(self, kind: Kind, num_requests: int) -> int:
        """Requests that the cycle which serves ``num_requests`` has places for."""
        return self.runner(kind).bucket_for(num_requests) // kind.num_rows

    def replay(
        self, kind: Kind, num_requests: int, max_nodes: Sequence[int] | None = None
    ) -> CycleResult:
        """Runs one cycle for the first ``num_requests`` rows.

        ``max_nodes``: what each of them keeps of its tree, for a kind that evicts.
        """
        runner = self.runner(kind)
        if max_nodes is not None:
            counts = pinned(torch.tensor(max_nodes), self.target.device)
            self.state.max_nodes[:num_requests].copy_(counts, non_blocking=True)
        return runner.replay(runner.bucket_for(num_requests))

    def cycle(self, kind: Kind, num_requests: int) -> Cycle | PlainCycle:
        """The one that serves ``num_requests``, for those who want to look into it."""
        return self._cycles[kind, self.num_places(kind, num_requests)]

    def runner(self, kind: Kind) -> GraphRunner:
        """That of one kind, captured."""
        runner = self._runners.get(kind)
        if runner is not None:
            return runner
        is_cuda = self.target.device.type == "cuda"
        runner = GraphRunner(
            lambda bucket: Plan(
                self._make(kind, bucket // kind.num_rows).run, prime=self._make_inert
            ),
            request_buckets(self.max_requests, kind.num_rows),
            tokens_per_request=kind.num_rows,
            device=self.target.device,
            comm=self.target.comm,
            # Run eagerly, a cycle sees every change by itself.
            watch=(self.target, self.drafter) if is_cuda else (),
            buffers=self.state.tensors(),
            num_warmups=2 if is_cuda else 1,
            record=self._record,
        )
        # Capturing runs on these very buffers, in which requests may stand.
        kept = [t.clone() for t in self.state.tensors()]
        seconds = dict(self.clock.seconds)
        try:
            runner.capture()
        finally:
            for tensor, value in zip(self.state.tensors(), kept, strict=True):
                tensor.copy_(value)
            self.clock.seconds.update(seconds)
        self._runners[kind] = runner
        return runner

    def _make(self, kind: Kind, num_requests: int) -> Cycle | PlainCycle:
        state = self.state.rows(slice(0, num_requests))
        if not kind.num_nodes:
            cycle = PlainCycle(self.target, state, self.clock)
        else:
            proposal = self.plan.make(
                self.drafter, state, kind.draws, kind.num_nodes, best_first=kind.evicts
            )
            cycle = Cycle(self.target, self.drafter, proposal, state, self.clock, kind.evicts)
        self._cycles[kind, num_requests] = cycle
        return cycle

    def _make_inert(self) -> None:
        self.state.limits.zero_()
        self.state.cache.context_lens.fill_(INERT)
