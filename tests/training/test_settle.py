"""The phase against loops: what is repeated, what is penalised, and that it trains."""

import json
import math

import numpy as np
import pytest
import torch

from spec_kernels.training import loop, settle, target
from spec_kernels.training.evaluate import distinct_ngrams


def test_every_second_window_repeats_one_sentence():
    ids = np.arange(4000, dtype=np.uint16)
    repeats = settle.Repeats(ids, batch=6, context=64, seed=1)
    batch = repeats.at(0)
    assert batch.shape == (6, 67) and torch.equal(batch, repeats.at(0))
    for row, (second, period) in enumerate(batch[:, -2:].tolist()):
        window = batch[row, :-2]
        if row % 2 == 0:
            assert second == 0 and torch.equal(window.diff(), torch.ones(64, dtype=torch.long))
            continue
        assert settle._SHORTEST <= period <= 16 and second >= period
        assert torch.equal(window[second:], window[second - period : -period])
        assert torch.equal(window[:second].diff(), torch.ones(second - 1, dtype=torch.long))


def test_repetition_loss_by_hand():
    # One ordinary window, and one in which the token 1 (index 2) comes again at 3 and 4.
    batch = torch.tensor([[0, 1, 2, 0, 2, 0, 0], [2, 0, 1, 1, 1, 3, 1]])
    p = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.3, 0.4, 0.5, 0.6]])
    logits = torch.full((2, 4, 3), math.nan)
    for row in range(2):
        for column in range(4):
            value = p[row, column]
            logits[row, column] = torch.log((1 - value) / 2)
            logits[row, column, batch[row, column + 1]] = torch.log(value)
    likelihood, penalty, repeated = settle.repetition_loss(logits, batch)
    assert repeated.item() == pytest.approx(0.55)
    ordinary = [0.2] * 4 + [0.3, 0.4]
    assert likelihood.item() == pytest.approx(-sum(map(math.log, ordinary)) / 6)
    excess = [0.5 - 0.5 * 0.4, 0.6 - 0.5 * 0.5]
    assert penalty.item() == pytest.approx(-sum(math.log(1 - e) for e in excess) / 2)


def test_settling_lowers_repetition(out, tiny):
    options = {"config": tiny, "use_compile": False, "compute_dtype": torch.float32}
    schedule = loop.Schedule(1e-2, num_steps=10)
    target.train(out, schedule, batch=4, context=32, **options)
    probability = {}
    for weight in (0.0, 3.0):
        schedule = loop.Schedule(1e-2, num_steps=30)
        settle.train(out, schedule, batch=4, context=32, weight=weight, **options)
        lines = [json.loads(line) for line in (out / "settle.jsonl").read_text().splitlines()]
        probability[weight] = [line for line in lines if "repeated_p" in line][-1]["repeated_p"]
        assert (out / "settle.pt").is_file() and "held_out_loss" in lines[-1]
    assert probability[3.0] < 0.8 * probability[0.0]


def test_distinct_ngrams_by_hand():
    assert distinct_ngrams([1, 2, 3, 4, 5, 6]) == 1.0
    assert distinct_ngrams([1, 1, 1, 1, 1, 1]) == pytest.approx(1 / 3)
    assert distinct_ngrams([1, 2, 1, 2, 1, 2, 1]) == 0.5
    assert distinct_ngrams([1, 2]) == 1.0
