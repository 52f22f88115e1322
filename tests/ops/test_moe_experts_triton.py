"""The Triton kernels of moe_experts: values, bits, launches, what they read and what they count.

What the other two suites ask of every backend is asked here too, by the same functions where these
are small enough for Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import os

import pytest
import torch

pytest.importorskip("triton")

import test_moe_experts as plain_suite
import test_moe_experts_int4 as int4_suite
from test_moe_experts import (  # noqa: F401  collected here for this backend
    make,
    test_a_bad_row_stays_alone,
    test_all_logits_nan,
    test_dense_layer,
    test_every_second_expert,
    test_groups,
    test_groups_without_experts_are_refused,
    test_nan_logits_are_chosen_last,
    test_out_may_be_x,
    test_out_stands_apart,
    test_ranks_sum_to_the_whole,
    test_router_weight_in_float32,
    test_scaling_and_normalization,
    test_strided_operands,
    test_ties_go_to_the_lower_id,
    test_top_k_zero_leaves_the_experts_out,
    test_without_bias_and_shared_expert,
)
from test_moe_experts_int4 import (  # noqa: F401
    test_case_42_offset_binary,
    test_case_45_shared_expert_of_another_width,
    test_experts_that_nobody_chose_are_not_read,
)
from test_moe_experts_int4 import test_every_second_expert as test_every_second_int4_expert  # noqa: F401
from test_moe_experts_int4 import test_out_may_be_x as test_int4_out_may_be_x  # noqa: F401
from test_moe_experts_int4 import test_out_stands_apart as test_int4_out_stands_apart  # noqa: F401
from test_moe_experts_int4 import test_strided_operands as test_int4_strided_operands  # noqa: F401

from spec_kernels.ops import moe_experts
from spec_kernels.ops.moe_experts import router_topk
from spec_kernels.testing import graph_safe, interpreter
from spec_kernels.testing.compare import assert_same_bits, poisoned

BACKENDS = ("triton",)
# T, H, I, Is, E, top_k: rows by pair and by expert, an expert of more rows than a tile has, tails
# of every tile, several splits of the router's depth.
SHAPES = [
    (1, 192, 12, 12, 16, 4),
    (0, 32, 8, 8, 4, 2),
    (3, 7, 1, 1, 1, 1),
    (5, 33, 13, 40, 5, 5),
    (37, 66, 17, 9, 4, 2),
    (2, 2051, 5, 3, 3, 2),
]
# And the groups of both matrices.
INT4_SHAPES = [
    (1, 64, 32, 12, 4, 2, 32, 32),
    (5, 96, 64, 40, 5, 5, 32, 32),
    (20, 160, 32, 7, 2, 1, 32, 32),
    (3, 192, 96, 33, 6, 3, 96, 96),
    (2, 1088, 64, 8, 2, 2, 1088, 64),
]


@pytest.fixture
def kernels():
    return importlib.import_module("spec_kernels.ops.moe_experts.triton")


@pytest.fixture
def interpreted():
    """For what only the interpreter can tell."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles in this process")
    interpreter.speed_up()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(backend, dtype, shape):
    plain_suite.check_accuracy(backend, dtype, [shape])


@pytest.mark.parametrize("shape", INT4_SHAPES, ids=str)
def test_int4_against_float64(backend, dtype, shape):
    int4_suite.check_accuracy(backend, dtype, [shape])


def in_int4(*shape, dtype):
    return int4_suite.make(*shape, dtype)


def in_full(*shape, dtype):
    return make(*shape, dtype)


KINDS = pytest.mark.parametrize("kind", [in_full, in_int4], ids=["full", "int4"])


@KINDS
def test_rows_do_not_depend_on_each_other(backend, dtype, kind):
    """Alone, in a batch, in another order; more rows an expert than a tile, pairs and experts."""
    a = kind(35, 96, 32, 12, 6, dtype=dtype)
    x = a.pop("x")
    whole = moe_experts(x, **a, top_k=2, backend=backend)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert_same_bits(moe_experts(x[order], **a, top_k=2, backend=backend), whole[order])
    for part in (slice(0, 1), slice(34, 35), slice(3, 6)):
        assert_same_bits(moe_experts(x[part], **a, top_k=2, backend=backend), whole[part])


def test_passes_do_not_show(backend, kernels, monkeypatch):
    """More rows than one pass takes."""
    a = make(11, 64, 12, 6, 8, torch.float32)
    want = moe_experts(**a, top_k=2, backend=backend)
    monkeypatch.setattr(kernels, "MAX_ROWS", 4)
    assert_same_bits(moe_experts(**a, top_k=2, backend=backend), want)
    moe_experts(**a, top_k=2, out=a["x"], backend=backend)
    assert_same_bits(a["x"], want)


def test_ids_of_several_chunks(backend, kernels, monkeypatch):
    """More pairs than a program compares at once, whose ranks go on from chunk to chunk."""
    a = make(23, 32, 8, 6, 3, torch.float32)
    few = make(5, 32, 8, 6, 24, torch.float32)
    want = [moe_experts(**b, top_k=3, backend=backend) for b in (a, few)]
    monkeypatch.setattr(kernels, "CHUNKS", (4,))
    got = [moe_experts(**b, top_k=3, backend=backend) for b in (a, few)]
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])


@KINDS
def test_weights_of_chosen_experts_are_read_once(interpreted, kind):
    """For all rows of their experts, up to the rows of a tile; others are not read at all."""
    a = kind(12, 128, 32, 16, 20, dtype=torch.bfloat16)
    num = len(router_topk(a["x"], a["router_weight"], a["correction_bias"], 2)[0].unique())
    assert num < 20
    names = [n for n in a if n.startswith("w_")]
    shared = ("shared_gate_up", "shared_down", "router_weight")
    with interpreter.count_reads(*(a[n] for n in (*names, *shared))) as reads:
        moe_experts(**a, top_k=2, backend="triton")
    got = [r.num_elements for r in reads]
    assert got == [num * a[n][0].numel() for n in names] + [a[n].numel() for n in shared]


@KINDS
def test_nothing_outside_the_arguments_is_read(interpreted, kind):
    a = kind(5, 96, 32, 12, 6, dtype=torch.bfloat16)
    out = poisoned(5, 96, dtype=torch.bfloat16)
    with interpreter.only_reads(*a.values(), out):
        moe_experts(**a, top_k=2, out=out, backend="triton")


class Notes:
    """Stands for a kernel: notes its launches."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def __getitem__(self, grid):
        def launch(*args, **constants):
            numbers = [v for v in args if not isinstance(v, torch.Tensor)]
            self.seen.append((self.name, grid, numbers, constants))

        return launch


@contextlib.contextmanager
def noted(kernels):
    names = ("scores_kernel", "choose_kernel", "gate_up_kernel", "down_kernel")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(kernels, name, Notes(name, seen))
        yield seen


@KINDS
def test_launches_do_not_depend_on_data(interpreted, kernels, kind):
    """What a graph would record, of values that choose one expert, or others in every row."""
    a = kind(9, 64, 32, 12, 6, dtype=torch.bfloat16)
    out = torch.empty_like(a["x"])
    runs = []

    def fill(run):
        for t in a.values():
            if t.dtype.is_floating_point:
                t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(run)))

    def call():
        with noted(kernels) as seen:
            moe_experts(**a, top_k=2, out=out, backend="triton")
        runs.append(seen)

    graph_safe.check(call, (a, out), fill=fill)
    assert all(run == runs[0] for run in runs)
    assert [name for name, *_ in runs[0]] == [
        "scores_kernel",
        "choose_kernel",
        "gate_up_kernel",
        "down_kernel",
    ]


def test_endless_experts_are_refused(interpreted):
    """Views that repeat an element, which no scratch could serve, and counts beyond 32 bits."""
    x = torch.ones(16, 1)
    for what, num_experts, inner in (("router_weight", 2**60, 1), ("w_down", 1, 2**24 + 1)):
        with pytest.raises(ValueError, match=f"{what}: expected at most"):
            moe_experts(
                x,
                torch.ones(1, 1).expand(num_experts, 1),
                torch.ones(1, 1, 1).expand(num_experts, 2 * inner, 1),
                torch.ones(1, 1, inner).expand(num_experts, 1, inner),
                top_k=1,
                backend="triton",
            )


def test_a_dense_layer_is_two_launches(interpreted, kernels):
    a = make(6, 40, 0, 30, 0)
    with noted(kernels) as seen:
        moe_experts(**a, top_k=0, backend="triton")
    assert [name for name, *_ in seen] == ["gate_up_kernel", "down_kernel"]
