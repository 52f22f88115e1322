import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spec_kernels import _library
from spec_kernels.ops import hidden_capture
from spec_kernels.testing.compare import assert_as_accurate, assert_same_bits, poisoned

BACKENDS = ("reference", "cpu", "cuda_on_host", "triton")
OP = torch.ops.spec_kernels.hidden_capture.default
ROOT = Path(__file__).resolve().parents[2]
EPS = 1e-5
ISAS = ("plain", "avx2", "avx512")

SHAPES = [(0, 8), (1, 1), (3, 7), (2, 16), (5, 17), (33, 192), (4, 1000), (3, 7168)]


def make(num_rows, hidden, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(num_rows, hidden, generator=g).to(dtype) for _ in range(2))
    weight = (1 + 0.2 * torch.randn(hidden, generator=g)).to(dtype)
    return x, residual, weight


def norm(r, weight):
    return r * torch.rsqrt(r.square().mean(-1, keepdim=True) + EPS) * weight


def check_accuracy(backend, dtype, shapes):
    for num_rows, hidden in shapes:
        x, residual, weight = make(num_rows, hidden, dtype)
        capture = poisoned(num_rows + 2, 3, hidden, dtype=dtype)
        stream = residual.clone()
        out = poisoned(num_rows, hidden, dtype=dtype)
        got = hidden_capture(
            x, stream, weight, EPS, capture=capture, slot=1, out=out, backend=backend
        )
        assert got is out
        # One rounding of the sum; everything later sees the rounded value.
        assert_same_bits(stream, (residual.double() + x.double()).to(dtype))
        assert_same_bits(capture[:num_rows, 1], stream)
        capture[:num_rows, 1] = float("nan")
        assert capture.isnan().all()
        assert_as_accurate(got, norm(stream.double(), weight.double()), norm(stream, weight))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(backend, dtype, shape):
    check_accuracy(backend, dtype, [shape])


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    if not _library.LIBRARIES["cpu"].loaded:
        pytest.skip(f"_C_cpu: {_library.LIBRARIES['cpu'].reason}")
    if ISAS.index(isa) > ISAS.index(_library.cpu_isa()):
        pytest.skip(f"this CPU, or SPEC_KERNELS_CPU_ISA, has no {isa}")
    code = (
        "import torch, test_hidden_capture as t\n"
        f"assert t._library.cpu_isa() == {isa!r}\n"
        "torch.set_num_threads(1)\n"
        "for d in torch.float32, torch.bfloat16:\n"
        "    t.check_accuracy('cpu', d, t.SHAPES)\n"
        "    t.check_rows('cpu', d)"
    )
    env = os.environ | {
        "SPEC_KERNELS_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_norm_only(backend, dtype):
    """x None: the residual stays as it is, and is captured."""
    _, residual, weight = make(4, 33, dtype)
    stream, capture = residual.clone(), poisoned(4, 1, 33, dtype=dtype)
    got = hidden_capture(None, stream, weight, EPS, capture=capture, backend=backend)
    assert_same_bits(stream, residual)
    assert_same_bits(capture[:, 0], residual)
    assert_as_accurate(got, norm(residual.double(), weight.double()), norm(residual, weight))


def check_rows(backend, dtype):
    """A row alone and in a batch, in any order: the same bits."""
    for hidden in (1, 30, 192, 2050):
        x, residual, weight = make(64, hidden, dtype)
        stream = residual.clone()
        whole = hidden_capture(x, stream, weight, EPS, backend=backend)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
        shuffled = hidden_capture(x[order], residual[order], weight, EPS, backend=backend)
        assert_same_bits(shuffled, whole[order])
        for t in range(0, 64, 7):
            row = residual[t : t + 1].clone()
            alone = hidden_capture(x[t : t + 1], row, weight, EPS, backend=backend)
            assert_same_bits(alone, whole[t : t + 1])
            assert_same_bits(row, stream[t : t + 1])


def test_rows_do_not_depend_on_each_other(backend, dtype):
    check_rows(backend, dtype)


def test_threads_do_not_change_bits(backend, dtype):
    x, residual, weight = make(40, 2048, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(hidden_capture(x, residual.clone(), weight, EPS, backend=backend))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_strided_operands(backend, dtype):
    """Gaps between rows hold NaN; they are neither read nor written."""
    x, residual, weight = make(5, 40, dtype)
    stream, capture = residual.clone(), torch.empty(5, 2, 40, dtype=dtype)
    want = hidden_capture(x, stream, weight, EPS, capture=capture, slot=1, backend=backend)

    def spread(t):
        base = poisoned(2 * t.shape[0] + 1, t.shape[1] + 5, dtype=dtype)
        view = base[1::2, 2:-3]
        view.copy_(t)
        return base, view

    x_base, x_view = spread(x)
    r_base, r_view = spread(residual)
    o_base, o_view = spread(torch.full_like(x, float("nan")))
    # Strided over rows and over slots.
    c_base = poisoned(14, 6, 45, dtype=dtype)
    c_view = c_base[1::2, 1::3, 4:44]
    hidden_capture(x_view, r_view, weight, EPS, capture=c_view, slot=1, out=o_view, backend=backend)
    assert_same_bits(o_view, want)
    assert_same_bits(r_view, stream)
    assert_same_bits(c_view[:5, 1], capture[:, 1])
    c_view[:5, 1] = float("nan")
    for base, view in ((x_base, x_view), (r_base, r_view), (o_base, o_view)):
        view.fill_(float("nan"))
        assert base.isnan().all()
    assert c_base.isnan().all()


def test_rows_of_another_layout(backend, dtype):
    """Residual rows interleaved with others: a slice of [T, 2, H]."""
    x, residual, weight = make(6, 24, dtype)
    want = hidden_capture(x, residual.clone(), weight, EPS, backend=backend)
    both = torch.stack([residual, poisoned(6, 24, dtype=dtype)], dim=1)
    assert_same_bits(hidden_capture(x, both[:, 0], weight, EPS, backend=backend), want)
    assert both[:, 1].isnan().all()


def test_out_may_be_x(backend, dtype):
    x, residual, weight = make(6, 37, dtype)
    want = hidden_capture(x, residual.clone(), weight, EPS, backend=backend)
    assert hidden_capture(x, residual, weight, EPS, out=x, backend=backend) is x
    assert_same_bits(x, want)


def test_out_must_not_be_residual(backend, dtype):
    x, residual, weight = make(6, 37, dtype)
    before = residual.clone()
    with pytest.raises(ValueError, match="hidden_capture: out: expected a tensor other than"):
        hidden_capture(x, residual, weight, EPS, out=residual, backend=backend)
    if backend == "cpu":
        with pytest.raises(ValueError, match="hidden_capture: out: expected a tensor other than"):
            hidden_capture(x, residual, weight, EPS, out=residual.view(6, 37), backend=backend)
    assert_same_bits(residual, before)


def test_overlapping_rows_are_refused(backend):
    x, residual, weight = make(6, 37)
    one = residual[:1].clone()
    # torch refuses with its own words where the reference writes.
    error = ValueError if backend == "cpu" else (ValueError, RuntimeError)
    with pytest.raises(error):
        hidden_capture(x, one.expand(6, 37), weight, EPS, backend=backend)
    with pytest.raises(error):
        hidden_capture(x, residual, weight, EPS, out=one.expand(6, 37), backend=backend)
    with pytest.raises(error):
        capture = one.expand(6, 37)[:, None]
        hidden_capture(x, residual, weight, EPS, capture=capture, backend=backend)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e18])
def test_small_and_large_values(backend, dtype, scale):
    x, residual, weight = make(4, 100, dtype)
    x, residual = x * scale, residual * scale
    got = hidden_capture(x, residual, weight, EPS, backend=backend)
    assert_as_accurate(got, norm(residual.double(), weight.double()), norm(residual, weight))


def test_squares_beyond_the_range_give_zero(backend, dtype):
    """As RMSNorm in fp32 everywhere: an infinite mean square scales the row to zero, not to NaN."""
    _, residual, weight = make(2, 40, dtype)
    got = hidden_capture(None, residual * 1e25, weight, EPS, backend=backend)
    assert (got == 0).all()


def test_rows_without_columns(backend, dtype):
    """Tensors without elements have no address, or one and the same."""
    for num_rows in (0, 3):
        x, residual = (torch.empty(num_rows, 0, dtype=dtype) for _ in range(2))
        capture = torch.empty(num_rows, 2, 0, dtype=dtype)
        weight = torch.empty(0, dtype=dtype)
        got = hidden_capture(x, residual, weight, EPS, capture=capture, slot=1, backend=backend)
        assert got.shape == (num_rows, 0)


def test_zero_row(backend, dtype):
    x, _, weight = make(3, 40, dtype)
    got = hidden_capture(-x, x.clone(), weight, EPS, backend=backend)
    assert (got == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(backend, dtype, value):
    x, residual, weight = make(6, 40, dtype)
    want = hidden_capture(x, residual.clone(), weight, EPS, backend=backend)
    x[2, 5] = value
    got = hidden_capture(x, residual, weight, EPS, backend=backend)
    assert_same_bits(got[[0, 1, 3, 4, 5]], want[[0, 1, 3, 4, 5]])
    assert got[2].isnan().any()


def test_case_22_replay_refreshes_the_buffer(backend, dtype):
    """The buffer is the caller's and static: each call with the same tensors fills it anew."""
    x, residual, weight = make(4, 24, dtype)
    capture, out = poisoned(6, 2, 24, dtype=dtype), torch.empty(4, 24, dtype=dtype)
    address = capture.data_ptr()
    for step in range(3):
        x.fill_(step + 1)
        want = (residual.float() + x.float()).to(dtype)
        hidden_capture(x, residual, weight, EPS, capture=capture, out=out, backend=backend)
        assert_same_bits(capture[:4, 0], want)
    assert capture.data_ptr() == address
    assert capture[4:].isnan().all() and capture[:, 1].isnan().all()


def test_case_23_the_captured_stream_is_the_one_normalised(backend, dtype):
    """What is captured is the complete sum, rounded as the residual is: never one rank's part.

    Ranks add the all-reduced block output, so that every rank captures the same bits; a rank that
    added its own part alone would capture another stream.
    """
    parts = [make(5, 32, dtype, seed)[0] for seed in range(4)]
    _, residual, weight = make(5, 32, dtype)
    whole = sum(p.float() for p in parts).to(dtype)
    captures, outs = [], []
    for _ in range(4):
        stream, capture = residual.clone(), poisoned(5, 1, 32, dtype=dtype)
        outs.append(hidden_capture(whole, stream, weight, EPS, capture=capture, backend=backend))
        captures.append(capture)
        assert_same_bits(capture[:, 0], stream)
        renormed = hidden_capture(None, capture[:, 0].clone(), weight, EPS, backend=backend)
        assert_same_bits(renormed, outs[-1])
    for other in captures[1:]:
        assert_same_bits(other, captures[0])
    alone = poisoned(5, 1, 32, dtype=dtype)
    hidden_capture(parts[0], residual.clone(), weight, EPS, capture=alone, backend=backend)
    assert not torch.equal(alone, captures[0])


@pytest.mark.parametrize("slot", [-1, 3, 61, 2**40, -(2**63)])
def test_case_24_a_slot_that_is_not_there_is_an_error(backend, dtype, slot):
    """An id that matches no slot captures nothing only if nobody looks: it is refused instead."""
    x, residual, weight = make(4, 24, dtype)
    before, capture = residual.clone(), poisoned(4, 3, 24, dtype=dtype)
    with pytest.raises(ValueError, match=r"hidden_capture: slot: expected 0 <= slot < 3, got"):
        hidden_capture(x, residual, weight, EPS, capture=capture, slot=slot, backend=backend)
    if _library.has_kernel("hidden_capture", "cpu"):
        with pytest.raises(RuntimeError, match=r"slot: expected 0 <= slot < 3, got"):
            OP(x, residual, weight, EPS, torch.empty_like(x), capture, slot)
    assert_same_bits(residual, before)
    assert capture.isnan().all()


def test_case_24_the_final_residual_has_a_slot_as_any_other(backend, dtype):
    """h[num_layers] is captured by the final norm, in the slot after those of the layers."""
    num_layers = 3
    _, residual, weight = make(4, 24, dtype)
    capture = poisoned(4, num_layers + 1, 24, dtype=dtype)
    streams = []
    for layer in range(num_layers + 1):
        x = make(4, 24, dtype, seed=layer + 1)[0] if layer else None
        hidden_capture(x, residual, weight, EPS, capture=capture, slot=layer, backend=backend)
        streams.append(residual.clone())
    for layer, stream in enumerate(streams):
        assert_same_bits(capture[:, layer], stream)


def test_case_25_a_row_for_every_token(backend, dtype):
    """Every row of the step is captured, not the last one alone; rows beyond it stay untouched."""
    for num_rows in (0, 1, 4, 7):
        x, residual, weight = make(num_rows, 24, dtype)
        capture = poisoned(8, 2, 24, dtype=dtype)
        hidden_capture(x, residual, weight, EPS, capture=capture, slot=1, backend=backend)
        assert_same_bits(capture[:num_rows, 1], residual)
        assert capture[num_rows:].isnan().all() and capture[:, 0].isnan().all()


def refused(argument, x, residual, weight, raw=True, out=None, capture=None):
    """The api raises ValueError and the op itself RuntimeError, both before anything is written."""
    before = residual.clone() if isinstance(residual, torch.Tensor) else None
    pattern = rf"spec_kernels::hidden_capture: {argument}: expected"
    for backend in (None, "reference"):
        with pytest.raises(ValueError, match=pattern):
            hidden_capture(x, residual, weight, EPS, out=out, capture=capture, backend=backend)
    if raw and _library.has_kernel("hidden_capture", "cpu"):
        out = torch.empty(residual.shape, dtype=residual.dtype) if out is None else out
        with pytest.raises(RuntimeError, match=pattern):
            OP(x, residual, weight, EPS, out, capture, 0)
    if before is not None:
        assert_same_bits(residual, before)


def test_bad_shapes():
    x, residual, weight = make(4, 24)
    refused("residual", x, residual[0], weight)
    refused("residual", x, residual[None], weight)
    refused("x", x[:3], residual, weight)
    refused("x", x[:, :23], residual, weight)
    refused("weight", x, residual, weight[:23])
    refused("weight", x, residual, weight[None])
    refused("out", x, residual, weight, out=torch.empty(4, 23))
    refused("capture", x, residual, weight, capture=torch.empty(4, 24))
    refused("capture", x, residual, weight, capture=torch.empty(3, 2, 24))
    refused("capture", x, residual, weight, capture=torch.empty(4, 2, 25))
    refused("slot", x, residual, weight, capture=torch.empty(4, 0, 24))


def test_bad_dtypes():
    x, residual, weight = make(4, 24)
    refused("residual", x, residual.half(), weight)
    refused("residual", x, residual.long(), weight)
    refused("x", x.bfloat16(), residual, weight)
    refused("weight", x, residual, weight.bfloat16())
    refused("out", x, residual, weight, out=torch.empty(4, 24, dtype=torch.bfloat16))
    refused("capture", x, residual, weight, capture=torch.empty(4, 1, 24, dtype=torch.float64))
    refused("residual", x, [1.0], weight, raw=False)
    refused("x", 1.0, residual, weight, raw=False)


def test_bad_strides_and_devices():
    x, residual, weight = make(4, 24)
    refused("residual", x, residual.t().contiguous().t(), weight)
    refused("x", x.t().contiguous().t(), residual, weight)
    refused("weight", x, residual, torch.stack([weight, weight], 1)[:, 0])
    refused("out", x, residual, weight, out=torch.empty(24, 4).t())
    refused("capture", x, residual, weight, capture=torch.empty(4, 24, 2).mT)
    refused("weight", x, residual, weight.to("meta"), raw=False)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend"):
        hidden_capture(*make(4, 24), EPS, backend="tpu")


def test_opcheck(dtype):
    x, residual, weight = make(4, 24, dtype)
    out = torch.empty_like(x)
    torch.library.opcheck(
        OP, (x, residual, weight, EPS, out, torch.empty(4, 2, 24, dtype=dtype), 1)
    )
    torch.library.opcheck(OP, (None, residual, weight, EPS, out, None, 0))


def test_compiles_without_a_break(dtype):
    x, residual, weight = make(4, 24, dtype)

    def block(x, residual, capture):
        y = hidden_capture(x * 2, residual, weight, EPS, capture=capture, slot=1)
        return y + 1

    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        stream, capture = residual.clone(), torch.zeros(4, 2, 24, dtype=dtype)
        results.append((function(x, stream, capture), stream, capture))
    for eager, compiled in zip(*results, strict=True):
        assert_same_bits(eager, compiled)


def test_outputs_stand_apart(backend):
    x, residual, weight = make(6, 37)
    capture = torch.zeros(6, 2, 37)
    with pytest.raises(ValueError, match="out: expected memory apart from capture"):
        hidden_capture(
            x, residual, weight, EPS, out=capture[:, 0], capture=capture, backend=backend
        )
    with pytest.raises(ValueError, match="residual: expected memory apart from weight"):
        hidden_capture(None, residual, residual[0], EPS, backend=backend)


def test_views_that_interleave_are_apart(backend):
    x, residual, weight = make(6, 37)
    both = torch.cat((x, residual, torch.zeros(6, 37)), 1)
    views = both[:, :37], both[:, 37:74], both[:, 74:]
    expected = hidden_capture(x, residual, weight, EPS, backend=backend)
    hidden_capture(views[0], views[1], weight, EPS, out=views[2], backend=backend)
    assert_same_bits(views[1], residual)
    assert_same_bits(views[2], expected)
    assert_same_bits(views[0], x)


def test_rows_longer_than_triton_keeps(dtype):
    """Their end is no multiple of a part; out may still be x, and x the residual."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process")
    check_accuracy("triton", dtype, [(3, 16385), (2, 20000)])
    x, residual, weight = make(2, 20000, dtype)
    want = hidden_capture(x, residual.clone(), weight, EPS, backend="triton")
    assert hidden_capture(x, residual, weight, EPS, out=x, backend="triton") is x
    assert_same_bits(x, want)
    twice = residual.clone()
    hidden_capture(twice, twice, weight, EPS, backend="triton")
    assert_same_bits(twice, residual + residual)


def test_triton_wants_tensors_that_have_values():
    pytest.importorskip("triton")
    x, residual, weight = (t.to("meta") for t in make(2, 8))
    with pytest.raises(ValueError, match="backend: expected tensors on cuda .*, got meta"):
        hidden_capture(x, residual, weight, EPS, backend="triton")


def build(element, hidden, has_x, arch):
    """Registers and so on of one build; for a process that has not chosen the interpreter."""
    kernels = importlib.import_module("spec_kernels.ops.hidden_capture.triton")
    kernel, sizes = kernels.hidden_capture_kernel, kernels.block_sizes(hidden)
    constants = sizes | {"HAS_X": has_x, "HAS_CAPTURE": True}
    types = {n: f"*{element}" for n in ("x", "residual", "weight", "out", "capture")}
    divisible = [*types, *(n for n in kernel.arg_names if n.startswith("stride_"))]
    types |= {"eps": "fp32"}
    types |= {n: "i32" for n in kernel.arg_names if n not in types and n not in constants}
    compile_kernel = importlib.import_module("triton_budgets").compile_kernel
    warps = kernels.num_warps(sizes["BLOCK"])
    return compile_kernel(
        kernel, types, constants, divisible, arch, warps, 3, enable_fp_fusion=False
    )


def test_triton_builds_within_its_budget():
    pytest.importorskip("triton")
    here = Path(__file__).resolve().parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, here.parent, here)))}
    env.pop("TRITON_INTERPRET", None)
    code = (
        "import json, test_hidden_capture as t\n"
        "kinds = [(e, h, x, a) for a in (80, 90, 120) for e, h, x in (('bf16', 7168, True), "
        "('fp32', 16384, True), ('bf16', 192, False), ('bf16', 18432, True))]\n"
        "print(json.dumps([[*k, t.build(*k)] for k in kinds]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 12
    for *kind, usage in found:
        assert usage["spills"] == 0, (kind, usage)
        assert usage["registers"] <= 128 and usage["shared"] <= 1024, (kind, usage)
