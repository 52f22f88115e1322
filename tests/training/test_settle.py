"""The phase against loops: what is repeated, what is penalised, and that it trains."""

import json
import math

import numpy as np
import pytest
import torch

from spec_kernels.training import loop, settle, target
from spec_kernels.training.evaluate import distinct_ngrams


def test_every_fourth_window_repeats_one_sentence():
    ids = np.arange(4000, dtype=np.uint16)
    repeats = settle.Repeats(ids, batch=8, context=64, seed=1)
    batch = repeats.at(0)
    assert batch.shape == (8, 67) and torch.equal(batch, repeats.at(0))
    for row, (second, period) in enumerate(batch[:, -2:].tolist()):
        window = batch[row, :-2]
        if row % 4 != 1:
            assert second == 0 and torch.equal(window.diff(), torch.ones(64, dtype=torch.long))
            continue
        assert settle._SHORTEST <= period <= 16 and second >= period
        assert torch.equal(window[second:], window[second - period : -period])
        assert torch.equal(window[:second].diff(), torch.ones(second - 1, dtype=torch.long))


def test_every_fourth_window_begins_with_an_own_text():
    ids = np.arange(4000, dtype=np.uint16)
    own = np.full((5, 40), 7, dtype=np.uint16)
    batch = settle.Repeats(ids, batch=8, context=64, seed=1, own=own, prompt_tokens=10).at(0)
    for row in (3, 7):
        assert batch[row, -2:].tolist() == [-10, 40]
        assert (batch[row, :40] == 7).all()
        assert torch.equal(batch[row, 40:-2].diff(), torch.ones(24, dtype=torch.long))
    with pytest.raises(ValueError, match="own: expected texts of at most 32 tokens, got 40"):
        settle.Repeats(ids, batch=8, context=32, seed=1, own=own)


def test_repeated_ngrams_by_hand():
    tokens = torch.tensor([[1, 2, 1, 2, 1, 2, 3, 1, 2, 3]])
    first, last = torch.tensor([[0]]), torch.tensor([[10]])
    # Bigrams 12 21 12 21 12 23 31 12 23, each at its last token.
    expected = [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert settle.ends_repeated_ngram(tokens, first, last, 2)[0].int().tolist() == expected
    # The text is tokens 3..8 alone: 21 12 23 31 12.
    expected = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    part = settle.ends_repeated_ngram(tokens, first + 3, last - 1, 2)
    assert part[0].int().tolist() == expected


def _logits(p, batch):
    """Logits over three tokens that give batch[:, 1:] the probabilities p."""
    logits = torch.empty(*p.shape, 3)
    for row in range(p.shape[0]):
        for column in range(p.shape[1]):
            logits[row, column] = torch.log((1 - p[row, column]) / 2)
            logits[row, column, batch[row, column + 1]] = torch.log(p[row, column])
    return logits


def test_repetition_loss_by_hand():
    # One ordinary window, and one in which the token 1 (index 2) comes again at 3 and 4.
    batch = torch.tensor([[0, 1, 2, 0, 2, 0, 0], [2, 0, 1, 1, 1, 3, 1]])
    p = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.3, 0.4, 0.5, 0.6]])
    likelihood, penalty, report = settle.repetition_loss(_logits(p, batch), batch)
    assert report["copied_p"].item() == pytest.approx(0.55)
    ordinary = [0.2] * 4 + [0.3, 0.4]
    assert likelihood.item() == pytest.approx(-sum(map(math.log, ordinary)) / 6)
    excess = [0.5 - 0.5 * 0.4, 0.6 - 0.5 * 0.5]
    assert penalty.item() == pytest.approx(-sum(math.log(1 - e) for e in excess) / 2)


def test_unlikelihood_by_hand():
    # An own text of 8 tokens with a prompt of 2, then 1 corpus token: 1111 ends at 5, 6 and 7.
    batch = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 2, -2, 8]])
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]])
    likelihood, penalty, report = settle.repetition_loss(_logits(p, batch), batch)
    assert likelihood.item() == pytest.approx(-math.log(0.8))
    assert penalty.item() == pytest.approx(-(math.log(0.4) + math.log(0.3)) / 2)
    assert report["own_repeated_p"].item() == pytest.approx(0.65)
    assert report["copied_p"].item() == 0


def test_settling_lowers_repetition(out, tiny):
    options = {"config": tiny, "use_compile": False, "compute_dtype": torch.float32}
    schedule = loop.Schedule(1e-2, num_steps=10)
    target.train(out, schedule, batch=4, context=32, **options)
    probability = {}
    for weight in (0.0, 4.0):
        schedule = loop.Schedule(1e-2, num_steps=50)
        settle.train(out, schedule, batch=4, context=32, weight=weight, **options)
        lines = [json.loads(line) for line in (out / "settle.jsonl").read_text().splitlines()]
        probability[weight] = [line for line in lines if "copied_p" in line][-1]["copied_p"]
        assert (out / "settle.safetensors").is_file() and "held_out_loss" in lines[-1]
    assert probability[4.0] < 0.7 * probability[0.0]


def test_distinct_ngrams_by_hand():
    assert distinct_ngrams([1, 2, 3, 4, 5, 6]) == 1.0
    assert distinct_ngrams([1, 1, 1, 1, 1, 1]) == pytest.approx(1 / 3)
    assert distinct_ngrams([1, 2, 1, 2, 1, 2, 1]) == 0.5
    assert distinct_ngrams([1, 2]) == 1.0
