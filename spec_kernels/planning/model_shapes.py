"""Bytes that a step of a sharded target or drafter reads, from the shapes of its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from spec_kernels.models.config import DrafterConfig, TargetConfig
from spec_kernels.planning.checks import count, fail

_BF16 = 2
_FP32 = 4


def _share(where: str, name: str, total: int, num_ranks: int) -> int:
    if total % num_ranks:
        raise fail(where, name, f"a multiple of {num_ranks} ranks", total)
    return total // num_ranks


@dataclass(frozen=True)
class TargetShape:
    """One rank's part of a target of MLA layers with routed experts; sizes in bytes.

    Split over ranks: q_b, kv_b and o_proj by head, experts, shared expert and dense layers by
    intermediate size, the head by vocabulary. On every rank: q_a, kv_a, router, norms, and the
    latent cache. Weights are bfloat16, but for routed experts (``expert_bytes``) and the router's
    float32 correction bias. A token's row of the embedding is left out (some kB).

    Attributes:
        num_ranks, num_layers, num_moe_layers, hidden, latent_dim: of the model.
        num_experts, experts_a_token: routed experts of a layer, and how many a token takes.
        fixed_bytes: what a step reads whatever its tokens: all but routed experts.
        expert_bytes: one routed expert of one layer, with its scales.
        embedding_bytes: held, though hardly read.
    """

    num_ranks: int
    num_layers: int
    num_moe_layers: int
    hidden: int
    latent_dim: int
    num_experts: int
    experts_a_token: int
    fixed_bytes: int
    expert_bytes: int
    embedding_bytes: int

    @classmethod
    def from_config(
        cls,
        config: TargetConfig,
        num_ranks: int = 8,
        *,
        expert_bits: int = 16,
        expert_group: int | None = None,
    ) -> TargetShape:
        """The shape of one of ``num_ranks`` ranks.

        Args:
            config: of the target.
            num_ranks: must divide heads, vocabulary and every intermediate size.
            expert_bits: of a weight of a routed expert: 16 or 4.
            expert_group: neighbours along a row that share a bfloat16 scale; None without scales.

        Raises:
            ValueError: naming what does not divide.
        """
        where, c = "target shape", config
        count(where, "num_ranks", num_ranks)
        if expert_bits not in (4, 16):
            raise fail(where, "expert_bits", "4 or 16", expert_bits)
        heads = _share(where, "num_attention_heads", c.num_attention_heads, num_ranks)
        vocab = _share(where, "vocab_size", c.vocab_size, num_ranks)
        inner = _share(where, "moe_intermediate_size", c.moe_intermediate_size, num_ranks)
        dense = _share(where, "intermediate_size", c.intermediate_size, num_ranks)
        if expert_group is not None:
            count(where, "expert_group", expert_group)
            for name, size in (("hidden_size", c.hidden_size), ("a rank's intermediate", inner)):
                if size % expert_group:
                    raise fail(where, name, f"a multiple of groups of {expert_group}", size)
        attention = (
            c.hidden_size * (c.q_lora_rank + c.latent_dim)
            + heads * c.q_lora_rank * c.qk_head_dim
            + heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
            + heads * c.v_head_dim * c.hidden_size
        )
        norms = 2 * c.hidden_size + c.q_lora_rank + c.kv_lora_rank
        num_moe = sum(c.is_moe(layer) for layer in range(c.num_hidden_layers))
        num_dense = c.num_hidden_layers - num_moe
        shared = 3 * c.hidden_size * c.n_shared_experts * inner
        weights = (
            c.num_hidden_layers * (attention + norms)
            + num_moe * (shared + c.hidden_size * c.n_routed_experts)
            + num_dense * 3 * c.hidden_size * dense
            + c.hidden_size  # the final norm
            + vocab * c.hidden_size
        )
        expert = 3 * c.hidden_size * inner
        scales = 0 if expert_group is None else expert // expert_group * _BF16
        return cls(
            num_ranks=num_ranks,
            num_layers=c.num_hidden_layers,
            num_moe_layers=num_moe,
            hidden=c.hidden_size,
            latent_dim=c.latent_dim,
            num_experts=c.n_routed_experts,
            experts_a_token=c.num_experts_per_tok,
            fixed_bytes=weights * _BF16 + num_moe * c.n_routed_experts * _FP32,
            expert_bytes=expert * expert_bits // 8 + scales,
            embedding_bytes=vocab * c.hidden_size * _BF16,
        )

    def distinct_experts(self, num_tokens: int) -> float:
        """Expected routed experts of a layer that ``num_tokens`` tokens touch together.

        E (1 - (1 - k/E)^T) for independent tokens and uniform routing. That is the most which
        independent tokens can touch on average: 1 - (1 - p)^T is concave in an expert's chance p.
        """
        count("distinct_experts", "num_tokens", num_tokens)
        missed = (1 - self.experts_a_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)

    def step_bytes(self, num_tokens: int) -> float:
        """Weight bytes a rank reads for ``num_tokens`` tokens, each distinct expert once."""
        experts = self.num_moe_layers * self.distinct_experts(num_tokens)
        return self.fixed_bytes + experts * self.expert_bytes

    def cache_bytes_a_token(self, element_bytes: int = 2) -> int:
        """Latent cache of one token in all layers, on every rank; 2 bytes (bf16) or 1 (fp8)."""
        return self.num_layers * self.latent_dim * element_bytes

    def message_bytes(self, num_tokens: int) -> int:
        """What each rank contributes to one all-reduce: bf16 rows."""
        return num_tokens * self.hidden * _BF16

    @property
    def num_allreduces(self) -> int:
        """Of a step: one after attention and one after the MLP of each layer."""
        return 2 * self.num_layers

    @property
    def held_bytes(self) -> int:
        """All weights of a rank."""
        experts = self.num_moe_layers * self.num_experts * self.expert_bytes
        return self.fixed_bytes + experts + self.embedding_bytes


@dataclass(frozen=True)
class DrafterShape:
    """One rank's part of an EAGLE-3 drafter of one Llama layer, split over the target's ranks.

    Attributes:
        hidden: of its rows.
        step_bytes: what one forward reads: q, k, v, o, MLP, head, norms.
        extend_bytes: what a forward over committed rows reads besides: ``fc`` over the captured
            streams.
        cache_bytes_a_token: K and V of one token.
        num_allreduces: of a forward.
    """

    hidden: int
    step_bytes: int
    extend_bytes: int
    cache_bytes_a_token: int
    num_allreduces: int = 2

    @classmethod
    def from_config(cls, config: DrafterConfig, num_ranks: int = 8) -> DrafterShape:
        """The bfloat16 shape of one of ``num_ranks`` ranks; ValueError for what does not divide."""
        where, c = "drafter shape", config
        count(where, "num_ranks", num_ranks)
        heads = _share(where, "num_attention_heads", c.num_attention_heads, num_ranks)
        kv_heads = _share(where, "num_key_value_heads", c.num_key_value_heads, num_ranks)
        inner = _share(where, "intermediate_size", c.intermediate_size, num_ranks)
        vocab = _share(where, "draft_vocab_size", c.draft_vocab_size, num_ranks)
        weights = (
            2 * c.hidden_size * (heads + 2 * kv_heads) * c.head_dim
            + heads * c.head_dim * c.hidden_size
            + 3 * c.hidden_size * inner
            + vocab * c.hidden_size
            + 4 * c.hidden_size  # norms: input, hidden, after attention, output
        )
        streams = 3 * c.target_hidden_size
        return cls(
            hidden=c.hidden_size,
            step_bytes=weights * _BF16,
            extend_bytes=_share(where, "hidden_size", c.hidden_size, num_ranks) * streams * _BF16,
            cache_bytes_a_token=2 * kv_heads * c.head_dim * _BF16,
        )


@cache
def _kimi() -> Mapping[str, Any]:
    return json.loads(files("spec_kernels.planning").joinpath("data/kimi-k2.5.json").read_text())


def kimi_k25(num_ranks: int = 8) -> TargetShape:
    """Kimi-K2.5 with INT4 routed experts in groups of 32."""
    data = _kimi()
    return TargetShape.from_config(
        TargetConfig.from_dict(data["target"]),
        num_ranks,
        expert_bits=data["expert_bits"],
        expert_group=data["expert_group"],
    )


def kimi_k25_drafter(num_ranks: int = 8) -> DrafterShape:
    """A Llama-type EAGLE-3 drafter for it, of the shape of the public ones: full vocabulary."""
    return DrafterShape.from_config(DrafterConfig.from_dict(_kimi()["drafter"]), num_ranks)
