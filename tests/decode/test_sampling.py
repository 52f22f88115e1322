from __future__ import annotations

import pytest
import torch

from spec_kernels.decode.sampling import SamplingOptions, SamplingParams, SamplingTensors


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
        ({"allowed": []}, "allowed: expected at least one id, or None"),
        ({"temperature": "1"}, "temperature: expected a finite number >= 0, got '1'"),
        ({"temperature": None}, "temperature: expected a finite number >= 0, got None"),
        ({"top_k": 2.5}, "top_k: expected an integer >= 0 of 64 bits, got 2.5"),
        ({"seed": 1.5}, "seed: expected a 64-bit integer, got 1.5"),
        # 0 in float32, which the op would refuse for the whole batch.
        ({"top_p": 1e-300}, r"top_p: expected a number in \(0, 1\], from 1.2e-38 on, got 1e-300"),
        ({"allowed": [1.5]}, r"allowed: expected integers, got \[1.5\]"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias: expected integers, got {1.5: 1.0}"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias: expected numbers of float32 by id"),
        ({"logit_bias": {5: 1e39}}, "logit_bias: expected numbers of float32 by id"),
        ({"logit_bias": {5: "x"}}, "logit_bias: expected numbers of float32 by id"),
        ({"logit_bias": 3}, "logit_bias: expected numbers of float32 by id, got 3"),
    ],
)
def test_parameters_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**change)


def test_ids_are_kept_as_they_were():
    """They are checked when a request comes, and read when it joins."""
    biases, allowed = {3: float("-inf")}, [1, 2]
    params = SamplingParams(logit_bias=biases, allowed=allowed)
    biases[10**6] = 1.0
    allowed.append(-1)
    assert params.logit_bias == {3: float("-inf")} and list(params.allowed) == [1, 2]


def test_tensors_hold_each_requests_parameters():
    tensors = SamplingTensors.allocate(3, 40, "cpu")
    everything = tensors.arguments(4)
    tensors.set(1, SamplingParams(0.7, 5, 0.9, 0.1, 42))
    assert everything["temperature"].tolist() == pytest.approx([0.0, 0.7, 0.0])
    assert everything["top_k"].tolist() == [0, 5, 0]
    assert everything["top_p"].tolist() == pytest.approx([1.0, 0.9, 1.0])
    assert everything["seeds"].tolist() == [0, 42, 0]
    assert everything["seeds"].dtype == torch.int64
    assert tensors.rows(slice(1, 2)).arguments(4)["min_p"].tolist() == pytest.approx([0.1])
    tensors.set(1, SamplingParams())
    # The same storage: a captured graph that read it while greedy samples when the values change.
    assert everything["temperature"].tolist() == [0.0, 0.0, 0.0]
    assert everything["logit_bias"] is None and everything["allowed"] is None


def test_biases_and_allowed_ids_are_a_requests_own_and_hold_at_every_node():
    options = SamplingOptions(logit_bias=True, allowed=True, typical=(0.3, 0.5))
    tensors = SamplingTensors.allocate(2, 70, "cpu", options)
    everything = tensors.arguments(3)
    assert everything["typical"] == (0.3, 0.5)
    tensors.set(1, SamplingParams(logit_bias={3: -1.5, 69: 2.0}, allowed=[0, 31, 32, 69]))
    bias, words = everything["logit_bias"], everything["allowed"]
    assert bias[1].nonzero().flatten().tolist() == [3, 69] and bias[1, 69] == 2
    assert not bias[0].any() and (words[0] == -1).all()
    assert words.shape == (2, 3, 3)
    for node in range(3):
        held = words[1, node].tolist()
        assert [i for i in range(96) if held[i // 32] >> (i % 32) & 1] == [0, 31, 32, 69]
    tensors.set(1, SamplingParams())
    assert not bias.any() and (words == -1).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"logit_bias": {1: 1.0}},
            r"logit_bias: expected none, .*SamplingOptions\(logit_bias=True\)",
        ),
        ({"allowed": [1]}, r"allowed: expected none, .*SamplingOptions\(allowed=True\)"),
    ],
)
def test_what_there_is_no_room_for_is_refused(change, message):
    tensors = SamplingTensors.allocate(1, 40, "cpu")
    with pytest.raises(ValueError, match=message):
        tensors.check(SamplingParams(**change), 40)


@pytest.mark.parametrize("change", [{"logit_bias": {40: 1.0}}, {"allowed": [1, -1]}])
def test_ids_outside_the_vocabulary_are_refused(change):
    options = SamplingOptions(logit_bias=True, allowed=True)
    tensors = SamplingTensors.allocate(1, 40, "cpu", options)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 40\), got"):
        tensors.check(SamplingParams(**change), 40)


@pytest.mark.parametrize("typical", [(0.0, 0.5), (1.1, 0.5), (0.3, 0.0), (0.3, float("inf"))])
def test_typical_acceptance_out_of_range_is_refused(typical):
    with pytest.raises(ValueError, match=r"typical: expected epsilon in \(0, 1\]"):
        SamplingOptions(typical=typical)
