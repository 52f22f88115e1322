from __future__ import annotations

import pytest
import torch

from spec_kernels.decode.sampling import SamplingParams, SamplingTensors, draft_coins, draw
from spec_kernels.ops.tree_verify import Purpose
from spec_kernels.ops.tree_verify.reference import coin


@pytest.mark.parametrize(
    "change, message",
    [
        ({"temperature": -0.1}, "temperature: expected a finite number >= 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 2**63}, "seed: expected a 64-bit integer"),
    ],
)
def test_parameters_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**change)


def test_tensors_hold_each_requests_parameters():
    tensors = SamplingTensors(3, "cpu")
    tensors.set(1, SamplingParams(0.7, 5, 0.9, 0.1, 42))
    everything = tensors.arguments()
    assert everything["temperature"].tolist() == pytest.approx([0.0, 0.7, 0.0])
    assert everything["top_k"].tolist() == [0, 5, 0]
    assert everything["seeds"].tolist() == [0, 42, 0]
    assert everything["seeds"].dtype == torch.int64
    assert tensors.arguments(1)["min_p"].tolist() == pytest.approx([0.1])
    tensors.set(1, SamplingParams())
    # The same storage: a captured graph that read it while greedy samples when the values change.
    assert everything["temperature"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, -(2**63)])
def test_draft_coins_are_those_of_the_counter(seed):
    positions = range(2**32 - 2, 2**32 + 3)
    coins = draft_coins(seed, positions, 3)
    assert coins.shape == (5, 3)
    for i, position in enumerate(positions):
        for ordinal in range(3):
            bits = coin(seed, position, Purpose.DRAFT, ordinal)
            assert int(coins[i, ordinal] * 2**24) == bits


def test_coins_are_laid_down_for_the_requests_positions():
    tensors = SamplingTensors(2, "cpu", num_positions=10, num_draws=2)
    assert tensors.any_greedy and not tensors.any_sampled
    tensors.set(1, SamplingParams(0.5, seed=9), range(4, 8))
    assert tensors.any_sampled and tensors.any_greedy
    assert tensors.coins[1, 4:8].equal(draft_coins(9, range(4, 8), 2))
    assert not tensors.coins[0].any() and not tensors.coins[1, 8:].any()
    tensors.set(0, SamplingParams(0.5), range(0, 2))
    assert not tensors.any_greedy
    tensors.set(0, SamplingParams())
    tensors.set(1, SamplingParams())
    assert not tensors.any_sampled


def test_draws_are_without_replacement_and_follow_q():
    """Every ordered pair, by a grid of coins: the shares are those of the textbook rule."""
    q = torch.tensor([0.5, 0.0, 0.3, 0.2])
    grid = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    coins = torch.cartesian_prod(grid, grid)
    pairs = draw(q.expand(len(coins), -1), coins)
    share = torch.zeros(4, 4)
    for first, second in pairs.tolist():
        share[first, second] += 1 / len(coins)
    for first in range(4):
        for second in range(4):
            exact = 0.0
            if first != second:
                exact = float(q[first] * q[second] / (1 - q[first]))
            assert share[first, second] == pytest.approx(exact, abs=6e-3), (first, second)
    assert not share[1].any() and not share[:, 1].any()


def test_extreme_coins_draw_what_is_possible():
    q = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    last = 1 - 2.0**-32
    for first, second in ((0.0, last), (last, 0.0), (0.5, 0.5)):
        drawn = draw(q, torch.tensor([[first, second, 0.5]], dtype=torch.float64))
        assert sorted(drawn[0, :2].tolist()) == [1, 2]
        assert 0 <= int(drawn[0, 2]) < 4  # nothing is left: any id, which counts as no draw
