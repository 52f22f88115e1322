"""The differentiable target: routing, grouped products, cached steps, names that load back."""

import pytest
import torch
import torch.nn.functional as F

from spec_kernels.training import model as m


@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 0], [130, 1, 300], [0, 200, 0], [128, 128, 7]])
def test_grouped_products_equal_a_loop(sizes):
    torch.manual_seed(0)
    counts = torch.tensor(sizes)
    x = torch.randn(sum(sizes), 6, dtype=torch.double, requires_grad=True)
    weight = torch.randn(3, 4, 6, dtype=torch.double, requires_grad=True)
    out = m.grouped_linear(x, weight, counts)
    expected = torch.cat([rows @ w.t() for rows, w in zip(x.split(sizes), weight, strict=True)])
    torch.testing.assert_close(out, expected)
    seed = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, weight), seed)
    for got, want in zip(ours, torch.autograd.grad(expected, (x, weight), seed), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_blocked_attention_equals_a_masked_softmax(length):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, length, 8, dtype=torch.double).unbind()
    v = torch.randn(2, 3, length, 5, dtype=torch.double)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    got = m.causal_attention(q, k, v, 0.3)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_moe_equals_a_loop_over_experts(tiny):
    torch.manual_seed(0)
    moe = m.MoE(tiny, 1.0)
    moe.correction_bias.copy_(torch.tensor([0.5, -0.5, 0.2, 0.0]))
    x = torch.randn(2, 7, tiny.hidden_size)
    out, counts = moe(x)
    assert counts.sum() == 2 * 7 * tiny.num_experts_per_tok
    for row, got in zip(x.flatten(0, 1), out.flatten(0, 1), strict=True):
        scores = torch.sigmoid(moe.router @ row)
        chosen = (scores + moe.correction_bias).topk(2).indices
        expected = moe.shared_experts(row)
        for expert in chosen:
            gate, up = (moe.gate_up[expert] @ row).chunk(2)
            weight = scores[expert] / scores[chosen].sum() * tiny.routed_scaling_factor
            expected = expected + weight * (moe.down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(got, expected)


def test_balance_moves_the_bias_against_the_load(tiny):
    moe = m.MoE(tiny, 1.0)
    moe.balance(torch.tensor([10, 2, 4, 4]), 0.01)
    torch.testing.assert_close(moe.correction_bias, torch.tensor([-0.01, 0.01, 0.01, 0.01]))


def test_steps_through_the_cache_equal_the_dense_pass(tiny):
    torch.manual_seed(0)
    model = m.Target(tiny, torch.float32).eval()
    tokens = torch.randint(tiny.vocab_size, (3, 12))
    dense, captured, loads = model(tokens, (0, 1, 4))
    assert captured.shape == (3, 12, 3 * tiny.hidden_size) and len(loads) == 3
    cache = model.new_cache(3, 12)
    torch.testing.assert_close(model.step(tokens[:, :5], cache), dense[:, 4], atol=1e-5, rtol=1e-4)
    for i in range(5, 12):
        got = model.step(tokens[:, i : i + 1], cache)
        torch.testing.assert_close(got, dense[:, i], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="step: tokens: expected 1 a row"):
        model.step(tokens[:, :2], cache)


def test_captured_streams_enter_their_layers(tiny):
    torch.manual_seed(0)
    model = m.Target(tiny, torch.float32).eval()
    tokens = torch.randint(tiny.vocab_size, (1, 6))
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits, captured, _ = model(tokens, (0, 2, 4))
    first, second, last = captured.chunk(3, dim=-1)
    assert torch.equal(first, seen[0]) and torch.equal(second, seen[2])
    torch.testing.assert_close(model.lm_head(model.norm(last)), logits)


def test_published_names_load_back(tiny):
    torch.manual_seed(0)
    model = m.Target(tiny, torch.float32)
    for layer in model.layers[1:]:
        layer.mlp.correction_bias.normal_()
    state = m.published_state(model)
    prefix = "model.layers.1."
    shapes = {
        "model.embed_tokens.weight": (300, 32),
        prefix + "self_attn.q_a_proj.weight": (16, 32),
        prefix + "self_attn.q_a_layernorm.weight": (16,),
        prefix + "self_attn.kv_a_proj_with_mqa.weight": (20, 32),
        prefix + "self_attn.kv_b_proj.weight": (40, 16),
        prefix + "mlp.gate.weight": (4, 32),
        prefix + "mlp.gate.e_score_correction_bias": (4,),
        prefix + "mlp.experts.3.gate_proj.weight": (16, 32),
        prefix + "mlp.experts.3.down_proj.weight": (32, 16),
        prefix + "mlp.shared_experts.up_proj.weight": (16, 32),
        "model.layers.0.mlp.gate_proj.weight": (48, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (300, 32),
    }
    for name, shape in shapes.items():
        assert tuple(state[name].shape) == shape, name
    for name, value in state.items():
        is_bias = name.endswith("e_score_correction_bias")
        assert value.dtype == (torch.float32 if is_bias else torch.bfloat16), name

    other = m.Target(tiny, torch.float32)
    m.load_published(other, state)
    again = m.published_state(other)
    assert all(torch.equal(again[name], value) for name, value in state.items())
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-2, rtol=1e-2)

    missing = {name: value for name, value in state.items() if "experts.2.up" not in name}
    with pytest.raises(ValueError, match="missing.*experts.2.up_proj"):
        m.load_published(other, missing)
    with pytest.raises(ValueError, match="left over.*extra"):
        m.load_published(other, state | {"extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"model.norm.weight: expected \(32,\), got \(31,\)"):
        m.load_published(other, state | {"model.norm.weight": torch.zeros(31)})
