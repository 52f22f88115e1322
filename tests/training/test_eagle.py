"""The drafter's TTT pass against a plain causal pass, and against drafting step by step."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from spec_kernels.models import rope
from spec_kernels.training import eagle
from spec_kernels.training.drafter import bundled_config, start_from_target
from spec_kernels.training.model import Target


@pytest.fixture
def config(tiny):
    return dataclasses.replace(
        bundled_config(tiny), head_dim=8, num_key_value_heads=1, intermediate_size=40
    )


@pytest.fixture
def drafter(config):
    torch.manual_seed(0)
    ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    return eagle.Drafter(config, ids, torch.float32).eval()


def _rows(drafter, embedded, feature, positions, visible):
    """A plain pass of the layer over rows whose keys ``visible [R, R]`` says."""
    c, layer, attn = drafter.config, drafter.midlayer, drafter.midlayer.self_attn
    x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(feature)), -1)
    cos, sin = rope.cos_sin(positions, drafter.frequencies)

    def heads(projected):
        return projected.unflatten(-1, (-1, c.head_dim)).transpose(0, 1)

    q = rope.apply_half_split(heads(attn.q_proj(x)), cos, sin)
    k = rope.apply_half_split(heads(attn.k_proj(x)), cos, sin)
    v = heads(attn.v_proj(x))
    k, v = (t.expand(c.num_attention_heads, -1, -1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, visible)
    r = feature + attn.o_proj(out.transpose(0, 1).flatten(1))
    return r + layer.mlp(layer.post_attention_layernorm(r))


def test_step_0_is_a_plain_causal_pass(drafter, config):
    torch.manual_seed(1)
    tokens = torch.randint(config.vocab_size, (1, 70))
    captured = torch.randn(1, 70, 3 * config.hidden_size)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    (logits,) = drafter(tokens, captured, embedding, 1)
    assert logits.shape == (1, 69, config.draft_vocab_size)
    r = _rows(
        drafter,
        embedding[tokens[0, 1:]],
        drafter.fc(captured[0, :69]),
        torch.arange(69),
        torch.ones(69, 69, dtype=torch.bool).tril(),
    )
    expected = drafter.lm_head(drafter.norm(r))
    torch.testing.assert_close(logits[0], expected, atol=1e-5, rtol=1e-4)


def test_later_steps_equal_drafting_a_chain_from_each_row(drafter, config):
    """Row t of step i = the i-th draft of a chain from committed row t, all tokens forced."""
    torch.manual_seed(2)
    length, num_steps = 12, 4
    tokens = torch.randint(config.vocab_size, (1, length))
    captured = torch.randn(1, length, 3 * config.hidden_size)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    logits = drafter(tokens, captured, embedding, num_steps)
    for t in range(length - num_steps):
        # Committed rows 0..t carry target features; each draft appends a row with the last output.
        features = drafter.fc(captured[0, : t + 1])
        for i in range(num_steps):
            rows = len(features)
            r = _rows(
                drafter,
                embedding[tokens[0, 1 : 1 + rows]],
                features,
                torch.arange(rows),
                torch.ones(rows, rows, dtype=torch.bool).tril(),
            )
            expected = drafter.lm_head(drafter.norm(r[-1]))
            torch.testing.assert_close(logits[i][0, t], expected, atol=1e-5, rtol=1e-4)
            features = torch.cat((features, r[-1:]))


def test_case43_d2t_is_an_offset(drafter, config):
    ids = drafter.draft_ids()
    assert torch.equal(torch.arange(config.draft_vocab_size) + drafter.d2t, ids)
    assert drafter.t2d.sum() == config.draft_vocab_size and drafter.t2d[ids].all()
    identity = dataclasses.replace(config, draft_vocab_size=config.vocab_size)
    full = eagle.Drafter(identity, torch.arange(config.vocab_size))
    assert not full.d2t.any()


def test_published_names(drafter):
    names = {
        "fc.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.hidden_norm.weight",
        *(f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"),
        "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    }
    state = eagle.published_state(drafter)
    assert state.keys() == names
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool
    assert state["fc.weight"].dtype == torch.bfloat16


def test_bad_drafters(config, drafter):
    with pytest.raises(ValueError, match="draft_ids: expected 225 ascending ids"):
        eagle.Drafter(config, torch.arange(224))
    with pytest.raises(ValueError, match="draft_ids"):
        eagle.Drafter(config, torch.arange(225).flip(0))
    with pytest.raises(ValueError, match="norm_output: expected false"):
        eagle.Drafter(dataclasses.replace(config, norm_output=True), torch.arange(225))
    with pytest.raises(ValueError, match="num_steps: expected fewer than 3 tokens, got 3"):
        drafter(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, 96), torch.zeros(300, 32), 3)


def test_accuracies_by_hand():
    right = torch.tensor([[[1, 1, 1, 0]], [[1, 0, 1, 1]], [[1, 1, 0, 1]]], dtype=torch.bool)
    full, conditional, predicted = eagle.accuracies(right)
    assert full == [0.75, 0.5, 0.25]
    assert conditional == pytest.approx([0.75, 2 / 3, 0.5])
    assert predicted == 2.5
    full, _, _ = eagle.accuracies(right, torch.tensor([[True, True, False, False]]))
    assert full == [1.0, 0.5, 0.5]


def test_replay_by_hand():
    # Accepted from rows 0..7: 2 0 1 0 0 2 0 0; cycles start at rows 0, 3, 4, 5 and 8 is the end.
    right = torch.tensor([[1, 0, 1, 0, 0, 1, 0, 0], [1, 1, 0, 1, 0, 1, 0, 1]], dtype=torch.bool)
    assert eagle.replay(right, 0, 8) == (8, 4)
    assert eagle.replay(right[:, :1], 0, 1) == (3, 1)


def test_drafter_starts_from_the_target_with_features_of_unit_size(drafter, tiny):
    torch.manual_seed(3)
    target = Target(tiny, torch.float32).eval()
    layers = drafter.config.captured_layers(tiny.num_hidden_layers)
    tokens = torch.randint(tiny.vocab_size, (4, 30))
    with torch.no_grad():
        target.embed_tokens.mul_(40.0)
        start_from_target(drafter, target, layers, tokens)
        feature = drafter.fc(target(tokens, layers)[1])
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[drafter.draft_ids()])
    assert 0.5 < feature.square().mean().sqrt() < 2.0
