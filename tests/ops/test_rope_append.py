"""``rope_append``: rotated queries, and K/V or latents at their place in the paged cache."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels import _library, rope_append, rope_append_mla
from spec_kernels.models.config import RopeConfig
from spec_kernels.models.rope import (
    apply_half_split,
    apply_interleaved,
    attention_factor,
    cos_sin,
    inverse_frequencies,
)
from spec_kernels.testing.compare import assert_as_accurate, assert_same_bits, bits, poisoned

BACKENDS = ("reference", "cpu", "triton")
ROOT = Path(__file__).resolve().parents[2]
ISAS = ("plain", "avx2", "avx512")
FP8 = torch.float8_e4m3fn
EPS = 1e-5
NUM_POSITIONS = 200


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["half-split", "interleaved"])
def interleaved(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["gqa", "mla"])
def mla(request):
    return request.param


def no_interpreter():
    """Why Triton cannot run on CPU tensors here."""
    if find_spec("triton") is None:
        return "triton is not installed"
    return None if os.environ.get("TRITON_INTERPRET") == "1" else "no TRITON_INTERPRET=1 here"


def few(backend):
    """Sizes of a call in Triton's interpreter, which takes 15 ms a row."""
    return {"batch": 1, "rows": 2} if backend == "triton" else {}


def table(rotary, num_positions=NUM_POSITIONS):
    angles = torch.arange(num_positions)[:, None] * 10.0 ** -torch.linspace(0, 3, rotary // 2)
    return torch.cat((angles.cos(), angles.sin()), 1).float()


class Problem:
    """One call of either form. Caches start as NaN, so what was not written shows."""

    def __init__(
        self,
        mla=False,
        *,
        batch=2,
        rows=5,
        heads=3,
        kv_heads=2,
        k_dim=24,
        v_dim=20,
        rotary=None,
        rank=33,
        normed=True,
        page=4,
        context=(7, 12),
        dtype=torch.float32,
        fp8=False,
        interleaved=False,
        int_dtype=torch.int64,
        seed=0,
    ):
        g = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(shape, generator=g).to(dtype)

        self.mla, self.page, self.dtype, self.fp8 = mla, page, dtype, fp8
        if mla:
            self.inputs = [
                randn(batch, rows, heads, k_dim),
                randn(batch, rows, rank) * 3,
                randn(batch, rows, k_dim),
            ]
            widths = [(rank + k_dim,)]
        else:
            self.inputs = [
                randn(batch, rows, heads, k_dim),
                randn(batch, rows, kv_heads, k_dim),
                randn(batch, rows, kv_heads, v_dim),
            ]
            widths = [(kv_heads, k_dim), (kv_heads, v_dim)]
        columns = -(-(max(max(context), 0) + rows + 8) // page)
        pages = batch * columns + 2
        self.caches = [
            poisoned(pages, page, *w, dtype=torch.float32 if fp8 else dtype) for w in widths
        ]
        if fp8:
            self.caches = [c.to(FP8) for c in self.caches]
        self.kwargs = {
            "cos_sin": table(k_dim if rotary is None else rotary),
            "depths": torch.randint(0, 4, (batch, rows), generator=g).to(int_dtype),
            "context_lens": torch.tensor(context[:batch], dtype=int_dtype),
            "block_tables": torch.randperm(pages, generator=g)[: batch * columns]
            .view(batch, columns)
            .to(int_dtype),
            "interleaved": interleaved,
        }
        if mla:
            weight = (1 + 0.2 * torch.randn(rank, generator=g)).to(dtype)
            self.kwargs["norm_weight"] = weight if normed else None
            self.kwargs["eps"] = EPS
        if fp8:
            names = ("cache_scale",) if mla else ("k_scale", "v_scale")
            count = 1 if mla else kv_heads
            for i, name in enumerate(names):
                self.kwargs[name] = 0.01 * (1 + i + torch.rand(count, generator=g))

    def run(self, backend, **change):
        """(q_out, caches) of a call on copies; ``change`` replaces arguments."""
        kwargs = {**self.kwargs, **change}
        inputs = kwargs.pop("inputs", self.inputs)
        caches = kwargs.pop("caches", None) or [c.clone() for c in self.caches]
        if "q_out" not in kwargs:
            kwargs["q_out"] = torch.full_like(self.inputs[0], float("nan"))
        q_out = kwargs["q_out"]
        function = rope_append_mla if self.mla else rope_append
        assert function(*inputs, *caches, backend=backend, **kwargs) is q_out
        return q_out, caches

    def values(self, dtype, **change):
        """What each row gives, unquantised: (q ``[B, N, H, D]``, [cached ``[B, N, ...]``])."""
        kwargs = {**self.kwargs, **change}
        q, second, third = (t.to(dtype) for t in self.inputs)
        context = kwargs["context_lens"].long().clamp(min=0).unsqueeze(1)
        position = (context + kwargs["depths"].long()).clamp(0, NUM_POSITIONS - 1)
        cos, sin = kwargs["cos_sin"][position].to(dtype).unsqueeze(2).chunk(2, -1)

        def turn(x):
            width = 2 * cos.shape[-1]
            a, b = x[..., :width].chunk(2, -1)
            if kwargs["interleaved"]:
                a, b = x[..., 0:width:2], x[..., 1:width:2]
            pairs = (a * cos - b * sin, b * cos + a * sin)
            both = torch.cat(pairs, -1)
            if kwargs["interleaved"]:
                both = torch.stack(pairs, -1).flatten(-2)
            return torch.cat((both, x[..., width:]), -1).to(dtype)

        if not self.mla:
            return turn(q), [turn(second), third]
        if kwargs["norm_weight"] is not None:
            root = torch.rsqrt(second.square().mean(-1, keepdim=True) + EPS)
            second = second * root * kwargs["norm_weight"].to(dtype)
        return turn(q), [torch.cat((second, turn(third.unsqueeze(2)).squeeze(2)), -1)]

    def places(self, **change):
        """``[(b, n, page, slot)]`` of the present rows, one by one from the contract.

        Rows that lead out of a tensor are left out: they raise on CPU, elsewhere they are absent.
        """
        kwargs = {**self.kwargs, **change}
        depths, lens = kwargs["depths"].tolist(), kwargs["context_lens"].tolist()
        tables = kwargs["block_tables"].tolist()
        slots = kwargs.get("slots")
        begins = kwargs.get("cache_lens")
        begins = lens if begins is None else begins.tolist()
        found = []
        for b, row in enumerate(depths):
            for n, depth in enumerate(row):
                slot = n if slots is None else int(slots[b, n])
                place = begins[b] + slot
                if (
                    min(lens[b], depth, slot, begins[b]) >= 0
                    and lens[b] + depth < NUM_POSITIONS
                    and place // self.page < len(tables[b])
                    and 0 <= tables[b][place // self.page] < self.caches[0].shape[0]
                ):
                    found.append((b, n, tables[b][place // self.page], place % self.page))
        return found

    def scales(self, **change):
        kwargs = {**self.kwargs, **change}
        if not self.fp8:
            return [None] * len(self.caches)
        if self.mla:
            return [kwargs["cache_scale"]]
        return [kwargs[name].unsqueeze(-1) for name in ("k_scale", "v_scale")]

    def check(self, backend, **change):
        """Every row against float64, and nothing else written."""
        q_out, caches = self.run(backend, **change)
        (exact_q, exact), (plain_q, plain) = (
            self.values(t, **change) for t in (torch.float64, self.dtype)
        )
        places = self.places(**change)
        b, n, pages, slots = torch.tensor(places, dtype=torch.int64).view(-1, 4).unbind(1)
        assert_as_accurate(q_out[b, n], exact_q[b, n], plain_q[b, n])
        untouched = torch.ones(q_out.shape[:2], dtype=torch.bool)
        untouched[b, n] = False
        assert q_out[untouched].isnan().all()
        scales = self.scales(**change)
        for cache, before, want, usual, scale in zip(
            caches, self.caches, exact, plain, scales, strict=True
        ):
            got = cache[pages, slots]
            if scale is None:
                assert_as_accurate(got, want[b, n], usual[b, n])
            else:
                assert_quantised(got, want[b, n] / scale.double())
            untouched = torch.ones(cache.shape[:2], dtype=torch.bool)
            untouched[pages, slots] = False
            assert torch.equal(bits(cache)[untouched], bits(before)[untouched])
        return q_out, caches


def assert_quantised(got, exact):
    """Saturated and rounded to nearest: half a step, and what fp32 arithmetic may add."""
    saturated = exact.clamp(-448, 448)
    step = 2.0 ** (saturated.abs().clamp(min=2.0**-6).log2().floor() - 3)
    error = (got.double() - saturated).abs()
    assert (error <= step / 2 + saturated.abs() * 1e-5 + 1e-6).all()


HEADS = [(2, 2), (8, 6), (17, 6), (64, 0), (80, 32), (128, 128)]


@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_head_sizes_and_partial_rotary(backend, dtype, interleaved, mla, shape):
    k_dim, rotary = shape
    problem = Problem(
        mla, k_dim=k_dim, rotary=rotary, dtype=dtype, interleaved=interleaved, **few(backend)
    )
    problem.check(backend)


@pytest.mark.parametrize("shape", HEADS[1::2], ids=str)
def test_fp8(backend, dtype, interleaved, mla, shape):
    k_dim, rotary = shape
    problem = Problem(
        mla, k_dim=k_dim, rotary=rotary, dtype=dtype, interleaved=interleaved, fp8=True,
        **few(backend),
    )  # fmt: skip
    problem.check(backend)


@pytest.mark.parametrize("rank", [1, 16, 31, 512])
@pytest.mark.parametrize("normed", [False, True], ids=["as-is", "normed"])
@pytest.mark.parametrize("fp8", [False, True], ids=["16-bit", "fp8"])
def test_latent_ranks(backend, dtype, rank, normed, fp8):
    problem = Problem(
        True, rank=rank, k_dim=64, normed=normed, dtype=dtype, fp8=fp8, **few(backend)
    )
    problem.check(backend)


def test_the_latent_without_a_norm_is_moved_bit_by_bit(backend, dtype):
    problem = Problem(True, normed=False, dtype=dtype)
    problem.inputs[1].view(torch.uint8)[0, 0, 0] = 0
    _, (cache,) = problem.run(backend)
    for b, n, page, slot in problem.places():
        assert_same_bits(cache[page, slot, :33], problem.inputs[1][b, n])


def test_values_are_moved_bit_by_bit(backend, dtype):
    problem = Problem(dtype=dtype)
    _, (_, cache) = problem.run(backend)
    for b, n, page, slot in problem.places():
        assert_same_bits(cache[page, slot], problem.inputs[2][b, n])


@pytest.mark.parametrize("page", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("context", [(0, 1), (7, 16), (15, 63)], ids=str)
def test_any_page_size(backend, mla, page, context):
    Problem(mla, page=page, context=context).check(backend)


@pytest.mark.parametrize("rows", [0, 1, 33, 130])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_batches_and_rows(backend, mla, batch, rows):
    rows = min(rows, 9) if backend == "triton" else rows
    Problem(mla, batch=batch, rows=rows, context=(3, 0, 40), page=16).check(backend)


def test_integer_widths(backend, mla, int_dtype):
    slots = torch.tensor([[4, 1, -1, 0, 2], [0, 1, 2, 3, 9]], dtype=int_dtype)
    cache_lens = torch.tensor([2, 0], dtype=int_dtype)
    problem = Problem(mla, int_dtype=int_dtype)
    problem.check(backend, slots=slots, cache_lens=cache_lens)


def test_positions_come_from_depths_and_places_from_slots(backend, mla):
    """Siblings share a position and stand apart in the cache."""
    problem = Problem(mla, batch=1, context=(9,))
    row = [t[:, :1].expand(-1, 5, *t.shape[2:]).contiguous() for t in problem.inputs]
    depths = torch.tensor([[0, 1, 1, 2, 1]])
    slots = torch.tensor([[0, 1, 2, 3, 4]])
    q_out, caches = problem.run(backend, inputs=row, depths=depths, slots=slots)
    assert_same_bits(q_out[0, 1], q_out[0, 2])
    assert_same_bits(q_out[0, 1], q_out[0, 4])
    assert not torch.equal(q_out[0, 0], q_out[0, 1]) and not torch.equal(q_out[0, 1], q_out[0, 3])
    place = {n: caches[0][page, slot] for _, n, page, slot in problem.places(slots=slots)}
    assert_same_bits(place[1], place[2])
    assert not torch.equal(place[1], place[3])


def test_case_05_absent_rows_and_padded_requests_write_nothing(backend, mla):
    """Whatever stands in the arguments of an absent row, and in those of a padded request."""
    problem = Problem(mla, batch=3, context=(6, -1, 5))
    depths = torch.tensor([[0, -1, 2, 3, 10**15], [2**62, 0, 0, -5, 1], [0, 1, 1, 1, 2]])
    slots = torch.tensor([[0, 10**15, 2, -1, -7], [0, 0, -9, 2**62, 1], [3, 2, 1, 0, -1]])
    problem.kwargs["block_tables"][1] = 10**12
    change = {"depths": depths, "slots": slots, "cache_lens": torch.tensor([6, -(2**63), 4])}
    assert [p[:2] for p in problem.places(**change)] == [
        (0, 0), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)
    ]  # fmt: skip
    problem.check(backend, **change)


def test_case_05_a_request_whose_cache_begins_nowhere_is_padded(backend, mla):
    problem = Problem(mla, batch=3, context=(6, 9, 5))
    change = {"cache_lens": torch.tensor([6, -1, 5])}
    assert {b for b, *_ in problem.places(**change)} == {0, 2}
    problem.check(backend, **change)


def test_case_05_a_smaller_batch_equals_a_fresh_one(backend, mla):
    problem = Problem(mla, batch=3, context=(6, 9, 5))
    q_out, caches = problem.run(backend)
    problem.kwargs["context_lens"] = torch.tensor([6, -1, -1])
    q_again, caches_again = problem.run(backend)
    assert_same_bits(q_again[0], q_out[0])
    assert q_again[1:].isnan().all()
    used = problem.kwargs["block_tables"][0]
    for a, z in zip(caches, caches_again, strict=True):
        assert torch.equal(bits(a[used]), bits(z[used]))


def test_case_08_offsets_beyond_32_bits(backend, mla):
    if backend.startswith("triton"):
        pytest.skip("storages of 8 GB, which the interpreter and the way to a device would copy")
    # Untouched pages of these storages are never mapped.
    stride = 2**31 + 64
    problem = Problem(mla, batch=1, rows=2, context=(1,), k_dim=4, v_dim=4, rank=4, kv_heads=1)
    want = problem.run(backend, block_tables=torch.tensor([[0, 1, 2, 3]]))[1]

    def far(cache):
        width = cache[0, 0].numel()
        return torch.empty(stride + 64, dtype=cache.dtype).as_strided(
            (2, 4, *cache.shape[2:]), (stride, width, *cache.stride()[2:])
        )

    caches = [far(c) for c in problem.caches]
    problem.run(backend, caches=caches, block_tables=torch.tensor([[1, 0, 0, 0]]))
    for a, z in zip(caches, want, strict=True):
        assert_same_bits(a[1, 1:3], z[0, 1:3])


def test_case_18_strides_are_honoured(backend, dtype, mla, interleaved):
    """Slices of one projection, interleaved K and V, a table of every other column."""
    problem = Problem(mla, dtype=dtype, interleaved=interleaved, **few(backend))
    want_q, want = problem.run(backend)
    batch, rows = problem.inputs[0].shape[:2]
    widths = [t[0, 0].numel() for t in problem.inputs]
    joined = poisoned(batch, rows, 2, sum(widths) + 7, dtype=dtype)
    views, at = [], 3
    for t, width in zip(problem.inputs, widths, strict=True):
        view = joined[:, :, 1, at : at + width].unflatten(-1, t.shape[2:])
        view.copy_(t)
        views.append(view)
        at += width
    caches, backing = [], []
    for c in problem.caches:
        base = poisoned(c.shape[0], 2 * c.shape[1], *c.shape[2:-1], c.shape[-1] + 5, dtype=dtype)
        backing.append(base)
        caches.append(base[:, ::2][..., 2:-3])
    wide = poisoned(batch, rows, 2, *want_q.shape[2:], dtype=dtype)
    lens = problem.kwargs["context_lens"]
    change = {
        "block_tables": problem.kwargs["block_tables"].repeat_interleave(2, 1)[:, ::2],
        "context_lens": torch.stack((lens, lens + 99), 1)[:, 0],
        "depths": problem.kwargs["depths"].t().contiguous().t(),
        "cos_sin": torch.cat((problem.kwargs["cos_sin"], torch.ones(NUM_POSITIONS, 3)), 1)[:, :-3],
    }
    problem.run(backend, inputs=views, caches=caches, q_out=wide[:, :, 0], **change)
    assert_same_bits(wide[:, :, 0], want_q)
    assert wide[:, :, 1].isnan().all()
    for base, view, cache in zip(backing, caches, want, strict=True):
        assert torch.equal(bits(view), bits(cache))
        view.fill_(float("nan"))
        assert base.isnan().all()


def test_queries_may_be_rotated_in_place(backend, dtype, interleaved, mla):
    rows = 3 if backend == "triton" else 5
    problem = Problem(mla, rows=rows, rotary=18, dtype=dtype, interleaved=interleaved)
    depths = problem.kwargs["depths"]
    depths[0, 2] = -1
    want, _ = problem.run(backend)
    q = problem.inputs[0].clone()
    problem.run(backend, inputs=[q, *problem.inputs[1:]], q_out=q)
    present = depths >= 0
    assert_same_bits(q[present], want[present])
    assert_same_bits(q[~present], problem.inputs[0][~present])


def test_allocated_queries_are_zero_where_absent(backend, mla):
    problem = Problem(mla)
    problem.kwargs["depths"][1] = -1
    function = rope_append_mla if mla else rope_append
    caches = [c.clone() for c in problem.caches]
    q_out = function(*problem.inputs, *caches, backend=backend, **problem.kwargs)
    assert (q_out[1] == 0).all() and (q_out[0] != 0).any()


def check_rows(backend, dtype):
    """A row alone, in any batch and beside any neighbours: the same bits."""
    for mla in (False, True):
        for interleaved in (mla,) if backend == "triton" else (False, True):
            for fp8 in (False, True):
                problem = Problem(
                    mla, batch=3, rows=3 if backend == "triton" else 7, k_dim=40, rotary=36,
                    rank=50, context=(3, 30, 11), dtype=dtype, interleaved=interleaved, fp8=fp8,
                )  # fmt: skip
                q_out, caches = problem.run(backend)
                for b, n, page, slot in problem.places()[::4]:
                    alone = {
                        "inputs": [t[b : b + 1, n : n + 1] for t in problem.inputs],
                        "q_out": torch.empty_like(problem.inputs[0][:1, :1]),
                        "slots": torch.tensor([[n]]),
                    }
                    for name in ("depths", "context_lens", "block_tables"):
                        alone[name] = problem.kwargs[name][b : b + 1]
                    alone["depths"] = alone["depths"][:, n : n + 1]
                    one, stored = problem.run(backend, **alone)
                    assert_same_bits(one[0, 0], q_out[b, n])
                    for a, z in zip(stored, caches, strict=True):
                        assert torch.equal(bits(a[page, slot]), bits(z[page, slot]))


def test_rows_do_not_depend_on_each_other(backend, dtype):
    check_rows(backend, dtype)


def test_threads_do_not_change_bits(backend, mla):
    rows = 2 if backend == "triton" else 64
    problem = Problem(mla, batch=2, rows=rows, heads=16, kv_heads=4, k_dim=128, page=16)
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(problem.run(backend))
    finally:
        torch.set_num_threads(before)
    for q_out, caches in results[1:]:
        assert_same_bits(q_out, results[0][0])
        for a, z in zip(caches, results[0][1], strict=True):
            assert torch.equal(bits(a), bits(z))


def check_bits_of_the_formula(backend):
    """Unfused fp32: rotations have the bits of the plain expression, whatever computes them."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for interleaved in (False, True):
            for fp8 in (False, True):
                problem = Problem(
                    k_dim=70, rotary=66, dtype=dtype, interleaved=interleaved, fp8=fp8,
                    **few(backend),
                )  # fmt: skip
                want_q, want = problem.run("reference")
                got_q, got = problem.run(backend)
                assert_same_bits(got_q, want_q)
                for a, z in zip(got, want, strict=True):
                    assert torch.equal(bits(a), bits(z))


def test_bits_of_the_formula(backend):
    check_bits_of_the_formula(backend)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    if not _library.LIBRARIES["cpu"].loaded:
        pytest.skip(f"_C_cpu: {_library.LIBRARIES['cpu'].reason}")
    if ISAS.index(isa) > ISAS.index(_library.cpu_isa()):
        pytest.skip(f"this CPU, or SPEC_KERNELS_CPU_ISA, has no {isa}")
    code = (
        "import torch, test_rope_append as t\n"
        f"assert t._library.cpu_isa() == {isa!r}\n"
        "torch.set_num_threads(1)\n"
        "t.check_bits_of_the_formula('cpu')\n"
        "for d in torch.float32, torch.bfloat16, torch.float16:\n"
        "    t.check_rows('cpu', d)\n"
        "    for fp8 in False, True:\n"
        "        t.Problem(True, dtype=d, fp8=fp8, interleaved=True).check('cpu')"
    )
    env = os.environ | {
        "SPEC_KERNELS_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_case_44_the_table_is_the_drafters_own_rope(backend, dtype, interleaved):
    """yarn, beyond the original context: equal to the model's own rope of the same positions."""
    rope = RopeConfig(
        kind="yarn", theta=50000.0, factor=64.0, original_max_position_embeddings=4096,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    )  # fmt: skip
    frequencies, factor = inverse_frequencies(rope, 24), attention_factor(rope)
    every = torch.cat(cos_sin(torch.arange(5000), frequencies, factor), -1)
    problem = Problem(batch=1, context=(4200,), page=64, dtype=dtype, interleaved=interleaved)
    problem.kwargs["cos_sin"] = every
    q_out, (k_cache, _) = problem.run(backend)
    positions = 4200 + problem.kwargs["depths"]
    cos, sin = (t.unsqueeze(2) for t in cos_sin(positions, frequencies, factor))
    apply = apply_interleaved if interleaved else apply_half_split
    want = apply(problem.inputs[1], cos, sin)
    want_q = apply(problem.inputs[0], cos, sin)
    assert_as_accurate(q_out, want_q.double(), want_q)
    for b, n, page, slot in problem.places():
        assert_as_accurate(k_cache[page, slot], want[b, n].double(), want[b, n])


def test_saturation_and_special_values(backend, mla):
    """Beyond the range: +-448; NaN stays; ties go to even; zeros keep their sign."""
    values = [
        0.0, -0.0, 448.0, 449.0, 464.0, 1e30, -1e30, math.inf, -math.inf, math.nan,
        1.0625, 1.1875, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-11, -(2.0**-6), 240.0, 17.0, -19.0,
    ]  # fmt: skip
    want = [
        0.0, -0.0, 448.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0, math.nan,
        1.0, 1.25, 2.0**-9, 0.0, 2.0**-8, 0.0, -(2.0**-6), 240.0, 16.0, -20.0,
    ]  # fmt: skip
    problem = Problem(
        mla, batch=1, rows=1, heads=1, kv_heads=1, v_dim=20, rank=20, normed=False, fp8=True,
        context=(0,),
    )  # fmt: skip
    problem.inputs[1 if mla else 2].view(-1)[:] = torch.tensor(values)
    one = torch.ones(1)
    scales = {"cache_scale": one} if mla else {"k_scale": one, "v_scale": one}
    _, caches = problem.run(backend, **scales)
    _, _, page, slot = problem.places()[0]
    got = caches[-1][page, slot].float().flatten()[:20]
    want = torch.tensor(want)
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got[~want.isnan()], want[~want.isnan()])


def test_one_scale_serves_all_heads(backend):
    problem = Problem(fp8=True)
    one = torch.tensor(0.02)
    each = torch.full((2,), 0.02)
    _, want = problem.run(backend, k_scale=each, v_scale=each)
    _, got = problem.run(backend, k_scale=one, v_scale=one.view(1))
    for a, z in zip(got, want, strict=True):
        assert torch.equal(bits(a), bits(z))


def test_a_bad_row_stays_alone(backend, mla):
    problem = Problem(mla, dtype=torch.float32)
    want_q, want = problem.run(backend)
    for t in problem.inputs:
        t[1, 3] = float("nan")
    got_q, got = problem.run(backend)
    kept = torch.ones(2, 5, dtype=torch.bool)
    kept[1, 3] = False
    assert_same_bits(got_q[kept], want_q[kept])
    for b, n, page, slot in problem.places():
        for a, z in zip(got, want, strict=True):
            if (b, n) == (1, 3):
                assert a[page, slot].isnan().all()
            else:
                assert_same_bits(a[page, slot], z[page, slot])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_any_call(seed):
    g = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=g))]

    batch, rows = pick(1, 2, 3), pick(1, 2, 9, 40)
    k_dim = pick(2, 8, 17, 34, 64)
    problem = Problem(
        pick(False, True),
        batch=batch,
        rows=rows,
        heads=pick(1, 3, 8),
        kv_heads=pick(1, 2),
        k_dim=k_dim,
        v_dim=pick(1, 16, 19),
        rotary=pick(0, 2, k_dim // 2 // 2 * 2, k_dim // 2 * 2),
        rank=pick(1, 16, 37),
        normed=pick(False, True),
        page=pick(1, 3, 16),
        context=[pick(-1, 0, 5, 60) for _ in range(batch)],
        dtype=pick(torch.float32, torch.bfloat16, torch.float16),
        fp8=pick(False, True),
        interleaved=pick(False, True),
        seed=seed,
    )
    slots = torch.rand(batch, rows + 3, generator=g).argsort(-1)[:, :rows]
    slots[torch.rand(batch, rows, generator=g) < 0.2] = -1
    change = {}
    if pick(False, True):
        change["slots"] = slots
    if pick(False, True):
        change["cache_lens"] = torch.tensor([pick(0, 1, 4) for _ in range(batch)])
    for backend in BACKENDS:
        if backend == "cpu" and not _library.LIBRARIES["cpu"].loaded:
            continue
        if backend == "triton" and (batch * rows > 4 or no_interpreter()):
            continue  # the interpreter is slow: the small calls
        problem.check(backend, **change)


def refuse(match, backend, mla, exception=ValueError, **change):
    problem = Problem(mla, fp8=change.pop("fp8", False))
    caches = [c.clone() for c in problem.caches]
    q_out = poisoned(2, 5, 3, 24, dtype=torch.float32)
    change = {"caches": caches, "q_out": q_out, **change}
    op = "rope_append_mla" if mla else "rope_append"
    with pytest.raises(exception, match=f"spec_kernels::{op}: {match}: expected .*, got"):
        problem.run(backend, **change)
    # Whatever is wrong is found before anything is written.
    assert q_out.isnan().all()
    for a, z in zip(caches, problem.caches, strict=True):
        assert torch.equal(bits(a), bits(z))


def ints(*values):
    return torch.tensor(values)


def changed(t, at, value):
    t = t.clone()
    t[at] = value
    return t


BIG = 2**63 - 1
DEPTHS = torch.tensor([[0, 1, 1, 2, 3], [0, 0, 1, 2, 2]])
SLOTS = torch.arange(5).repeat(2, 1)
TABLES = torch.arange(14).view(2, 7)
TWICE = changed(TABLES, (0, 2), 1)
CLASH = torch.tensor([[0, 4, 1, 8, 9]] * 2)  # in blocks 1, 2, 1, 3, 3 from place 6 on


BAD_VALUES = [
        (r"depths\[1, 4\]", {"depths": changed(DEPTHS, (1, 4), 188)}),
        (r"depths\[0, 1\]", {"depths": changed(DEPTHS, (0, 1), BIG)}),
        (r"depths\[1, 0\]", {"context_lens": ints(7, BIG)}),
        (r"depths\[1, 0\]", {"context_lens": ints(7, 2**31)}),
        (r"slots\[1, 2\]", {"slots": changed(SLOTS, (1, 2), 16)}),
        (r"slots\[0, 0\]", {"slots": changed(SLOTS, (0, 0), BIG)}),
        (r"slots\[0, 3\]", {"cache_lens": ints(25, 0)}),
        (r"slots\[1, 0\]", {"cache_lens": ints(0, BIG)}),
        (r"slots\[1\]", {"slots": changed(SLOTS, (1, 2), 4)}),
        (r"slots\[0\]", {"block_tables": TWICE, "cache_lens": ints(6, 6), "slots": CLASH}),
        (r"block_tables\[1, 3\]", {"block_tables": changed(TABLES, (1, 3), 16)}),
        (r"block_tables\[1, 3\]", {"block_tables": changed(TABLES, (1, 3), -1)}),
        (r"block_tables\[0, 1\]", {"block_tables": changed(TABLES, (0, 1), 2**40)}),
    ]  # fmt: skip
BAD_VALUES = [
    (match, {"block_tables": TABLES, "depths": DEPTHS, **change}) for match, change in BAD_VALUES
]


@pytest.mark.parametrize("match, change", BAD_VALUES)
def test_bad_values_are_refused_before_anything_is_written(
    backend, mla, match, change, monkeypatch
):
    if backend.startswith("triton"):
        monkeypatch.setenv("SPEC_KERNELS_CHECK", "1")
    refuse(match, backend, mla, **change)


@pytest.mark.parametrize("match, change", BAD_VALUES)
def test_where_values_are_not_looked_at_their_rows_are_absent(mla, match, change):
    if no_interpreter():
        pytest.skip(no_interpreter())
    problem = Problem(mla)
    problem.kwargs |= change
    taken = [place[2:] for place in problem.places()]
    caches, q_out = (
        [c.clone() for c in problem.caches],
        torch.full_like(problem.inputs[0], math.nan),
    )
    tensors = [*problem.inputs, *problem.kwargs.values()]
    with importlib.import_module("spec_kernels.testing.interpreter").only_reads(
        *(t for t in tensors if isinstance(t, torch.Tensor)), *caches
    ):
        problem.run("triton", caches=caches, q_out=q_out)
    if len(set(taken)) == len(taken):  # else two rows have one place, and either may stand there
        assert len(taken) < 10
        problem.check("triton")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_scales(backend, value, monkeypatch):
    if backend.startswith("triton"):
        monkeypatch.setenv("SPEC_KERNELS_CHECK", "1")
    refuse(r"cache_scale\[0\]", backend, True, fp8=True, cache_scale=torch.tensor([value]))
    good, bad = torch.ones(2), torch.tensor([1.0, value])
    refuse(r"k_scale\[1\]", backend, False, fp8=True, k_scale=bad, v_scale=good)
    refuse(r"v_scale\[1\]", backend, False, fp8=True, k_scale=good, v_scale=bad)


def test_requests_may_share_a_place(backend, mla):
    """Which of them stands there is the caller's matter; nothing is refused, and no other place
    and no query is touched by it."""
    problem = Problem(mla, context=(7, 7))
    q_apart, caches_apart = problem.run(backend)
    problem.kwargs["block_tables"][1] = problem.kwargs["block_tables"][0]
    q_out, caches = problem.run(backend)
    assert_same_bits(q_out, q_apart)
    theirs = problem.kwargs["block_tables"][0]
    for cache, apart in zip(caches, caches_apart, strict=True):
        written, expected = (~c.isnan().flatten(2).any(2) for c in (cache, apart))
        assert_same_bits(written[theirs], expected[theirs])
        assert written.sum() == written[theirs].sum() > 0


def test_bad_arguments(backend):
    def both(match, **change):
        for mla in (False, True):
            refuse(match, backend, mla, **change)

    p, m = Problem(), Problem(True)
    q, k, v = p.inputs
    q_rope, latent, k_rope = m.inputs
    both("cos_sin", cos_sin=torch.ones(50, 26))
    both("cos_sin", cos_sin=torch.ones(50, 7))
    both("cos_sin", cos_sin=torch.ones(50))
    both("cos_sin", cos_sin=torch.ones(50, 24, dtype=torch.float64))
    both("cos_sin", cos_sin=torch.ones(24, 50).t())
    both("depths", depths=torch.zeros(2, 4, dtype=torch.int64))
    both("depths", depths=torch.zeros(2, 5))
    both("slots", slots=torch.zeros(2, 6, dtype=torch.int64))
    both("slots", slots=torch.zeros(2, 5, dtype=torch.int16))
    both("context_lens", context_lens=torch.zeros(3, dtype=torch.int64))
    both("cache_lens", cache_lens=torch.zeros(2))
    both("block_tables", block_tables=torch.zeros(14, dtype=torch.int64))
    both("q_out", q_out=torch.zeros(2, 5, 3, 23))
    both("q_out", q_out=torch.zeros(2, 5, 3, 24, dtype=torch.float16))
    refuse("q", backend, False, inputs=[q.double(), k, v])
    refuse("q", backend, False, inputs=[q[0], k, v])
    refuse("q", backend, False, inputs=[q.transpose(2, 3).contiguous().transpose(2, 3), k, v])
    refuse("k", backend, False, inputs=[q, k.half(), v])
    refuse("k", backend, False, inputs=[q, k[..., 1:], v])
    refuse("v", backend, False, inputs=[q, k, v[:, :, :1]])
    refuse("v", backend, False, inputs=[q, k, v[:1]])
    refuse("k_cache", backend, False, caches=[p.caches[0].bfloat16(), p.caches[1]])
    refuse("k_cache", backend, False, caches=[p.caches[0][:, :0], p.caches[1][:, :0]])
    refuse("v_cache", backend, False, caches=[p.caches[0], p.caches[1][:, :3]])
    refuse("v_cache", backend, False, caches=[p.caches[0], p.caches[1].to(FP8)])
    refuse("k_scale", backend, False, k_scale=torch.ones(2))
    refuse("v_scale", backend, False, fp8=True, v_scale=None)
    refuse("k_scale", backend, False, fp8=True, k_scale=torch.ones(3))
    refuse("k_scale", backend, False, fp8=True, k_scale=torch.ones(2).double())
    refuse("q_rope", backend, True, inputs=[q_rope.long(), latent, k_rope])
    refuse("latent", backend, True, inputs=[q_rope, latent[:, :4], k_rope])
    refuse("k_rope", backend, True, inputs=[q_rope, latent, k_rope[..., 1:]])
    refuse("cache", backend, True, caches=[m.caches[0][..., 1:]])
    refuse("norm_weight", backend, True, norm_weight=torch.ones(32))
    refuse("norm_weight", backend, True, norm_weight=torch.ones(33).half())
    refuse("eps", backend, True, eps=math.nan)
    refuse("cache_scale", backend, True, cache_scale=torch.ones(1))
    refuse("cache_scale", backend, True, fp8=True, cache_scale=None)


def test_outputs_stand_apart(backend):
    p, m = Problem(), Problem(True)
    k_cache = p.caches[0]
    with pytest.raises(ValueError, match="k_cache: expected memory apart from v_cache"):
        square = Problem(v_dim=24)
        square.run(backend, caches=[square.caches[0], square.caches[0]])
    with pytest.raises(ValueError, match="k_cache: expected rows that do not overlap"):
        p.run(backend, caches=[k_cache[:1].expand(k_cache.shape), p.caches[1]])
    with pytest.raises(ValueError, match="q_out: expected memory apart from q"):
        shape, size = p.inputs[0].shape, p.inputs[0].numel()
        both = torch.zeros(size + 24)
        q, q_out = both[:size].view(shape), both[24:].view(shape)
        p.run(backend, inputs=[q, *p.inputs[1:]], q_out=q_out)
    with pytest.raises(ValueError, match="cache: expected memory apart from latent"):
        cache = m.caches[0]
        latent = cache[:2, :1].expand(2, 5, 57)[..., :33]
        m.run(backend, caches=[cache], inputs=[m.inputs[0], latent, m.inputs[2]])
    assert p.caches[0].isnan().all() and m.caches[0].isnan().all()


def op_arguments(problem, **change):
    """Positional arguments of the schema."""
    kwargs = {**problem.kwargs, "slots": None, "cache_lens": None, **change}
    name = "rope_append_mla" if problem.mla else "rope_append"
    names = [a.name for a in _library.arguments(name)]
    given = dict(zip(names[:3], problem.inputs, strict=True))
    given["q_out"] = torch.zeros_like(problem.inputs[0])
    caches = [torch.zeros_like(c) for c in problem.caches]
    given |= dict(zip(names[-len(caches) :], caches, strict=True))
    given |= {n: None for n in names if n.endswith("_scale")} | kwargs
    return getattr(torch.ops.spec_kernels, name).default, [given[n] for n in names]


def test_opcheck(mla, dtype):
    for fp8 in (False, True):
        function, args = op_arguments(Problem(mla, dtype=dtype, fp8=fp8))
        if fp8:  # the other checks compute with the tensors, which torch cannot in fp8
            names = ("test_autograd_registration", "test_faketensor")
            torch.library.opcheck(function, args, test_utils=names)
        else:
            torch.library.opcheck(function, args)


def test_compiles_without_a_break(mla, dtype):
    problem = Problem(mla, dtype=dtype)
    function = rope_append_mla if mla else rope_append

    def step(inputs, caches):
        q_out = function(inputs[0] * 2, *inputs[1:], *caches, **problem.kwargs)
        return q_out + 1

    results = []
    for f in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = [torch.zeros_like(c) for c in problem.caches]
        results.append((f(problem.inputs, caches), caches))
    assert_same_bits(results[0][0], results[1][0])
    for a, z in zip(results[0][1], results[1][1], strict=True):
        assert_same_bits(a, z)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend"):
        Problem().run("tpu")


def test_triton_runs_on_cpu_tensors_only_in_its_interpreter():
    pytest.importorskip("triton")
    code = (
        "import test_rope_append as t\n"
        "try:\n"
        "    t.Problem().run('triton')\n"
        "except ValueError as error:\n"
        "    assert 'rope_append: backend: expected tensors on cuda' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('ran')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=_without_interpreter(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _without_interpreter():
    """The environment of a child process that imports this file."""
    folders = (ROOT, ROOT / "tests", Path(__file__).parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(f) for f in folders)}
    env.pop("TRITON_INTERPRET", None)
    return env


# element, cache, heads, KV heads, key size, value size, rotary columns, interleaved, normalised
BUILDS = {
    "Kimi-K2.5, 8 heads": ("bf16", "bf16", 8, 1, 64, 512, 64, True, True),
    "Kimi-K2.5, 8 heads, fp8": ("bf16", "u8", 8, 1, 64, 512, 64, True, True),
    "64 heads of 128 over 8, fp8": ("bf16", "u8", 64, 8, 128, 128, 128, False, False),
    "partial rotary, fp16": ("fp16", "fp16", 32, 8, 96, 96, 64, False, False),
    "heads of 256, fp32": ("fp32", "fp32", 16, 4, 256, 256, 256, True, False),
}


def build(name, arch):
    """Registers, spills and so on of one build; for a process without the interpreter."""
    kernels = importlib.import_module("spec_kernels.ops.rope_append.triton")
    budgets = importlib.import_module("triton_budgets")
    element, stored, heads, kv_heads, k_dim, v_dim, rotary, interleaved, normed = BUILDS[name]
    constants = kernels.block_sizes(heads, kv_heads, k_dim, v_dim, rotary) | {
        "HAS_SLOTS": True,
        "HAS_CACHE_LENS": False,
        "INTERLEAVED": interleaved,
        "NORM": normed,
        "FP8": stored == "u8",
    }
    pointers = (
        (element, "q k v q_out norm_weight"),
        (stored, "k_cache v_cache"),
        ("fp32", "cos_sin k_scale v_scale"),
        ("i32", "depths slots context_lens cache_lens block_tables"),
    )
    types = {name: f"*{kind}" for kind, names in pointers for name in names.split()}
    divisible = [*types]
    kernel = kernels.rope_append_kernel
    for argument in kernel.arg_names:
        if argument not in types and argument not in constants:
            types[argument] = "fp32" if argument == "eps" else "i32"
            if re.fullmatch("stride_([kvqo].*|cos)", argument):
                divisible.append(argument)
    return budgets.compile_kernel(
        kernel, types, constants, divisible, arch, kernels.NUM_WARPS, 3, enable_fp_fusion=False
    )


def test_triton_builds_within_its_budget():
    """No spills, hardly any shared memory, and no fused multiply-add that would change bits."""
    pytest.importorskip("triton")
    code = (
        "import json, triton_budgets, test_rope_append as t\n"
        "builds = [(n, a) for n in t.BUILDS for a in triton_budgets.ARCHS]\n"
        "print(json.dumps({f'{n}, sm_{a}': t.build(n, a) for n, a in builds}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=_without_interpreter(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 3 * len(BUILDS)
    for name, usage in found.items():
        assert usage["spills"] == 0 and usage["fma"] == 0, (name, usage)
        assert usage["registers"] <= 128 and usage["shared"] <= 1024, (name, usage)
