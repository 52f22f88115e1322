"""moe_experts over packed INT4 experts: the format, then what is asked of any weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_moe_experts import ISAS, OP, mlp, oracle, plain, refused

from spec_kernels import _library
from spec_kernels.ops import moe_experts
from spec_kernels.ops.moe_experts import dequantize_int4
from spec_kernels.testing import graph_safe
from spec_kernels.testing.compare import assert_as_accurate, assert_same_bits, poisoned
from spec_kernels.testing.int4 import pack_int4, quantize_int4, random_int4

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ("w_gate_up", "w_down")

# T, H, I, Is, E, top_k and the groups of both matrices: one rank of 8, then other widths of shared
# expert, many rows an expert, groups of other sizes and of a whole row.
SHAPES = [
    (1, 64, 32, 12, 4, 2, 32, 32),
    (5, 96, 64, 40, 5, 5, 32, 32),
    (40, 160, 32, 7, 2, 1, 32, 32),
    (9, 192, 96, 33, 6, 3, 96, 96),
    (3, 64, 128, 5, 3, 2, 64, 128),
    (4, 7168, 32, 16, 3, 2, 32, 32),
    (13, 2176, 64, 8, 2, 2, 2176, 32),
]


def make(num_rows, hidden, inner, shared, num_experts, dtype, groups=(32, 32), seed=0):
    g = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return (torch.randn(*shape, generator=g) / max(1, shape[-1]) ** 0.5).to(dtype)

    gate_up, down = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    a = {
        "x": torch.randn(num_rows, hidden, generator=g).to(dtype),
        "router_weight": weight(num_experts, hidden),
        "correction_bias": torch.randn(num_experts, generator=g) * 0.2,
        "shared_gate_up": weight(2 * shared, hidden),
        "shared_down": weight(hidden, shared),
    }
    a["w_gate_up"], a["w_gate_up_scale"] = random_int4(*gate_up, group=groups[0], generator=g)
    a["w_down"], a["w_down_scale"] = random_int4(*down, group=groups[1], generator=g)
    return a


def unpacked(a, dtype):
    """The same call with dequantised weights."""
    b = {k: v for k, v in a.items() if not k.endswith("scale")}
    return b | {name: dequantize_int4(a[name], a[f"{name}_scale"]).to(dtype) for name in WEIGHTS}


def unpacked_call(*sizes):
    return unpacked(make(*sizes), sizes[-1])


def check_accuracy(backend, dtype, shapes):
    for num_rows, hidden, inner, shared, num_experts, top_k, *groups in shapes:
        a = make(num_rows, hidden, inner, shared, num_experts, dtype, groups)
        out = poisoned(num_rows, hidden, dtype=dtype)
        moe_experts(**a, top_k=top_k, out=out, backend=backend)
        exact = oracle(unpacked(a, torch.float64), top_k)
        assert_as_accurate(out, exact, plain(unpacked(a, dtype), top_k))


def check_rows(backend, dtype):
    """A row alone, in a batch, in another order, across a pass boundary: the same bits."""
    sizes = ((64, 96, 32, 12, 8), (7, 2112, 64, 3, 3))
    if backend in ("reference", "cpu"):
        sizes += ((300, 64, 32, 5, 4),)
    for shape in sizes:
        a = make(*shape, dtype)
        x = a.pop("x")
        whole = moe_experts(x, **a, top_k=3, backend=backend)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
        assert_same_bits(moe_experts(x[order], **a, top_k=3, backend=backend), whole[order])
        for t in range(0, len(x), 9):
            alone = moe_experts(x[t : t + 1], **a, top_k=3, backend=backend)
            assert_same_bits(alone, whole[t : t + 1])


def one_expert(up, up_scale, down, down_scale):
    """One expert of weight one, whose gates are 1 wherever ``x`` is a unit vector."""
    inner, hidden = up.shape[0], down.shape[0]
    gate = torch.ones(inner, hidden, dtype=torch.int64)
    gate_scale = torch.ones(inner, up_scale.shape[1], dtype=torch.bfloat16)
    return {
        "router_weight": torch.zeros(1, hidden),
        "w_gate_up": pack_int4(torch.cat((gate, up)))[None],
        "w_down": pack_int4(down)[None],
        "w_gate_up_scale": torch.cat((gate_scale, up_scale))[None],
        "w_down_scale": down_scale[None],
        "top_k": 1,
    }


def distinct_scales(rows, columns):
    """A power of two for every group, so that products with them are exact."""
    powers = torch.arange(rows * columns).view(rows, columns) % 13 - 6
    return (2.0**powers).to(torch.bfloat16)


@pytest.mark.parametrize("group", [32, 64])
def test_case_42_offset_binary(backend, group):
    """Every place of a word and every value, through both matrices, with a scale for each group."""
    size = 64
    values = (torch.arange(size)[:, None] * 7 + torch.arange(size)) % 16 - 8
    assert values.unique().tolist() == list(range(-8, 8))
    scales = distinct_scales(size, size // group)
    weights = values * scales.float().repeat_interleave(group, 1)
    eye, ones = torch.eye(size, dtype=torch.int64), torch.ones_like(scales)
    silu = F.silu(torch.ones(()))
    for a in (one_expert(values, scales, eye, ones), one_expert(eye, ones, values, scales)):
        got = moe_experts(torch.eye(size), **a, backend=backend)
        torch.testing.assert_close(got, silu * weights.t(), rtol=1e-6, atol=0.0)


def test_case_42_golden_words():
    """Published layout: element j at bits 4 (j % 8) of word j // 8, the stored nibble less 8."""
    # 0x76543210 holds 0..7 from the lowest bits on, 0xFEDCBA98 8..15.
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - 2**32] * 2], dtype=torch.int32)
    scale = torch.tensor([[0.5]], dtype=torch.bfloat16)
    want = torch.arange(-8, 8).repeat(2)[None] * 0.5
    assert torch.equal(dequantize_int4(words, scale), want)
    assert torch.equal(pack_int4(want * 2), words)


def test_quantised_weights_are_near():
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    got = dequantize_int4(*quantize_int4(weight))
    largest = weight.abs().unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, 1)
    assert ((got - weight).abs() <= largest * 0.51 / 7).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(backend, dtype, shape):
    check_accuracy(backend, dtype, [shape])


def test_rows_do_not_depend_on_each_other(backend, dtype):
    check_rows(backend, dtype)


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "avx512_bf16"])
def test_every_instruction_set(isa):
    if not _library.LIBRARIES["cpu"].loaded:
        pytest.skip(f"_C_cpu: {_library.LIBRARIES['cpu'].reason}")
    base = isa.removesuffix("_bf16")
    if ISAS.index(base) > ISAS.index(_library.cpu_isa()):
        pytest.skip(f"this CPU, or SPEC_KERNELS_CPU_ISA, has no {base}")
    code = (
        "import torch, test_moe_experts_int4 as t\n"
        "torch.set_num_threads(1)\n"
        "for d in torch.float32, torch.bfloat16:\n"
        "    t.check_accuracy('cpu', d, t.SHAPES[1:6])\n"
        "    t.check_rows('cpu', d)\n"
        "t.test_case_42_offset_binary('cpu', 32)"
    )
    env = os.environ | {
        "SPEC_KERNELS_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_do_not_change_bits(dtype):
    if not _library.LIBRARIES["cpu"].loaded:
        pytest.skip(f"_C_cpu: {_library.LIBRARIES['cpu'].reason}")
    a = make(9, 512, 96, 64, 8, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(moe_experts(**a, top_k=3, backend="cpu"))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_case_45_shared_expert_of_another_width(backend, dtype):
    """It stays in the dtype of x, beside experts of another width, and is added unscaled."""
    a = make(6, 96, 32, 45, 4, dtype)
    got = moe_experts(**a, top_k=2, routed_scaling=2.5, backend=backend)
    b = unpacked(a, dtype)
    exact = oracle(unpacked(a, torch.float64), 2, scaling=2.5)
    assert_as_accurate(got, exact, plain(b, 2, scaling=2.5))
    a |= {"router_weight": a["router_weight"][:0], "correction_bias": None}
    a |= {name: v[:0] for name, v in a.items() if name.startswith("w_")}
    alone = moe_experts(**a, top_k=0, backend=backend)
    exact = mlp(*(b[n].double() for n in ("x", "shared_gate_up", "shared_down")))
    assert_as_accurate(alone, exact, mlp(b["x"], b["shared_gate_up"], b["shared_down"]))


def test_case_45_a_packed_shared_expert_is_refused():
    a = make(3, 64, 32, 32, 4, torch.float32)
    packed, _ = quantize_int4(a["shared_down"])
    refused(a | {"shared_down": packed}, "shared_down")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_sum_to_the_whole(backend, num_ranks):
    """Rows of gate and up, columns of down: views of words and scales, cut at groups."""
    a = make(9, 64, 128, 16, 6, torch.float32)
    exact = oracle(unpacked(a, torch.float64), 2)
    total = torch.zeros(9, 64, dtype=torch.float64)
    for rank in range(num_ranks):
        part = dict(a)

        def share(size, rank=rank):
            return slice(rank * size // num_ranks, (rank + 1) * size // num_ranks)

        for name in ("w_gate_up", "w_gate_up_scale", "shared_gate_up"):
            halves = a[name].unflatten(-2, (2, -1))
            part[name] = halves[..., share(halves.shape[-2]), :].flatten(-3, -2)
        for name in ("w_down", "w_down_scale", "shared_down"):
            part[name] = a[name][..., share(a[name].shape[-1])]
        total += moe_experts(**part, top_k=2, backend=backend).double()
    error = (total - exact).abs().max()
    assert error <= num_ranks * torch.finfo(torch.float32).eps * exact.abs().max()


def test_strided_operands(backend, dtype):
    """Gaps between rows are poison; they are neither read nor written."""
    a = make(5, 64, 64, 6, 8, dtype)
    want = moe_experts(**a, top_k=3, backend=backend)

    def spread(t):
        if t.dim() == 1:
            return t
        wide = poisoned(*t.shape[:-2], t.shape[-2] + 2, t.shape[-1] + 3, dtype=t.dtype)
        wide = wide[..., 1:-1, 2:-1]
        return wide.copy_(t)

    base = poisoned(9, 67, dtype=dtype)
    out = base[2:7, 1:65]
    moe_experts(**{k: spread(v) for k, v in a.items()}, top_k=3, out=out, backend=backend)
    assert_same_bits(out, want)
    out.fill_(float("nan"))
    assert base.isnan().all()


def test_every_second_expert(backend, dtype):
    a = make(5, 64, 32, 6, 8, dtype)
    b = dict(a, **{k: a[k][::2] for k in a if k.startswith("w_") or k == "router_weight"})
    b["correction_bias"] = a["correction_bias"][:4]
    c = {k: v.contiguous() for k, v in b.items()}
    assert_same_bits(
        moe_experts(**b, top_k=2, backend=backend), moe_experts(**c, top_k=2, backend=backend)
    )


def test_experts_that_nobody_chose_are_not_read(backend, dtype):
    """A scale of NaN would show in the sum."""
    a = make(4, 64, 32, 6, 8, dtype)
    a["router_weight"] = torch.zeros_like(a["router_weight"])
    a["correction_bias"] = torch.zeros(8)
    for name in ("w_gate_up_scale", "w_down_scale"):
        a[name][3:] = float("nan")
    assert not moe_experts(**a, top_k=3, backend=backend).isnan().any()


def test_out_may_be_x(backend, dtype):
    a = make(7, 64, 32, 6, 8, dtype)
    want = moe_experts(**a, top_k=2, backend=backend)
    moe_experts(**a, top_k=2, out=a["x"], backend=backend)
    assert_same_bits(a["x"], want)


def test_bad_arguments():
    a = make(3, 64, 64, 4, 4, torch.float32)
    bf16 = torch.bfloat16
    refused(a | {"w_down_scale": None}, "w_down_scale")
    refused(a | {"w_gate_up_scale": None}, "w_down_scale")
    for name in WEIGHTS:
        refused(a | {name: a[name].float()}, name)
        refused(a | {name: a[name][..., :-1]}, "w_gate_up")
        refused(a | {name: a[name][:, :-1]}, name)
        scale = f"{name}_scale"
        for wrong in (
            a[scale].float(),
            a[scale][:3],
            a[scale][:, :-1],
            a[scale][..., :1].expand(-1, -1, 3),
            a[scale][..., :1].repeat(1, 1, 4),  # groups of 16
            a[scale][..., :0],
            a[scale].mT.contiguous().mT,
            a[scale][0],
        ):
            refused(a | {scale: wrong}, scale)
    unscaled = {"w_gate_up_scale": None, "w_down_scale": None}
    refused(a | unscaled, "w_down")
    refused(unpacked(a, torch.float32) | {n: a[n] for n in unscaled}, "w_down")
    narrow = make(3, 64, 32, 4, 4, torch.float32)
    narrow["x"] = torch.zeros(3, 40)
    narrow["router_weight"] = torch.zeros(4, 40)
    refused(narrow, "x")
    refused(a, "out", out=a["w_down_scale"].view(-1)[: 3 * 64].view(3, 64).to(bf16))


def test_out_stands_apart(backend):
    a = make(2, 32, 32, 4, 4, torch.bfloat16)
    for name in ("w_gate_up_scale", "w_down_scale"):
        out = torch.as_strided(a[name], (2, 32), (32, 1))
        with pytest.raises(ValueError, match=f"out: expected memory apart from {name}"):
            moe_experts(**a, top_k=2, out=out, backend=backend)


@pytest.mark.parametrize("kind", [make, unpacked_call], ids=["int4", "full"])
def test_a_graph_may_hold_it(backend, dtype, kind):
    """Values that choose other experts in every run; for Triton's launcher, see its own suite."""
    a = kind(9, 64, 32, 12, 6, dtype)
    out = torch.empty_like(a["x"])

    def fill(run):
        g = torch.Generator().manual_seed(run)
        for t in a.values():
            if t.dtype.is_floating_point:
                t.copy_(torch.randn(t.shape, generator=g))

    graph_safe.check(
        lambda: moe_experts(**a, top_k=2, out=out, backend=backend), (a, out), fill=fill
    )


def raw_arguments(a, out, top_k=2):
    names = ("x", "router_weight", "correction_bias", *WEIGHTS, *(f"{n}_scale" for n in WEIGHTS))
    tensors = [a[n] for n in (*names, "shared_gate_up", "shared_down")]
    return (*tensors, top_k, 1, 1, 2.5, True, out)


def test_opcheck(dtype):
    a = make(3, 64, 32, 4, 4, dtype)
    torch.library.opcheck(OP, raw_arguments(a, torch.empty(3, 64, dtype=dtype)))


def test_compiles_without_a_break(dtype):
    a = make(3, 64, 32, 4, 4, dtype)

    def model(x):
        rest = {k: v for k, v in a.items() if k != "x"}
        return moe_experts(x * 2, **rest, top_k=2) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(a["x"]), model(a["x"]))
