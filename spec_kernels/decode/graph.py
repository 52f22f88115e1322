"""Running a static plan as a CUDA graph, one for each of few sizes; eagerly on a CPU.

``GraphRunner`` knows nothing of models: an engine gives it a function that makes a ``Plan`` for a
bucket. What a plan must keep to is what any captured graph needs, and
``spec_kernels.testing.graph_safe`` finds on a CPU what does not.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from spec_kernels.comm import Communicator
from spec_kernels.decode.nests import children, named_tensors

# Runs a callable once and returns how to run it again, and what it returned.
Recorder = Callable[[Callable[[], object]], tuple[Callable[[], object], object]]


class CaptureError(RuntimeError):
    """A bucket could not be captured, here or on another rank; no graph is left."""


class StaleGraph(RuntimeError):
    """Something that the graphs were captured with has changed since; nothing was run."""


@dataclasses.dataclass
class Plan:
    """What one bucket runs, over buffers that stay where they are.

    Attributes:
        run: takes nothing, reads and writes static buffers, and returns tensors in them, in any
            nest, or nothing. It is called a few times on dummy inputs, then recorded.
        inputs: buffers that ``GraphRunner.run`` fills, by name, a whole number of rows a request.
        padding: for each of ``inputs``, what rows without a request hold. With it, ``run`` must
            treat such a row as absent: write nothing for it to what outlives the run, and read
            nothing that is not there.
        prime: puts buffers that are no inputs into a state on which ``run`` is valid and has no
            effect that lasts: before each warm-up, before the recording, and after it.
    """

    run: Callable[[], object]
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    padding: Mapping[str, float] = dataclasses.field(default_factory=dict)
    prime: Callable[[], object] | None = None


@dataclasses.dataclass
class _Captured:
    plan: Plan
    replay: Callable[[], object]
    outputs: object


def request_buckets(max_requests: int, tokens_per_request: int = 1) -> list[int]:
    """Buckets in tokens for 1, 2, 4, ... and ``max_requests`` requests."""
    if max_requests < 1 or tokens_per_request < 1:
        raise ValueError(
            "request_buckets: expected max_requests and tokens_per_request >= 1, got "
            f"{max_requests} and {tokens_per_request}"
        )
    powers = [1 << i for i in range((max_requests - 1).bit_length())]
    return [n * tokens_per_request for n in (*powers, max_requests)]


class GraphRunner:
    """Captures a plan for each bucket and replays the one that a batch fits in.

    The graphs share one memory pool, so that together they need no more than the largest: what a
    run allocates is overwritten by the next replay of any bucket. Replays therefore run one after
    the other, on one stream, and results are read before the next replay of the same bucket.

    What the caller must keep to:

    - ``make`` allocates every buffer that outlives a run, results included; ``run`` allocates
      temporaries only. Buffers may be shared between buckets.
    - ``run`` reads nothing on the host, decides nothing by data, and draws from no generator (see
      ``graph_safe``). Whatever the host decides in it (options, which states are captured, drafts
      or none) is decided at the capture: set it before, and ``capture`` again to change it.
    - Weights, caches and options that ``run`` uses are passed as ``watch`` and ``buffers``, so that
      a replay after a change is an error instead of a wrong result.
    - ``capture`` and ``run`` are called in the same grad mode, ``capture`` while nothing else uses
      the device.
    - All ranks of ``comm`` call ``capture`` together, and ``run`` with the same number of requests;
      they change their models between the same two runs.

    Args:
        make: called with a bucket, in tokens, by ``capture``: returns its ``Plan``.
        buckets: sizes in tokens, increasing, multiples of ``tokens_per_request``
            (``request_buckets``).
        tokens_per_request: rows that a request takes in one run: nodes of its tree, 1 for plain
            decoding.
        device: a CUDA device captures CUDA graphs; any other runs the plans eagerly, with the same
            checks.
        comm: the ranks that capture together; None for one.
        watch: models, drafters, options, in any nest: their tensors must keep address, shape and
            version, and the numbers and texts beside them their values. Attributes with a leading
            underscore are left out. Tensors made in inference mode have no version: changes of
            their values are not seen.
        buffers: as ``watch``, but values may change: K/V caches, tables.
        num_warmups: runs before the recording, at least 1: kernels are compiled there, and what
            the model allocates once for a shape is allocated there.
        record: how a run is recorded, instead of by ``device`` alone: ``shared_recorder``, or
            ``eagerly``.

    Raises:
        ValueError: buckets, tokens_per_request or num_warmups are out of range.
    """

    def __init__(
        self,
        make: Callable[[int], Plan],
        buckets: Sequence[int],
        *,
        tokens_per_request: int = 1,
        device: torch.device | str = "cpu",
        comm: Communicator | None = None,
        watch: object = (),
        buffers: object = (),
        num_warmups: int = 2,
        record: Recorder | None = None,
    ):
        sizes = list(buckets)
        if tokens_per_request < 1 or num_warmups < 1:
            raise ValueError(
                "graph runner: expected tokens_per_request and num_warmups >= 1, got "
                f"{tokens_per_request} and {num_warmups}"
            )
        sound = (
            sizes and sizes[0] > 0 and all(a < b for a, b in zip(sizes, sizes[1:], strict=False))
        )
        if not sound or any(size % tokens_per_request for size in sizes):
            raise ValueError(
                "graph runner: buckets: expected increasing numbers of tokens, multiples of "
                f"{tokens_per_request} a request, got {sizes}"
            )
        self.make, self.buckets, self.tokens_per_request = make, sizes, tokens_per_request
        self.device = torch.device(device)
        self.comm = comm or Communicator.single()
        self.num_warmups = num_warmups
        self._watched, self._record = (watch, buffers), record
        self._captured: dict[int, _Captured] = {}
        self._fingerprints: list[_Fingerprint] = []

    @property
    def is_captured(self) -> bool:
        return bool(self._captured)

    def invalidate(self) -> None:
        """Drops all graphs, plans and their memory."""
        self._captured, self._fingerprints = {}, []

    def capture(self) -> None:
        """Makes, warms up and records the plan of every bucket, the largest first.

        Graphs of an earlier capture are dropped before. When it fails on one rank, it fails on all:
        ``comm`` is aborted, and of no further use.

        Raises:
            ValueError: ranks have different buckets, tokens a request or warm-ups.
            CaptureError: what failed, from what was raised on this rank.
        """
        self.invalidate()
        self._agree()
        record = self._record or shared_recorder(self.device)
        captured, bucket = {}, None
        try:
            for bucket in reversed(self.buckets):
                captured[bucket] = self._capture(bucket, record)
            # Whoever passes knows that nobody failed.
            self.comm.barrier()
        except Exception as error:
            text = f"graph runner: bucket of {bucket} tokens: {type(error).__name__}: {error}"
            self.comm.abort(text)
            raise CaptureError(text) from error
        watch, buffers = self._watched
        self._fingerprints = [
            _Fingerprint("watch", watch, versions=True),
            _Fingerprint("buffers", buffers, versions=False),
        ]
        self._captured = captured

    def bucket_for(self, num_requests: int) -> int:
        """The smallest bucket, in tokens, that holds ``num_requests`` requests.

        ValueError if there are none, or more than the largest bucket holds.
        """
        num_tokens, largest = num_requests * self.tokens_per_request, self.buckets[-1]
        if not 0 < num_tokens <= largest:
            raise ValueError(
                f"graph runner: num_requests: expected 1 to {largest // self.tokens_per_request}, "
                f"since the largest bucket holds {largest} tokens, got {num_requests} of "
                f"{self.tokens_per_request} tokens each"
            )
        return next(bucket for bucket in self.buckets if bucket >= num_tokens)

    def run(self, num_requests: int, **inputs: Tensor) -> object:
        """Fills the inputs of the bucket that fits and replays it.

        Args:
            num_requests: how many requests the inputs hold.
            inputs: for each of the plan's, the rows of the requests; the rest is padded.

        Returns:
            The plan's results, rows without a request included. The next run of this bucket
            overwrites them.

        Raises, all before anything is written or run:
            ValueError: no bucket fits; inputs are missing, unknown, or of another shape or dtype.
            StaleGraph, RuntimeError: as ``replay``.
        """
        bucket = self.bucket_for(num_requests)
        plan = self._checked(bucket).plan
        if inputs.keys() != plan.inputs.keys():
            raise ValueError(
                f"graph runner: inputs: expected {sorted(plan.inputs)}, got {sorted(inputs)}"
            )
        num_places = bucket // self.tokens_per_request
        for name, value in inputs.items():
            buffer = plan.inputs[name]
            rows = buffer.shape[0] // num_places * num_requests
            shape = (rows, *buffer.shape[1:])
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"graph runner: {name}: expected a tensor, got {type(value).__name__}"
                )
            if tuple(value.shape) != shape or value.dtype != buffer.dtype:
                raise ValueError(
                    f"graph runner: {name}: expected {buffer.dtype} of shape {shape} for "
                    f"{num_requests} requests, got {value.dtype} of {tuple(value.shape)}"
                )
        for name, value in inputs.items():
            buffer = plan.inputs[name]
            # Detached: a buffer would keep the history of whatever was ever copied to it.
            buffer[: value.shape[0]].copy_(value.detach(), non_blocking=True)
            buffer[value.shape[0] :].fill_(plan.padding[name])
        return self._replay(bucket)

    def replay(self, bucket: int) -> object:
        """Replays ``bucket`` on what its buffers hold; its results, as ``run``.

        Raises:
            StaleGraph: something watched has changed; it says what. ``capture`` again, on every
                rank.
            RuntimeError: nothing was captured yet.
        """
        self._checked(bucket)
        return self._replay(bucket)

    def plan(self, bucket: int) -> Plan:
        """The plan of ``bucket``, as ``make`` gave it. RuntimeError before a capture."""
        return self._checked(bucket).plan

    def _replay(self, bucket: int) -> object:
        captured = self._captured[bucket]
        captured.replay()
        return captured.outputs

    def _checked(self, bucket: int) -> _Captured:
        if not self._captured:
            raise RuntimeError("graph runner: expected capture() before, got none that succeeded")
        if bucket not in self._captured:
            raise ValueError(
                f"graph runner: bucket: expected one of {self.buckets} tokens, got {bucket}"
            )
        for fingerprint in self._fingerprints:
            change = fingerprint.change()
            if change:
                raise StaleGraph(
                    f"graph runner: {change} since the capture; capture again, on every rank"
                )
        return self._captured[bucket]

    def _agree(self) -> None:
        mine = [self.buckets, self.tokens_per_request, self.num_warmups]
        if self.comm.world_size == 1:
            return
        for rank, theirs in enumerate(self.comm.exchange(mine)):
            if theirs != mine:
                raise ValueError(
                    "graph runner: buckets, tokens_per_request, num_warmups: expected the same on "
                    f"all ranks, got {mine} on rank {self.comm.rank}, {theirs} on rank {rank}"
                )

    def _capture(self, bucket: int, record: Recorder) -> _Captured:
        plan = self.make(bucket)
        self._check_plan(plan, bucket)
        # Held, so that results in memory of the run cannot come to stand where these do.
        first = None
        for number in range(self.num_warmups):
            _prime(plan)
            result = plan.run()
            first = result if number == 0 else first
        _prime(plan)
        replay, outputs = record(plan.run)
        _check_outputs(first, outputs)
        _prime(plan)
        return _Captured(plan, replay, outputs)

    def _check_plan(self, plan: Plan, bucket: int) -> None:
        if not isinstance(plan, Plan):
            raise ValueError(f"make: expected a Plan, got {type(plan).__name__}")
        if plan.inputs.keys() != plan.padding.keys():
            raise ValueError(
                f"padding: expected a value for each of {sorted(plan.inputs)}, got "
                f"{sorted(plan.padding)}"
            )
        num_requests = bucket // self.tokens_per_request
        for name, buffer in plan.inputs.items():
            if not isinstance(buffer, Tensor):
                raise ValueError(f"inputs: {name}: expected a tensor, got {type(buffer).__name__}")
            if buffer.dim() == 0 or buffer.shape[0] % num_requests:
                raise ValueError(
                    f"inputs: {name}: expected a whole number of rows for each of {num_requests} "
                    f"requests, got shape {tuple(buffer.shape)}"
                )


def _prime(plan: Plan) -> None:
    for name, buffer in plan.inputs.items():
        buffer.fill_(plan.padding[name])
    if plan.prime is not None:
        plan.prime()


def _check_outputs(first: object, recorded: object) -> None:
    """Results that stand elsewhere in each run would stand in the pool, which all graphs share."""
    before, now = dict(named_tensors(first, "result")), dict(named_tensors(recorded, "result"))
    for name in sorted(before.keys() | now.keys()):
        a, b = before.get(name), now.get(name)
        if a is None or b is None:
            raise ValueError(f"{name}: expected the same results from every run, got it from some")
        if (a.data_ptr(), a.shape, a.stride()) != (b.data_ptr(), b.shape, b.stride()):
            raise ValueError(
                f"{name}: expected a buffer that make() allocated, got a tensor that is elsewhere "
                "in every run"
            )


# ------------------------------------------------------------------------------------ recording


def eagerly(run: Callable[[], object]) -> tuple[Callable[[], object], object]:
    """The recorder that records nothing: replays call ``run`` again, on any device."""
    return run, run()


def shared_recorder(device: torch.device | str) -> Recorder:
    """How runners record on ``device``; those that are given one recorder share one memory pool,
    and replay on one stream, one after the other."""
    device = torch.device(device)
    return _CudaGraphs(device).record if device.type == "cuda" else eagerly


class _CudaGraphs:
    """Graphs of one device over one pool."""

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            # Memory is shared through the pool only by captures on the same stream.
            self.stream = torch.cuda.Stream()
        self.pool = None
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, run: Callable[[], object]) -> tuple[Callable[[], object], object]:
        if not self._alive:
            # torch refuses a pool whose graphs are all gone.
            self.pool = torch.cuda.graph_pool_handle()
        graph, failure = torch.cuda.CUDAGraph(), None
        # Other threads of an engine may allocate or copy meanwhile: thread_local lets them.
        context = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        try:
            # The outer one puts the stream back where ending a broken capture raises.
            with torch.cuda.stream(torch.cuda.current_stream(self.device)), context:
                try:
                    outputs = run()
                except Exception as error:
                    failure = error
                    raise
        except Exception as error:
            # torch may go on taking the pool for one that is being captured into.
            self._alive = weakref.WeakSet()
            # What ending a broken capture raises says less than what broke it.
            raise (failure or error) from None
        self._alive.add(graph)
        return graph.replay, outputs


# ---------------------------------------------------------------------------------- fingerprint


class _Fingerprint:
    """Where everything in a nest stands, and what state it is in, to be compared later.

    A comparison walks lists made once, since it precedes every replay.
    """

    def __init__(self, name: str, value: object, *, versions: bool):
        # Where an item stands, the item, and its name.
        self._items: list[tuple[object, object, object, str]] = []
        # Their addresses, and the versions that count writes, of those that have one.
        self._tensors: list[tuple[Tensor, int, str]] = []
        self._versioned: list[tuple[Tensor, int, str]] = []
        # A version counts what changes a tensor's form in place, too; others show it themselves.
        self._formed: list[tuple[Tensor, tuple, str]] = []
        rest = [(name, (value,), 0, value)]
        seen: set[int] = set()
        while rest:
            name, where, key, item = rest.pop()
            self._items.append((where, key, item, name))
            if id(item) in seen:
                continue
            seen.add(id(item))
            if not isinstance(item, Tensor):
                rest += [(name + written, *place) for written, *place in children(item)]
                continue
            self._tensors.append((item, item.data_ptr(), name))
            if versions and not item.is_inference():
                self._versioned.append((item, item._version, name))
            else:
                self._formed.append((item, _form(item), name))

    def change(self) -> str | None:
        """What has changed, in words."""
        for where, key, item, name in self._items:
            try:
                now = where[key]
            except (KeyError, IndexError, AttributeError):
                return f"{name} was removed"
            if now is not item and not (type(now) is type(item) in _PLAIN and now == item):
                return f"{name} was replaced"
        for tensor, address, name in self._tensors:
            if tensor.data_ptr() != address:
                return f"{name} was moved"
        for tensor, form, name in self._formed:
            if _form(tensor) != form:
                return f"{name} was given another shape or dtype"
        for tensor, version, name in self._versioned:
            if tensor._version != version:
                return f"{name} was written"
        return None


def _form(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype


_PLAIN = (bool, int, float, str)
