"""The target, a DeepSeek-V3 / Kimi-K2 decoder: one forward for all nodes of a draft tree."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor

from spec_kernels.comm import Communicator
from spec_kernels.models.config import TargetConfig
from spec_kernels.models.layers import (
    MLA,
    DenseMLP,
    Embedding,
    LMHead,
    MLABuffers,
    MoE,
    Rotary,
    Step,
    add_norm,
    norm,
)
from spec_kernels.models.weights import TARGET_PREFIXES, Checkpoint, Shard


class _Layer:
    def __init__(self, weights: Checkpoint, index: int, config: TargetConfig, shard: Shard, dtype):
        prefix, hidden = f"model.layers.{index}", config.hidden_size
        self.attention = MLA(weights, f"{prefix}.self_attn", config, shard, dtype)
        if config.is_moe(index):
            self.mlp = MoE(weights, f"{prefix}.mlp", config, shard, dtype)
        else:
            inner = config.intermediate_size
            self.mlp = DenseMLP(weights, f"{prefix}.mlp", hidden, inner, shard, dtype)
        self.input_norm = weights.read(f"{prefix}.input_layernorm.weight", (hidden,), dtype)
        self.mlp_norm = weights.read(f"{prefix}.post_attention_layernorm.weight", (hidden,), dtype)


class _Buffers:
    """Static buffers of one step shape; every layer reuses them."""

    def __init__(self, config: TargetConfig, shape: tuple[int, int], num_heads: int, dtype, device):
        num_rows = shape[0] * shape[1]
        self.residual, self.normed, self.block = (
            torch.zeros(num_rows, config.hidden_size, dtype=dtype, device=device) for _ in range(3)
        )
        self.attention = MLABuffers(config, shape, num_heads, dtype, device)


class Target:
    """One rank's part of the target.

    Args:
        config: its shape.
        weights: the checkpoint it is read from; every text tensor must find its use.
        comm: the ranks that share the model; heads, expert and dense intermediates and the
            vocabulary of the head are split over them.
        dtype: float32 or bfloat16, of weights, activations and cache.
        captured_layers: ids i of h[i], the residual stream entering layer i (num_hidden_layers:
            after the last layer, before the final norm), in the order of the capture slots.

    Raises:
        ValueError: a tensor is missing, left over or of another shape; ranks do not divide a
            dimension; a captured id is not in [0, num_hidden_layers].
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: Checkpoint,
        comm: Communicator,
        dtype: torch.dtype = torch.float32,
        captured_layers: tuple[int, ...] = (),
    ):
        num_layers = config.num_hidden_layers
        if any(not 0 <= i <= num_layers for i in captured_layers):
            raise ValueError(
                f"target: captured_layers: expected ids in [0, {num_layers}], got {captured_layers}"
            )
        if len(set(captured_layers)) != len(captured_layers):
            raise ValueError(
                f"target: captured_layers: expected different ids, got {captured_layers}"
            )
        self.config, self.comm, self.dtype = config, comm, dtype
        self.device = weights.device
        self.captured_layers = tuple(captured_layers)
        shard = Shard(comm.rank, comm.world_size)
        self.embedding = Embedding(weights, "model.embed_tokens.weight", config, shard, comm, dtype)
        self.layers = [_Layer(weights, i, config, shard, dtype) for i in range(num_layers)]
        self.final_norm = weights.read("model.norm.weight", (config.hidden_size,), dtype)
        self.head = LMHead(self._read_head(weights, shard), comm)
        weights.finish()
        self.rotary = Rotary(config.rope, config.qk_rope_head_dim, self.device)
        # All who run it write the same buffers: batches hold this while they do.
        self.lock = threading.RLock()
        self._slot_of = {layer: slot for slot, layer in enumerate(self.captured_layers)}
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        # Views of the cache of the last call: making them anew costs as much as an op.
        self._cache, self._cache_layers = None, []

    def _read_head(self, weights: Checkpoint, shard: Shard) -> Tensor:
        config = self.config
        rows = shard.of(config.vocab_size, "vocab_size")
        if config.tie_word_embeddings and "lm_head.weight" not in weights:
            return self.embedding.weight if self.embedding.split else self.embedding.weight[rows]
        shape = (config.vocab_size, config.hidden_size)
        return weights.read("lm_head.weight", shape, self.dtype, rows=rows)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        comm: Communicator,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        captured_layers: tuple[int, ...] = (),
    ) -> Target:
        """Reads ``directory/config.json`` and this rank's slices of the safetensors beside it."""
        config = TargetConfig.from_json(directory)
        weights = Checkpoint(directory, TARGET_PREFIXES, device=device)
        return cls(config, weights, comm, dtype, captured_layers)

    def new_cache(self, num_pages: int, page_size: int) -> Tensor:
        """Latent cache ``[L, P, page, R + Dr]`` of zeros."""
        config = self.config
        size = (config.num_hidden_layers, num_pages, page_size, config.latent_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def new_capture(self, num_rows: int) -> Tensor:
        """Static buffer ``[num_rows, num_slots, H]`` for the captured streams."""
        size = (num_rows, len(self.captured_layers), self.config.hidden_size)
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def forward(
        self,
        step: Step,
        cache: Tensor,
        capture: Tensor | None = None,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        """Logits of the successors of the step's rows.

        Args:
            step: ``[B, N]`` rows; their latents are written to ``cache`` before attention.
            cache: ``[L, P, page, R + Dr]``.
            capture: ``[>= B * N, num_slots, H]``; row b * N + n receives the captured streams.
            logit_rows: ``[K]`` int64 flat rows b * N + n to give logits for; None = all.

        Returns:
            ``[B, N, V]``, or ``[K, V]`` with ``logit_rows``; the same bits on every rank.
        """
        shape = step.shape
        b = self._buffers.get(shape)
        if b is None:
            heads = self.layers[0].attention.num_heads
            b = _Buffers(self.config, shape, heads, self.dtype, self.device)
            self._buffers[shape] = b
        eps = self.config.rms_norm_eps
        rotation = step.rotation
        if rotation is None:
            rotation = self.rotary.rotation(step.positions)
        places = b.attention.places.arguments(step, rotation)
        if cache is not self._cache:
            self._cache, self._cache_layers = cache, list(cache)
        slot_of = self._slot_of if capture is not None else {}
        self.embedding.lookup(step.tokens.reshape(-1), b.residual)
        added = None
        for index, layer in enumerate(self.layers):
            slot = slot_of.get(index)
            self._add_norm(added, b, layer.input_norm, eps, capture, slot)
            layer.attention.forward(
                b.normed, step, places, self._cache_layers[index], b.attention, b.block
            )
            self._add_norm(b.block, b, layer.mlp_norm, eps, None, None)
            layer.mlp.forward(b.normed, b.block)
            added = b.block
        self._add_norm(added, b, self.final_norm, eps, capture, slot_of.get(len(self.layers)))
        if logit_rows is not None:
            return self.head.forward(b.normed.index_select(0, logit_rows))
        return self.head.forward(b.normed).view(*shape, -1)

    def _add_norm(self, x, b: _Buffers, weight, eps: float, capture, slot: int | None) -> None:
        """residual += x of all ranks; normed = norm(residual); the residual also goes to ``slot``.

        Without x, the residual is the embedding, which all ranks have in full.
        """
        kept = None if slot is None else capture
        if x is None:
            norm(b.residual, weight, eps, b.normed, kept, slot or 0)
        else:
            add_norm(self.comm, x, b.residual, weight, eps, b.normed, kept, slot or 0)
