import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spec_kernels import _library
from spec_kernels.ops import moe_experts
from spec_kernels.ops.moe_experts import router_topk
from spec_kernels.testing.compare import assert_as_accurate, assert_same_bits, poisoned

OP = torch.ops.spec_kernels.moe_experts.default
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("x", "router_weight", "correction_bias", "w_gate_up", "w_down")

# T, H, I, Is, E, top_k: the bundled model whole and as one of 8 ranks, then tails of every tile.
SHAPES = [
    (1, 192, 12, 12, 16, 4),
    (16, 192, 96, 96, 16, 4),
    (0, 32, 8, 8, 4, 2),
    (3, 7, 1, 1, 1, 1),
    (5, 33, 13, 40, 5, 5),
    (64, 31, 17, 9, 3, 2),
    (37, 130, 70, 33, 12, 3),
    (2, 7168, 40, 16, 6, 2),
    (20, 2051, 33, 35, 2, 1),
]


def make(num_rows, hidden, inner, shared, num_experts, dtype=torch.float32, seed=0):
    """Arguments whose outputs are of the order of one."""
    g = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return (torch.randn(*shape, generator=g) / max(1, shape[-1]) ** 0.5).to(dtype)

    return {
        "x": torch.randn(num_rows, hidden, generator=g).to(dtype),
        "router_weight": weight(num_experts, hidden),
        "w_gate_up": weight(num_experts, 2 * inner, hidden),
        "w_down": weight(num_experts, hidden, inner),
        "correction_bias": torch.randn(num_experts, generator=g) * 0.2,
        "shared_gate_up": weight(2 * shared, hidden),
        "shared_down": weight(hidden, shared),
    }


def mlp(x, gate_up, down):
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def choose(scores, bias, top_k, n_group=1, topk_group=1):
    """The router's rule in plain Python, on one row of scores: ids, best first."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(biased) // n_group
    groups = [range(g * size, (g + 1) * size) for g in range(n_group)]

    def worth(group):
        return sum(sorted((biased[e] for e in group), reverse=True)[:2])

    best = sorted(range(n_group), key=lambda g: (-worth(groups[g]), g))[:topk_group]
    allowed = sorted(e for g in best for e in groups[g])
    return sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]


def oracle(a, top_k, n_group=1, topk_group=1, scaling=1.0, normalize=True):
    """float64, row by row, from the definition."""
    a = {k: None if v is None else v.double() for k, v in a.items()}
    out = torch.zeros_like(a["x"])
    bias = a["correction_bias"]
    for t, x in enumerate(a["x"]):
        scores = torch.sigmoid(a["router_weight"] @ x).tolist()
        zeros = [0.0] * len(scores)
        ids = choose(scores, zeros if bias is None else bias.tolist(), top_k, n_group, topk_group)
        total = sum(scores[e] for e in ids) + 1e-20 if normalize else 1.0
        for e in ids:
            out[t] += scores[e] / total * scaling * mlp(x, a["w_gate_up"][e], a["w_down"][e])
        if a["shared_down"] is not None:
            out[t] += mlp(x, a["shared_gate_up"], a["shared_down"])
    return out


def plain(a, top_k, n_group=1, topk_group=1, scaling=1.0, normalize=True):
    """The obvious PyTorch expression in the dtype of ``x``."""
    x = a["x"]
    ids, weights = router_topk(
        x, a["router_weight"], a["correction_bias"], top_k, n_group, topk_group, scaling, normalize
    )
    out = torch.zeros_like(x) if a["shared_down"] is None else 0
    if a["shared_down"] is not None:
        out = mlp(x, a["shared_gate_up"], a["shared_down"])
    for e in ids.unique().tolist():
        rows, slots = torch.where(ids == e)
        y = mlp(x[rows], a["w_gate_up"][e], a["w_down"][e])
        out.index_add_(0, rows, y * weights[rows, slots, None].to(y.dtype))
    return out


def check_accuracy(backend, dtype, shapes):
    for num_rows, hidden, inner, shared, num_experts, top_k in shapes:
        a = make(num_rows, hidden, inner, shared, num_experts, dtype)
        out = poisoned(num_rows, hidden, dtype=dtype)
        got = moe_experts(**a, top_k=top_k, out=out, backend=backend)
        assert got is out
        assert_as_accurate(got, oracle(a, top_k), plain(a, top_k))


def check_rows(backend, dtype):
    """A row alone, in a batch, in another order, across a pass boundary: the same bits."""
    for shape, top_k in (
        ((64, 96, 20, 12, 8), 3),
        ((300, 33, 9, 5, 4), 2),
        ((7, 2100, 33, 3, 3), 2),
    ):
        a = make(*shape, dtype)
        x = a.pop("x")
        whole = moe_experts(x, **a, top_k=top_k, backend=backend)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
        shuffled = moe_experts(x[order], **a, top_k=top_k, backend=backend)
        assert_same_bits(shuffled, whole[order])
        for t in range(0, len(x), 9):
            alone = moe_experts(x[t : t + 1], **a, top_k=top_k, backend=backend)
            assert_same_bits(alone, whole[t : t + 1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(backend, dtype, shape):
    check_accuracy(backend, dtype, [shape])


def test_rows_do_not_depend_on_each_other(backend, dtype):
    check_rows(backend, dtype)


ISAS = ["none", "plain", "avx2", "avx512"]


@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "avx512_bf16"])
def test_every_instruction_set(isa):
    if not _library.LIBRARIES["cpu"].loaded:
        pytest.skip(f"_C_cpu: {_library.LIBRARIES['cpu'].reason}")
    base = isa.removesuffix("_bf16")
    if ISAS.index(base) > ISAS.index(_library.cpu_isa()):
        pytest.skip(f"this CPU, or SPEC_KERNELS_CPU_ISA, has no {base}")
    code = (
        "import torch, test_moe_experts as t\n"
        f"assert t._library.cpu_isa() == {base!r}\n"
        "torch.set_num_threads(1)\n"
        "for d in torch.float32, torch.bfloat16:\n"
        "    t.check_accuracy('cpu', d, t.SHAPES[::2])\n"
        "    t.check_rows('cpu', d)"
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
    a = make(9, 512, 100, 64, 8, dtype)
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


@pytest.mark.parametrize("n_group, topk_group", [(4, 2), (4, 1), (8, 8), (16, 5), (2, 1)])
def test_groups(backend, dtype, n_group, topk_group):
    a = make(12, 48, 10, 6, 16, dtype)
    options = {"n_group": n_group, "topk_group": topk_group}
    got = moe_experts(**a, top_k=4, **options, backend=backend)
    assert_as_accurate(got, oracle(a, 4, **options), plain(a, 4, **options))


@pytest.mark.parametrize("normalize", [True, False])
def test_scaling_and_normalization(backend, dtype, normalize):
    a = make(6, 40, 10, 6, 8, dtype)
    got = moe_experts(**a, top_k=3, routed_scaling=2.827, normalize=normalize, backend=backend)
    options = {"scaling": 2.827, "normalize": normalize}
    assert_as_accurate(got, oracle(a, 3, **options), plain(a, 3, **options))


def test_router_weight_in_float32(backend):
    a = make(6, 40, 10, 6, 8, torch.bfloat16)
    a["router_weight"] = torch.randn(8, 40, generator=torch.Generator().manual_seed(3))
    got = moe_experts(**a, top_k=3, backend=backend)
    assert_as_accurate(got, oracle(a, 3), plain(a, 3))


def test_without_bias_and_shared_expert(backend, dtype):
    a = make(6, 40, 10, 6, 8, dtype)
    a |= {"correction_bias": None, "shared_gate_up": None, "shared_down": None}
    got = moe_experts(**a, top_k=3, backend=backend)
    assert_as_accurate(got, oracle(a, 3), plain(a, 3))


@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (4, 2)])
def test_against_transformers(backend, n_group, topk_group):
    modeling = pytest.importorskip(
        "transformers.models.deepseek_v3.modeling_deepseek_v3",
        reason="transformers is not installed: no DeepseekV3MoE to compare with",
    )
    config = modeling.DeepseekV3Config(
        hidden_size=48,
        moe_intermediate_size=20,
        n_routed_experts=16,
        num_local_experts=16,
        num_experts_per_tok=4,
        n_group=n_group,
        topk_group=topk_group,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    )
    block = modeling.DeepseekV3MoE(config)
    g = torch.Generator().manual_seed(0)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.15, generator=g)
    block.gate.e_score_correction_bias.normal_(std=0.2, generator=g)
    w = block.state_dict()
    x = torch.randn(23, 48, generator=g)
    with torch.no_grad():
        want = block(x[None])[0]
    shared = [w[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
    got = moe_experts(
        x,
        w["gate.weight"],
        w["experts.gate_up_proj"],
        w["experts.down_proj"],
        top_k=4,
        correction_bias=w["gate.e_score_correction_bias"],
        shared_gate_up=torch.cat(shared[:2]),
        shared_down=shared[2],
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling=2.5,
        backend=backend,
    )
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_sum_to_the_whole(backend, dtype, num_ranks):
    """Each rank passes views of its part of the intermediate dimension."""
    a = make(9, 64, 24, 16, 6, dtype)
    total = torch.zeros(9, 64, dtype=torch.float64)
    for rank in range(num_ranks):
        part = dict(a)
        for up, down in (("w_gate_up", "w_down"), ("shared_gate_up", "shared_down")):
            inner = a[down].shape[-1]
            mine = slice(rank * inner // num_ranks, (rank + 1) * inner // num_ranks)
            halves = a[up].unflatten(-2, (2, inner))[..., mine, :]
            part[up] = halves.flatten(-3, -2)
            part[down] = a[down][..., mine]
        total += moe_experts(**part, top_k=2, backend=backend).double()
    exact = oracle(a, 2)
    error = (total - exact).abs().max()
    # Every rank rounds its own sum once.
    bound = num_ranks * torch.finfo(dtype).eps * exact.abs().max()
    assert error <= bound, (error, bound)


def test_strided_operands(backend, dtype):
    """Gaps between rows hold NaN; they are neither read nor written."""
    a = make(5, 40, 10, 6, 8, dtype)
    want = moe_experts(**a, top_k=3, backend=backend)

    def spread(t):
        if t.dim() == 1:
            wide = poisoned(2 * len(t), dtype=t.dtype)[::2]
        else:
            wide = poisoned(*t.shape[:-2], t.shape[-2] + 2, t.shape[-1] + 3, dtype=t.dtype)
            wide = wide[..., 1:-1, 2:-1]
        wide.copy_(t)
        return wide

    base = poisoned(9, 43, dtype=dtype)
    out = base[2:7, 1:41]
    b = {k: v if k == "correction_bias" else spread(v) for k, v in a.items()}
    moe_experts(**b, top_k=3, out=out, backend=backend)
    assert_same_bits(out, want)
    out.fill_(float("nan"))
    assert base.isnan().all()


def test_every_second_expert(backend, dtype):
    """Experts may be a strided view too."""
    a = make(5, 40, 10, 6, 8, dtype)
    b = dict(a, **{k: a[k][::2] for k in ("router_weight", "w_gate_up", "w_down")})
    b["correction_bias"] = a["correction_bias"][:4]
    c = {k: v.contiguous() for k, v in b.items()}
    assert_same_bits(
        moe_experts(**b, top_k=2, backend=backend), moe_experts(**c, top_k=2, backend=backend)
    )


def test_out_may_be_x(backend, dtype):
    a = make(270 if backend == "cpu" else 7, 40, 10, 6, 8, dtype)
    want = moe_experts(**a, top_k=2, backend=backend)
    moe_experts(**a, top_k=2, out=a["x"], backend=backend)
    assert_same_bits(a["x"], want)


def test_dense_layer(backend, dtype):
    """No routed expert: the shared expert alone."""
    a = make(6, 40, 0, 30, 0, dtype)
    got = moe_experts(**a, top_k=0, backend=backend)
    assert_as_accurate(got, oracle(a, 0), mlp(a["x"], a["shared_gate_up"], a["shared_down"]))
    a |= {"shared_gate_up": None, "shared_down": None}
    assert_same_bits(moe_experts(**a, top_k=0, backend=backend), torch.zeros(6, 40, dtype=dtype))


def test_top_k_zero_leaves_the_experts_out(backend, dtype):
    a = make(6, 40, 10, 30, 4, dtype)
    a["w_down"] = torch.full_like(a["w_down"], float("nan"))
    got = moe_experts(**a, top_k=0, backend=backend)
    assert_as_accurate(got, oracle(a, 0), mlp(a["x"], a["shared_gate_up"], a["shared_down"]))


def test_unchosen_experts_are_not_read(backend, dtype):
    a = make(4, 40, 10, 6, 8, dtype)
    a["correction_bias"] = torch.tensor([0.0, 9, 0, 0, 9, 0, 9, 0])
    want = moe_experts(**a, top_k=3, backend=backend)
    for name in ("w_gate_up", "w_down"):
        a[name][[0, 2, 3, 5, 7]] = float("nan")
    assert_same_bits(moe_experts(**a, top_k=3, backend=backend), want)
    assert not want.isnan().any()


def test_bias_chooses_and_does_not_weigh(backend, dtype):
    a = make(4, 40, 10, 6, 8, dtype)
    a["correction_bias"] = torch.tensor([5.0, 5, 0, 0, 0, 0, 0, 0])
    b = {k: v[:2] if k.startswith(("router", "w_")) else v for k, v in a.items()}
    b["correction_bias"] = None
    # Chosen by bias or as the only two there are: the same weights. The order of choice may differ.
    got = moe_experts(**a, top_k=2, backend=backend)
    want = moe_experts(**b, top_k=2, backend=backend)
    torch.testing.assert_close(got, want, rtol=0, atol=torch.finfo(dtype).eps * want.abs().max())


@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (4, 2)])
def test_ties_go_to_the_lower_id(backend, dtype, n_group, topk_group):
    a = make(3, 40, 10, 6, 8, dtype)
    a["router_weight"] = torch.zeros_like(a["router_weight"])
    a["correction_bias"] = torch.zeros(8)
    a["w_down"][3:] = float("nan")
    options = {"n_group": n_group, "topk_group": topk_group}
    got = moe_experts(**a, top_k=3, **options, backend=backend)
    assert not got.isnan().any()
    ids, _ = router_topk(a["x"], a["router_weight"], None, 3, **options)
    assert ids.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_stays_alone(backend, dtype, value):
    a = make(8, 40, 10, 6, 8, dtype)
    want = moe_experts(**a, top_k=3, backend=backend)
    a["x"][[2, 5]] = value
    got = moe_experts(**a, top_k=3, backend=backend)
    sound = [0, 1, 3, 4, 6, 7]
    assert_same_bits(got[sound], want[sound])
    assert got[[2, 5]].isnan().all()


@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (4, 2)])
def test_nan_logits_are_chosen_last(backend, dtype, n_group, topk_group):
    a = make(5, 40, 10, 6, 8, dtype)
    a["router_weight"][[0, 4, 6]] = float("nan")
    a["w_down"][[0, 4, 6]] = float("nan")
    options = {"n_group": n_group, "topk_group": topk_group}
    # Two groups hold at least three experts whose logits are sound.
    got = moe_experts(**a, top_k=2, **options, backend=backend)
    assert not got.isnan().any()
    ids, weights = router_topk(a["x"], a["router_weight"], a["correction_bias"], 4, **options)
    assert ((0 <= ids) & (ids < 8)).all() and weights.isfinite().all()
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_all_logits_nan(backend, dtype):
    """Every id stays in range and every weight is zero, so sound experts add nothing."""
    a = make(5, 40, 10, 6, 8, dtype)
    a["router_weight"][:] = float("nan")
    want = oracle(dict(a, router_weight=a["router_weight"].nan_to_num(0)), 0)
    plainly = mlp(a["x"], a["shared_gate_up"], a["shared_down"])
    for bias in (a["correction_bias"], torch.full((8,), float("nan")), None):
        a["correction_bias"] = bias
        assert_as_accurate(moe_experts(**a, top_k=3, backend=backend), want, plainly)


def test_router_follows_its_definition():
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(20, 12, generator=g), torch.randn(24, 12, generator=g)
    bias = torch.randn(24, generator=g)
    for n_group, topk_group, top_k in ((1, 1, 24), (1, 1, 5), (6, 2, 8), (24, 3, 3), (2, 1, 1)):
        ids, weights = router_topk(x, w, bias, top_k, n_group, topk_group, 1.5)
        scores = (x @ w.t()).sigmoid()
        for t in range(20):
            assert ids[t].tolist() == choose(
                scores[t].tolist(), bias.tolist(), top_k, n_group, topk_group
            )
        torch.testing.assert_close(weights.sum(-1), torch.full((20,), 1.5))


def refused(a, argument, raw=True, **options):
    """The api raises ValueError and the op itself RuntimeError, both before anything is written."""
    options = {"top_k": 2, "n_group": 1, "topk_group": 1, "routed_scaling": 1.0} | options
    out = options.pop("out", None)
    if out is None:
        out = poisoned(*a["x"].shape, dtype=torch.float32)
    before = out.clone()
    for backend in (None, "reference"):
        with pytest.raises(ValueError, match=rf"spec_kernels::moe_experts: {argument}: expected"):
            moe_experts(**a, **options, out=out, backend=backend)
    if raw and _library.has_kernel("moe_experts", "cpu"):
        names = (*NAMES, "w_gate_up_scale", "w_down_scale", "shared_gate_up", "shared_down")
        tensors = [a.get(n) for n in names]
        numbers = [options[n] for n in ("top_k", "n_group", "topk_group", "routed_scaling")]
        with pytest.raises(RuntimeError, match=rf"spec_kernels::moe_experts: {argument}: expected"):
            OP(*tensors, *numbers, True, out)
    assert_same_bits(out, before)


def test_bad_shapes():
    a = make(3, 8, 4, 4, 4)
    refused(a | {"router_weight": torch.zeros(4, 9)}, "router_weight")
    refused(a | {"router_weight": torch.zeros(5, 8)}, "w_down")
    refused(a | {"w_gate_up": torch.zeros(4, 7, 8)}, "w_gate_up")
    refused(a | {"w_gate_up": torch.zeros(3, 8, 8)}, "w_gate_up")
    refused(a | {"w_gate_up": torch.zeros(4, 8, 7)}, "w_gate_up")
    refused(a | {"w_down": torch.zeros(4, 9, 4)}, "w_down")
    refused(a | {"w_down": torch.zeros(8, 4)}, "w_down")
    refused(a | {"shared_gate_up": torch.zeros(7, 8)}, "shared_gate_up")
    refused(a | {"shared_down": torch.zeros(7, 4)}, "shared_down")
    refused(a | {"shared_down": None}, "shared_down")
    refused(a | {"shared_gate_up": None}, "shared_down")
    refused(a | {"correction_bias": torch.zeros(5)}, "correction_bias")
    refused(a, "out", out=poisoned(3, 9, dtype=torch.float32))
    refused(a, "out", out=poisoned(2, 8, dtype=torch.float32))
    with pytest.raises(ValueError, match="x: expected shape"):
        moe_experts(**a | {"x": torch.zeros(3)}, top_k=2)


def test_bad_dtypes():
    a = make(3, 8, 4, 4, 4)
    for name in ("router_weight", "w_gate_up", "w_down", "shared_gate_up", "shared_down"):
        refused(a | {name: a[name].to(torch.bfloat16)}, name)
    refused(a | {"correction_bias": torch.zeros(4, dtype=torch.float64)}, "correction_bias")
    refused(a | {"x": a["x"].double()}, "x")
    refused(a, "out", out=poisoned(3, 8, dtype=torch.bfloat16))
    refused(a | {"x": [1.0]}, "x", raw=False, out=poisoned(3, 8, dtype=torch.float32))


def test_bad_strides_and_devices():
    a = make(3, 8, 4, 4, 4)
    for name in ("x", "router_weight", "w_gate_up", "w_down", "shared_gate_up", "shared_down"):
        refused(a | {name: a[name].mT.contiguous().mT}, name)
    refused(a, "out", out=poisoned(8, 3, dtype=torch.float32).t())
    refused(a | {"w_down": a["w_down"].to("meta")}, "w_down", raw=False)


@pytest.mark.parametrize(
    "argument, options",
    [
        ("top_k", {"top_k": -1}),
        ("top_k", {"top_k": 5}),
        ("top_k", {"top_k": 3, "n_group": 4, "topk_group": 2}),
        ("n_group", {"n_group": 0}),
        ("n_group", {"n_group": 3}),
        ("topk_group", {"topk_group": 0}),
        ("topk_group", {"topk_group": 2}),
        ("routed_scaling", {"routed_scaling": float("nan")}),
        ("routed_scaling", {"routed_scaling": float("inf")}),
    ],
    ids=str,
)
def test_bad_numbers(argument, options):
    refused(make(3, 8, 4, 4, 4), argument, **options)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend"):
        moe_experts(**make(3, 8, 4, 4, 4), top_k=2, backend="tpu")


def test_opcheck(dtype):
    a = make(3, 8, 4, 4, 4, dtype)
    out = torch.empty(3, 8, dtype=dtype)
    tensors = [*(a[n] for n in NAMES), None, None, a["shared_gate_up"], a["shared_down"]]
    torch.library.opcheck(OP, (*tensors, 2, 1, 1, 1.0, True, out))
    none = [a["x"], a["router_weight"], None, a["w_gate_up"], a["w_down"], *[None] * 4]
    torch.library.opcheck(OP, (*none, 2, 2, 1, 2.5, False, out))


def test_compiles_without_a_break(dtype):
    a = make(3, 8, 4, 4, 4, dtype)

    def model(x):
        rest = {k: v for k, v in a.items() if k != "x"}
        return moe_experts(x * 2, **rest, top_k=2) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(a["x"]), model(a["x"]))


@pytest.mark.skipif(not _library.LIBRARIES["cpu"].loaded, reason="the compiled kernel is meant")
def test_endless_experts_are_refused():
    """Views that repeat an element: their scratch would not fit 64 bits."""
    x = torch.ones(16, 1)
    router = torch.ones(1, 1).expand(2**60, 1)
    with pytest.raises(ValueError, match="router_weight: expected at most"):
        moe_experts(
            x,
            router,
            torch.ones(1, 2, 1).expand(2**60, 2, 1),
            torch.ones(1, 1, 1).expand(2**60, 1, 1),
            top_k=1,
        )


def test_out_stands_apart(backend):
    x, router = torch.randn(2, 8), torch.randn(2, 8)
    gate_up, down = torch.randn(2, 8, 8), torch.randn(2, 8, 4)
    with pytest.raises(ValueError, match="out: expected memory apart from router_weight"):
        moe_experts(x, router, gate_up, down, top_k=1, out=router, backend=backend)
    with pytest.raises(ValueError, match="out: expected memory apart from x"):
        both = torch.randn(3, 8)
        moe_experts(both[1:], router, gate_up, down, top_k=1, out=both[:2], backend=backend)


def test_groups_without_experts_are_refused(backend):
    """Any number divides no experts, and the scratch has a place for every group."""
    x = torch.randn(2, 8)
    none = torch.empty(0, 8), torch.empty(0, 8, 8), torch.empty(0, 8, 4)
    for n_group in (2, 2**63 - 1):
        with pytest.raises(ValueError, match="n_group: expected a divisor of 0 experts"):
            moe_experts(x, *none, top_k=0, n_group=n_group, backend=backend)
