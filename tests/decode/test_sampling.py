from __future__ import annotations

import pytest
import torch

from spec_kernels.decode.sampling import SamplingParams, SamplingTensors


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
