"""The EAGLE-3 drafter as a differentiable module, and its training-time-test (TTT) pass.

Row t pairs the embedding of token x[t+1] with the feature of position t, stands at position t and
predicts x[t+2]. In step i of a TTT pass, row t is the draft that i earlier drafts led to: it takes
the embedding of x[t+1+i] (teacher-forced), its own output of step i-1 as feature, position t+i, and
sees the keys of step 0 up to row t and its own keys of steps 1..i. That is what a chain drafted
from row t sees when all drafts are right.

The module's state has the names of published checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_kernels.models import rope
from spec_kernels.models.config import NUM_CAPTURED_LAYERS, DrafterConfig
from spec_kernels.training.model import MLP, Linear, RMSNorm

_QUERY_BLOCK = 64
_MASKED = -1e9


def ttt_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """q and each of keys and values ``[B, H, R, D]`` -> ``[B, H, R, D]``.

    keys[0] is seen causally, keys[j >= 1] only by the row of the same number. Softmax in float32.
    """
    num_rows, outputs = q.shape[2], []
    diagonal = [(q.float() * k.float()).sum(-1, keepdim=True) * scale for k in keys[1:]]
    for start in range(0, num_rows, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, num_rows)
        scores = torch.matmul(q[:, :, start:end], keys[0][:, :, :end].transpose(-1, -2))
        rows = torch.arange(start, end, device=q.device).unsqueeze(1)
        hidden = torch.arange(end, device=q.device) > rows
        scores = (scores.float() * scale).masked_fill(hidden, _MASKED)
        scores = torch.cat([scores, *(d[:, :, start:end] for d in diagonal)], dim=-1)
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        out = torch.matmul(weights[..., :end], values[0][:, :, :end])
        for j, value in enumerate(values[1:]):
            out = out + weights[..., end + j, None] * value[:, :, start:end]
        outputs.append(out)
    return torch.cat(outputs, dim=2)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        width = 2 * config.hidden_size
        inner = config.num_attention_heads * config.head_dim
        self.q_proj = Linear(inner, width)
        self.k_proj = Linear(config.num_key_value_heads * config.head_dim, width)
        self.v_proj = Linear(config.num_key_value_heads * config.head_dim, width)
        self.o_proj = Linear(config.hidden_size, inner, 0.5)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        c, (batch, num_rows, _) = self.config, x.shape
        repeat = c.num_attention_heads // c.num_key_value_heads

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, num_rows, -1, c.head_dim).transpose(1, 2)

        q = rope.apply_half_split(heads(self.q_proj(x)), cos, sin)
        k = rope.apply_half_split(heads(self.k_proj(x)), cos, sin)
        k = k.repeat_interleave(repeat, dim=1)
        v = heads(self.v_proj(x)).repeat_interleave(repeat, dim=1)
        out = ttt_attention(q, [*keys, k], [*values, v], c.head_dim**-0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2)), k, v


class _MidLayer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, 0.5)

    def forward(
        self,
        embedded: Tensor,
        feature: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(feature)), dim=-1)
        attended, k, v = self.self_attn(x, cos, sin, keys, values)
        r = feature + attended
        return r + self.mlp(self.post_attention_layernorm(r)), k, v


class Drafter(nn.Module):
    def __init__(
        self,
        config: DrafterConfig,
        draft_ids: Tensor,
        compute_dtype: torch.dtype = torch.bfloat16,
    ):
        """``draft_ids [draft_vocab_size]`` int64, ascending: the target id of each draft id."""
        super().__init__()
        unsupported = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")
        for name in unsupported:
            if getattr(config, name):
                raise ValueError(f"train: drafter config: {name}: expected false, got true")
        if draft_ids.shape != (config.draft_vocab_size,) or (draft_ids.diff() <= 0).any():
            raise ValueError(
                f"train: draft_ids: expected {config.draft_vocab_size} ascending ids, "
                f"got shape {tuple(draft_ids.shape)}"
            )
        self.config, self.compute_dtype = config, compute_dtype
        hidden = config.hidden_size
        self.fc = Linear(hidden, NUM_CAPTURED_LAYERS * config.target_hidden_size)
        self.midlayer = _MidLayer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = Linear(config.draft_vocab_size, hidden, 0.5)
        self.register_buffer("d2t", draft_ids - torch.arange(config.draft_vocab_size))
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[draft_ids] = True
        self.register_buffer("t2d", is_drafted)
        frequencies = rope.inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def draft_ids(self) -> Tensor:
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def forward(
        self, tokens: Tensor, captured: Tensor, embedding: Tensor, num_steps: int
    ) -> list[Tensor]:
        """The TTT pass: draft logits ``[B, N - num_steps, draft_vocab]`` of each step.

        tokens [B, N] and the target's captured streams [B, N, 3 * hidden] of the same positions;
        embedding [V, hidden] is the target's. Row t of step i predicts x[t + 2 + i].
        """
        num_rows = tokens.shape[1] - num_steps
        if num_rows < 1:
            raise ValueError(
                f"ttt: num_steps: expected fewer than {tokens.shape[1]} tokens, got {num_steps}"
            )
        embedded = F.embedding(tokens, embedding.to(self.compute_dtype))
        feature = self.fc(captured[:, :num_rows].to(self.compute_dtype))
        positions = torch.arange(num_rows, device=tokens.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for i in range(num_steps):
            cos, sin = rope.cos_sin(
                positions + i, self.frequencies, rope.attention_factor(self.config.rope)
            )
            feature, k, v = self.midlayer(
                embedded[:, i + 1 : i + 1 + num_rows], feature, cos, sin, keys, values
            )
            keys.append(k)
            values.append(v)
            logits.append(self.lm_head(self.norm(feature)))
        return logits


def published_state(model: Drafter) -> dict[str, Tensor]:
    """The weights in bfloat16, d2t int64 and t2d bool, under published names."""
    return {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value)
        .detach()
        .contiguous()
        .clone()
        for name, value in model.state_dict().items()
    }


def are_right(model: Drafter, logits: list[Tensor], tokens: Tensor) -> Tensor:
    """Whether the top draft of each step is the token that follows: bool ``[steps, B, R]``.

    tokens [B, N + 1] are those of the pass and one more.
    """
    ids, num_rows = model.draft_ids(), logits[0].shape[1]
    return torch.stack(
        [
            ids[step.argmax(-1)] == tokens[:, i + 2 : i + 2 + num_rows]
            for i, step in enumerate(logits)
        ]
    )


def accuracies(right: Tensor, mask: Tensor | None = None) -> tuple[list[float], list[float], float]:
    """(full, conditional, predicted accept length) of bool ``right [steps, B, R]``.

    Full at step i: drafts 0..i are all right. Conditional: step i is, given those before.
    Predicted: 1 + sum of full. ``mask [B, R]`` keeps the rows that count.
    """
    together = right.cumprod(0).bool()
    if mask is not None:
        together = together[:, mask]
    full = together.flatten(1).double().mean(1).tolist()
    before = [1.0, *full[:-1]]
    conditional = [f / b if b else 0.0 for f, b in zip(full, before, strict=True)]
    return full, conditional, 1.0 + sum(full)


def replay(right: Tensor, first_row: int, last_row: int) -> tuple[int, int]:
    """(tokens emitted, cycles) of decoding one text with chains: ``right [steps, R]`` bool.

    Starts at ``first_row``; each cycle accepts the leading right drafts of its row, adds the bonus
    token and jumps there. ``last_row`` is the first row beyond which no cycle starts.
    """
    accepted = right.cumprod(0).sum(0)
    row, cycles = first_row, 0
    while row < last_row:
        row += int(accepted[row]) + 1
        cycles += 1
    return row - first_row, cycles
