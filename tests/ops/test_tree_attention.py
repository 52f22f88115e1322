"""``tree_attention`` and ``tree_attention_mla``: values, masks, bits, strides, bad input.

Problems and their right values come from ``spec_kernels.testing.attention_cases``.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import subprocess
import sys

import pytest
import torch

from spec_kernels import (
    _library,
    attention_split_size,
    attention_splits,
    tree_attention,
    tree_attention_mla,
)
from spec_kernels.ops.tree_attention import KEY_BLOCK, MAX_SPLITS
from spec_kernels.testing.attention_cases import (
    check,
    make,
    paths_of,
    random_paths,
    words_of,
)
from spec_kernels.testing.compare import assert_same_bits, poisoned

needs_kernel = pytest.mark.skipif(
    not _library.LIBRARIES["cpu"].loaded, reason=f"_C_cpu: {_library.LIBRARIES['cpu'].reason}"
)


FORMS = pytest.mark.parametrize("form", ["gqa", "mla"])


# --------------------------------------------------------------------------------------- values

SIZES = [
    # nodes, contexts, page, heads, kv_heads, k_dim, v_dim, shape
    (1, (0, 1), 1, 1, 1, 1, 1, "chain"),
    (2, (15, 16, 17), 16, 4, 4, 24, 24, "bushy"),
    (4, (1000, 0), 16, 8, 1, 40, 32, "chain"),
    (8, (255, 256, 257), 16, 8, 2, 33, 17, "deep"),
    (31, (17,), 3, 6, 2, 20, 16, "bushy"),
    (32, (250,), 64, 4, 1, 64, 48, "deep"),
    (33, (1, 63), 3, 2, 2, 16, 16, "deep"),
    (63, (1000,), 64, 2, 1, 80, 64, "bushy"),
    (64, (16,), 1, 3, 3, 16, 40, "deep"),
    (65, (511,), 16, 4, 2, 32, 32, "chain"),
    (128, (200,), 16, 2, 1, 48, 33, "deep"),
    (200, (100, 13), 3, 2, 1, 16, 16, "chain"),
    (1024, (5,), 64, 1, 1, 16, 16, "bushy"),
]


@FORMS
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"N{s[0]}")
def test_matches_float64(form, size, dtype, backend):
    nodes, contexts, page, heads, kv_heads, k_dim, v_dim, shape = size
    problem = make(
        form,
        dtype,
        contexts=contexts,
        num_nodes=nodes,
        shape=shape,
        page=page,
        heads=heads,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=min(v_dim, k_dim) if form == "mla" else v_dim,
        seed=nodes,
    )
    check(problem, backend)


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed, backend):
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    k_dim = rng.choice([8, 16, 31, 64, 100])
    nodes = rng.choice([1, 3, 7, 20, 50])
    paths = [random_paths(nodes, rng, rng.choice(["chain", "bushy", "deep"])) for _ in range(2)]
    for request in paths:
        for i in range(len(request)):
            if rng.random() < 0.2:
                request[i] = []
    problem = make(
        rng.choice(["gqa", "mla"]),
        rng.choice([torch.float32, torch.bfloat16]),
        contexts=(rng.randrange(600), rng.randrange(40)),
        paths=paths,
        heads=kv_heads * rng.choice([1, 2, 5]),
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=rng.randrange(1, k_dim + 1),
        page=rng.choice([1, 2, 7, 16, 256]),
        window=rng.choice([0, 0, 1, 2, 9, 300]),
        logit_cap=rng.choice([0.0, 0.0, 3.0]),
        seed=seed,
    )
    check(problem, backend)


@FORMS
def test_kimi_shape(form, dtype, backend):
    problem = make(
        form, dtype, contexts=(300,), num_nodes=5, heads=8, kv_heads=1, k_dim=576, v_dim=512
    )
    check(problem, backend)


def test_both_integer_widths(int_dtype, backend):
    wide = make(contexts=(40, 3), int_dtype=torch.int64)
    other = make(contexts=(40, 3), int_dtype=int_dtype)
    for a, b in zip(wide.run(backend), other.run(backend), strict=True):
        assert_same_bits(a, b)


def test_a_chain_is_causal_attention(dtype, backend):
    problem = make("gqa", dtype, contexts=(37,), num_nodes=40, shape="chain")
    k, v = (c[problem.tables[0]].flatten(0, 1)[:77].transpose(0, 1) for c in (problem.k, problem.v))
    mask = torch.ones(40, 77, dtype=torch.bool).tril(37)
    k, v, q = (t.double() for t in (k, v, problem.q[0].transpose(0, 1)))
    right = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, enable_gqa=True
    )
    out, _ = problem.run(backend)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out[0].double(), right[0].transpose(0, 1), atol=tolerance, rtol=tolerance
    )


@FORMS
def test_fewer_queries_than_tree_rows(form, dtype, backend):
    # A drafter queries the newest level of its tree: rows 4..6 of seven.
    paths = [[[0, 1, 4], [0, 2, 5], [0, 1, 6]]]
    check(make(form, dtype, contexts=(21,), paths=paths, num_words=2), backend)


@pytest.mark.parametrize("logit_cap", [0.5, 30.0])
def test_logit_cap(logit_cap, dtype, backend):
    check(make("gqa", dtype, contexts=(50,), logit_cap=logit_cap, scale=2.0), backend)


# ------------------------------------------------------------------------------- reported faults


@FORMS
def test_case_15_empty_rows_give_zero_and_minus_infinity(form, dtype, backend):
    paths = [[[0], [], [0, 2]], [[], [], []]]
    problem = make(form, dtype, contexts=(300, 9), paths=paths)
    problem.q[1] = math.nan
    problem.tables[1] = -7  # nothing is read for a request without rows
    out, lse = problem.run(backend)
    assert (out[0, 1] == 0).all() and (lse[0, 1] == -math.inf).all()
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    check(problem.rows(slice(0, 1), slice(None)), backend)


def test_case_15_whole_leaves_outside_the_window(dtype, backend):
    # Leaves that some rows or no row sees are merged as empties.
    chain = [list(range(i + 1)) for i in range(700)]
    problem = make("gqa", dtype, contexts=(1000,), paths=[chain[::80]], window=300)
    check(problem, backend)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_case_16_extreme_scores_still_normalise(sign, dtype, backend):
    def values(k, v, row):
        k[..., 0] = 256.0
        k[..., 1:] = k[..., 1:] / 16

    problem = make("gqa", dtype, contexts=(30,), scale=1.0, values=values)
    problem.q[..., 0] = sign * 234.0
    out, lse = problem.run(backend)
    assert out.isfinite().all()
    assert ((lse - sign * 59904.0).abs() < 50).all()
    check(problem, backend)


def test_case_16_very_large_scores(dtype, backend):
    problem = make("gqa", dtype, contexts=(30,), scale=1e30)
    check(problem, backend)


def test_case_17_window_counts_depth(dtype, backend):
    # Siblings 1..5 stand in different rows at one depth: with equal queries and keys they agree.
    paths = [[[0, j] for j in range(1, 6)]]
    problem = make("gqa", dtype, contexts=(20,), paths=paths, window=4)
    problem.q[:] = problem.q[:, :1]
    first = int(problem.tables[0, 21 // 16]), 21 % 16
    for j in range(1, 6):
        row = 20 + j
        at = int(problem.tables[0, row // 16]), row % 16
        problem.k[at], problem.v[at] = problem.k[first], problem.v[first]
    out, lse = problem.run(backend)
    tolerance = dict(rtol=0, atol=0) if backend == "cpu" else {}
    for n in range(1, 5):
        torch.testing.assert_close(out[:, n], out[:, 0], **tolerance)
        torch.testing.assert_close(lse[:, n], lse[:, 0], **tolerance)
    check(problem, backend)


def test_case_18_strided_inputs_and_outputs_are_honoured(dtype, backend):
    plain = make("gqa", dtype, contexts=(40, 7), num_nodes=5, num_words=2)
    right, right_lse = plain.run(backend)
    p = plain
    q = p.q.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack((p.k, p.v), 2)  # K and V interleaved in one buffer, a common layout
    k, v = both[:, :, 0], both[:, :, 1]
    tables = torch.full((p.tables.shape[1], 4), 10**6)
    tables[:, ::2] = p.tables.T
    context = torch.stack((p.context, torch.full_like(p.context, 10**6)), 1)[:, 0]
    ancestors = p.ancestors.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    strided = plain.replace(
        q=q, k=k, v=v, tables=tables[:, ::2].T, context=context, ancestors=ancestors
    )
    wide = poisoned(2, 4, 5, 3 * 32, dtype=dtype)
    out = wide[..., 32:64].transpose(1, 2)
    wide_lse = poisoned(4, 5, 2, 2, dtype=torch.float32)
    lse = wide_lse[..., 0].permute(2, 1, 0)
    for t in (q, k, v, strided.tables, context, ancestors, out, lse):
        assert not t.is_contiguous()
    strided.run(backend, out=out, lse=lse)
    torch.testing.assert_close(out, right, rtol=0, atol=0 if backend == "cpu" else 1e-6)
    torch.testing.assert_close(lse, right_lse, rtol=0, atol=0 if backend == "cpu" else 1e-6)
    assert wide[..., :32].isnan().all() and wide[..., 64:].isnan().all()
    assert wide_lse[..., 1].isnan().all()


def test_case_18_strided_latent_cache(dtype, backend):
    plain = make("mla", dtype, contexts=(40,), k_dim=40, v_dim=32)
    wide = poisoned(*plain.k.shape[:3], 64, dtype=dtype)
    wide[..., 8:48] = plain.k
    view = wide[..., 8:48]
    strided = plain.replace(k=view, v=view[..., :32])
    for a, b in zip(plain.run(backend), strided.run(backend), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_case_18_strided_columns_are_refused(name, backend):
    problem = make()
    t = getattr(problem, name)
    bad = problem.replace(**{name: torch.stack((t, t), -1)[..., 0]})
    with pytest.raises(ValueError, match=r"spec_kernels::tree_attention: .*stride 1"):
        bad.run(backend)


@FORMS
@pytest.mark.parametrize("page", [2, 3, 5, 64])
def test_case_20_branches_over_pages(form, page, backend):
    paths = [[[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]]
    check(make(form, contexts=(7,), paths=paths, page=page), backend)


@FORMS
def test_case_21_a_chain_inside_a_tree_is_the_chain_alone(form, dtype, backend):
    # Rows 1, 3, 6 of the tree are a chain; the others must not be seen, wherever they stand.
    paths = [[[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 1, 3, 6]]]
    tree = make(form, dtype, contexts=(250,), paths=paths)
    nodes = [0, 1, 3, 6]
    alone = tree.replace(
        q=tree.q[:, nodes],
        k=tree.k.clone(),
        ancestors=words_of([list(range(i + 1)) for i in range(4)], 1)[None],
    )
    alone = alone.replace(v=alone.k[..., : tree.v.shape[-1]] if form == "mla" else tree.v.clone())
    for i, node in enumerate(nodes):
        for source, target in ((tree.k, alone.k), (tree.v, alone.v)):
            at, to = 250 + node, 250 + i
            target[int(tree.tables[0, to // 16]), to % 16] = source[
                int(tree.tables[0, at // 16]), at % 16
            ]
    for a, b in zip(tree.run(backend), alone.run(backend), strict=True):
        if backend == "reference":
            torch.testing.assert_close(a[:, nodes], b, rtol=1e-2, atol=1e-2)
        else:
            assert_same_bits(a[:, nodes], b)


def test_case_08_offsets_need_64_bits(backend):
    # 4.3 GB of address space; only the pages in use are ever touched.
    page, dim = 16, 64
    num_pages = (1 << 31) // (page * dim) + 8
    cache = torch.empty(num_pages, page, 1, dim, dtype=torch.bfloat16)
    problem = make("gqa", torch.bfloat16, contexts=(20,), kv_heads=1, k_dim=dim)
    problem = problem.replace(v=problem.k)
    right = problem.run(backend)
    far = torch.arange(num_pages - problem.tables.shape[1], num_pages)[None]
    cache[far[0]] = problem.k[problem.tables[0]]
    moved = problem.replace(tables=far, k=cache, v=cache)
    for a, b in zip(right, moved.run(backend), strict=True):
        assert_same_bits(a, b) if backend == "cpu" else torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_only_who_sees_it(value, window, dtype, backend):
    for shape in ("chain", "deep"):
        problem = make("gqa", dtype, contexts=(300,), num_nodes=12, shape=shape, window=window)
        right, right_lse = problem.run(backend)
        paths = paths_of(problem.ancestors[0])
        for row in (264, 265, 300 + 5):
            at = int(problem.tables[0, row // 16]), row % 16
            if problem.k[at].isnan().any():
                continue  # outside every window
            spoilt = problem.replace(v=problem.v.clone())
            spoilt.v[at] = value
            out, lse = spoilt.run(backend)
            for n, path in enumerate(paths):
                if row in problem.seen(0, path):
                    assert not out[0, n].isfinite().all()
                else:
                    torch.testing.assert_close(out[0, n], right[0, n])
            torch.testing.assert_close(lse, right_lse)


# ----------------------------------------------------------------------------------------- bits


@needs_kernel
@FORMS
def test_a_row_has_the_same_bits_alone_and_in_company(form, dtype):
    problem = make(form, dtype, contexts=(250, 0, 511), num_nodes=40, shape="deep", heads=6)
    out, lse = problem.run("cpu")
    for b in range(3):
        for n in (0, 1, 17, 39):
            alone, alone_lse = problem.rows(slice(b, b + 1), slice(n, n + 1)).run("cpu")
            assert_same_bits(alone[0, 0], out[b, n])
            assert_same_bits(alone_lse[0, 0], lse[b, n])
    shuffled = problem.replace(
        **{k: getattr(problem, k).flip(0) for k in ("q", "tables", "context", "ancestors")}
    )
    assert_same_bits(shuffled.run("cpu")[0].flip(0), out)


@needs_kernel
@FORMS
@pytest.mark.parametrize("context", [0, 1, 15, 250, 253, 508, 1000])
@pytest.mark.parametrize("window", [0, 100])
def test_verifying_a_path_gives_the_bits_of_decoding_it(form, context, window, dtype):
    """The losslessness of greedy decoding hangs on this: not only within a split but across leaves.

    Decoding commits the path's keys one by one; verifying finds them scattered over the tree.
    """
    tree = make(
        form, dtype, contexts=(context,), num_nodes=24, shape="deep", window=window, seed=context
    )
    out, lse = tree.run("cpu")
    paths = paths_of(tree.ancestors[0])
    longest = max(paths, key=len)
    page = tree.k.shape[1]
    k = torch.full_like(tree.k, math.nan)
    v = k[..., : tree.v.shape[-1]] if form == "mla" else torch.full_like(tree.v, math.nan)

    def put(target_row, source_row):
        to = int(tree.tables[0, target_row // page]), target_row % page
        at = int(tree.tables[0, source_row // page]), source_row % page
        k[to], v[to] = tree.k[at], tree.v[at]

    for row in range(context):
        put(row, row)
    for depth, node in enumerate(longest):
        put(context + depth, context + node)
        step = tree.replace(
            q=tree.q[:, node : node + 1],
            k=k,
            v=v,
            context=torch.tensor([context + depth]),
            ancestors=torch.ones(1, 1, 1, dtype=torch.int32),
        )
        alone, alone_lse = step.run("cpu")
        assert_same_bits(alone[0, 0], out[0, node])
        assert_same_bits(alone_lse[0, 0], lse[0, node])


@needs_kernel
@FORMS
# The windows begin in leaves of either parity and at runs of either parity.
@pytest.mark.parametrize(
    "contexts, window",
    [((5000,), 0), ((9000, 700, 0), 0), ((1000,), 700), ((2300,), 1900), ((5000,), 4400)],
)
def test_the_number_of_threads_does_not_show(form, contexts, window, dtype):
    problem = make(form, dtype, contexts=contexts, num_nodes=9, heads=8, kv_heads=2, window=window)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(problem.run("cpu"))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])


def check_this_instruction_set() -> None:
    for form in ("gqa", "mla"):
        for dtype in (torch.float32, torch.bfloat16):
            for nodes, contexts, k_dim, v_dim in (
                (7, (300, 0), 33, 17),
                (33, (15,), 64, 64),
                (1, (513,), 96, 48),
            ):
                problem = make(
                    form,
                    dtype,
                    contexts=contexts,
                    num_nodes=nodes,
                    k_dim=k_dim,
                    v_dim=v_dim,
                    heads=6,
                    logit_cap=4.0,
                    window=200,
                )
                check(problem, "cpu")
            test_verifying_a_path_gives_the_bits_of_decoding_it(form, 250, 0, dtype)
            test_a_row_has_the_same_bits_alone_and_in_company(form, dtype)


@needs_kernel
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "avx512_bf16"])
def test_every_instruction_set(isa):
    if isa not in ("plain", _library.cpu_isa()) and _library.cpu_isa() != "avx512":
        pytest.skip(f"this CPU has {_library.cpu_isa()}")
    done = subprocess.run(
        [sys.executable, __file__],
        env={
            **os.environ,
            "SPEC_KERNELS_CPU_ISA": isa,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_library.LIBRARIES["cpu"].path.parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == isa.split("_")[0]


# --------------------------------------------------------------------------------------- binding


@FORMS
def test_opcheck(form):
    op = getattr(torch.ops.spec_kernels, "tree_attention" + ("" if form == "gqa" else "_mla"))
    problem = make(form, contexts=(40, 3))
    problem.k.nan_to_num_(0.0)
    if form == "gqa":
        problem.v.nan_to_num_(0.0)
    args = list(problem.args())
    args[-2:] = (t.zero_() for t in args[-2:])
    torch.library.opcheck(op.default, tuple(args))


@FORMS
def test_compiles_without_a_break(form):
    problem = make(form, contexts=(40, 3))
    function = tree_attention if form == "gqa" else tree_attention_mla
    compiled = torch.compile(
        lambda *a: function(*a, scale=problem.scale), fullgraph=True, backend="aot_eager"
    )
    for a, b in zip(compiled(*problem.inputs()), problem.run(), strict=True):
        assert_same_bits(a, b)


def test_outputs_are_allocated_when_not_given(backend):
    problem = make()
    for a, b in zip(problem.run(backend), problem.run(backend, out=None, lse=None), strict=True):
        assert_same_bits(a, b)
    q, k, v, *rest = problem.inputs()
    out, _ = tree_attention(q, k, v, *rest, backend=backend)  # scale: Dk ** -0.5
    assert_same_bits(out, problem.run(backend)[0])


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("empty", ["batch", "rows", "heads", "words"])
def test_nothing_to_do(empty, backend):
    problem = make()
    if empty == "batch":
        problem = problem.rows(slice(0, 0), slice(None))
    elif empty == "rows":
        problem = problem.rows(slice(None), slice(0, 0))
    elif empty == "heads":
        problem = problem.replace(q=problem.q[:, :, :0])
    else:
        problem = problem.replace(ancestors=problem.ancestors[..., :0])
    out, lse = problem.run(backend)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_entries_nobody_needs_are_not_looked_at(dtype, backend):
    problem = make("gqa", dtype, contexts=(100,), num_nodes=3, shape="chain", window=20, page=4)
    right = problem.run(backend)
    wide = torch.full((1, problem.tables.shape[1] + 5), 1 << 40)
    wide[:, : problem.tables.shape[1]] = problem.tables
    wide[:, :20] = -5  # positions below 80: outside every window
    for a, b in zip(right, problem.replace(tables=wide).run(backend), strict=True):
        torch.testing.assert_close(a, b)


def with_far_bit(ancestors):
    """Request 1 sees tree row 63, which its table has no room for."""
    far = torch.zeros_like(ancestors)
    far[1] = -(1 << 31)
    return torch.cat((ancestors, far), -1)


def bad_inputs():
    """Name of the argument blamed, and the change that earns it."""
    yield "q", lambda p: dict(q=p.q[0])
    yield "q", lambda p: dict(q=p.q.double())
    yield "k_cache", lambda p: dict(k=p.k[..., :-1].contiguous())
    yield "k_cache", lambda p: dict(k=p.k.bfloat16())
    yield "k_cache", lambda p: dict(k=p.k[:, :0], v=p.v[:, :0])
    yield "k_cache", lambda p: dict(q=p.q[:, :, :3])
    yield "v_cache", lambda p: dict(v=p.v[:-1])
    yield "block_tables", lambda p: dict(tables=p.tables.float())
    yield "block_tables", lambda p: dict(tables=p.tables[:1])
    yield "context_lens", lambda p: dict(context=p.context[:1])
    yield "context_lens", lambda p: dict(context=p.context.double())
    yield "ancestors", lambda p: dict(ancestors=p.ancestors[:, :-1])
    yield "ancestors", lambda p: dict(ancestors=p.ancestors.long())
    yield "ancestors", lambda p: dict(ancestors=p.ancestors.repeat(1, 1, 33))
    yield "scale", lambda p: dict(scale=math.nan)
    yield "logit_cap", lambda p: dict(logit_cap=math.inf)
    yield r"context_lens\[1\]", lambda p: dict(context=torch.tensor([40, -1]))
    for length in (10**6, (1 << 63) - 1):
        yield r"block_tables\[0\]", lambda p, n=length: dict(context=torch.tensor([n, 3]))
    yield r"block_tables\[0\]", lambda p: dict(tables=p.tables[:, :2])
    yield r"block_tables\[1\]", lambda p: dict(ancestors=with_far_bit(p.ancestors))
    for page in (-1, 1 << 40, -(1 << 40)):
        yield r"block_tables\[0, 1\]", lambda p, x=page: dict(tables=one_bad(p, x))


def one_bad(problem, page):
    tables = problem.tables.clone()
    tables[0, 1] = page
    return tables


@pytest.mark.parametrize("case", list(bad_inputs()), ids=lambda c: c[0].replace("\\", ""))
def test_bad_input_is_refused_before_anything_is_written(case, backend):
    argument, change = case
    problem = make(contexts=(40, 3), num_nodes=4)
    bad = problem.replace(**change(problem))
    out, lse = problem.outputs()
    if argument == "q" or "q" in change(problem):
        out, lse = (None, None) if bad.q.dim() != 4 else bad.outputs()
    for choice in (backend, None):
        with pytest.raises(ValueError, match=f"spec_kernels::tree_attention: {argument}: expected"):
            bad.run(choice, out=out, lse=lse)
    if out is not None:
        assert out.isnan().all() and lse.isnan().all()


@needs_kernel
@pytest.mark.parametrize("case", list(bad_inputs()), ids=lambda c: c[0].replace("\\", ""))
def test_the_raw_op_is_safe_by_itself(case):
    argument, change = case
    problem = make(contexts=(40, 3), num_nodes=4)
    bad = problem.replace(**change(problem))
    args = problem.args() if bad.q.dim() != 4 else bad.args()
    outputs = args[-2:]
    args = (*bad.inputs(), *args[len(bad.inputs()) : -2])
    with pytest.raises(RuntimeError, match=f"spec_kernels::tree_attention: {argument}: expected"):
        torch.ops.spec_kernels.tree_attention.default(*args, *outputs)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q_rope", lambda p: (p[0], p[1][:, :1], *p[2:])),
        ("cache", lambda p: (*p[:2], p[2][..., :-1].contiguous(), *p[3:])),
        ("cache", lambda p: (*p[:2], p[2].double(), *p[3:])),
        ("q_latent", lambda p: (p[0][0], *p[1:])),
    ],
)
def test_bad_input_of_the_latent_form(name, change, backend):
    problem = make("mla", k_dim=40, v_dim=32)
    for choice in (backend, None):
        with pytest.raises(ValueError, match=f"spec_kernels::tree_attention_mla: {name}: expected"):
            tree_attention_mla(*change(problem.inputs()), scale=1.0, backend=choice)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("out", lambda o, s: (o[:, :1], s)),
        ("out", lambda o, s: (o.double(), s)),
        ("out", lambda o, s: (o[:, :1].expand(o.shape), s)),
        ("lse", lambda o, s: (o, s.double())),
        ("lse", lambda o, s: (o, s[:, :1].expand(s.shape))),
    ],
)
def test_bad_outputs(name, change, backend):
    problem = make()
    out, lse = change(*problem.outputs())
    for choice in (backend, None):
        with pytest.raises(ValueError, match=f"spec_kernels::tree_attention: {name}: expected"):
            problem.run(choice, out=out, lse=lse)


def test_not_a_tensor(backend):
    problem = make()
    for choice in (backend, None):
        with pytest.raises(ValueError, match="spec_kernels::tree_attention: q: expected a tensor"):
            tree_attention(problem.q.tolist(), *problem.inputs()[1:], backend=choice)
        with pytest.raises(ValueError, match="tree_attention: block_tables: expected a tensor"):
            problem.replace(tables=None).run(choice)


# ---------------------------------------------------------------------------------------- splits


def test_splits_follow_the_length_alone():
    assert attention_splits(0) == attention_splits(1) == attention_splits(KEY_BLOCK) == 1
    edges = [(2048, 32, 64), (8192, 64, 128), (32768, 128, 256), (65536, 128, 512)]
    for edge, splits, size in edges:
        assert (attention_splits(edge), attention_split_size(edge)) == (splits, size)
        assert attention_split_size(edge + 1) == 2 * size
    for length in [*range(0, 3000, 7), 10**5, 10**6, 10**7]:
        size = attention_split_size(length)
        assert size % KEY_BLOCK == 0 and (size // KEY_BLOCK).bit_count() == 1
        assert 1 <= attention_splits(length) <= MAX_SPLITS
        assert attention_splits(length) * size >= length
    with pytest.raises(ValueError, match="context_len"):
        attention_splits(-1)


@needs_kernel
def test_splits_agree_with_their_twin():
    twin = ctypes.CDLL(str(_library.LIBRARIES["cpu"].path)).spec_kernels_attention_splits
    twin.restype, twin.argtypes = ctypes.c_int64, [ctypes.c_int64]
    for length in [*range(0, 20000, 13), 8192, 8193, 16384, 16385, 10**6, 10**9, 1 << 40]:
        assert twin(length) == attention_splits(length)


if __name__ == "__main__":
    check_this_instruction_set()
    print(_library.cpu_isa())


def test_outputs_stand_apart(backend):
    """A table that the output overwrites would be read again after it was checked."""
    q, cache = torch.randn(1, 2, 1, 4), torch.randn(2, 4, 1, 4)
    tables = torch.tensor([[0, 1]], dtype=torch.int32)
    call = (q, cache, cache.clone(), tables, torch.tensor([3]), torch.tensor([[[1], [3]]]).int())
    lse = tables.view(torch.float32).view(1, 2, 1)
    with pytest.raises(ValueError, match="lse: expected memory apart from block_tables"):
        tree_attention(*call, lse=lse, backend=backend)
    with pytest.raises(ValueError, match="out: expected memory apart from q"):
        tree_attention(*call, out=q, backend=backend)
    assert tables.tolist() == [[0, 1]]


@pytest.mark.parametrize("num_blocks", [2**40, 2**61, 2**62])
def test_endless_tables_hold_no_endless_context(backend, num_blocks):
    q, cache = torch.randn(1, 1, 1, 4), torch.randn(2, 4, 1, 4)
    tables = torch.zeros((1, 1), dtype=torch.int32).expand(1, num_blocks)
    words = torch.ones((1, 1, 1), dtype=torch.int32)
    for length in (2**31, 2**62, 2**63 - 2):
        with pytest.raises(ValueError, match="block_tables.0.: expected room for"):
            tree_attention(q, cache, cache, tables, torch.tensor([length]), words, backend=backend)


@pytest.mark.parametrize("num_keys", [1, 40, 200])
@pytest.mark.parametrize("place", ["q", "k"])
def test_nan_scores_are_not_taken_for_an_empty_row(backend, dtype, place, num_keys):
    """A broken hidden state must show in its own row, and in no other."""
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(1, 2, 2, 8, generator=generator)
    cache = torch.randn(16, 16, 2, 8, generator=generator)
    keys = cache.clone()
    if place == "q":
        q[0, 0] = math.nan
    else:
        keys.view(-1, 2, 8)[num_keys] = math.nan  # tree row 0, which the first node alone sees
    q, cache, keys = q.to(dtype), cache.to(dtype), keys.to(dtype)
    words = torch.tensor([[[1], [2]]], dtype=torch.int32)
    tables = torch.arange(16)[None]
    call = (tables, torch.tensor([num_keys]), words)
    out, lse = tree_attention(q, keys, cache, *call, backend=backend)
    assert out[0, 0].isnan().all() and lse[0, 0].isnan().all()
    assert out[0, 1].isfinite().all() and lse[0, 1].isfinite().all()


def test_a_call_without_rows_reads_no_values(backend):
    q, cache = torch.empty(1, 0, 1, 4), torch.randn(2, 4, 1, 4)
    words = torch.empty((1, 0, 1), dtype=torch.int32)
    tables = torch.tensor([[1 << 40]])
    out, lse = tree_attention(q, cache, cache, tables, torch.tensor([-1]), words, backend=backend)
    assert out.shape == (1, 0, 1, 4) and lse.shape == (1, 0, 1)
