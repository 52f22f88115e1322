"""``tree_attention`` and ``tree_attention_mla``: values, masks, bits, strides, bad input.

Problems and their right values come from ``spec_kernels.testing.attention_cases``.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_kernels import (
    ContextShard,
    _library,
    attention_split_size,
    attention_splits,
    merge_states,
    tree_attention,
    tree_attention_mla,
)
from spec_kernels.ops.tree_attention import KEY_BLOCK, MAX_SPLITS
from spec_kernels.ops.tree_attention.traffic import (
    attention_traffic,
    floors_table,
    mla_traffic,
    partials_table,
)
from spec_kernels.testing.attention_cases import (
    FP8,
    check,
    exact,
    make,
    paths_of,
    random_paths,
    shards_of,
    words_of,
)
from spec_kernels.testing.compare import assert_same_bits, poisoned

BACKENDS = ("reference", "cpu", "triton_on_device")
needs_kernel = pytest.mark.skipif(
    not _library.LIBRARIES["cpu"].loaded, reason=f"_C_cpu: {_library.LIBRARIES['cpu'].reason}"
)


FORMS = pytest.mark.parametrize("form", ["gqa", "mla"])
# Queries and cache: what the plain dtype fixture leaves out.
NARROW = pytest.mark.parametrize(
    "kinds",
    [
        (torch.float16, torch.float16),
        (torch.float32, FP8),
        (torch.bfloat16, FP8),
        (torch.float16, FP8),
    ],
    ids=["fp16", "fp32-fp8", "bf16-fp8", "fp16-fp8"],
)


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
    (3, (70,), 64, 4, 2, 64, 64, "deep"),
    (5, (33,), 256, 4, 1, 96, 80, "bushy"),
    (7, (129,), 16, 2, 2, 128, 128, "deep"),
    (9, (40,), 100, 4, 2, 192, 128, "chain"),
    (6, (50,), 32, 2, 1, 256, 256, "deep"),
    (10, (30,), 16, 4, 1, 320, 256, "deep"),
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


@st.composite
def problems(draw):
    """Any sound call: tree, absent rows, table, lengths, dtypes, and every option."""
    seed = draw(st.integers(0, 2**20))
    rng = random.Random(seed)
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    k_dim = draw(st.sampled_from([8, 16, 31, 64, 100]))
    nodes = draw(st.sampled_from([1, 3, 7, 20, 50]))
    paths = [
        random_paths(nodes, rng, draw(st.sampled_from(["chain", "bushy", "deep"])))
        for _ in range(2)
    ]
    for request in paths:
        for i in range(len(request)):
            if rng.random() < 0.2:
                request[i] = []
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    num_shards = draw(st.sampled_from([1, 1, 2, 4]))
    return make(
        draw(st.sampled_from(["gqa", "mla"])),
        dtype,
        cache_dtype=draw(st.sampled_from([dtype, FP8])),
        contexts=(draw(st.integers(0, 600)), draw(st.integers(0, 40))),
        paths=paths,
        heads=kv_heads * draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=draw(st.integers(1, k_dim)),
        page=draw(st.sampled_from([1, 2, 7, 16, 256])),
        window=draw(st.sampled_from([0, 0, 1, 2, 9, 300])),
        logit_cap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        with_sinks=draw(st.booleans()),
        shard=ContextShard(
            draw(st.integers(0, num_shards - 1)), num_shards, draw(st.sampled_from([1, 5, 64]))
        ),
        int_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=seed,
    )


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(problem=problems())
def test_any_problem(backend, problem):
    check(problem, backend)


@pytest.mark.parametrize("page", [1, 2, 3, 7, 16, 64, 100, 256])
@FORMS
def test_any_page_size(form, page, backend):
    check(make(form, contexts=(2 * page + 1, page, 0), page=page, num_nodes=6), backend)


@FORMS
@pytest.mark.parametrize("step", [64, 128, 2048, 8192, 32768])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_around_every_step_of_the_split_rule(form, step, offset, backend):
    problem = make(
        form,
        contexts=(step + offset,),
        num_nodes=3,
        heads=1,
        kv_heads=1,
        k_dim=16,
        v_dim=16,
        page=64,
        seed=step,
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


# ------------------------------------------------------------------------------ sinks, fp8, fp16


@FORMS
@NARROW
def test_narrow_types_match_float64(form, kinds, backend):
    dtype, cache_dtype = kinds
    for nodes, contexts, k_dim, v_dim, window in (
        (7, (300, 0), 33, 17, 0),
        (33, (15,), 64, 64, 0),
        (4, (513,), 96, 48, 200),
    ):
        problem = make(
            form,
            dtype,
            cache_dtype=cache_dtype,
            contexts=contexts,
            num_nodes=nodes,
            k_dim=k_dim,
            v_dim=v_dim,
            heads=6,
            window=window,
        )
        check(problem, backend)


@FORMS
def test_case_19_fp8_equals_dequantise_then_attend(form, backend):
    """K and V by different scales, each once; a latent row, which is both, by its one scale."""
    stored = make(form, cache_dtype=FP8, contexts=(90, 3), num_nodes=5, heads=4)
    assert not stored.k.isnan().all()
    k = stored.k.float() * stored.k_scale.view(-1, 1)
    v = stored.v.float() * stored.v_scale.view(-1, 1)
    if form == "gqa":
        assert (stored.k_scale != stored.v_scale).all()
    plain = stored.replace(k=k, v=v, k_scale=None, v_scale=None)
    for a, b in zip(stored.run(backend), plain.run(backend), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@FORMS
def test_one_scale_serves_all_heads(form, backend):
    problem = make(form, cache_dtype=FP8)
    one = torch.tensor(0.5)
    heads = problem.k.shape[2]
    many = problem.replace(k_scale=one.repeat(heads), v_scale=one.repeat(heads))
    for shape in ((), (1,)):
        single = problem.replace(k_scale=one.view(shape), v_scale=one.view(shape))
        for a, b in zip(single.run(backend), many.run(backend), strict=True):
            assert_same_bits(a, b)


def test_scales_may_be_strided(backend):
    problem = make(cache_dtype=FP8)
    gap = torch.full((2,), math.nan)
    wide = problem.replace(
        k_scale=torch.stack((problem.k_scale, gap), 1)[:, 0],
        v_scale=torch.stack((problem.v_scale, gap), 1)[:, 0],
    )
    for a, b in zip(problem.run(backend), wide.run(backend), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [256, 250])
def test_every_fp8_value_arrives_exactly(dtype, columns, backend):
    """Alone in sight, a value has weight one: it comes out as it is stored, NaN included."""
    codes = torch.arange(columns, dtype=torch.uint8)
    values = codes.view(FP8)[None, None, None]  # [1 page, 1 slot, 1 head, columns]
    keys = torch.zeros(1, 1, 1, 8).to(FP8)
    one = torch.ones(1)
    out, lse = tree_attention(
        torch.ones(1, 1, 1, 8, dtype=dtype),
        keys,
        values,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1, 1, 1, dtype=torch.int32),
        k_scale=one,
        v_scale=one,
        backend=backend,
    )
    right = values.float()[0, 0, 0]
    torch.testing.assert_close(out[0, 0, 0].float(), right, rtol=0, atol=0, equal_nan=True)
    assert lse.item() == 0.0


@pytest.mark.parametrize("code", range(0, 256, 5))
def test_every_fp8_key_arrives_exactly(code, backend):
    """One key of a single non-zero column: the log-sum-exp is its value."""
    keys = torch.zeros(1, 1, 1, 40, dtype=torch.uint8)
    keys[..., 37] = code
    keys = keys.view(FP8)
    one = torch.ones(1)
    words = torch.ones(1, 1, 1, dtype=torch.int32)
    q = torch.ones(1, 1, 1, 40, dtype=torch.bfloat16)
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    call = (q, keys, keys[..., :1], tables, lens, words)
    _, lse = tree_attention(*call, scale=1.0, k_scale=one, v_scale=one, backend=backend)
    right = keys.float()[0, 0, 0, 37]
    torch.testing.assert_close(lse[0, 0, 0], right, rtol=0, atol=0, equal_nan=True)


@FORMS
def test_sinks_are_one_more_column_without_a_value(form, dtype, backend):
    problem = make(form, dtype, contexts=(40, 300), num_nodes=5, with_sinks=True, window=30)
    check(problem, backend)  # whose right values come from that column
    out, lse = problem.run(backend)
    bare, bare_lse = problem.replace(sinks=None).run(backend)
    total = torch.logaddexp(bare_lse, problem.sinks)
    share = torch.exp(bare_lse - total).unsqueeze(-1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(lse, total)
    torch.testing.assert_close(out.float(), bare.float() * share, atol=tolerance, rtol=tolerance)


def test_extreme_sinks(backend):
    problem = make(contexts=(40,), heads=4)
    bare, bare_lse = problem.run(backend)
    sinks = torch.tensor([-math.inf, -1e5, 1e5, 3e38])
    out, lse = problem.replace(sinks=sinks).run(backend)
    for a, b in ((out, bare), (lse, bare_lse)):
        torch.testing.assert_close(a[:, :, :2], b[:, :, :2])
    assert (out[:, :, 2:] == 0).all() and (lse[:, :, 2:] == sinks[2:]).all()


def test_sinks_leave_absent_rows_absent(backend):
    problem = make(contexts=(40,), paths=[[[0], [], [0, 2]]], with_sinks=True)
    out, lse = problem.run(backend)
    assert (out[0, 1] == 0).all() and (lse[0, 1] == -math.inf).all()


@pytest.mark.parametrize("page", [16, 256])
def test_sinks_may_be_strided(page, backend):
    problem = make(with_sinks=True, page=page)
    wide = torch.stack((problem.sinks, torch.full((4,), math.nan)), 1)
    for a, b in zip(
        problem.run(backend), problem.replace(sinks=wide[:, 0]).run(backend), strict=True
    ):
        assert_same_bits(a, b)


# ---------------------------------------------------------------------------------------- shards


def merged(parts, backend):
    states = [part.run(backend) for part in parts]
    return merge_states(*(torch.stack(t) for t in zip(*states, strict=True)))


@FORMS
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("run", [1, 3, 16, 64])
@pytest.mark.parametrize("window", [0, 50])
def test_merged_shards_equal_the_whole(form, num_shards, run, window, backend):
    whole = make(form, contexts=(170, 3, 0), num_nodes=6, with_sinks=True, window=window)
    out, lse = merged(shards_of(whole, num_shards, run), backend)
    right, right_lse = exact(whole)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=1e-5)


@FORMS
def test_a_shard_matches_float64(form, dtype, backend):
    whole = make(form, dtype, contexts=(300, 41), num_nodes=7, logit_cap=3.0, with_sinks=True)
    for part in shards_of(whole, 3, 10):
        check(part, backend)


def test_shards_of_an_fp8_cache(backend):
    whole = make("gqa", torch.bfloat16, cache_dtype=FP8, contexts=(100,), num_nodes=3)
    out, lse = merged(shards_of(whole, 4, 16), backend)
    right, right_lse = exact(whole)
    torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-3, rtol=2e-3)


@FORMS
def test_empty_shards_are_harmless(form, dtype, backend):
    """Shards 1 to 7 hold nothing of a short context: they change no bit of shard 0's result."""
    whole = make(form, dtype, contexts=(3, 0), num_nodes=4, with_sinks=True)
    first, *others = shards_of(whole, 8, 16)
    states = [first.run(backend)]
    for part in others:
        unread = part.replace(
            q=torch.full_like(part.q, math.nan), tables=torch.full_like(part.tables, -9)
        )
        states.append(unread.run(backend))
        assert (states[-1][0] == 0).all() and (states[-1][1] == -math.inf).all()
    result = merge_states(*(torch.stack(t) for t in zip(*states, strict=True)))
    for a, b in zip(result, states[0], strict=True):
        assert_same_bits(a, b)


@needs_kernel
@FORMS
def test_a_part_has_the_same_bits_alone_and_in_company(form, dtype):
    whole = make(form, dtype, contexts=(700, 90), num_nodes=12, heads=6)
    for part in shards_of(whole, 2, 64):
        out, lse = part.run("cpu")
        for b, n in ((0, 3), (0, 11), (1, 7)):
            alone, alone_lse = part.rows(slice(b, b + 1), slice(n, n + 1)).run("cpu")
            assert_same_bits(alone[0, 0], out[b, n])
            assert_same_bits(alone_lse[0, 0], lse[b, n])


def test_the_rule_of_shards():
    for num_shards, run in ((1, 1), (2, 1), (3, 4), (8, 16)):
        shards = [ContextShard(i, num_shards, run) for i in range(num_shards)]
        for length in (*range(0, 40), 127, 128, 1000):
            held = [s.local_positions(length) for s in shards]
            assert sorted(p for own in held for p in own) == list(range(length))
            for shard, own in zip(shards, held, strict=True):
                assert len(own) == shard.local_length(length)
                assert own == [p for p in range(length) if p // run % num_shards == shard.index]
                assert [shard.local_position(p) for p in own] == list(range(len(own)))
                assert all(shard.holds(p) for p in own)
        lengths = torch.arange(300)
        for shard in shards:
            right = [shard.local_length(n) for n in range(300)]
            assert shard.local_length(lengths).tolist() == right


@pytest.mark.parametrize(
    "name, values",
    [
        ("num_shards", (0, 0, 1)),
        ("num_shards", (0, 1025, 1)),
        ("index", (2, 2, 1)),
        ("index", (-1, 2, 1)),
        ("run", (0, 2, 0)),
        ("run", (0, 2, 2**31 + 1)),
    ],
)
def test_bad_shards(name, values):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        ContextShard(*values)
    raw = {"index": "shard_index", "run": "shard_run"}.get(name, name)
    args = list(make().args())
    args[-5:-2] = values
    with pytest.raises((RuntimeError, ValueError), match=f"tree_attention: {raw}: expected"):
        torch.ops.spec_kernels.tree_attention.default(*args)


def test_a_shard_is_a_context_shard(backend):
    for choice in (backend, None):
        with pytest.raises(ValueError, match="tree_attention: shard: expected a ContextShard"):
            make().run(choice, shard=(0, 2, 1))


# ------------------------------------------------------------------------------ negative controls

FAULTS = {
    "a stranger is taken for an ancestor": lambda p: dict(ancestors=p.ancestors | 2),
    "an ancestor is not seen": lambda p: dict(ancestors=p.ancestors & ~1),
    "the window is one too wide": lambda p: dict(window=p.window + 1),
    "the window is one too narrow": lambda p: dict(window=p.window - 1),
    "the scales change places": lambda p: dict(k_scale=p.v_scale, v_scale=p.k_scale),
    "the value scale is forgotten": lambda p: dict(v_scale=torch.ones(2)),
    "the sinks are forgotten": lambda p: dict(sinks=None),
    "the sinks are shifted by a head": lambda p: dict(sinks=p.sinks.roll(1)),
    "the cap is forgotten": lambda p: dict(logit_cap=0.0),
    "two pages change places": lambda p: dict(tables=p.tables[:, [0, 1, 2, 6, 4, 5, 3]]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_see(fault, dtype, backend):
    """Each wrong call differs from the right one by what a kernel might get wrong."""
    paths = [[[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]]
    right = make(
        "gqa",
        dtype,
        cache_dtype=FP8,
        contexts=(100,),
        paths=paths,
        window=40,
        logit_cap=2.0,
        scale=1.0,
        with_sinks=True,
        poison=0.5,
    )
    check(right, backend)
    wrong = right.replace(**FAULTS[fault](right))
    with pytest.raises(AssertionError, match="largest error"):
        check(right, backend, run=wrong.run)


def test_the_checks_see_a_shard_that_is_left_out(backend):
    whole = make(contexts=(100,), num_nodes=3)
    parts = shards_of(whole, 4, 3)
    right, _ = exact(whole)
    out, _ = merged(parts, backend)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
    for i in range(4):
        out, _ = merged(parts[:i] + parts[i + 1 :], backend)
        assert not torch.allclose(out.double(), right, atol=1e-3, rtol=1e-3)


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


@FORMS
@pytest.mark.parametrize("length", [-1, -17, -(1 << 31), -(1 << 63)])
def test_case_05_a_negative_length_is_a_padded_request(form, length, dtype, backend):
    options = dict(cache_dtype=FP8, with_sinks=True, window=30)
    problem = make(form, dtype, contexts=(20, 9, 140), num_nodes=3, **options)
    problem.tables[1] = 1 << 40  # nothing is read for it
    problem.q[1] = math.nan
    problem.context[1] = length
    out, lse = problem.run(backend)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    for b in (0, 2):
        alone = problem.rows(slice(b, b + 1), slice(None))
        check(alone, backend)
        if backend != "reference":  # which promises no bits
            for mine, own in zip((out, lse), alone.run(backend), strict=True):
                assert_same_bits(mine[b : b + 1], own)


@pytest.mark.parametrize("length", [-1, -(1 << 31)])
def test_case_05_padded_requests_alone(length, int_dtype, backend):
    problem = make(contexts=(20, 9), int_dtype=int_dtype)
    problem.context[:], problem.tables[:] = length, -1
    for shard in (ContextShard(), ContextShard(1, 2, 4)):
        out, lse = problem.replace(shard=shard).run(backend)
        assert (out == 0).all() and (lse == -math.inf).all()


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
    options = dict(contexts=(context,), num_nodes=24, shape="deep", window=window, seed=context)
    check_decoding_bits(make(form, dtype, **options))


@needs_kernel
@FORMS
@NARROW
@pytest.mark.parametrize("context, window", [(15, 0), (253, 100), (508, 0)])
def test_narrow_caches_and_sinks_keep_the_bits_too(form, context, window, kinds):
    tree = make(
        form,
        kinds[0],
        cache_dtype=kinds[1],
        contexts=(context,),
        num_nodes=24,
        window=window,
        with_sinks=True,
    )
    check_decoding_bits(tree)


def check_decoding_bits(tree) -> None:
    context = int(tree.context[0])
    out, lse = tree.run("cpu")
    paths = paths_of(tree.ancestors[0])
    longest = max(paths, key=len)
    page = tree.k.shape[1]
    k = torch.full_like(tree.k, math.nan)
    v = k[..., : tree.v.shape[-1]] if tree.form == "mla" else torch.full_like(tree.v, math.nan)

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
        for dtype, cache_dtype in (
            (torch.float32, None),
            (torch.bfloat16, None),
            (torch.float16, None),
            (torch.bfloat16, FP8),
            (torch.float16, FP8),
        ):
            for nodes, contexts, k_dim, v_dim in (
                (7, (300, 0), 33, 17),
                (33, (15,), 64, 64),
                (1, (513,), 96, 48),
            ):
                problem = make(
                    form,
                    dtype,
                    cache_dtype=cache_dtype,
                    contexts=contexts,
                    num_nodes=nodes,
                    k_dim=k_dim,
                    v_dim=v_dim,
                    heads=6,
                    logit_cap=4.0,
                    window=200,
                    with_sinks=True,
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
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=["fp32", "fp8"])
def test_opcheck(form, cache_dtype):
    op = getattr(torch.ops.spec_kernels, "tree_attention" + ("" if form == "gqa" else "_mla"))
    problem = make(form, contexts=(40, 3), cache_dtype=cache_dtype, with_sinks=True)
    for cache in (problem.k, problem.v):  # opcheck takes a NaN for a change
        cache.copy_(cache.float().nan_to_num(0.0))
    args = list(problem.args())
    args[-2:] = (t.zero_() for t in args[-2:])
    checks = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    # torch cannot compare fp8 tensors, by which it tells whether an input was changed.
    checks = checks[cache_dtype == FP8 :]
    torch.library.opcheck(op.default, tuple(args), test_utils=checks)


@FORMS
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_break(form, dynamic):
    problem = make(form, contexts=(40, 3))
    function = tree_attention if form == "gqa" else tree_attention_mla
    # By its default the scale depends on a shape.
    options = dict(scale=problem.scale) if form == "mla" else {}
    compiled = torch.compile(
        lambda *a: function(*a, **options), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for a, b in zip(compiled(*problem.inputs()), problem.run(), strict=True):
        assert_same_bits(a, b)


@FORMS
def test_the_reference_waits_for_no_device(form):
    """Meta tensors, which have no values, stand for a device's: asking for one would raise."""
    problem = make(form, contexts=(40, 3), cache_dtype=FP8, with_sinks=True, window=9)
    out, lse = problem.to("meta").run("reference")
    assert out.device.type == lse.device.type == "meta" and out.shape == (2, 4, 4, 32)
    with pytest.raises(RuntimeError, match="meta tensor"):
        bool((problem.to("meta").context < 0).any())


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
    for scale in (math.nan, math.inf, 1e39, -1e300):  # the last two: not in fp32
        yield "scale", lambda p, x=scale: dict(scale=x)
    for cap in (math.nan, -math.inf, 1e39, 1e-46, 1e-300):
        yield "logit_cap", lambda p, x=cap: dict(logit_cap=x)
    yield "k_scale", lambda p: dict(k=p.k.to(FP8), v=p.v.to(FP8), v_scale=torch.ones(2))
    yield "v_scale", lambda p: dict(k=p.k.to(FP8), v=p.v.to(FP8), k_scale=torch.ones(2))
    yield "k_scale", lambda p: fp8_with(p, torch.ones(3))
    yield "k_scale", lambda p: fp8_with(p, torch.ones(2).double())
    for wrong in (0.0, -1.0, math.nan, math.inf):
        yield r"k_scale\[1\]", lambda p, wrong=wrong: fp8_with(p, torch.tensor([1.0, wrong]))
    yield "k_scale", lambda p: dict(k_scale=torch.ones(2))
    yield "v_scale", lambda p: dict(v_scale=torch.ones(2))
    yield "v_cache", lambda p: fp8_with(p, torch.ones(2)) | dict(v=p.v)
    yield "k_cache", lambda p: dict(k=p.k.to(torch.float8_e5m2), v=p.v.to(torch.float8_e5m2))
    yield "sinks", lambda p: dict(sinks=torch.ones(3))
    yield "sinks", lambda p: dict(sinks=torch.ones(4).half())
    for length in (10**6, (1 << 63) - 1):
        yield r"block_tables\[0\]", lambda p, n=length: dict(context=torch.tensor([n, 3]))
    yield r"block_tables\[0\]", lambda p: dict(tables=p.tables[:, :2])
    yield r"block_tables\[1\]", lambda p: dict(ancestors=with_far_bit(p.ancestors))
    for page in (-1, 1 << 40, -(1 << 40)):
        yield r"block_tables\[0, 1\]", lambda p, x=page: dict(tables=one_bad(p, x))


def fp8_with(problem, k_scale):
    right = torch.ones(2)
    return dict(k=problem.k.to(FP8), v=problem.v.to(FP8), k_scale=k_scale, v_scale=right)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_KERNELS_CHECK", "1")  # a device looks at no values unasked
        for choice in (backend, None):
            with pytest.raises(
                ValueError, match=f"spec_kernels::tree_attention: {argument}: expected"
            ):
                bad.run(choice, out=out, lse=lse)
    if out is not None:
        assert out.isnan().all() and lse.isnan().all()


@needs_kernel
@pytest.mark.parametrize("case", list(bad_inputs()), ids=lambda c: c[0].replace("\\", ""))
def test_the_raw_op_is_safe_by_itself(case):
    argument, change = case
    problem = make(contexts=(40, 3), num_nodes=4)
    bad = problem.replace(**change(problem))
    args = (problem if bad.q.dim() != 4 else bad).args()
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
        ("cache_scale", lambda p: (*p[:2], p[2].to(FP8), *p[3:])),
    ],
)
def test_bad_input_of_the_latent_form(name, change, backend):
    problem = make("mla", k_dim=40, v_dim=32)
    for choice in (backend, None):
        with pytest.raises(ValueError, match=f"spec_kernels::tree_attention_mla: {name}: expected"):
            tree_attention_mla(*change(problem.inputs()), scale=1.0, backend=choice)
    with pytest.raises(ValueError, match="cache_scale: expected None"):
        problem.run(backend, cache_scale=torch.ones(1))
    with pytest.raises(ValueError, match="cache_scale: expected shape"):
        quantised = problem.replace(k=problem.k.to(FP8), v=problem.v.to(FP8))
        quantised.run(backend, cache_scale=torch.ones(2))


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


# --------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize("context, latent", [(0, False), (60, True), (3000, False), (9000, True)])
def test_traffic_is_what_a_loop_counts(context, latent):
    heads, kv_heads, k_dim, v_dim, paths = 4, 1 if latent else 2, 24, 16, [1, 2, 2, 3]
    size = attention_split_size(context)
    partials = flops = 0
    for path in paths:
        splits = {p // size for p in range(context + path)}
        if len(splits) > 1:
            partials += len(splits) * heads * (v_dim + 2) * 4 * 2
        flops += sum(2 * heads * (k_dim + v_dim) for _ in range(context + path))
    row = 24 if latent else 2 * (24 + 16)
    t = attention_traffic(
        context,
        4,
        num_heads=heads,
        num_kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        latent=latent,
        cache_itemsize=1,
        path_lengths=paths,
    )
    assert (t.cache, t.partials, t.flops) == ((context + 4) * row, partials, flops)
    assert (t.queries, t.outputs) == (16 * 24 * 2, 16 * (16 * 2 + 4))
    assert t.most_bytes - t.least_bytes == t.partials
    assert t.floor_us(1000.0)[0] == pytest.approx(t.least_bytes / 1e6)


def test_traffic_of_the_cache_does_not_grow_with_heads_or_rows_of_the_tree():
    one, many = (mla_traffic(8192, n) for n in (1, 64))
    assert many.cache - one.cache == 63 * 576 * 2
    with pytest.raises(ValueError, match="path_lengths: expected 2"):
        attention_traffic(8, 2, num_heads=1, k_dim=8, v_dim=8, path_lengths=[1])


def test_the_documentation_has_the_tables_that_the_functions_give():
    text = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text()
    assert floors_table() in text and partials_table() in text


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH")
def test_the_instruction_counter_compiles():
    """Its driver fills the kernel's arguments by hand, so a change there must reach it."""
    root = Path(__file__).resolve().parents[2]
    includes = [f"-I{root / 'csrc'}", "-isystem", str(Path(torch.__file__).parent / "include")]
    source = str(root / "benchmarks" / "count_instructions.cpp")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-DSK_ISA=plain", *includes, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    check_this_instruction_set()
    print(_library.cpu_isa())
