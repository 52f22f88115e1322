"""Whether a callable can be captured as a CUDA graph, found out on a CPU.

A capture runs a callable once and keeps what it launched: kernels, their scalar arguments, the
addresses they read and write. ``check`` runs it several times on different data in the same static
buffers, watches every call that reaches torch's dispatcher, and fails on whatever a capture would
refuse or freeze, naming the op and the line:

sync      the host reads a value: ``.item()``, ``bool(t)``, ``.tolist()``, ``.numpy()``, indexing
          with a mask, ``nonzero``, ``torch.equal``, an op that reads a value inside
copy      data comes from the host or goes there: ``torch.tensor``, ``.cpu()``, an op over devices
random    an op draws from a generator that is not registered with the graph
sequence  another op, or one more or less, for other data: the host decided by something
scalar    an argument that is no tensor differs between runs: it would be frozen
shape     a shape, stride or dtype differs between runs
address   a tensor from outside stands elsewhere than in the run before, or is moved by an op
output    a result stands in memory that the call allocated, which later graphs of its pool reuse
kept      memory that the call allocated outlives it

``record`` makes a graph of its own: a ``Recording`` replays the ops of one run on the same tensors,
everything that a capture would freeze being frozen, so that replays can be compared with eager
calls where there is no GPU.

Not seen, because it never reaches the dispatcher: synchronisation by ``torch.cuda`` (such code does
not run on a CPU), reading through raw pointers, device code that only the CUDA branch of a function
would run, and what a kernel does inside.
"""

from __future__ import annotations

import gc
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spec_kernels.decode.nests import named_tensors

KINDS = (
    "sync", "copy", "random", "sequence", "scalar", "shape", "address", "output", "kept"
)  # fmt: skip

# Methods that hand data to the host without a call to the dispatcher, at least on a CPU.
_TO_HOST = {"tolist", "numpy", "__array__", "__dlpack__", "cpu", "__repr__", "__str__"}
_PINS = {"pin_memory"}
# Ops that read a tensor on the host inside, in CUDA's implementation, and have no tag that says so.
_READS_INSIDE = {
    "aten::_linalg_check_errors",
    "aten::multinomial",
    "aten::masked_fill.Tensor",
    "aten::masked_fill_.Tensor",
    "aten::index_fill.int_Tensor",
    "aten::index_fill_.int_Tensor",
}
# Neither views nor kernels. A scalar_tensor is a number for the op that follows.
_NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "scalar_tensor",
    "lift_fresh",
    "_unsafe_view",
    "_reshape_alias",
}
_OWN_FILES = (__file__, str(Path(torch.__file__).parent))


@dataclass(frozen=True)
class Place:
    """A line of Python."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line} in {self.function}: {source}"


@dataclass(frozen=True)
class Finding:
    """One thing that a capture would refuse or freeze.

    Attributes:
        kind: one of ``KINDS``.
        op: the op or method; empty for what belongs to no op.
        message: what is wrong.
        stack: the lines that led there, innermost first; torch's own are left out.
    """

    kind: str
    op: str
    message: str
    stack: tuple[Place, ...] = ()

    def __str__(self) -> str:
        text = f"{self.kind}: {self.op + ': ' if self.op else ''}{self.message}"
        lines = [f"    at {self.stack[0]}"] if self.stack else []
        lines += [f"    from {place}" for place in self.stack[1:]]
        return "\n".join([text, *lines])


@dataclass(frozen=True)
class Launch:
    """A call that launches something on a device: at least one kernel."""

    op: str
    stack: tuple[Place, ...]


class NotGraphSafe(AssertionError):
    """What ``check`` found, in ``findings``."""

    def __init__(self, findings: Sequence[Finding]):
        count = f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"
        super().__init__("\n".join([f"graph_safe: {count}", *map(str, findings)]))
        self.findings = tuple(findings)


@dataclass
class Report:
    """What the runs showed.

    Attributes:
        findings: in the order in which they were met, each once.
        launches: of the last run, in order. Views and allocations launch nothing. The number is a
            lower bound on the kernels of a CUDA run, where some ops of torch launch several.
    """

    findings: list[Finding] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def by_op(self) -> Counter[str]:
        """Launches a run by op: ``{"aten::mm": 12, ...}``."""
        return Counter(launch.op for launch in self.launches)

    def by_caller(self, *functions: str) -> Counter[str]:
        """Launches a run by the innermost function on the stack, as ``Class.method``.

        With ``functions``, by the innermost of these, and ``"elsewhere"`` outside all of them.
        """
        counts: Counter[str] = Counter()
        for launch in self.launches:
            names = (p.function for p in launch.stack if not functions or p.function in functions)
            counts[next(names, "elsewhere")] += 1
        return counts

    def within(self, function: str) -> list[Launch]:
        """Launches of a run with ``function`` anywhere on the stack."""
        return [x for x in self.launches if any(p.function == function for p in x.stack)]

    def require_safe(self) -> None:
        """Raises ``NotGraphSafe`` if anything was found."""
        if self.findings:
            raise NotGraphSafe(self.findings)


def check(function: Callable[[], object], buffers: object = (), **options) -> Report:
    """Fails unless ``function`` can be captured and replayed; arguments as for ``inspect``.

    Raises:
        NotGraphSafe: with every finding.
    """
    report = inspect(function, buffers, **options)
    report.require_safe()
    return report


def inspect(
    function: Callable[[], object],
    buffers: object = (),
    *,
    fill: Callable[[int], object] | None = None,
    num_runs: int = 3,
    num_warmups: int = 1,
    generators: Iterable[torch.Generator] = (),
) -> Report:
    """Runs ``function`` and reports what of it a CUDA graph would refuse or freeze.

    Args:
        function: what would be captured. It takes nothing, reads and writes static buffers, and
            returns tensors in them, in any nest, or nothing.
        buffers: the static buffers, in any nest of containers and objects; they must stay where
            they are.
        fill: called with 0, 1, ... before each run, to write other data into the same buffers.
            What the runs have in common is not found: make them differ as the inputs may.
        num_runs: watched runs, at least 2.
        num_warmups: runs before, not watched: what is allocated only once may be allocated there.
        generators: registered with the graph, so that replays draw on. ``torch.default_generator``
            stands for the device's default one, which torch registers by itself.

    Raises:
        ValueError: fewer than 2 runs, or a negative number of warm-ups.
        Exception: whatever ``function`` or ``fill`` raise.
    """
    if num_runs < 2 or num_warmups < 0:
        raise ValueError(
            "graph_safe: expected num_runs >= 2 and num_warmups >= 0, got "
            f"{num_runs} and {num_warmups}"
        )
    fill = fill or (lambda run: None)
    found: dict[tuple, Finding] = {}
    registered = {generator._cdata for generator in generators}
    places = _places_of(buffers)
    runs: list[_Run] = []
    for number in range(num_warmups + num_runs):
        fill(number)
        places = _compare_buffers(places, _places_of(buffers), "fill", found)
        run = _Run(registered, found)
        if number < num_warmups:
            function()
        else:
            run.perform(function)
            runs.append(run)
        places = _compare_buffers(places, _places_of(buffers), "the call", found)
    for run in runs[1:]:
        _compare(runs[0], run, found)
    return Report(list(found.values()), runs[-1].launches)


# -------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class _Event:
    """A call of an op, as far as a replay would repeat it; holds no tensor."""

    op: str
    scalars: tuple
    shapes: tuple
    places: tuple
    stack: tuple[Place, ...]


class _Run:
    """One watched run of a callable."""

    def __init__(self, registered: set[int], found: dict[tuple, Finding]):
        self.registered, self.found = registered, found
        self.events: list[_Event] = []
        self.launches: list[Launch] = []
        # Storages by the address of their control block, which a reference, weak or not, keeps from
        # being given to another.
        self.outside: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self.inside: dict[int, tuple[StorageWeakRef, int, str, tuple[Place, ...]]] = {}
        # What the host made. Of that, numbers are what an assignment or a scalar argument needs.
        self.host: dict[int, tuple[StorageWeakRef, int]] = {}
        self.numbers: dict[int, StorageWeakRef] = {}
        self.is_inside_op = self.is_assigning = False

    def perform(self, function: Callable[[], object]) -> None:
        with _Methods(self), _Ops(self):
            result = _called(function)
        returned = set()
        for name, tensor in named_tensors(result, "the result"):
            key = tensor.untyped_storage()._cdata
            returned.add(key)
            if key in self.inside:
                _, _, op, stack = self.inside[key]
                self.add(
                    "output",
                    op,
                    f"{name} stands in memory that the call allocated; return a static buffer",
                    stack,
                )
        del result
        tensor = None
        kept = [key for key in self._alive() if key not in returned]
        if kept and gc.collect():
            kept = [key for key in self._alive() if key not in returned]
        for key in kept:
            _, _, op, stack = self.inside[key]
            message = "allocates memory that outlives the call; allocate it before the capture"
            self.add("kept", op, message, stack)

    def _alive(self) -> list[int]:
        return [key for key, (storage, *_) in self.inside.items() if not storage.expired()]

    def add(self, kind: str, op: str, message: str, stack: tuple[Place, ...]) -> None:
        self.found.setdefault((kind, op, stack[:1]), Finding(kind, op, message, stack))

    def call(self, func, args: tuple, kwargs: dict):
        """Runs one op and notes it."""
        op, stack = func.name(), _stack()
        values = list(_flat([args, *kwargs.values()]))
        inputs = [value for value in values if isinstance(value, Tensor)]
        before = [(t, t.untyped_storage().data_ptr()) for t in inputs]
        if _base(func) == "lift_fresh":
            values += self._take_from_host(op, inputs[0], stack)
        else:
            self._judge(func, op, args, kwargs, values, inputs, stack)
        places = tuple(self._place(t) for t in inputs)

        self.is_inside_op = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.is_inside_op = False

        if any(t.untyped_storage().data_ptr() != address for t, address in before):
            message = "moves the memory of a tensor that it writes; give it one of the right size"
            self.add("address", op, message, stack)
        outputs = [value for value in _flat([result]) if isinstance(value, Tensor)]
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if not any(key in known for known in (self.inside, self.outside, self.host)):
                self.inside[key] = (StorageWeakRef(storage), len(self.inside), op, stack)
            if _base(func) == "scalar_tensor":
                self.numbers[key] = StorageWeakRef(storage)
        shapes = tuple((*t.shape, *t.stride(), t.dtype, t.device) for t in inputs + outputs)
        scalars = tuple(_plain(value) for value in values if not isinstance(value, Tensor))
        self.events.append(_Event(op, scalars, shapes, places, stack))
        if _launches(func):
            self.launches.append(Launch(op, stack))
        return result

    def _place(self, tensor: Tensor) -> tuple:
        """Where a replay would look for ``tensor``."""
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        key = storage._cdata
        if key in self.inside:
            return ("inside", self.inside[key][1], offset)
        if key in self.host:
            return ("host", self.host[key][1], offset)
        # Held until all runs are over, so that an equal address means the same memory.
        self.outside.setdefault(key, (storage, storage.data_ptr()))
        return ("outside", storage.data_ptr(), offset)

    def _take_from_host(self, op: str, tensor: Tensor, stack) -> list:
        """A tensor made of the host's data. Returns the number, if it stands for one."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self.host[storage._cdata] = (reference, len(self.host))
        if self.is_assigning and tensor.dim() == 0:
            self.numbers[storage._cdata] = reference
            return [tensor.item()]
        message = "takes data of the host; make the tensor before the capture"
        self.add("copy", op, message, stack)
        return []

    def _judge(self, func, op, args, kwargs, values, inputs, stack) -> None:
        """What can be said of a call before it runs."""
        tags, base = func.tags, _base(func)
        masked = base.startswith(("index", "_index", "_unsafe_index")) and any(
            t.dtype in (torch.bool, torch.uint8) for t in _indices(args, kwargs)
        )
        is_number = [t.untyped_storage()._cdata in self.numbers for t in inputs]
        if masked and base.lstrip("_").startswith("index_put") and is_number[-1]:
            masked = False  # filled under the mask, without looking for where it is set
        elif any(is_number) and base in ("copy_", "index_put_", "index_put"):
            message = "takes a number of the host as a tensor; use fill_"
            self.add("copy", op, message, stack)
        is_by_data = torch.Tag.data_dependent_output in tags
        is_shaped = torch.Tag.dynamic_output_shape in tags and not base.endswith("index")
        is_shaped &= kwargs.get("output_size") is None  # the caller knows it
        if masked or is_by_data or is_shaped or op in _READS_INSIDE:
            what = "a mask as an index" if masked else "the host reads a value"
            if is_shaped:
                what = "the shape of the result depends on data, and the host waits for it"
            self.add("sync", op, what, stack)
        if torch.Tag.nondeterministic_seeded in tags and _draws(func, args, kwargs):
            given = [v._cdata for v in values if isinstance(v, torch.Generator)]
            drawn_from = given[0] if given else torch.default_generator._cdata
            if drawn_from not in self.registered:
                message = "draws from a generator that is not registered with the graph"
                self.add("random", op, message, stack)
        devices = {t.device for t, number in zip(inputs, is_number, strict=True) if not number}
        wanted = kwargs.get("device")
        if wanted is not None and inputs:
            devices.add(torch.device(wanted))
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            self.add("copy", op, f"works on several devices: {names}", stack)
        if kwargs.get("pin_memory"):
            self.add("copy", op, "allocates pinned memory of the host", stack)


class _Ops(TorchDispatchMode):
    def __init__(self, run: _Run | Recording):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # What an op is made of is what a capture sees; without autograd it arrives whole.
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        return self.run.call(func, args, kwargs or {})


class _Methods(TorchFunctionMode):
    """Sees what never reaches the dispatcher."""

    def __init__(self, run: _Run):
        super().__init__()
        self.run = run

    def __torch_function__(self, func, types, args=(), kwargs=None):
        run, kwargs, name = self.run, kwargs or {}, getattr(func, "__name__", "")
        if run.is_inside_op:  # an op implemented in Python
            return func(*args, **kwargs)
        method = f"Tensor.{name}"
        if name in _TO_HOST:
            run.add("sync", method, "the host reads the data", _stack())
        elif name in _PINS:
            run.add("copy", method, "allocates pinned memory of the host", _stack())
        elif name == "to" and any(
            isinstance(value, str) and value.startswith("cpu")
            for value in (*args[1:], *kwargs.values())
        ):
            run.add("copy", method, "brings the data to the host", _stack())
        if name != "__setitem__":
            return func(*args, **kwargs)
        was_assigning, run.is_assigning = run.is_assigning, not isinstance(args[2], Tensor)
        try:
            return func(*args, **kwargs)
        finally:
            run.is_assigning = was_assigning


def _called(function: Callable[[], object]) -> object:
    """Frames inside this one are the callable's."""
    return function()


def _stack() -> tuple[Place, ...]:
    """The callable's lines that are being executed, innermost first."""
    places, frame = [], sys._getframe(1)
    while frame is not None and frame.f_code is not _called.__code__:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN_FILES):
            name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
            places.append(Place(code.co_filename, frame.f_lineno, name))
        frame = frame.f_back
    return tuple(places)


def _flat(values: Iterable) -> Iterator:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _plain(value: object) -> str:
    # Of a generator only that there is one: its state moves on, as it does between replays.
    return "generator" if isinstance(value, torch.Generator) else repr(value)


def _base(func) -> str:
    """The name without namespace and overload."""
    return func._schema.name.partition("::")[2]


def _indices(args: tuple, kwargs: dict) -> Iterator[Tensor]:
    given = args[1] if len(args) > 1 else kwargs.get("indices", ())
    return (t for t in _flat([given]) if isinstance(t, Tensor))


def _draws(func, args: tuple, kwargs: dict) -> bool:
    """Whether a random op draws anything: attention with a dropout of 0 does not."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return given != 0.0
    return True


def _launches(func) -> bool:
    return not (func.is_view or torch.Tag.inplace_view in func.tags or _base(func) in _NO_KERNEL)


# ---------------------------------------------------------------------------------- between runs


def _compare(first: _Run, run: _Run, found: dict[tuple, Finding]) -> None:
    """Notes where ``run`` parts from ``first``, as far as their ops can be paired."""
    for a, b in zip(first.events, run.events, strict=False):
        if a.op != b.op:
            here = a.stack[0] if a.stack else "nowhere"
            run.add("sequence", b.op, f"another run called {a.op} instead, at {here}", b.stack)
            return
        if a.scalars != b.scalars:
            pairs = zip(a.scalars, b.scalars, strict=False)
            changed = [f"{x} and {y}" for x, y in pairs if x != y]
            what = ", ".join(changed) or f"{len(a.scalars)} and {len(b.scalars)} of them"
            run.add("scalar", b.op, f"arguments differ between runs: {what}", b.stack)
        if a.shapes != b.shapes:
            pairs = zip(a.shapes, b.shapes, strict=False)
            changed = [f"{_shape(x)} and {_shape(y)}" for x, y in pairs if x != y]
            what = ", ".join(changed) or f"{len(a.shapes)} and {len(b.shapes)} tensors"
            run.add("shape", b.op, f"tensors differ between runs: {what}", b.stack)
            return  # what follows differs because of it
        if a.places != b.places:
            message = "reads or writes a tensor that stands elsewhere in every run"
            run.add("address", b.op, message, b.stack)
    shorter, longer = sorted((first, run), key=lambda r: len(r.events))
    if len(shorter.events) != len(longer.events):
        extra = longer.events[len(shorter.events)]
        run.add(
            "sequence", extra.op, "called in some runs only, after the others' end", extra.stack
        )


def _shape(described: tuple) -> str:
    *sizes, dtype, device = described
    half = len(sizes) // 2
    return f"{sizes[:half]} strides {sizes[half:]} {dtype} {device}"


def _places_of(buffers: object) -> dict[str, tuple]:
    return {
        name: (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device)
        for name, t in named_tensors(buffers, "buffers")
    }


def _compare_buffers(
    before: dict[str, tuple], now: dict[str, tuple], who: str, found: dict[tuple, Finding]
) -> dict[str, tuple]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            finding = Finding("address", "", f"{who} replaced {name}; write into it instead")
            found.setdefault(("address", name, who), finding)
    return now


# ----------------------------------------------------------------------------- record and replay


class Recording:
    """The ops of one run, to be replayed on the same tensors; made by ``record``.

    Attributes:
        outputs: what the callable returned.
        num_launches: ops that a replay runs.
    """

    def __init__(self):
        self.outputs: object = None
        self._steps: list[tuple[Callable, tuple, dict, list[Tensor], object]] = []
        self._inside: dict[int, Tensor] = {}
        self._outside: set[int] = set()
        self._is_inference = torch.is_inference_mode_enabled()

    @property
    def num_launches(self) -> int:
        return len(self._steps)

    def call(self, func, args: tuple, kwargs: dict):
        given = {
            t.untyped_storage()._cdata
            for t in _flat([args, *kwargs.values()])
            if isinstance(t, Tensor)
        }
        self._outside |= given - self._inside.keys()
        result = func(*args, **kwargs)
        outputs = [t for t in _flat([result]) if isinstance(t, Tensor)]
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in given]
        for tensor in fresh:
            key = tensor.untyped_storage()._cdata
            if key not in self._outside and key not in self._inside:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                self._inside[key] = whole.set_(tensor.untyped_storage())
        if _launches(func) or _base(func) == "scalar_tensor":
            self._steps.append((func, args, kwargs, fresh, outputs))
        return result

    def replay(self) -> object:
        """Runs the recorded ops again and returns ``outputs``.

        What the run allocated is filled with bytes of ones before, NaN to a float: between replays
        that memory belongs to other graphs of the pool.
        """
        with torch.inference_mode(self._is_inference), torch.no_grad():
            for storage in self._inside.values():
                storage.fill_(0xFF)
            for func, args, kwargs, fresh, outputs in self._steps:
                made = [t for t in _flat([func(*args, **kwargs)]) if isinstance(t, Tensor)]
                for target, source in zip(outputs, made, strict=True):
                    if any(target is t for t in fresh):
                        target.copy_(source)
        return self.outputs


def record(function: Callable[[], object]) -> Recording:
    """Runs ``function`` once and keeps its ops, as a capture does.

    Scalars, host decisions and addresses are those of this run; values read by the host
    (``.item()``) stay as they were.
    """
    recording = Recording()
    with _Ops(recording):
        recording.outputs = function()
    return recording
