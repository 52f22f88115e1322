"""Rotary embedding against closed forms."""

import math

import pytest
import torch

from spec_kernels.models import rope
from spec_kernels.models.config import RopeConfig

KIMI = RopeConfig(
    theta=50000.0,
    kind="yarn",
    factor=64.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def test_softmax_scale_of_kimi():
    assert rope.softmax_scale(KIMI, 192) == pytest.approx(0.144679, abs=1e-6)
    assert rope.attention_factor(KIMI) == 1.0


def test_softmax_scale_without_yarn_is_plain():
    assert rope.softmax_scale(RopeConfig(theta=10000.0), 64) == 0.125


def test_attention_factor_without_mscale_all_dim_is_the_yarn_term():
    config = RopeConfig(10000.0, "yarn", 16.0, 1024)
    assert rope.attention_factor(config) == pytest.approx(0.1 * math.log(16.0) + 1.0)
    assert rope.softmax_scale(config, 64) == 0.125


def test_plain_and_linear_frequencies():
    plain = rope.inverse_frequencies(RopeConfig(theta=10000.0), 8)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    linear = rope.inverse_frequencies(RopeConfig(10000.0, "linear", 4.0), 8)
    torch.testing.assert_close(linear, plain / 4.0)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    dim = 64
    plain = rope.inverse_frequencies(RopeConfig(theta=50000.0), dim)
    yarn = rope.inverse_frequencies(KIMI, dim)
    turns = plain * 4096 / (2 * math.pi)
    # The ramp's ends are rounded outwards to whole pairs: strictly beyond them nothing blends.
    fast, slow = turns > 32 * 50000 ** (2 / dim), turns < 50000 ** (-2 / dim)
    assert fast.any() and slow.any()
    torch.testing.assert_close(yarn[fast], plain[fast])
    torch.testing.assert_close(yarn[slow], plain[slow] / 64.0)
    share = (plain - yarn) / (plain - plain / 64.0)
    assert (share.diff() >= -1e-6).all()


def test_yarn_ramp_at_one_pair_by_hand():
    config = RopeConfig(10000.0, "yarn", 8.0, 512, 32.0, 1.0, truncate=False)
    dim = 16

    def pair(rotations):
        return dim * math.log(512 / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = pair(32.0), pair(1.0)
    share = (3 - low) / (high - low)
    plain = 10000.0 ** (-6 / dim)
    expected = plain * (1 - share) + plain / 8.0 * share
    assert rope.inverse_frequencies(config, dim)[3].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case44_position", [0, 1, 2047, 2048, 100_000])
def test_cos_sin_at_any_position(case44_position):
    frequencies = rope.inverse_frequencies(RopeConfig(theta=1e6), 8)
    cos, sin = rope.cos_sin(torch.tensor([[case44_position]]), frequencies, 2.0)
    assert cos.shape == (1, 1, 4) and cos.dtype == torch.float32
    for i, frequency in enumerate(frequencies.tolist()):
        angle = case44_position * frequency
        assert cos[0, 0, i].item() == pytest.approx(2 * math.cos(angle), abs=2e-2)
        assert sin[0, 0, i].item() == pytest.approx(2 * math.sin(angle), abs=2e-2)


def _as_complex_rotation(x, cos, sin, pairs):
    out = x.clone()
    for i, (a, b) in enumerate(pairs):
        turned = torch.complex(x[..., a], x[..., b]) * torch.complex(cos[..., i], sin[..., i])
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize(
    "apply, pairs",
    [
        (rope.apply_interleaved, [(0, 1), (2, 3), (4, 5)]),
        (rope.apply_half_split, [(0, 3), (1, 4), (2, 5)]),
    ],
)
def test_both_layouts_are_complex_rotations(apply, pairs):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 6)
    cos, sin = rope.cos_sin(torch.arange(5), rope.inverse_frequencies(RopeConfig(theta=10000.0), 6))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    expected = _as_complex_rotation(x, cos, sin, pairs)
    torch.testing.assert_close(apply(x, cos, sin), expected)
    half = apply(x.bfloat16(), cos, sin)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.05, rtol=0.02)


def test_products_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 16).double().unbind()
    frequencies = rope.inverse_frequencies(RopeConfig(theta=10000.0), 16)

    def product(apply, m, n):
        (cm, sm), (cn, sn) = (rope.cos_sin(torch.tensor(p), frequencies) for p in (m, n))
        return (apply(q, cm, sm) * apply(k, cn, sn)).sum().item()

    for apply in (rope.apply_interleaved, rope.apply_half_split):
        assert product(apply, 7, 3) == pytest.approx(product(apply, 104, 100), abs=1e-4)
        assert abs(product(apply, 7, 3) - product(apply, 7, 5)) > 1e-3


def test_odd_dimension_is_refused():
    with pytest.raises(ValueError, match="dim: expected an even number"):
        rope.inverse_frequencies(RopeConfig(theta=10000.0), 7)
