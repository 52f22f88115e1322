"""The target as a differentiable, dense pass over whole sequences (naive MLA), for training.

``published_state`` and ``load_published`` translate to and from the tensor names of DeepSeek-V3
checkpoints; inside, the experts of a layer are stacked so that they train as one tensor.

Master weights are float32; ``compute_dtype`` (bfloat16 in training, float32 in tests) is what the
matrix products and the residual stream run in.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_kernels.models import rope
from spec_kernels.models.config import TargetConfig

# Queries are taken in blocks, each against the keys up to its end: about half the arithmetic of a
# full mask. Smaller blocks waste less and launch more.
_QUERY_BLOCK = 64
_MASKED = -1e9


# A GEMM library compiles one kernel for each shape it meets, and expert loads differ at every step:
# row counts are rounded up to this, so that few shapes exist.
_ROW_STEP = 128


def _rounded(count: int) -> int:
    return -(-count // _ROW_STEP) * _ROW_STEP


@torch.library.custom_op("spec_kernels_training::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of x [M, K], sorted by group, times their group's weight [E, N, K]: [M, N].

    counts [E] int64 says how many rows each group has. One opaque op, because row counts that
    depend on data would otherwise break the compiled layer in two.
    """
    out = x.new_empty(x.shape[0], weight.shape[1])
    # From the last group to the first: a window rounded up reaches back into rows of earlier
    # groups, which are written after it.
    end = x.shape[0]
    for group, count in reversed(list(enumerate(counts.tolist()))):
        start = end - _rounded(count)
        if start >= 0:
            torch.mm(x[start:end], weight[group].t(), out=out[start:end])
        elif count:
            out[end - count : end] = torch.mm(x[end - count : end], weight[group].t())
        end -= count
    return out


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("spec_kernels_training::grouped_outer", mutates_args=())
def grouped_outer(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """For each group grad_rows^T @ x_rows: grad [M, N], x [M, K] -> [E, N, K]."""
    out = grad.new_zeros(counts.shape[0], grad.shape[1], x.shape[1])
    sizes = counts.tolist()
    padded = x.new_zeros(_rounded(max(sizes)), x.shape[1])
    padded_grad = grad.new_zeros(padded.shape[0], grad.shape[1])
    start = 0
    for group, count in enumerate(sizes):
        if count:
            size = _rounded(count)
            for buffer, rows in ((padded, x), (padded_grad, grad)):
                buffer[:count] = rows[start : start + count]
                buffer[count:size] = 0
            torch.mm(padded_grad[:size].t(), padded[:size], out=out[group])
        start += count
    return out


@grouped_outer.register_fake
def _(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return grad.new_empty(counts.shape[0], grad.shape[1], x.shape[1])


def _save_grouped(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx, grad: Tensor):
    x, weight, counts = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grouped_linear(grad, weight.transpose(1, 2).contiguous(), counts)
    return grad_x, grouped_outer(grad, x, counts), None


grouped_linear.register_autograd(_grouped_backward, setup_context=_save_grouped)


class _Permute(torch.autograd.Function):
    """x[order] whose backward is grad[inverse]: a gather both ways, never a scatter-add."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T with the float32 master weight rounded to x's dtype."""
    return F.linear(x, weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Linear(nn.Module):
    """No bias. ``scale`` multiplies the initial standard deviation 1 / sqrt(fan in)."""

    def __init__(self, num_out: int, num_in: int, scale: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) * (scale * num_in**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q, k [B, H, N, D], v [B, H, N, Dv] -> [B, H, N, Dv]; softmax in float32."""
    length = q.shape[2]
    outputs = []
    for start in range(0, length, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, length)
        scores = torch.matmul(q[:, :, start:end], k[:, :, :end].transpose(-1, -2)).float() * scale
        rows = torch.arange(start, end, device=q.device).unsqueeze(1)
        hidden = torch.arange(end, device=q.device) > rows
        weights = torch.softmax(scores.masked_fill(hidden, _MASKED), dim=-1).to(v.dtype)
        outputs.append(torch.matmul(weights, v[:, :, :end]))
    return torch.cat(outputs, dim=2)


class Attention(nn.Module):
    def __init__(self, config: TargetConfig, out_scale: float):
        super().__init__()
        self.config = config
        heads = config.num_attention_heads
        self.q_a_proj = Linear(config.q_lora_rank, config.hidden_size)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
        self.q_b_proj = Linear(heads * config.qk_head_dim, config.q_lora_rank)
        self.kv_a_proj_with_mqa = Linear(config.latent_dim, config.hidden_size)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps)
        self.kv_b_proj = Linear(
            heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank
        )
        self.o_proj = Linear(config.hidden_size, heads * config.v_head_dim, out_scale)
        self.scale = rope.softmax_scale(config.rope, config.qk_head_dim)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, hidden] -> q, k [B, H, N, qk_head_dim], v [B, H, N, v_head_dim]."""
        c, (batch, length, _) = self.config, x.shape
        heads = c.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, length, heads, c.qk_head_dim).transpose(1, 2)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, heads, -1)
        k_nope, v = kv.transpose(1, 2).split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        q_rope = rope.apply_interleaved(q_rope, cos, sin)
        k_rope = rope.apply_interleaved(k_rope, cos, sin).unsqueeze(1).expand(-1, heads, -1, -1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        return q, torch.cat((k_nope, k_rope), dim=-1), v

    def merge(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        return self.merge(causal_attention(q, k, v, self.scale))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, out_scale: float):
        super().__init__()
        self.gate_proj = Linear(intermediate, hidden)
        self.up_proj = Linear(intermediate, hidden)
        self.down_proj = Linear(hidden, intermediate, out_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Sigmoid scores; chosen by biased score, weighed by the unbiased one, normalised, scaled.

    The bias is not trained by gradient: ``balance`` moves it against each expert's load.
    """

    def __init__(self, config: TargetConfig, out_scale: float):
        super().__init__()
        if config.n_group != 1:
            raise ValueError(f"train: n_group: expected 1, got {config.n_group}")
        self.config = config
        experts, hidden, inner = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        self.router = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer("correction_bias", torch.zeros(experts))
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) * (out_scale * inner**-0.5))
        self.shared_experts = (
            MLP(hidden, config.shared_intermediate_size, out_scale)
            if config.n_shared_experts
            else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, N, hidden] -> (output, rows each expert got [E] int64)."""
        config, shape = self.config, x.shape
        x = x.flatten(0, 1)
        top_k = config.num_experts_per_tok
        scores = torch.sigmoid(F.linear(x.float(), self.router))
        chosen = torch.topk(scores.detach() + self.correction_bias, top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = (weights * config.routed_scaling_factor).to(x.dtype)

        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        inverse = torch.argsort(order)
        experts = torch.arange(config.n_routed_experts, device=x.device)
        counts = (flat.unsqueeze(1) == experts).sum(0)
        rows = x.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
        rows = _Permute.apply(rows, order, inverse)
        gate, up = grouped_linear(rows, self.gate_up.to(x.dtype), counts).chunk(2, dim=-1)
        rows = grouped_linear(F.silu(gate) * up, self.down.to(x.dtype), counts)
        rows = _Permute.apply(rows, inverse, order).unflatten(0, (-1, top_k))
        out = (rows * weights.unsqueeze(-1)).sum(1)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out.view(shape), counts

    @torch.no_grad()
    def balance(self, counts: Tensor, speed: float) -> None:
        """Auxiliary-loss-free balancing (arXiv 2408.15664): bias += speed * sign(mean - load)."""
        load = counts.float()
        self.correction_bias += speed * torch.sign(load.mean() - load)


class Layer(nn.Module):
    def __init__(self, config: TargetConfig, index: int):
        super().__init__()
        out_scale = (2 * config.num_hidden_layers) ** -0.5
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, out_scale)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.is_moe = config.is_moe(index)
        self.mlp = (
            MoE(config, out_scale)
            if self.is_moe
            else MLP(config.hidden_size, config.intermediate_size, out_scale)
        )

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        normed = self.post_attention_layernorm(x)
        if self.is_moe:
            out, counts = self.mlp(normed)
            return x + out, counts
        return x + self.mlp(normed), None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.feed_forward(x + self.self_attn(self.input_layernorm(x), cos, sin))


@dataclasses.dataclass
class Cache:
    """Keys and values of every layer, ``[layers, B, H, capacity, D]``, and how many are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0


class Target(nn.Module):
    def __init__(self, config: TargetConfig, compute_dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.embed_tokens = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.5)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, 0.5)
        frequencies = rope.inverse_frequencies(config.rope, config.qk_rope_head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def compile_layers(self) -> None:
        """Compiles each layer; equal layers share one compilation."""
        for layer in self.layers:
            layer.compile(dynamic=False)

    def _rotation(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + length, device=self.frequencies.device)
        factor = rope.attention_factor(self.config.rope)
        return rope.cos_sin(positions, self.frequencies, factor)

    def forward(
        self, tokens: Tensor, captured_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """tokens [B, N] -> (logits [B, N, V], captured [B, N, S * hidden] or None, loads).

        Captured are the streams h[i] of ``captured_layers`` side by side; loads holds for each MoE
        layer how many rows each expert got.
        """
        x = F.embedding(tokens, self.embed_tokens.to(self.compute_dtype))
        cos, sin = self._rotation(0, tokens.shape[1])
        streams, loads = {}, []
        for index, layer in enumerate(self.layers):
            if index in captured_layers:
                streams[index] = x
            x, counts = layer(x, cos, sin)
            if counts is not None:
                loads.append(counts)
        if len(self.layers) in captured_layers:
            streams[len(self.layers)] = x
        captured = torch.cat([streams[i] for i in captured_layers], -1) if captured_layers else None
        return self.lm_head(self.norm(x)), captured, loads

    def balance(self, loads: list[Tensor], speed: float) -> None:
        moe_layers = [layer for layer in self.layers if layer.is_moe]
        for layer, counts in zip(moe_layers, loads, strict=True):
            layer.mlp.balance(counts, speed)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        c = self.config
        shape = (len(self.layers), batch, c.num_attention_heads, capacity)
        empty = {"dtype": self.compute_dtype, "device": self.embed_tokens.device}
        return Cache(
            torch.zeros(*shape, c.qk_head_dim, **empty), torch.zeros(*shape, c.v_head_dim, **empty)
        )

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Appends tokens [B, N] to the cache; logits [B, V] of the last one.

        Only an empty cache takes more than one token a row.
        """
        length, start = tokens.shape[1], cache.length
        if start and length != 1:
            raise ValueError(f"step: tokens: expected 1 a row on a filled cache, got {length}")
        end = start + length
        x = F.embedding(tokens, self.embed_tokens.to(self.compute_dtype))
        cos, sin = self._rotation(start, length)
        for index, layer in enumerate(self.layers):
            attn = layer.self_attn
            q, k, v = attn.project(layer.input_layernorm(x), cos, sin)
            cache.keys[index, :, :, start:end] = k
            cache.values[index, :, :, start:end] = v
            if start:
                heads = F.scaled_dot_product_attention(
                    q,
                    cache.keys[index, :, :, :end],
                    cache.values[index, :, :, :end],
                    scale=attn.scale,
                )
            else:
                heads = causal_attention(q, k, v, attn.scale)
            x, _ = layer.feed_forward(x + attn.merge(heads))
        cache.length = end
        return self.lm_head(self.norm(x[:, -1]))


def _expert_names(layer: int, expert: int) -> tuple[str, str, str]:
    prefix = f"model.layers.{layer}.mlp.experts.{expert}"
    return tuple(f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down"))


def published_state(model: Target) -> dict[str, Tensor]:
    """The weights under DeepSeek-V3's published names: bfloat16, the correction bias float32."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if last == "router":
            state[f"model.{prefix}.gate.weight"] = value
        elif last == "correction_bias":
            state[f"model.{prefix}.gate.e_score_correction_bias"] = value
        elif last == "gate_up":
            layer = int(name.split(".")[1])
            for expert, (gate, up) in enumerate(w.chunk(2) for w in value):
                gate_name, up_name, _ = _expert_names(layer, expert)
                state[gate_name], state[up_name] = gate, up
        elif last == "down":
            layer = int(name.split(".")[1])
            for expert, weight in enumerate(value):
                state[_expert_names(layer, expert)[2]] = weight
        elif name == "embed_tokens":
            state["model.embed_tokens.weight"] = value
        elif name == "lm_head.weight":
            state[name] = value
        else:
            state[f"model.{name}"] = value
    return {
        name: value.detach()
        .to(torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)
        .contiguous()
        .clone()
        for name, value in state.items()
    }


@torch.no_grad()
def load_published(model: Target, state: dict[str, Tensor]) -> None:
    """The reverse of ``published_state``; every name must be there, with its shape, and no other.

    ValueError names what is missing, left over or of another shape.
    """
    expected = {name: value.shape for name, value in published_state(model).items()}
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"load_published: tensors missing: {missing}, left over: {extra}")
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise ValueError(
                f"load_published: {name}: expected {tuple(shape)}, got {tuple(state[name].shape)}"
            )
    for name, value in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if last == "router":
            source = state[f"model.{prefix}.gate.weight"]
        elif last == "correction_bias":
            source = state[f"model.{prefix}.gate.e_score_correction_bias"]
        elif last in ("gate_up", "down"):
            layer = int(name.split(".")[1])
            names = [_expert_names(layer, e) for e in range(value.shape[0])]
            source = torch.stack(
                [
                    torch.cat((state[gate], state[up])) if last == "gate_up" else state[down]
                    for gate, up, down in names
                ]
            )
        elif name == "embed_tokens":
            source = state["model.embed_tokens.weight"]
        else:
            source = state[name if name == "lm_head.weight" else f"model.{name}"]
        value.copy_(source)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats; the softmax runs in float32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    return nats_per_token / math.log(2.0) / bytes_per_token
