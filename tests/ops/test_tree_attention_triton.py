"""The Triton kernels of tree attention: values, bits, schedule, reads, guards, mutants.

What ``test_tree_attention`` asks of every backend is asked here too, where it is small enough for
Triton's interpreter by the same functions, else on smaller problems.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import test_tree_attention as shared
import triton
import triton.language as tl
from test_tree_attention import (  # noqa: F401  collected here for this backend
    test_a_call_without_rows_reads_no_values,
    test_a_shard_is_a_context_shard,
    test_bad_input_of_the_latent_form,
    test_bad_outputs,
    test_both_integer_widths,
    test_case_05_a_negative_length_is_a_padded_request,
    test_case_05_padded_requests_alone,
    test_case_08_offsets_need_64_bits,
    test_case_15_empty_rows_give_zero_and_minus_infinity,
    test_case_16_extreme_scores_still_normalise,
    test_case_16_very_large_scores,
    test_case_17_window_counts_depth,
    test_case_18_strided_columns_are_refused,
    test_case_18_strided_inputs_and_outputs_are_honoured,
    test_case_18_strided_latent_cache,
    test_case_20_branches_over_pages,
    test_case_21_a_chain_inside_a_tree_is_the_chain_alone,
    test_empty_shards_are_harmless,
    test_entries_nobody_needs_are_not_looked_at,
    test_every_fp8_key_arrives_exactly,
    test_every_fp8_value_arrives_exactly,
    test_extreme_sinks,
    test_fewer_queries_than_tree_rows,
    test_logit_cap,
    test_nan_scores_are_not_taken_for_an_empty_row,
    test_not_a_tensor,
    test_nothing_to_do,
    test_one_scale_serves_all_heads,
    test_outputs_are_allocated_when_not_given,
    test_outputs_stand_apart,
    test_scales_may_be_strided,
    test_shards_of_an_fp8_cache,
    test_sinks_leave_absent_rows_absent,
    test_sinks_may_be_strided,
)

from spec_kernels import ContextShard, _library, attention_split_size, merge_states
from spec_kernels.ops.tree_attention import schedule
from spec_kernels.ops.tree_attention import triton as kernels
from spec_kernels.ops.triton_common import INTERPRETED
from spec_kernels.testing import interpreter
from spec_kernels.testing.attention_cases import (
    FP8,
    Problem,
    check,
    exact,
    make,
    paths_of,
    random_paths,
    shards_of,
)
from spec_kernels.testing.compare import assert_same_bits

# ruff: noqa: E402, F811

BACKENDS = ("triton",)

# What is too large for the interpreter, or raises where a device looks at no values: the test here
# that asks the same.
ASKED_BY = {
    "test_a_chain_is_causal_attention": "test_matches_float64",
    "test_a_shard_matches_float64": "test_shards_merge_to_the_whole",
    "test_any_page_size": "test_random_problems",
    "test_any_problem": "test_random_problems",
    "test_case_15_whole_leaves_outside_the_window": "test_case_15_splits_outside_the_window",
    "test_case_19_fp8_equals_dequantise_then_attend": (
        "test_case_19_fp8_caches_are_scaled_once_and_sinks_count"
    ),
    "test_endless_tables_hold_no_endless_context": "test_a_request_of_impossible_length_is_absent",
    "test_kimi_shape": "test_latent_sizes",
    "test_lengths_around_every_step_of_the_split_rule": "test_the_kernel_follows_the_split_rule",
    "test_merged_shards_equal_the_whole": "test_shards_merge_to_the_whole",
    "test_narrow_types_match_float64": "test_random_problems",
    "test_sinks_are_one_more_column_without_a_value": (
        "test_case_19_fp8_caches_are_scaled_once_and_sinks_count"
    ),
    "test_the_checks_see": "test_mutants_are_seen",
    "test_the_checks_see_a_shard_that_is_left_out": "test_mutants_are_seen",
}


def test_every_shared_test_is_asked_here_too():
    tests = {name: f for name, f in vars(shared).items() if name.startswith("test_")}
    of_backends = {n for n, f in tests.items() if "backend" in inspect.signature(f).parameters}
    assert of_backends - globals().keys() == ASKED_BY.keys()
    assert set(ASKED_BY.values()) <= globals().keys()


FORMS = pytest.mark.parametrize("form", ["gqa", "mla"])


@pytest.fixture
def interpreted():
    """For what only the interpreter can show."""
    if not INTERPRETED:
        pytest.skip("Triton compiles here")
    interpreter.speed_up()


@pytest.fixture
def num_programs(monkeypatch):
    """Sets the size of the grid, which on a device is fixed."""
    facts = kernels.device_facts

    def set_to(number):
        tile = schedule.Tile(**{**vars(tile_of(make())), "programs_per_sm": 1})
        monkeypatch.setattr(kernels, "attention_tile", lambda *_: tile)
        monkeypatch.setattr(kernels, "device_facts", lambda device: (facts(device)[0], number))

    return set_to


def tile_of(p: Problem) -> schedule.Tile:
    v_dim = p.v.shape[-1]
    k_dim = v_dim if p.form == "mla" else p.k.shape[-1]
    return schedule.attention_tile(k_dim, v_dim, p.q.element_size(), p.k.dtype == FP8, 120)


def work_of(p: Problem) -> schedule.Work:
    return schedule.count_work(
        p.context.tolist(),
        [[len(path) for path in paths_of(words)] for words in p.ancestors],
        capacity=p.tables.shape[1] * p.k.shape[1],
        num_words=p.ancestors.shape[2],
        group=p.q.shape[2] // p.k.shape[2],
        num_kv_heads=p.k.shape[2],
        tile=tile_of(p),
        window=p.window,
        shard=p.shard,
    )


def same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert_same_bits(x, y)


# --------------------------------------------------------------------------------------- values

SIZES = [
    # nodes, contexts, page, heads, kv_heads, k_dim, v_dim, shape
    (1, (0, 1), 1, 1, 1, 1, 1, "chain"),
    (2, (15, 64, 65), 16, 2, 2, 24, 24, "bushy"),
    (4, (300, 0), 16, 8, 1, 40, 32, "chain"),
    (7, (127, 3), 7, 4, 2, 33, 17, "deep"),
    (33, (70,), 64, 1, 1, 20, 16, "deep"),
    (40, (63,), 3, 2, 1, 16, 16, "chain"),
]


@FORMS
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"N{s[0]}")
def test_matches_float64(form, size, dtype, backend):
    nodes, contexts, page, heads, kv_heads, k_dim, v_dim, shape = size
    v_dim = min(v_dim, k_dim) if form == "mla" else v_dim
    sizes = dict(heads=heads, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, page=page, seed=nodes)
    check(make(form, dtype, contexts=contexts, num_nodes=nodes, shape=shape, **sizes), backend)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(dim, dtype, backend):
    check(make("gqa", dtype, contexts=(70,), heads=2, kv_heads=1, k_dim=dim, v_dim=dim), backend)


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 32), (100, 8)])
def test_latent_sizes(rank, rope, dtype, backend):
    check(make("mla", dtype, contexts=(70,), heads=8, k_dim=rank + rope, v_dim=rank), backend)


def test_a_latent_without_rope_columns(backend):
    check(make("mla", contexts=(70,), k_dim=32, v_dim=32), backend)


def test_1024_nodes(backend):
    rng = random.Random(3)
    paths = random_paths(1024, rng, "deep")
    queried = [paths[i] for i in (0, 31, 32, 500, 1023)]
    sizes = dict(heads=2, kv_heads=1, k_dim=16, v_dim=16, page=64)
    problem = make("gqa", contexts=(5,), paths=[queried], num_words=32, **sizes)
    assert len(queried[-1]) > 128
    check(problem, backend)


@FORMS
def test_the_end_of_a_context_of_256k(form, backend):
    options = dict(window=70, page=64, heads=2, kv_heads=1, k_dim=16, v_dim=16)
    check(make(form, torch.float16, contexts=(262_144, 200_001), **options), backend)


@st.composite
def trees(draw, num_nodes):
    """Paths of a tree of at most ``num_nodes``, its rows in any order, some of them absent."""
    parents = [draw(st.integers(-1, i - 1)) if i else -1 for i in range(num_nodes)]
    paths = []
    for i, parent in enumerate(parents):
        paths.append(([] if parent < 0 else paths[parent]) + [i])
    queried = draw(st.lists(st.sampled_from(range(num_nodes)), min_size=1, max_size=4))
    return [paths[i] if draw(st.booleans()) or i == queried[0] else [] for i in queried]


@st.composite
def small_problems(draw, form):
    """Any tree, table and lengths at sizes that the interpreter takes a second for."""
    num_nodes, num_requests = draw(st.integers(1, 36)), draw(st.integers(1, 2))
    requests = [draw(trees(num_nodes)) for _ in range(num_requests)]
    rows = max(map(len, requests))
    heads = draw(st.sampled_from([1, 3]))
    num_shards = draw(st.sampled_from([1, 1, 3]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    around = st.sampled_from([0, 1, 63, 64, 65, 127, 129]) | st.integers(0, 140)
    return make(
        form,
        dtype,
        contexts=[draw(around) for _ in requests],
        paths=[paths + [[]] * (rows - len(paths)) for paths in requests],
        heads=heads,
        kv_heads=draw(st.sampled_from([1, heads])),
        k_dim=draw(st.sampled_from([8, 17])),
        v_dim=8,
        page=draw(st.integers(1, 20)),
        window=draw(st.sampled_from([0, 0, 1, 30])),
        logit_cap=draw(st.sampled_from([0.0, 3.0])),
        cache_dtype=draw(st.sampled_from([dtype, FP8])),
        with_sinks=draw(st.booleans()),
        shard=ContextShard(
            draw(st.integers(0, num_shards - 1)), num_shards, draw(st.sampled_from([1, 5]))
        ),
        int_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 99)),
    )


@FORMS
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_tree_table_and_lengths(form, backend, data):
    """Right, and a row alone has the bits that it has in company."""
    problem = data.draw(small_problems(form))
    check(problem, backend)
    b = data.draw(st.integers(0, problem.q.shape[0] - 1))
    n = data.draw(st.integers(0, problem.q.shape[1] - 1))
    one = slice(b, b + 1), slice(n, n + 1)
    whole = (t[one] for t in problem.run(backend))
    same_bits(whole, problem.rows(*one).run(backend))


@pytest.mark.parametrize("seed", range(16))
def test_random_problems(seed, backend):
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2])
    k_dim = rng.choice([8, 16, 31, 64])
    nodes = rng.choice([1, 3, 7])
    paths = [random_paths(nodes, rng, rng.choice(["chain", "bushy", "deep"])) for _ in range(2)]
    for request in paths:
        for i in range(len(request)):
            if rng.random() < 0.2:
                request[i] = []
    problem = make(
        rng.choice(["gqa", "mla"]),
        rng.choice([torch.float32, torch.bfloat16, torch.float16]),
        contexts=(rng.randrange(200), rng.randrange(40)),
        paths=paths,
        heads=kv_heads * rng.choice([1, 2, 5]),
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=rng.randrange(1, k_dim + 1),
        page=rng.choice([1, 2, 7, 16, 256]),
        window=rng.choice([0, 0, 1, 2, 9, 100]),
        logit_cap=rng.choice([0.0, 0.0, 3.0]),
        cache_dtype=rng.choice([None, FP8]),
        with_sinks=rng.random() < 0.5,
        seed=seed,
    )
    check(problem, backend)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_19_fp8_caches_are_scaled_once_and_sinks_count(form, dtype, backend):
    sizes = dict(contexts=(70, 0), num_nodes=3, page=8)
    check(make(form, dtype, cache_dtype=FP8, with_sinks=True, **sizes), backend)


@FORMS
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("num_shards", "run"), [(2, 1), (3, 16), (4, 64)])
def test_shards_merge_to_the_whole(form, window, num_shards, run, backend):
    sizes = dict(contexts=(150, 5), num_nodes=3, heads=2, kv_heads=1)
    whole = make(form, with_sinks=True, window=window, **sizes)
    parts = shards_of(whole, num_shards, run)
    for part in parts:
        check(part, backend)
    outs, lses = zip(*(part.run(backend) for part in parts), strict=True)
    out, lse = merge_states(torch.stack(outs), torch.stack(lses), backend=backend)
    right, right_lse = exact(whole)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=1e-5)


def test_case_15_splits_outside_the_window(backend):
    """Some rows see a split, others of the same tile do not, and some splits no row sees."""
    chain = [list(range(i + 1)) for i in range(150)]
    sizes = dict(heads=2, kv_heads=1)
    check(make("gqa", contexts=(200,), paths=[chain[::60]], window=90, **sizes), backend)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_only_who_sees_it(value, window, backend):
    paths = [[[0], [0, 1], [0, 2], [0, 1, 3]]]
    problem = make(contexts=(100,), paths=paths, window=window, heads=2, kv_heads=1)
    right, right_lse = problem.run(backend)
    for row in (61, 62, 101, 102):
        at = int(problem.tables[0, row // 16]), row % 16
        if problem.k[at].isnan().any():
            continue  # outside every window
        spoilt = problem.replace(v=problem.v.clone())
        spoilt.v[at] = value
        out, lse = spoilt.run(backend)
        for n, path in enumerate(paths[0]):
            if row in problem.seen(0, path):
                assert not out[0, n].isfinite().all()
            else:
                assert_same_bits(out[0, n], right[0, n])
        assert_same_bits(lse, right_lse)


@pytest.mark.parametrize("case", list(shared.bad_inputs()), ids=lambda c: c[0].replace("\\", ""))
def test_bad_input_is_refused_before_anything_is_written(case, backend, monkeypatch):
    # Shapes always; values, which on a device nobody looks at, only when asked.
    monkeypatch.setenv("SPEC_KERNELS_CHECK", "1")
    shared.test_bad_input_is_refused_before_anything_is_written(case, backend)


# ----------------------------------------------------------------------------------------- bits


def decoded(tree: Problem, node: int, path: list[int]) -> Problem:
    """The call that decodes ``node`` alone: its ancestors are committed, and nothing else is."""
    context, depth = int(tree.context[0]), len(path) - 1
    page = tree.k.shape[1]
    k = torch.full_like(tree.k.float(), math.nan)
    v = torch.full_like(tree.v.float(), math.nan)
    rows = list(range(context)) + [context + j for j in path]
    for target, source in enumerate(rows):
        to = int(tree.tables[0, target // page]), target % page
        at = int(tree.tables[0, source // page]), source % page
        k[to], v[to] = tree.k[at].float(), tree.v[at].float()
    k = k.to(tree.k.dtype)
    return tree.replace(
        q=tree.q[:, node : node + 1],
        k=k,
        v=k[..., : tree.v.shape[-1]] if tree.form == "mla" else v.to(tree.v.dtype),
        context=torch.tensor([context + depth]),
        ancestors=torch.ones(1, 1, 1, dtype=torch.int32),
    )


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("context", "options"),
    [
        (0, {}),
        (62, {}),  # the path crosses the edge of a split
        (130, dict(window=40)),
        (61, dict(cache_dtype=FP8, with_sinks=True)),
        (190, dict(logit_cap=5.0, page=7)),
    ],
    ids=["0", "62", "130-window", "61-fp8-sinks", "190-cap"],
)
def test_verifying_a_path_gives_the_bits_of_decoding_it(form, dtype, context, options, backend):
    options = dict(heads=2, kv_heads=1, num_nodes=6, shape="deep") | options
    tree = make(form, dtype, contexts=(context,), seed=context, **options)
    out, lse = tree.run(backend)
    paths = paths_of(tree.ancestors[0])
    longest = max(paths, key=len)
    assert len(longest) > 2
    for node in longest[1:]:
        alone, alone_lse = decoded(tree, node, paths[node]).run(backend)
        assert_same_bits(alone[0, 0], out[0, node])
        assert_same_bits(alone_lse[0, 0], lse[0, node])


@FORMS
def test_across_a_step_of_the_split_rule_they_are_close(form, backend):
    tree = make(form, contexts=(2047,), num_nodes=3, shape="chain", heads=2, kv_heads=1, page=64)
    assert attention_split_size(2047) != attention_split_size(2049)
    out, lse = tree.run(backend)
    alone, alone_lse = decoded(tree, 2, [0, 1, 2]).run(backend)
    torch.testing.assert_close(alone[0, 0], out[0, 2])
    torch.testing.assert_close(alone_lse[0, 0], lse[0, 2])


@FORMS
def test_a_row_has_the_same_bits_alone_and_in_company(form, backend):
    sizes = dict(num_nodes=7, heads=6, kv_heads=1)  # rows of a node in several tiles
    problem = make(form, torch.float16, contexts=(140, 0, 64), window=90, **sizes)
    out, lse = problem.run(backend)
    for b, n in ((0, 0), (0, 6), (1, 3), (2, 5)):
        alone, alone_lse = problem.rows(slice(b, b + 1), slice(n, n + 1)).run(backend)
        assert_same_bits(alone[0, 0], out[b, n])
        assert_same_bits(alone_lse[0, 0], lse[b, n])
    flipped = problem.replace(
        **{k: getattr(problem, k).flip(0) for k in ("q", "tables", "context", "ancestors")}
    )
    same_bits((t.flip(0) for t in flipped.run(backend)), (out, lse))


def test_a_wider_table_costs_no_scratch(interpreted, backend, monkeypatch):
    """Bytes follow the split rule, not the blocks of keys that a table could hold, and nothing of
    it shows in the result."""
    problem = make(contexts=(150, 3), num_nodes=3, heads=2, kv_heads=1, page=64)
    right, allocated = problem.run(backend), []
    empty = torch.empty

    def recorded(*args, **kwargs):
        made = empty(*args, **kwargs)
        allocated.append(made.nbytes)
        return made

    of_width = {}
    for columns in (4, 128, 1024, 1 << 14):
        tables = torch.full((2, columns), -1)
        tables[:, : problem.tables.shape[1]] = problem.tables
        wide = problem.replace(tables=tables)
        allocated.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", recorded)
            got = wide.run(backend)
        same_bits(got, right)
        of_width[columns] = sum(allocated)
        v_dim = problem.v.shape[-1]
        sizes = schedule.scratch_sizes(2 * 3 * 2, columns * 64, 1, v_dim)
        assert of_width[columns] == 4 * sum(sizes)
    place = 2 * 3 * 2 * (problem.v.shape[-1] + 2) * 4
    assert [n / place for n in of_width.values()] == [4, 64, 129, 129]


@FORMS
def test_the_size_of_the_grid_does_not_show(form, num_programs, backend):
    sizes = dict(num_nodes=3, heads=2, kv_heads=1)
    problem = make(form, contexts=(150, 3, 0, 70), window=70, **sizes)
    results = []
    for number in (1, 2, 7, 50):
        num_programs(number)
        results.append(problem.run(backend))
    for other in results[1:]:
        same_bits(other, results[0])


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("context", [0, 40, 60])
@FORMS
def test_a_launch_without_a_merge_gives_the_bits_of_one_with_it(form, context, with_sinks, backend):
    problem = make(
        form, contexts=(context, 0), paths=[[[0], [0, 1], []]] * 2, page=64, with_sinks=with_sinks
    )
    assert problem.tables.shape[1] == 1
    wide = problem.replace(tables=torch.cat((problem.tables, problem.tables * 0 - 1), 1))
    assert schedule.num_launches(64, 1) == 1 and schedule.num_launches(128, 1) == 2
    same_bits(problem.run(backend), wide.run(backend))
    check(problem, backend)


# ------------------------------------------------------------------------------------- schedule


@triton.jit
def _lengths_kernel(contexts, result, capacity, num, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    real = lane < num
    context, length, shift = kernels._length(
        tl.load(contexts + lane, mask=real, other=0), capacity, 0, 1, 1, False
    )
    tl.store(result + lane, length, mask=real)
    tl.store(result + BLOCK + lane, 1 << shift, mask=real)


def test_the_kernel_follows_the_split_rule(interpreted):
    edges = [1 << i for i in range(31)]
    contexts = sorted({0, *range(1, 300, 7), *(e + d for e in edges for d in (-1, 0, 1)), 10**5})
    capacity = (1 << 30) + 1
    contexts += [capacity + 1, -1, (1 << 62), -(1 << 62)]  # impossible: length 0
    result = torch.zeros(2, 256, dtype=torch.int64)
    _lengths_kernel[(1,)](torch.tensor(contexts), result, capacity, len(contexts), BLOCK=256)
    for i, context in enumerate(contexts):
        length = context if 0 <= context <= capacity else 0
        assert result[:, i].tolist() == [length, attention_split_size(length)], context


@pytest.mark.parametrize("num_words", [1, 3, 32])
def test_max_splits_is_the_most_that_any_length_needs(num_words):
    for capacity in (1, 63, 64, 65, 500, 2048, 2049, 9000, 40000):
        step = max(1, capacity // 600)
        lengths = {*range(0, capacity + 1, step), *(e for e in (2048, 8192, 32768)), capacity}
        most = max(
            -(-min(n + 32 * num_words, capacity) // attention_split_size(n))
            for n in lengths
            if n <= capacity
        )
        assert schedule.max_splits(capacity, num_words) == max(1, most), capacity
    assert schedule.max_splits(1 << 18, 1) == 129


COUNTED = {
    "batch 1": dict(contexts=(200,), num_nodes=5),
    "window": dict(contexts=(200, 30), num_nodes=5, window=100),
    "several tiles": dict(contexts=(130,), num_nodes=40, heads=2, kv_heads=1),
    "lengths": dict(contexts=(64, 0, 65, 127, 128), num_nodes=3),
    "fp8": dict(contexts=(100,), num_nodes=3, cache_dtype=FP8),
}


@FORMS
@pytest.mark.parametrize("name", COUNTED)
def test_keys_are_read_as_often_as_the_schedule_says(form, name, interpreted):
    problem = make(form, **COUNTED[name])
    work = work_of(problem)
    with interpreter.count_reads(problem.k, problem.v, problem.tables) as counts:
        out, _ = problem.run("triton")
    keys, values, tables = counts
    assert out.isfinite().all()
    dim = problem.k.shape[-1]
    assert keys.num_elements == work.num_keys * dim
    # A latent row is fetched once, and is key and value.
    assert values.num_elements == work.num_keys * (dim if form == "mla" else problem.v.shape[-1])
    assert tables.num_loads == work.num_blocks
    assert tables.num_elements == work.num_keys


def test_the_prefix_is_read_once_for_a_tile_of_rows_and_not_once_for_a_node(interpreted):
    def keys(nodes, context):
        problem = make("mla", contexts=(context,), num_nodes=nodes, shape="chain", heads=4)
        with interpreter.count_reads(problem.k) as (count,):
            problem.run("triton")
        assert count.num_elements == work_of(problem).num_keys * problem.k.shape[-1]
        return count.num_elements // problem.k.shape[-1]

    rows = tile_of(make("mla")).rows
    nodes = rows // 4
    more = keys(nodes, 256) - keys(nodes, 128)
    assert more == 128  # 128 keys more are read once, by one tile that holds every row
    assert keys(2 * nodes, 256) - keys(2 * nodes, 128) == 2 * 128
    assert keys(1, 256) - keys(1, 128) == 128


def test_work_depends_on_lengths_alone(interpreted):
    """Neither a wider table nor padded requests make a call read more or do more."""
    problem = make("gqa", contexts=(150, 20), num_nodes=4)

    def reads(p):
        with interpreter.count_reads(p.k, p.tables) as counts:
            result = p.run("triton")
        return result, [(c.num_elements, c.num_loads) for c in counts]

    right, counted = reads(problem)
    wide = torch.full((2, 4000), -1)
    wide[:, : problem.tables.shape[1]] = problem.tables
    again, same = reads(problem.replace(tables=wide))
    assert same == counted
    same_bits(again, right)

    def pad(t):
        return torch.cat((t, torch.zeros_like(t[:1]).expand(6, *t.shape[1:])))

    padded = problem.replace(
        **{k: pad(getattr(problem, k)) for k in ("q", "tables", "context", "ancestors")}
    )
    again, same = reads(padded)
    assert same == counted
    same_bits((t[:2] for t in again), right)
    assert (again[0][2:] == 0).all() and (again[1][2:] == -math.inf).all()
    assert work_of(padded).num_busy == work_of(problem).num_busy


def test_128_requests_of_different_length(interpreted):
    rng = random.Random(5)
    contexts = [rng.choice([0, 1, 30, 63, 64, 65, 100]) for _ in range(130)]
    problem = make("mla", contexts=contexts, num_nodes=1, heads=2, k_dim=16, v_dim=16, page=64)
    with interpreter.count_reads(problem.k) as (count,):
        out, _ = problem.run("triton")
    assert count.num_elements == work_of(problem).num_keys * 16
    right, _ = exact(problem)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)


def test_launches_of_a_layer(monkeypatch, interpreted):
    launched = []
    run = triton.runtime.interpreter.InterpretedFunction.run

    def counting(self, *args, **kwargs):
        launched.append(self.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", counting)
    for page, names in ((64, ["split_kernel"]), (256, ["split_kernel", "merge_kernel"])):
        launched.clear()
        make(contexts=(9,), page=page).run("triton")
        assert launched == names
        assert schedule.num_launches(page, 1) == len(names)


def test_launches_go_to_the_device_of_the_tensors(monkeypatch, interpreted):
    """Triton launches on the current device, whatever the tensors' is."""
    current, launched = [], []

    @contextlib.contextmanager
    def device_of(t):
        current.append(t.data_ptr())
        yield
        current.pop()

    run = triton.runtime.interpreter.InterpretedFunction.run

    def seeing(self, *args, **kwargs):
        launched.append((self.__name__, *current))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", seeing)
    for form in ("gqa", "mla"):
        problem = make(form, contexts=(9,), page=256)
        problem.run("triton")
        assert launched == [(n, problem.q.data_ptr()) for n in ("split_kernel", "merge_kernel")]
        launched.clear()
    outs = torch.ones(2, 1, 1, 1, 4)
    merge_states(outs, torch.ones(2, 1, 1, 1), backend="triton")
    assert launched == [("merge_states_kernel", outs.data_ptr())]


# --------------------------------------------------------------------------------------- guards


def reading_only(problem, backend):
    """Where addresses can be seen, every read is from one of the call's tensors."""
    if backend != "triton":
        return contextlib.nullcontext()
    extra = (problem.sinks, problem.k_scale, problem.v_scale)
    return interpreter.only_reads(*problem.inputs(), *(t for t in extra if t is not None))


@FORMS
@pytest.mark.parametrize("length", [-1, -(1 << 62), 10**6, (1 << 31) - 1, (1 << 62)])
def test_a_request_of_impossible_length_is_absent(form, length, backend):
    problem = make(form, contexts=(150, 20), num_nodes=3, with_sinks=True)
    right, right_lse = problem.run(backend)
    bad = problem.replace(context=torch.tensor([length, 20]))
    with reading_only(bad, backend):
        out, lse = bad.run(backend)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    same_bits((out[1], lse[1]), (right[1], right_lse[1]))


@pytest.mark.parametrize("page", [-1, 1 << 20, 1 << 40, -(1 << 40)])
def test_a_key_on_a_page_out_of_range_is_absent(page, backend):
    problem = make("gqa", contexts=(40, 100), num_nodes=3, page=8, window=0)
    bad = problem.replace(tables=problem.tables.clone())
    bad.tables[1, 2] = page  # positions 16 to 23
    with reading_only(bad, backend):
        out, lse = bad.run(backend)
    reference = bad.replace(k=bad.k.clone())
    # With the same scores everywhere else, these keys have no weight.
    reference.tables = problem.tables.clone()
    spare = [p for p in range(problem.k.shape[0]) if p not in problem.tables]
    reference.tables[1, 2] = spare[0]
    reference.k[spare[0]] = 0
    reference = reference.replace(q=torch.cat((problem.q, problem.q[..., :1] * 0 + 1), -1))
    keys = torch.cat((reference.k, reference.k[..., :1] * 0), -1)
    keys[spare[0], ..., -1] = -1e9
    reference = reference.replace(k=keys, v=torch.nan_to_num(problem.v))
    right, right_lse = exact(reference)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=1e-5)


def test_tree_rows_beyond_the_table_are_absent(backend):
    problem = make("gqa", contexts=(30,), paths=[[[0], [0, 1], [0, 2]]], page=8)
    narrow = problem.replace(tables=problem.tables[:, :4])  # rows 0 and 1 have places, 2 has none
    with reading_only(narrow, backend):
        out, lse = narrow.run(backend)
    right, right_lse = problem.run(backend)
    same_bits((out[:, :2], lse[:, :2]), (right[:, :2], right_lse[:, :2]))
    alone = make("gqa", contexts=(30,), paths=[[[0]]], page=8)
    alone = problem.replace(q=problem.q[:, 2:], ancestors=problem.ancestors[:, :1])
    same_bits((out[:, 2:], lse[:, 2:]), alone.run(backend))


def test_integers_do_not_overflow(interpreted):
    """A table that repeats for ever, and the widest window, are arithmetic like any other."""
    problem = make("mla", contexts=(70, 3), num_nodes=3, window=(1 << 62), page=16)
    with interpreter.overflow_checks():
        check(problem, "triton")
    k = problem.k.nan_to_num()
    same = problem.replace(k=k, v=k[..., : problem.v.shape[-1]], tables=problem.tables * 0)
    endless = torch.zeros(2, 1, dtype=torch.int64).expand(2, 1 << 40)
    with interpreter.overflow_checks():
        result = same.replace(tables=endless).run("triton")
    same_bits(result, same.run("triton"))


# -------------------------------------------------------------------------------------- mutants

SMALL = dict(heads=2, kv_heads=1, num_nodes=4, seed=3)


def right_values(**options):
    check(make("gqa", contexts=(140,), **SMALL | options), "triton")


def right_reads():
    problem = make("gqa", contexts=(140,), **SMALL)
    with interpreter.count_reads(problem.k) as (count,):
        problem.run("triton")
    assert count.num_elements == work_of(problem).num_keys * problem.k.shape[-1]


def right_in_a_wide_table():
    problem = make("gqa", contexts=(100,), **SMALL)
    table = torch.nn.functional.pad(problem.tables, (0, 100), value=-1)
    same_bits(problem.run("triton"), problem.replace(tables=table).run("triton"))


def right_guards():
    problem = make("gqa", contexts=(40,), **SMALL)
    problem.tables[0, 1] = problem.k.shape[0]
    with interpreter.only_reads(*problem.inputs()):
        problem.run("triton")


def right_bits():
    tree = make("gqa", contexts=(126,), **SMALL | dict(num_nodes=6, shape="chain"))
    alone, _ = decoded(tree, 5, [0, 1, 2, 3, 4, 5]).run("triton")
    assert_same_bits(alone[0, 0], tree.run("triton")[0][0, 5])


# What is broken: the line, what becomes of it, and the check that must see it.
MUTANTS = {
    "the window begins a key late": (
        "first = tl.maximum(context + path_length - window, 0)",
        "first = tl.maximum(context + path_length - window + 1, 0)",
        lambda: right_values(window=20),
    ),
    "a row does not see itself": (
        "tl.minimum(end, capacity), 0)",
        "tl.minimum(end, capacity) - 1, 0)",
        right_values,
    ),
    "the wrong bit is selected": (
        "(counts[None, :] <= ranks[:, None])",
        "(counts[None, :] < ranks[:, None])",
        right_values,
    ),
    "the merge leaves out a split": (
        "(end + (1 << shift) - 1) >> shift, 0)",
        "(end - 1) >> shift, 0)",
        right_values,
    ),
    "sums are not rescaled": (
        "total = total * keep + tl.sum(weight, 1)",
        "total = total + tl.sum(weight, 1)",
        right_values,
    ),
    "the merge does not rescale": (
        "weight = tl.exp2((tops - base) * LOG2E)",
        "weight = tl.exp2((tops - tops) * LOG2E)",
        right_values,
    ),
    "sinks do not count": (
        "total = total * keep + tl.exp2((sink - shift) * LOG2E)",
        "total = total * keep",
        lambda: right_values(with_sinks=True),
    ),
    "values take the scale of keys": (
        "acc = acc * tl.load(v_scale + kv_head * stride_v_scale)",
        "acc = acc * tl.load(k_scale + kv_head * stride_k_scale)",
        lambda: right_values(cache_dtype=FP8),
    ),
    "a shard holds another's run": (
        "tl.where(mine > shard_index, shard_run, rest)",
        "tl.where(mine >= shard_index, shard_run, rest)",
        lambda: right_values(shard=ContextShard(0, 2, 16)),
    ),
    "every node reads the prefix": (
        "    shared_end = length >> shift",
        "    shared_end = length * 0",
        right_reads,
    ),
    "the prefix's end is shared, and tree rows lost": (
        "    shared_end = length >> shift",
        "    shared_end = (length + below) >> shift",
        right_values,
    ),
    "the split depends on the capacity": (
        "0) - _LOG_MAX_SPLITS, _LOG_KEY_BLOCK)",
        "0) - _LOG_MAX_SPLITS, _LOG_KEY_BLOCK + tl.where(capacity > 200, 1, 0))",
        right_in_a_wide_table,
    ),
    "splits begin where the tree does": (
        "begin = tl.maximum(begin, split << shift)",
        "begin = tl.maximum(begin, (split << shift) + tl.where(is_tile, 0, 1))",
        right_bits,
    ),
    "pages beyond the cache are read": (
        "(page >= 0) & (page < num_pages)",
        "(page >= 0)",
        right_guards,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name, interpreted, tmp_path, monkeypatch):
    line, changed, seen_by = MUTANTS[name]
    seen_by()
    source = Path(kernels.__file__).read_text()
    assert source.count(line) == 1, f"{line!r} occurs {source.count(line)} times"
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(line, changed))
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutant", mutant)  # where the interpreter finds the source
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(_library, "triton_kernel", lambda op: getattr(mutant, f"{op}_triton"))
    with pytest.raises((AssertionError, triton.runtime.errors.InterpreterError)):
        seen_by()


# -------------------------------------------------------------------------------------- binding


def run_python(code, **env):
    folders = (str(Path(__file__).parents[2]), str(Path(__file__).parents[1]))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | env
    env = {k: v for k, v in env.items() if v is not None}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_the_package_does_not_import_triton():
    code = "import sys, spec_kernels; print([m for m in sys.modules if 'triton' in m])"
    loaded = eval(run_python(code))
    assert not [m for m in loaded if m == "triton" or m.startswith("spec_kernels.")]


def test_cpu_tensors_need_the_interpreter():
    code = (
        "from spec_kernels.testing.attention_cases import make\n"
        "try:\n    make().run('triton')\n"
        "except ValueError as error:\n    print(error)"
    )
    message = run_python(code, TRITON_INTERPRET=None)
    assert "tree_attention: backend: expected tensors on cuda" in message
    assert "TRITON_INTERPRET=1" in message


def test_cuda_tensors_go_to_triton_where_no_kernel_is_compiled():
    code = (
        "import torch\n"
        "torch.version.cuda = torch.version.cuda or '12.8'\n"  # as a build with CUDA has it
        "from spec_kernels import _library, info\n"
        "row = info.collect()['ops']\n"
        "for op in ('tree_attention', 'tree_attention_mla', 'merge_states'):\n"
        "    key = torch._C._dispatch_has_kernel_for_dispatch_key('spec_kernels::' + op, 'CUDA')\n"
        "    print(key, _library.has_kernel(op, 'cuda'), row[op]['cuda_tensors'])"
    )
    lines = run_python(code).splitlines()
    expected = "True True cuda" if _library.has_kernel("merge_states", "cuda") else None
    assert lines[2] == (expected or "True False triton")
    assert set(lines[:2]) <= {"True False triton", "True True cuda"}


@FORMS
def test_opcheck(form, interpreted):
    """The op as the dispatcher runs it with this kernel: schema, fake, and a full graph."""
    name = "tree_attention" if form == "gqa" else "tree_attention_mla"
    namespace = f"spec_kernels_triton_{form}"
    library = _library.define_schemas(namespace)
    library.impl(name, _library.triton_kernel(name), "CPU")
    op = getattr(getattr(torch.ops, namespace), name).default
    problem = make(form, contexts=(40, 3), heads=2, kv_heads=1, with_sinks=True)
    problem.k = problem.k.nan_to_num()
    problem.v = problem.k[..., :32] if form == "mla" else problem.v.nan_to_num()
    args = problem.args()
    torch.library.opcheck(op, (*args[:-2], *(t.zero_() for t in args[-2:])))
    out, lse = problem.outputs()
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")
    compiled(*args[:-2], out, lse)
    same_bits((out, lse), problem.run("triton"))
