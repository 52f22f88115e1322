"""``merge_states``: values, empties, order, bits, strides, bad input."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_kernels import _library, merge_states
from spec_kernels.testing.compare import assert_as_accurate, assert_same_bits, poisoned

needs_kernel = pytest.mark.skipif(
    not _library.LIBRARIES["cpu"].loaded, reason=f"_C_cpu: {_library.LIBRARIES['cpu'].reason}"
)
BACKENDS = ("reference", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16", "fp16"])
def dtype(request):
    return request.param


def make(parts, batch=2, rows=3, heads=2, dim=32, *, dtype=torch.float32, empty=0.0, seed=0):
    """Outputs and LSEs; of the ``empty`` share that saw nothing the output is NaN: unread."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, batch, rows, heads, dim, generator=generator)
    lses = 5 * torch.randn(parts, batch, rows, heads, generator=generator)
    nothing = torch.rand(lses.shape, generator=generator) < empty
    lses[nothing] = -math.inf
    outs[nothing] = math.nan
    return outs.to(dtype), lses


def call(outs, lses, backend):
    out = poisoned(*outs.shape[1:], dtype=outs.dtype)
    lse = poisoned(*lses.shape[1:], dtype=torch.float32)
    assert merge_states(outs, lses, out=out, lse=lse, backend=backend)[0] is out
    return out, lse


def exact(outs, lses):
    """All parts at once in float64."""
    total = torch.logsumexp(lses.double(), 0)
    weights = torch.exp(lses.double() - torch.where(total == -math.inf, 0, total))
    seen = (lses != -math.inf).unsqueeze(-1)
    values = torch.where(seen, outs.double(), 0) * weights.unsqueeze(-1)
    return values.sum(0), total


def plain(outs, lses):
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(total == -math.inf, 0, total))
    seen = (lses != -math.inf).unsqueeze(-1)
    values = torch.where(seen, outs.float(), 0) * weights.unsqueeze(-1)
    return values.sum(0).to(outs.dtype), total


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 130])
@pytest.mark.parametrize("dim", [1, 16, 33, 576])
def test_matches_float64(parts, dim, dtype, backend):
    outs, lses = make(parts, dim=dim, dtype=dtype, empty=0.3, seed=parts)
    out, lse = call(outs, lses, backend)
    right, right_lse = exact(outs, lses)
    other, other_lse = plain(outs, lses)
    assert_as_accurate(out, right, other)
    assert_as_accurate(lse, right_lse, other_lse)


@pytest.mark.parametrize("parts", [0, 1, 2, 5])
def test_case_15_merging_empties_gives_zero_and_minus_infinity(parts, dtype, backend):
    outs, lses = make(parts, dtype=dtype, empty=1.1)
    out, lse = call(outs, lses, backend)
    assert_same_bits(out, torch.zeros_like(out))
    assert (lse == -math.inf).all()


def test_empty_parts_change_no_bit(dtype, backend):
    outs, lses = make(3, dtype=dtype)
    right, right_lse = call(outs, lses, backend)
    for order in itertools.permutations([0, 1, 2, None], 4):
        full = [i for i in order if i is not None]
        if full != sorted(full):
            continue
        wide = poisoned(4, *outs.shape[1:], dtype=dtype)
        wide_lses = torch.full((4, *lses.shape[1:]), -math.inf)
        for place, part in enumerate(order):
            if part is not None:
                wide[place], wide_lses[place] = outs[part], lses[part]
        out, lse = call(wide, wide_lses, backend)
        assert_same_bits(out, right)
        assert_same_bits(lse, right_lse)


def test_one_part_is_itself(dtype, backend):
    outs, lses = make(1, dtype=dtype)
    out, lse = call(outs, lses, backend)
    assert_same_bits(out, outs[0])
    assert_same_bits(lse, lses[0])


@pytest.mark.parametrize("shift", [-6e4, 6e4])
def test_case_16_extreme_lses_still_normalise(shift, dtype, backend):
    outs, lses = make(4, dtype=dtype)
    out, lse = call(outs, lses + shift, backend)
    right, right_lse = exact(outs, lses + shift)
    torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-2, rtol=0)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_states(backend, data):
    """Right, and every row alone has the bits that it has in company."""
    draw = data.draw
    parts, batch, rows, heads = (draw(st.integers(1, n)) for n in (9, 2, 3, 3))
    dtype = draw(st.sampled_from(DTYPES))
    outs, lses = make(
        parts, batch, rows, heads, draw(st.integers(1, 40)), dtype=dtype,
        empty=draw(st.sampled_from([0.0, 0.3, 0.9])), seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    out, lse = call(outs, lses, backend)
    (right, right_lse), (other, other_lse) = exact(outs, lses), plain(outs, lses)
    assert_as_accurate(out, right, other)
    assert_as_accurate(lse, right_lse, other_lse)
    b, n = draw(st.integers(0, batch - 1)), draw(st.integers(0, rows - 1))
    alone = call(outs[:, b : b + 1, n : n + 1], lses[:, b : b + 1, n : n + 1], backend)
    assert_same_bits(alone[0], out[b : b + 1, n : n + 1])
    assert_same_bits(alone[1], lse[b : b + 1, n : n + 1])


def digest():
    """Of the bits that the CPU kernel gives."""
    found = hashlib.sha256()
    for dtype, parts in itertools.product(DTYPES, (1, 2, 7, 130)):
        for t in call(*make(parts, dim=37, dtype=dtype, empty=0.2, seed=parts), "cpu"):
            found.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@needs_kernel
@pytest.mark.parametrize("isa", ["plain", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(isa):
    if isa not in ("plain", _library.cpu_isa()) and _library.cpu_isa() != "avx512":
        pytest.skip(f"this CPU has {_library.cpu_isa()}")
    here = Path(__file__).resolve().parent
    folders = (here.parents[1], here.parent, here)
    env = {
        **os.environ,
        "SPEC_KERNELS_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    code = "import test_merge_states as t\nprint(t._library.cpu_isa(), t.digest())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa, digest()]


def test_nan_shows_in_its_row_alone(dtype, backend):
    outs, lses = make(3, dtype=dtype)
    right, right_lse = call(outs, lses, backend)
    lses[1, 0, 1, 0] = math.nan
    out, lse = call(outs, lses, backend)
    assert out[0, 1, 0].isnan().all() and lse[0, 1, 0].isnan()
    out[0, 1, 0], lse[0, 1, 0] = right[0, 1, 0], right_lse[0, 1, 0]
    assert_same_bits(out, right)
    assert_same_bits(lse, right_lse)


@needs_kernel
def test_a_row_has_the_same_bits_alone_and_in_company(dtype):
    outs, lses = make(8, batch=3, rows=64, heads=8, dim=72, dtype=dtype, empty=0.2)
    out, lse = call(outs, lses, "cpu")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single, single_lse = call(outs, lses, "cpu")
    finally:
        torch.set_num_threads(before)
    assert_same_bits(single, out)
    assert_same_bits(single_lse, lse)
    alone, alone_lse = call(outs[:, 1:2, 40:41, 3:4], lses[:, 1:2, 40:41, 3:4], "cpu")
    assert_same_bits(alone[0, 0, 0], out[1, 40, 3])
    assert_same_bits(alone_lse[0, 0, 0], lse[1, 40, 3])


def test_case_18_strides_are_honoured(dtype, backend):
    outs, lses = make(3, dtype=dtype)
    right, right_lse = call(outs, lses, backend)
    strided = torch.cat((outs, outs), -1).permute(3, 0, 2, 1, 4).contiguous()
    strided = strided.permute(1, 3, 2, 0, 4)[..., :32]
    turned = lses.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    wide = poisoned(2, 2, 3, 96, dtype=dtype)
    out = wide[..., 32:64].permute(1, 2, 0, 3)
    wide_lse = poisoned(3, 2, 2, 2, dtype=torch.float32)
    lse = wide_lse[..., 0].permute(1, 0, 2)
    assert not any(t.is_contiguous() for t in (strided, turned, out, lse))
    merge_states(strided, turned, out=out, lse=lse, backend=backend)
    assert_same_bits(out, right)
    assert_same_bits(lse, right_lse)
    assert wide[..., :32].isnan().all() and wide[..., 64:].isnan().all()
    assert wide_lse[..., 1].isnan().all()


def test_outputs_are_allocated_when_not_given(backend):
    outs, lses = make(2)
    for a, b in zip(merge_states(outs, lses, backend=backend), call(outs, lses, None), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_nothing_to_do(dim, backend):
    outs, lses = make(2)
    outs = outs.narrow(dim, 0, 0)
    lses = lses if dim == 4 else lses.narrow(dim, 0, 0)
    out, lse = call(outs, lses, backend)
    assert out.shape == outs.shape[1:] and lse.shape == lses.shape[1:]


def test_opcheck():
    outs, lses = make(3, empty=0.0)
    args = (outs, lses, torch.zeros_like(outs[0]), torch.zeros_like(lses[0]))
    torch.library.opcheck(torch.ops.spec_kernels.merge_states.default, args)


def test_compiles_without_a_break():
    outs, lses = make(3)
    compiled = torch.compile(merge_states, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(outs, lses), merge_states(outs, lses), strict=True):
        assert_same_bits(a, b)


BAD = [
    ("outs", lambda o, s, r, t: (o[0], s, r, t)),
    ("outs", lambda o, s, r, t: (o.double(), s, r, t)),
    ("outs", lambda o, s, r, t: (torch.stack((o, o), -1)[..., 0], s, r, t)),
    ("outs", lambda o, s, r, t: (o[:1].expand(1025, *o.shape[1:]), s, r, t)),
    ("lses", lambda o, s, r, t: (o, s[:1], r, t)),
    ("lses", lambda o, s, r, t: (o, s.double(), r, t)),
    ("out", lambda o, s, r, t: (o, s, r[:, :1], t)),
    ("out", lambda o, s, r, t: (o, s, r.double(), t)),
    ("out", lambda o, s, r, t: (o, s, r[:, :1].expand(r.shape), t)),
    ("out", lambda o, s, r, t: (o, s, o[0], t)),
    ("lse", lambda o, s, r, t: (o, s, r, t.double())),
    ("lse", lambda o, s, r, t: (o, s, r, t[:, :1].expand(t.shape))),
    ("lse", lambda o, s, r, t: (o, s, r, s[0])),
]


@pytest.mark.parametrize("case", BAD, ids=lambda c: c[0])
def test_bad_input_is_refused_before_anything_is_written(case, backend):
    name, change = case
    outs, lses = make(2)
    kept = outs.clone(), lses.clone()
    out = poisoned(*outs.shape[1:], dtype=outs.dtype)
    lse = poisoned(*lses.shape[1:], dtype=torch.float32)
    o, s, r, t = change(outs, lses, out, lse)
    with pytest.raises(ValueError, match=f"spec_kernels::merge_states: {name}: expected"):
        merge_states(o, s, out=r, lse=t, backend=backend)
    if _library.LIBRARIES["cpu"].loaded:
        with pytest.raises(RuntimeError, match=f"spec_kernels::merge_states: {name}: expected"):
            torch.ops.spec_kernels.merge_states.default(o, s, r, t)
    assert out.isnan().all() and lse.isnan().all()
    assert_same_bits(outs, kept[0])
    assert_same_bits(lses, kept[1])


def test_not_a_tensor(backend):
    with pytest.raises(ValueError, match="spec_kernels::merge_states: outs: expected a tensor"):
        merge_states([1.0], torch.zeros(1), backend=backend)


def test_triton_wants_tensors_that_have_values():
    pytest.importorskip("triton")
    outs, lses = torch.ones(2, 1, 1, 1, 4, device="meta"), torch.ones(2, 1, 1, 1, device="meta")
    with pytest.raises(ValueError, match="backend: expected tensors on cuda .*, got meta"):
        merge_states(outs, lses, backend="triton")


def build(element, dim, arch):
    """Registers and so on of one build; for a process that has not chosen the interpreter."""
    kernels = importlib.import_module("spec_kernels.ops.merge_states.triton")
    kernel = kernels.merge_states_kernel
    constants = {"DIM": dim, "ROWS": kernels._ROWS, "BLOCK_D": kernels._BLOCK_D}
    types = {"outs": f"*{element}", "lses": "*fp32", "out": f"*{element}", "lse": "*fp32"}
    divisible = [*types]
    types |= {n: "i32" for n in kernel.arg_names if n not in types and n not in constants}
    compile_kernel = importlib.import_module("triton_budgets").compile_kernel
    return compile_kernel(kernel, types, constants, divisible, arch, 4, 3, enable_fp_fusion=False)


def test_triton_builds_within_its_budget():
    pytest.importorskip("triton")
    here = Path(__file__).resolve().parent
    folders = (here.parents[1], here.parent, here)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    env.pop("TRITON_INTERPRET", None)
    code = (
        "import json, test_merge_states as t\n"
        "kinds = [(e, d, a) for e in ('bf16', 'fp32') for d in (512, 576) for a in (80, 90, 120)]\n"
        "print(json.dumps([[*k, t.build(*k)] for k in kinds]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 12
    for *kind, usage in found:
        assert usage["spills"] == 0, (kind, usage)
        assert usage["registers"] <= 128 and usage["shared"] <= 1024, (kind, usage)
