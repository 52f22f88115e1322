"""Each thing that a capture would refuse or freeze is found, and nothing else is."""

import random

import numpy as np
import pytest
import torch

from spec_kernels.decode.nests import named_tensors
from spec_kernels.ops.hidden_capture import hidden_capture
from spec_kernels.testing import graph_safe
from spec_kernels.testing.compare import assert_same_bits

HERE = __file__


@pytest.fixture(autouse=True, params=[True, False], ids=["inference", "grad"])
def _mode(request):
    """Without autograd, composite ops arrive at the dispatcher whole."""
    with torch.inference_mode(request.param):
        yield


class World:
    """Static buffers, new data in them for each run, and a host that knows what it should not."""

    def __init__(self):
        self.x = torch.arange(12.0).view(3, 4)
        self.ids = torch.tensor([0, 1, 2])
        self.mask = torch.zeros(3, 4, dtype=torch.bool)
        self.out = torch.zeros(3, 4)
        self.row = torch.zeros(4)
        self.elsewhere = torch.zeros(3, 4, device="meta")
        self.number = 0
        self.kept = []
        self.generator = torch.Generator()

    def fill(self, run):
        g = torch.Generator().manual_seed(run)
        self.number = run
        self.x.copy_(torch.rand(3, 4, generator=g))
        self.ids.copy_(torch.randperm(3, generator=g))
        self.mask.zero_()
        self.mask.view(-1)[: run + 1] = True

    def buffers(self):
        return {"x": self.x, "ids": self.ids, "mask": self.mask, "out": [self.out, self.row]}

    def inspect(self, function, **options):
        options.setdefault("fill", self.fill)
        return graph_safe.inspect(lambda: function(self), self.buffers(), **options)


def if_positive(w):
    if w.x.sum() > 5:
        w.out.copy_(w.x)


def new_row(w):
    w.row = torch.zeros(4)


def grow(w):
    w.kept.append(w.x * 2)


def keep_in_a_cycle(w):
    cycle = [w.x * 2]
    cycle.append(cycle)


def out_of_the_wrong_size(w):
    torch.add(w.x, 1, out=w.row)


def rotate(w):
    """Reads one of two static tensors, another one each time."""
    w.kept = w.kept or [torch.zeros(3, 4), torch.zeros(3, 4)]
    w.kept.reverse()
    w.out.copy_(w.kept[0])


def no_result(*values):
    """Returns nothing."""


class Twice(torch.nn.Module):
    def forward(self, x):
        return x * x.max().item()


# What is wrong, and of which kinds exactly it is found to be.
UNSOUND = {
    "item": (lambda w: w.out.fill_(w.x[0, 0].item()), {"sync", "scalar"}),
    "bool": (if_positive, {"sync"}),
    "int": (lambda w: int(w.ids[0]), {"sync"}),
    "float": (lambda w: float(w.x[0, 0]), {"sync"}),
    "index of a list": (lambda w: [1, 2, 3][w.ids[0]], {"sync"}),
    "range": (lambda w: list(range(w.ids[0])), {"sync"}),
    "in": (lambda w: 1.0 in w.x, {"sync"}),
    "tolist": (lambda w: w.x.tolist(), {"sync"}),
    "numpy": (lambda w: w.x.numpy(), {"sync"}),
    "asarray": (lambda w: np.asarray(w.x), {"sync"}),
    "print": (lambda w: repr(w.x), {"sync"}),
    "format": (lambda w: f"{w.x[0, 0]:.1f}", {"sync"}),
    "cpu": (lambda w: w.out.copy_(w.x.cpu()), {"sync"}),
    "to cpu": (lambda w: w.out.copy_(w.x.to("cpu")), {"copy"}),
    "equal": (lambda w: torch.equal(w.x, w.out), {"sync"}),
    "allclose": (lambda w: torch.allclose(w.x, w.out), {"sync"}),
    "nonzero": (lambda w: w.ids.nonzero(), {"sync", "output"}),
    "where of one argument": (lambda w: w.row.copy_(torch.where(w.mask)[0][0]), {"sync", "shape"}),
    "masked_select": (lambda w: w.row.add_(w.x.masked_select(w.mask).sum()), {"sync", "shape"}),
    "mask index": (lambda w: w.row.add_(w.x[w.mask].sum()), {"sync", "shape"}),
    "mask assignment": (lambda w: w.out.__setitem__(w.mask, w.x[0, 0]), {"sync"}),
    "index with a 0-dim tensor": (lambda w: w.row.copy_(w.x[w.ids[0]]),
                               {"sync", "scalar", "address"}),
    "slice by a tensor": (lambda w: w.row.add_(w.x[: w.ids[0]].sum()),
                          {"sync", "scalar", "shape"}),
    "index with a list": (lambda w: w.out[:2].copy_(w.x[[0, 2]]), {"copy"}),
    "unique": (lambda w: w.row.add_(w.ids.unique().sum()), {"sync"}),
    "bincount": (lambda w: w.row.add_(w.ids.bincount().sum()), {"sync"}),
    "repeat_interleave": (lambda w: w.row.add_(w.x.repeat_interleave(w.ids, 0).sum()), {"sync"}),
    "number of the host to a slice": (lambda w: w.out.__setitem__(slice(1, None), w.number),
                                      {"scalar"}),
    "masked_fill by a tensor": (lambda w: w.out.masked_fill_(w.mask, w.x[0, 0]), {"sync"}),
    "inverse": (lambda w: w.out[:3, :3].copy_(torch.linalg.inv(torch.eye(3))), {"sync"}),
    "tensor": (lambda w: w.row.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0])), {"copy"}),
    "new_tensor": (lambda w: w.row.copy_(w.row.new_tensor([1.0, 2.0, 3.0, 4.0])), {"copy"}),
    "as_tensor": (lambda w: w.row.copy_(torch.as_tensor(np.ones(4, np.float32))), {"copy"}),
    "from_numpy": (lambda w: w.row.copy_(torch.from_numpy(np.ones(4))), {"copy"}),
    "number to one element": (lambda w: w.row.__setitem__(0, 1.0), {"copy"}),
    "other device": (lambda w: w.elsewhere.copy_(w.x), {"copy"}),
    "to another device": (lambda w: no_result(w.x.to("meta")), {"copy"}),
    "rand": (lambda w: w.row.copy_(torch.rand(4)), {"random"}),
    "dropout": (lambda w: w.out.copy_(torch.nn.functional.dropout(w.x)), {"random"}),
    "exponential_": (lambda w: w.row.exponential_(), {"random"}),
    "own generator": (lambda w: w.row.normal_(generator=w.generator), {"random"}),
    "multinomial": (lambda w: w.ids.copy_(torch.multinomial(w.x[:, :3] + 1, 1)[:, 0]),
                    {"sync", "random"}),
    "scalar of the host": (lambda w: w.row.add_(w.number), {"scalar"}),
    "shape of the host": (lambda w: w.row.add_(w.x[:, : w.number].sum()), {"scalar", "shape"}),
    "zeros of the host's size": (lambda w: w.row.add_(torch.zeros(w.number).sum()),
                                 {"scalar", "shape"}),
    "branch of the host": (lambda w: w.row.sin_() if w.number % 2 else w.row.cos_(), {"sequence"}),
    "loop of the host": (lambda w: no_result([w.row.sin_() for _ in range(w.number)]),
                         {"sequence"}),
    "result in new memory": (lambda w: w.x * 2, {"output"}),
    "view of new memory": (lambda w: {"a": [(w.x * 2)[0]]}, {"output"}),
    "replaced buffer": (new_row, {"kept"}),
    "growing list": (grow, {"kept"}),
    "resized by out=": (out_of_the_wrong_size, {"address"}),
    "one of two tensors": (rotate, {"address"}),
    "inside a module": (lambda w: w.out.copy_(Twice()(w.x)), {"sync", "scalar"}),
}  # fmt: skip


@pytest.mark.parametrize("function, kinds", UNSOUND.values(), ids=UNSOUND)
@pytest.mark.filterwarnings("ignore")
def test_unsound(function, kinds):
    report = World().inspect(function)
    assert {finding.kind for finding in report.findings} == kinds, report.findings
    for finding in report.findings:
        if finding.stack:
            assert finding.stack[0].file == HERE
            assert finding.op
    with pytest.raises(graph_safe.NotGraphSafe):
        report.require_safe()
    assert set(graph_safe.KINDS) >= kinds


def test_every_kind_has_an_example():
    assert set().union(*(kinds for _, kinds in UNSOUND.values())) == set(graph_safe.KINDS)


def attention(w):
    q = w.x.view(1, 1, 3, 4)
    w.out.copy_(torch.nn.functional.scaled_dot_product_attention(q, q, q)[0, 0])


def own_op(w):
    hidden_capture(w.x, w.out, torch.ones(4), 1e-6, out=w.x)


def nested(w):
    return {"rows": [w.out, (w.out[1:], w.row)], "none": None, "name": "x"}


@torch.compiler.disable
def a_decorated_one(w):
    w.out.copy_(w.x)


def lazily(w):
    """Allocates when it is first called, as the buffers of a step shape do."""
    w.kept = w.kept or [torch.zeros(3, 4)]
    return torch.sin(w.x, out=w.kept[0])


SOUND = {
    "arithmetic": lambda w: w.out.copy_((w.x * 2 + 1).softmax(-1)),
    "out=": lambda w: torch.mm(w.x, w.x.t() @ w.x, out=w.out),
    "in place": lambda w: w.out.add_(w.x).mul_(2).clamp_(max=3),
    "views": lambda w: no_result(w.out.view(4, 3).t()[1:, ::2].unsqueeze(0).flatten(0, 1).mul_(2)),
    "returned views": lambda w: (w.out[1:], w.out.t(), w.row.expand(2, 4)),
    "reshape with a copy": lambda w: w.out.copy_(w.x.t().reshape(3, 4)),
    "split and cat": lambda w: w.out.copy_(torch.cat(w.x.split(2, 1)[::-1], 1)),
    "gathers": lambda w: w.out.copy_(w.x.index_select(0, w.ids).gather(1, w.ids[:, None])),
    "integer index": lambda w: w.out.copy_(w.x[w.ids]),
    "index_put_": lambda w: w.out.index_put_((w.ids,), w.x),
    "assignment by index": lambda w: w.out.__setitem__(w.ids, w.x),
    "slice assignment": lambda w: w.out.__setitem__(slice(1, None), w.x[1:]),
    "number to a slice": lambda w: w.out.__setitem__(slice(1, None), 3.0),
    "number under a mask": lambda w: w.out.__setitem__(w.mask, 3.0),
    "where": lambda w: w.out.copy_(torch.where(w.mask, w.x, -1)),
    "masked_fill by a number": lambda w: w.out.masked_fill_(w.mask, 3.0),
    "topk and sort": lambda w: w.out.copy_(w.x.topk(4, -1).values + w.x.sort(stable=True).values),
    "scatter, cumsum": lambda w: w.out.scatter_(1, w.ids[:, None], w.x.cumsum(1)),
    "searchsorted": lambda w: w.ids.copy_(torch.searchsorted(w.row, w.x[:, 0].contiguous())),
    "repeat_interleave of a known size": lambda w: w.out.copy_(
        w.x.repeat_interleave(w.ids, 0, output_size=3)),
    "nonzero of a known size": lambda w: w.ids.copy_(w.mask.nonzero_static(size=3)[:, 0]),
    "repeat_interleave by a number": lambda w: w.out.copy_(w.x[:, :2].repeat_interleave(2, 1)),
    "ones, arange": lambda w: w.row.add_(torch.ones(4) + torch.arange(4)),
    "other dtype": lambda w: w.out.copy_(w.x.to(torch.bfloat16).float()),
    "device of another": lambda w: w.out.copy_(w.x.to(w.out.device)),
    "composite ops": lambda w: w.out.copy_(torch.nn.functional.linear(w.x, torch.ones(4, 4))),
    "einsum": lambda w: w.out.copy_(torch.einsum("ij,jk->ik", w.x, torch.ones(4, 4))),
    "rms_norm": lambda w: w.out.copy_(torch.nn.functional.rms_norm(w.x, (4,), torch.ones(4))),
    "attention without dropout": attention,
    "our own op": own_op,
    "own Python op": lambda w: torch.ops.graph_safe_test.by_value(w.x, w.out),
    "module": lambda w: w.out.copy_(w.layer(w.x)),
    "nested results": nested,
    "decorated": a_decorated_one,
    "allocated at the first call": lazily,
    "memory in a cycle": keep_in_a_cycle,
    "data_ptr and shapes": lambda w: no_result(w.x.data_ptr(), w.x.shape, w.x.device, w.x.stride()),
    "nothing": lambda w: None,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def library():
    """Ops in Python that read values, as a reference may on a CPU: what is inside is not judged."""
    lib = torch.library.Library("graph_safe_test", "DEF")
    lib.define("by_value(Tensor x, Tensor(a!) out) -> ()")
    lib.define("rows_of_data(Tensor x) -> Tensor")

    def by_value(x, out):
        out.fill_(max(x.flatten().tolist()) + x[0, 0].item())

    lib.impl("by_value", by_value, "CPU")
    lib.impl("rows_of_data", lambda x: x.new_zeros(int(x.sum()) + 1), "CPU")
    yield
    lib._destroy()


@pytest.mark.parametrize("function", SOUND.values(), ids=SOUND)
def test_sound(function):
    world = World()
    world.layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
    with torch.no_grad():
        assert world.inspect(function).findings == []


def test_a_shape_that_an_untagged_op_makes_of_data():
    world = World()
    report = world.inspect(
        lambda w: w.row.add_(torch.ops.graph_safe_test.rows_of_data(w.x * 9).sum())
    )
    assert [(f.kind, f.op) for f in report.findings] == [("shape", "graph_safe_test::rows_of_data")]


def test_registered_generators_may_be_drawn_from():
    world = World()

    def drawing(w):
        w.row.normal_(generator=w.generator)
        w.out.uniform_()

    found = world.inspect(drawing, generators=[world.generator])
    assert [f.op for f in found.findings] == ["aten::uniform_"]
    both = [world.generator, torch.default_generator]
    assert world.inspect(drawing, generators=both).findings == []


def test_buffers_replaced_between_runs():
    world = World()

    def fill(run):
        if run == 2:
            world.x = torch.ones(3, 4)

    report = graph_safe.inspect(lambda: None, world, fill=fill)
    assert [str(f) for f in report.findings] == [
        "address: fill replaced buffers.x; write into it instead"
    ]


def test_an_input_replaced_between_runs_is_found_where_it_is_read():
    world = World()

    def fill(run):
        world.x = torch.full((3, 4), float(run))

    report = graph_safe.inspect(lambda: world.out.copy_(world.x), world.out, fill=fill)
    assert [(f.kind, f.op) for f in report.findings] == [("address", "aten::copy_")]


def test_warm_ups_are_not_watched_and_runs_are():
    world = World()
    with pytest.raises(graph_safe.NotGraphSafe, match="kept"):
        graph_safe.check(lambda: lazily(world), num_warmups=0)
    world.kept = []
    graph_safe.check(lambda: lazily(world), num_warmups=1)


def test_the_message_names_op_line_and_caller():
    world = World()

    def inner():
        return world.x[0, 0].item()  # here

    def outer():
        world.out.fill_(inner())

    with pytest.raises(graph_safe.NotGraphSafe) as caught:
        graph_safe.check(outer)
    text = str(caught.value).splitlines()
    assert text[0] == "graph_safe: 1 finding"
    assert text[1] == "sync: aten::_local_scalar_dense: the host reads a value"
    assert "inner: return world.x[0, 0].item()  # here" in text[2] and HERE in text[2]
    assert "outer: world.out.fill_(inner())" in text[3]


def test_launches_by_op_and_by_caller():
    world = World()

    class Layer:
        def forward(self):
            self.norm()
            torch.mm(world.x, world.x.t(), out=torch.empty(3, 3))

        def norm(self):
            hidden_capture(world.x, world.out, torch.ones(4), 1e-6, out=world.x)

    def cycle():
        for _ in range(3):
            Layer().forward()
        world.row.zero_()

    cycle_report = graph_safe.check(cycle)
    assert cycle_report.by_op() == {
        "spec_kernels::hidden_capture": 3,
        "aten::mm.out": 3,
        "aten::ones": 3,
        "aten::zero_": 1,
    }
    layer, norm = ("test_launches_by_op_and_by_caller.Layer." + n for n in ("forward", "norm"))
    me = "test_launches_by_op_and_by_caller.cycle"
    assert cycle_report.by_caller() == {layer: 3, norm: 3, "run": 3, me: 1}
    assert cycle_report.by_caller(layer) == {layer: 9, "elsewhere": 1}
    assert len(cycle_report.within(layer)) == 9


def test_what_the_callable_raises_comes_through():
    with pytest.raises(ZeroDivisionError):
        graph_safe.check(lambda: 1 / 0)
    # and leaves no mode behind
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("options", [{"num_runs": 1}, {"num_warmups": -1}])
def test_bad_numbers_of_runs(options):
    with pytest.raises(ValueError, match="graph_safe: expected num_runs >= 2"):
        graph_safe.check(lambda: None, **options)


# ----------------------------------------------------------------------------- record and replay


def step(w):
    h = torch.nn.functional.rms_norm(w.x, (4,))
    best = h.topk(2, -1)
    h[:, :2] += best.values
    w.ids.copy_(best.indices[:, 0] % 3)
    torch.mm(h.index_select(0, w.ids), h.t() @ h, out=w.out)
    w.row.add_(torch.cat([h[:, :2].sum(0), h.new_zeros(2)]))
    hidden_capture(w.x, w.out, torch.ones(4), 1e-6, out=w.x)


def test_replays_of_sound_code_equal_eager_calls():
    world, eager = World(), World()
    with torch.no_grad():
        recording = graph_safe.record(lambda: step(world))
        step(eager)
        for run in random.Random(0).sample(range(20), 5):
            world.fill(run)
            eager.fill(run)
            recording.replay()
            step(eager)
            pairs = zip(named_tensors(world.buffers()), named_tensors(eager.buffers()), strict=True)
            for (_, got), (_, want) in pairs:
                assert_same_bits(got, want)
    assert recording.num_launches > 10


def test_a_replay_has_what_the_host_knew_frozen():
    world = World()
    world.fill(3)
    with torch.no_grad():
        value = world.x[0, 0].item()
        recording = graph_safe.record(lambda: world.out.fill_(world.x[0, 0].item() + world.number))
        world.fill(4)
        recording.replay()
    assert world.out.eq(torch.tensor(value + 3)).all()


def test_between_replays_the_memory_of_a_recording_is_not_its_own():
    """Memory that is read before the run writes it holds anything at all."""
    world = World()
    with torch.no_grad():
        recording = graph_safe.record(
            lambda: world.out.copy_(torch.empty(3, 4).fill_(1).add_(torch.empty(3, 4).mul_(0)))
        )
        recording.replay()
    assert world.out.isnan().all()
