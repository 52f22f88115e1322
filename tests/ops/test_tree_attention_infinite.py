"""Infinities and NaN in tree attention, ``merge_states`` and ``rope_append``: who sees them, and
what comes of it, the same on every backend.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys

import pytest
import torch

from spec_kernels import _library, merge_states, rope_append, rope_append_mla
from spec_kernels.testing.attention_cases import FP8, check, exact, make, paths_of, shards_of
from spec_kernels.testing.compare import assert_as_accurate

BACKENDS = ("reference", "cpu", "triton")
INF, NAN = math.inf, math.nan
FORMS = pytest.mark.parametrize("form", ["gqa", "mla"])
TREE = [[[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]]
# Triton's interpreter warns where numpy meets what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")


def few(backend, *lists):
    """All combinations; in the interpreter, which takes a second for each, the first alone."""
    cases = list(itertools.product(*lists))
    return cases[:1] if backend == "triton" else cases


CONTEXTS, DTYPES = (70, 3, 300), (torch.float32, torch.bfloat16)


def in_rows(changes):
    """``values`` for ``make``: row of the cache -> function of (key, value)."""

    def values(key, value, row):
        if row in changes:
            changes[row](key, value)

    return values


def states(problem):
    """Of the right result: which rows are NaN altogether, which columns, which rows are empty."""
    out, lse = exact(problem)
    return lse.isnan(), out.isnan(), lse == -INF


def test_an_infinite_key_decides_by_its_score(backend):
    """+inf makes a row NaN, -inf weighs nothing; queries of both signs meet a key in the prefix
    and one in the tree."""
    for context, infinity, dtype in few(backend, CONTEXTS, (INF, -INF), DTYPES):

        def spoil(key, value, infinity=infinity):
            key[:, 3] = infinity

        values = in_rows({context - 1: spoil, context + 2: spoil})
        problem = make("gqa", dtype, contexts=(context,), paths=TREE, values=values)
        problem.q[..., 3] = problem.q[..., 3].abs() + 0.1
        problem.q[:, 1:, :2, 3] *= -1
        problem.q[:, 0] = 0  # 0 * inf
        nan, _, _ = states(problem)
        signs = problem.q[..., 3] * infinity
        assert nan[:, 0].all() and nan[:, 1:].equal((signs > 0)[:, 1:])
        check(problem, backend)


def test_an_infinite_query_is_its_own_affair(backend):
    for (dtype,) in few(backend, DTYPES):
        problem = make("gqa", dtype, contexts=(20,), paths=TREE)
        problem.q[0, 1, 2, 5] = INF
        problem.q[0, 3, 0, 5] = -INF
        right = make("gqa", dtype, contexts=(20,), paths=TREE).run(backend)
        out, lse = problem.run(backend)
        others = torch.ones(lse.shape, dtype=torch.bool)
        others[0, 1, 2] = others[0, 3, 0] = False
        assert out[others].equal(right[0][others]) and lse[others].equal(right[1][others])
        assert lse[~others].isnan().all()
        check(problem, backend)


def test_a_value_that_is_not_finite_makes_its_column_nan(backend):
    for context, value, dtype in few(backend, CONTEXTS, (INF, -INF, NAN), DTYPES):

        def spoil(key, values, value=value):
            values[:, 4] = value

        changes = in_rows({context // 2: spoil, context + 1: spoil})
        problem = make("gqa", dtype, contexts=(context,), paths=TREE, values=changes)
        nan, columns, _ = states(problem)
        assert not nan.any() and columns[..., 4].all()
        assert int(columns.sum()) == columns[..., 4].numel()
        check(problem, backend)


def test_whatever_its_weight(backend):
    """One that underflows, and one of a score of -inf."""
    for (dtype,) in few(backend, DTYPES):

        def far(key, value):
            key[:, 0], value[:, 1] = -1e4, INF

        def off(key, value):
            key[:, 0], value[:, 2] = -INF, NAN

        problem = make(
            "gqa", dtype, contexts=(300,), paths=TREE, values=in_rows({5: far, 7: off, 280: off})
        )
        problem.q[..., 0] = 1.0
        nan, columns, _ = states(problem)
        assert not nan.any() and columns[..., 1:3].all() and not columns[..., 3:].any()
        check(problem, backend)


@FORMS
def test_scores_of_minus_infinity_alone_are_like_nothing(form, backend):
    """In all heads but the last, whose own scores are +inf."""
    for context, dtype in few(backend, CONTEXTS, DTYPES):

        def off(key, value):
            key[:, 0] = -INF
            if form == "gqa":
                value[:, 5] = NAN

        values = in_rows(dict.fromkeys(range(context + 5), off))
        problem = make(form, dtype, contexts=(context,), paths=TREE, values=values, k_dim=40)
        problem.q[..., 0] = 1.0
        problem.q[..., -1, 0] = -1.0
        nan, columns, empty = states(problem)
        assert empty[..., :-1].all() and nan[..., -1].all()
        if form == "gqa":
            assert not columns[..., :-1, :5].any() and columns[..., 5].all()
        check(problem, backend)


@pytest.mark.parametrize("sink", [INF, NAN, -INF])
def test_sinks_that_are_not_finite(sink, backend):
    for (dtype,) in few(backend, DTYPES):
        problem = make("gqa", dtype, contexts=(70,), paths=TREE, with_sinks=True)
        problem.sinks[1] = sink
        nan, _, _ = states(problem)
        assert nan[..., 1].all() == (sink != -INF) and not nan[..., [0, 2, 3]].any()
        check(problem, backend)
        absent = problem.replace(ancestors=problem.ancestors.clone())
        absent.ancestors[0, 2] = 0
        out, lse = absent.run(backend)
        assert (out[0, 2] == 0).all() and (lse[0, 2] == -INF).all()


def test_a_finite_sink_beside_scores_of_minus_infinity(backend):
    """The sink is all that has weight: no value, and its own LSE."""
    for (dtype,) in few(backend, DTYPES):

        def off(key, value):
            key[:, 0] = -INF

        values = in_rows(dict.fromkeys(range(9), off))
        problem = make("gqa", dtype, contexts=(4,), paths=TREE, values=values, with_sinks=True)
        problem.q[..., 0] = 1.0
        out, lse = problem.run(backend)
        assert (out == 0).all()
        torch.testing.assert_close(lse, problem.sinks.expand_as(lse))
        check(problem, backend)


def test_a_cap_makes_infinite_scores_finite(backend):
    for (dtype,) in few(backend, DTYPES):

        def spoil(key, value):
            key[:, 3] = INF

        problem = make(
            "gqa", dtype, contexts=(70,), paths=TREE, values=in_rows({9: spoil}), logit_cap=5.0
        )
        problem.q[..., 3] = problem.q[..., 3].abs() + 0.1
        problem.q[:, :, 0, 3] *= -1
        assert not states(problem)[0].any()
        check(problem, backend)


def test_rows_that_do_not_see_it_keep_their_bits(backend):
    """Wherever the infinity stands, and whatever else they see."""
    for place, window, dtype in few(backend, ("value", "key"), (40, 0), DTYPES):
        for row in (102, 75) if backend == "triton" else (2, 75, 101, 102, 104):
            problem = make("gqa", dtype, contexts=(100,), paths=TREE, window=window)
            at = int(problem.tables[0, row // 16]), row % 16
            right = problem.run(backend)
            spoilt = problem.replace(k=problem.k.clone(), v=problem.v.clone())
            (spoilt.k if place == "key" else spoilt.v)[at] = INF
            out, lse = spoilt.run(backend)
            num_untouched = 0
            for n, path in enumerate(paths_of(problem.ancestors[0])):
                if row not in problem.seen(0, path):
                    assert out[0, n].equal(right[0][0, n]) and lse[0, n].equal(right[1][0, n])
                    num_untouched += 1
                else:
                    assert not out[0, n].isfinite().all()
            assert row < 101 or num_untouched > 0
            check(spoilt, backend)


@FORMS
def test_infinities_anywhere(form, dtype, backend):
    """Any of keys, values, queries and sinks, an fp8 cache and shards among them."""
    for seed in range(3 if backend == "triton" else 30):
        rng = random.Random(seed)
        places = {rng.randrange(110): rng.choice([INF, -INF, NAN]) for _ in range(rng.randrange(4))}

        def values(key, value, row, places=places, rng=rng):
            if row in places:
                (key if rng.random() < 0.6 else value)[:, rng.randrange(8)] = places[row]

        stored = rng.choice([None, None, FP8])
        problem = make(
            form, dtype, contexts=(100, 5), num_nodes=6, values=values, seed=seed, k_dim=16,
            v_dim=8, page=rng.choice([1, 5, 16]), with_sinks=rng.random() < 0.5,
            window=rng.choice([0, 0, 30]), logit_cap=rng.choice([0.0, 0.0, 3.0]),
            cache_dtype=stored,
        )  # fmt: skip
        for _ in range(rng.randrange(3)):
            problem.q[rng.randrange(2), rng.randrange(6), rng.randrange(4), 2] = rng.choice(
                [INF, -INF]
            )
        if problem.sinks is not None:
            problem.sinks[rng.randrange(4)] = rng.choice([INF, -INF, 0.0])
        check(problem, backend)
        if seed % 3 == 0:
            for part in shards_of(problem, 2, 3):
                check(part, backend)


# ------------------------------------------------------------------------------------ merge_states


@pytest.mark.parametrize("bad", [INF, NAN])
def test_merging_an_lse_that_is_no_number_makes_its_row_nan(bad, dtype, backend):
    g = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 1, 4, 2, 33, generator=g).to(dtype)
    lses = torch.randn(3, 1, 4, 2, generator=g)
    right = merge_states(outs, lses, backend=backend)
    for part in range(3):
        spoilt = lses.clone()
        spoilt[part, 0, 2, 1] = bad
        out, lse = merge_states(outs, spoilt, backend=backend)
        assert out[0, 2, 1].isnan().all() and lse[0, 2, 1].isnan()
        others = torch.ones(lse.shape, dtype=torch.bool)
        others[0, 2, 1] = False
        assert out[others].equal(right[0][others]) and lse[others].equal(right[1][others])


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_merging_a_value_that_is_not_finite_makes_its_column_nan(value, dtype, backend):
    """Whatever the weight: about a third, none that fp32 holds; but of no part that saw nothing."""
    outs = torch.ones(4, 1, 1, 1, 20, dtype=dtype)
    lses = torch.tensor([0.0, 0.0, -500.0, -INF]).view(4, 1, 1, 1)
    for part in range(4):
        spoilt = outs.clone()
        spoilt[part, ..., 17] = value
        out, lse = merge_states(spoilt, lses, backend=backend)
        assert out[0, 0, 0, 17].isnan() == (part < 3)
        assert out[..., :17].eq(1).all() and out[..., 18:].eq(1).all() and lse.isfinite().all()


@FORMS
def test_merged_shards_with_infinities_equal_the_whole(form, backend):
    def off(key, value):
        key[:, 0] = -INF

    def spoil(key, value):
        value[:, 3] = INF

    changes = {4: off, 5: off, 41: off} | ({12: spoil} if form == "gqa" else {})
    problem = make(form, contexts=(40,), paths=TREE, values=in_rows(changes), k_dim=40)
    problem.q[..., 0] = 1.0
    problem.q[:, 0, 1, 0] = -1.0
    parts = [part.run(backend) for part in shards_of(problem, 4, 3)]
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    out, lse = merge_states(outs, lses, backend=backend)
    right, right_lse = exact(problem)
    plain, plain_lse = problem.plain()
    assert_as_accurate(out, right, plain, factor=4)
    assert_as_accurate(lse, right_lse, plain_lse, factor=4)


# ------------------------------------------------------------------------------------- rope_append


@pytest.mark.parametrize("stored", [None, FP8], ids=["same", "fp8"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_appending_infinities(latent, interleaved, stored, dtype, backend):
    """IEEE arithmetic in one order, so the very NaNs of the reference; an fp8 cache saturates."""
    g = torch.Generator().manual_seed(1)
    num_rows, dim = 4, 8
    angles = torch.arange(20)[:, None] * 10.0 ** -torch.linspace(0, 3, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    q = torch.randn(1, num_rows, 2, dim, generator=g)
    k, v = torch.randn(2, 1, num_rows, 2, dim, generator=g)
    k_rope, c = (
        torch.randn(1, num_rows, dim, generator=g),
        torch.randn(1, num_rows, 33, generator=g),
    )
    for t in (q, k, v, k_rope, c):
        t[0, 0, ..., 1], t[0, 1, ..., 2], t[0, 2, ..., 3] = INF, -INF, NAN
    q, k, v, k_rope, c = (t.to(dtype) for t in (q, k, v, k_rope, c))
    where = dict(
        depths=torch.arange(num_rows)[None], context_lens=torch.tensor([0]),
        block_tables=torch.tensor([[1, 0]]), interleaved=interleaved,
    )  # fmt: skip
    results = []
    for name in ("reference", backend):
        one = torch.ones(2)
        if latent:
            cache = torch.zeros(2, 3, 41).to(stored or dtype)
            scale = dict(cache_scale=one[:1]) if stored else {}
            turned = rope_append_mla(
                q, c, k_rope, cos_sin=cos_sin, cache=cache, norm_weight=torch.ones(33, dtype=dtype),
                backend=name, **where, **scale,
            )  # fmt: skip
            results.append((turned, cache))
        else:
            caches = [torch.zeros(2, 3, 2, dim).to(stored or dtype) for _ in range(2)]
            scale = dict(k_scale=one, v_scale=one) if stored else {}
            turned = rope_append(
                q, k, v, cos_sin=cos_sin, k_cache=caches[0], v_cache=caches[1], backend=name,
                **where, **scale,
            )  # fmt: skip
            results.append((turned, *caches))
    for want, got in zip(*results, strict=True):
        want, got = want.float(), got.float()
        assert got.isnan().equal(want.isnan()) and got.isinf().equal(want.isinf())
        assert got[got.isinf()].equal(want[want.isinf()])
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02, equal_nan=True)


# ---------------------------------------------------------------------------------------- all sets


@pytest.mark.skipif(
    not _library.LIBRARIES["cpu"].loaded, reason=f"_C_cpu: {_library.LIBRARIES['cpu'].reason}"
)
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512", "avx512_bf16"])
def test_every_instruction_set(isa):
    if isa not in ("plain", _library.cpu_isa()) and _library.cpu_isa() != "avx512":
        pytest.skip(f"this CPU has {_library.cpu_isa()}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-x", "-k", "cpu and not instruction_set"]
        + ["-p", "no:cacheprovider"],
        env={**os.environ, "SPEC_KERNELS_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]
