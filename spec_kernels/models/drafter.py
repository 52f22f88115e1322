"""The EAGLE-3 drafter: one Llama layer over the target's embedding and captured hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spec_kernels.comm import Communicator
from spec_kernels.comm.policy import num_cores
from spec_kernels.models.config import NUM_CAPTURED_LAYERS, DrafterConfig
from spec_kernels.models.layers import (
    DenseMLP,
    Embedding,
    LMHead,
    Rotary,
    RowPlaces,
    Step,
    add_norm,
    norm,
)
from spec_kernels.models.weights import DRAFTER_PREFIXES, Checkpoint, Shard

_ops = torch.ops.spec_kernels

# Below this a rank computes the whole drafter: at a few rows two all-reduces a step cost more.
REPLICATED_DRAFTER_BYTES = 64 * 2**20
PARALLEL_MODES = ("auto", "tp", "replicated", "leader")


def choose_parallel(config: DrafterConfig, comm: Communicator, dtype: torch.dtype, device) -> str:
    """How ``"auto"`` shares a drafter; the same answer on every rank of a machine.

    CPU ranks that outnumber the cores take turns, so work that all repeat costs as often as there
    are ranks: one drafts for all. Otherwise a small drafter runs whole on every rank, where nobody
    waits for anybody, and a large one is split.
    """
    if comm.world_size == 1:
        return "replicated"
    if torch.device(device).type == "cpu" and comm.world_size > num_cores():
        return "leader"
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    rows = 3 * config.intermediate_size + 2 * heads * config.head_dim + config.draft_vocab_size
    num_bytes = config.hidden_size * rows * dtype.itemsize
    return "replicated" if num_bytes <= REPLICATED_DRAFTER_BYTES else "tp"


class AbsentDrafter:
    """Stands for the drafter on ranks that take their drafts from rank 0."""

    is_here = False

    def __init__(self, config: DrafterConfig, target):
        self.config, self.dtype, self.device = config, target.dtype, target.device
        self.captured_layers = target.captured_layers
        self.audience = target.comm


class _Buffers:
    """Static buffers of one step shape."""

    def __init__(self, drafter: Drafter, shape: tuple[int, int]):
        config, (batch, nodes) = drafter.config, shape
        num_rows, hidden, dim = batch * nodes, config.hidden_size, config.head_dim
        heads, kv_heads = drafter.num_heads, drafter.num_kv_heads

        def new(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=drafter.dtype, device=drafter.device)

        self.embedded = new(num_rows, hidden)
        self.joined = new(num_rows, 2 * hidden)
        self.normed_embedding, self.normed_feature = self.joined.chunk(2, dim=1)
        qkv = new(num_rows, (heads + 2 * kv_heads) * dim)
        self.qkv = qkv
        by_head = qkv.view(batch, nodes, heads + 2 * kv_heads, dim)
        # The queries are rotated in place.
        self.q, self.k, self.v = by_head.split((heads, kv_heads, kv_heads), 2)
        self.places = RowPlaces(shape, drafter.device)
        self.attended = new(batch, nodes, heads, dim)
        self.attended_rows = self.attended.view(num_rows, heads * dim)
        self.lse = torch.zeros(batch, nodes, heads, dtype=torch.float32, device=drafter.device)
        self.normed, self.block = new(num_rows, hidden), new(num_rows, hidden)


class Drafter:
    """One rank's part of the drafter, or all of it.

    Row t pairs the embedding of token t + 1 with the feature of position t, stands at position t
    and predicts token t + 2. The feature is ``fc`` of the target's captured streams for a committed
    row, and the drafter's own output of the row before for a drafted one.

    Args:
        config: its shape.
        weights: the checkpoint it is read from.
        embedding: the target's, used unless the checkpoint has its own ``embed_tokens``.
        num_target_layers: to give the captured layer ids one meaning.
        comm: the target's ranks.
        dtype: float32 or bfloat16.
        parallel: ``"tp"`` splits heads, intermediate and vocabulary over the ranks;
            ``"replicated"`` computes everything on each rank, with no exchange; ``"leader"`` too,
            but on rank 0 alone, which then broadcasts its drafts (``load`` gives the other ranks
            an ``AbsentDrafter``); ``"auto"``: see ``choose_parallel``.

    Attributes:
        is_here: whether this rank runs the drafter.
        audience: the ranks to which drafts are broadcast, or None if all have their own.

    Raises:
        ValueError: a tensor is missing, left over or of another shape; a reduced vocabulary comes
            without d2t; d2t leads outside the vocabulary; ranks do not divide a dimension.
    """

    is_here = True

    def __init__(
        self,
        config: DrafterConfig,
        weights: Checkpoint,
        embedding: Embedding,
        num_target_layers: int,
        comm: Communicator,
        dtype: torch.dtype = torch.float32,
        parallel: str = "auto",
    ):
        if parallel not in PARALLEL_MODES:
            raise ValueError(
                f"drafter: parallel: expected one of {PARALLEL_MODES}, got {parallel!r}"
            )
        self.config, self.dtype, self.device = config, dtype, weights.device
        self.captured_layers = config.captured_layers(num_target_layers)
        hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
        if parallel == "auto":
            parallel = choose_parallel(config, comm, dtype, self.device)
        self.audience = comm if parallel == "leader" and comm.world_size > 1 else None
        self.comm = comm if parallel == "tp" else Communicator.single()
        shard = Shard(self.comm.rank, self.comm.world_size)

        q_heads = shard.of(config.num_attention_heads, "drafter num_attention_heads")
        kv_heads = shard.of(config.num_key_value_heads, "drafter num_key_value_heads")
        self.num_heads = q_heads.stop - q_heads.start
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        attention = "midlayer.self_attn"

        def projection(name: str, total: int, mine: slice) -> Tensor:
            rows = slice(mine.start * dim, mine.stop * dim)
            shape = (total * dim, 2 * hidden)
            return weights.read(f"{attention}.{name}_proj.weight", shape, dtype, rows=rows)

        q = projection("q", config.num_attention_heads, q_heads)
        k = projection("k", config.num_key_value_heads, kv_heads)
        v = projection("v", config.num_key_value_heads, kv_heads)
        self.qkv_t = torch.cat((q, k, v)).t()
        columns = slice(q_heads.start * dim, q_heads.stop * dim)
        shape = (hidden, config.num_attention_heads * dim)
        o = weights.read(f"{attention}.o_proj.weight", shape, dtype, columns=columns)
        self.o_t = o.contiguous().t()
        self.mlp = DenseMLP(weights, "midlayer.mlp", hidden, inner, shard, dtype)

        def vector(name: str, size: int = hidden) -> Tensor:
            return weights.read(f"{name}.weight", (size,), dtype)

        features = config.target_hidden_size
        self.fc_t = weights.read("fc.weight", (hidden, NUM_CAPTURED_LAYERS * features), dtype).t()
        self.feature_norms = []
        if config.fc_norm:
            self.feature_norms = [
                vector(f"fc_norm.{i}", features) for i in range(NUM_CAPTURED_LAYERS)
            ]
        self.joint_norm = None
        if config.norm_before_fc:
            self.joint_norm = vector("input_norm", NUM_CAPTURED_LAYERS * features)
        self.embedding = embedding
        if "embed_tokens.weight" in weights:
            self.embedding = Embedding(
                weights, "embed_tokens.weight", config, shard, self.comm, dtype
            )
        elif hidden != features:
            raise ValueError(
                f"{weights.directory}: embed_tokens.weight: expected embeddings of {hidden}, since "
                f"the target's have {features}, got no such tensor"
            )
        self.input_norm = vector("midlayer.input_layernorm")
        self.hidden_norm = vector("midlayer.hidden_norm")
        self.mlp_norm = vector("midlayer.post_attention_layernorm")
        self.final_norm = vector("norm")
        rows = shard.of(config.draft_vocab_size, "draft_vocab_size")
        shape = (config.draft_vocab_size, hidden)
        self.head = LMHead(weights.read("lm_head.weight", shape, dtype, rows=rows), self.comm)
        self.target_ids = self._read_target_ids(weights)
        weights.finish()
        self.rotary = Rotary(config.rope, dim, self.device)
        self.scale = dim**-0.5
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        # Views of the cache of the last call: making them anew costs as much as an op.
        self._cache = self._keys = self._values = None

    def _read_target_ids(self, weights: Checkpoint) -> Tensor:
        """``[Vd]`` int64, the target's id of each draft id: draft id + d2t[draft id]."""
        config, where = self.config, weights.directory
        own = torch.arange(config.draft_vocab_size, device=self.device)
        if "d2t" not in weights:
            if config.draft_vocab_size != config.vocab_size:
                raise ValueError(
                    f"{where}: d2t: expected offsets for a draft vocabulary of "
                    f"{config.draft_vocab_size} out of {config.vocab_size}, got no such tensor"
                )
            ids = own
        else:
            ids = own + weights.read("d2t", (config.draft_vocab_size,), torch.int64)
        wrong = (ids < 0) | (ids >= config.vocab_size)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"{where}: d2t: expected draft id + d2t in [0, {config.vocab_size}), got "
                f"{int(ids[at])} for draft id {at} (an offset is expected, not an index)"
            )
        if "t2d" in weights:
            used = torch.zeros(config.vocab_size, dtype=torch.bool, device=self.device)
            used[ids] = True
            t2d = weights.read("t2d", (config.vocab_size,), torch.bool)
            if not torch.equal(used, t2d):
                raise ValueError(f"{where}: t2d: expected the ids that d2t leads to, got others")
        return ids

    @classmethod
    def load(
        cls,
        directory: str | Path,
        target,
        parallel: str = "auto",
        config: DrafterConfig | None = None,
    ) -> Drafter | AbsentDrafter:
        """Reads the drafter of ``directory`` for ``target`` (a ``Target``): its ranks and dtype.

        ValueError if the two do not fit: hidden size, vocabulary, captured layers.
        """
        config = config or DrafterConfig.from_json(directory)
        theirs = target.config
        for name, ours, wanted in (
            ("target_hidden_size", config.target_hidden_size, theirs.hidden_size),
            ("vocab_size", config.vocab_size, theirs.vocab_size),
        ):
            if ours != wanted:
                raise ValueError(
                    f"drafter config: {name}: expected {wanted} as the target, got {ours}"
                )
        ids = config.captured_layers(theirs.num_hidden_layers)
        if target.captured_layers != ids:
            raise ValueError(
                f"drafter config: captured layers {ids}: the target captures "
                f"{target.captured_layers}"
            )
        if parallel == "auto":
            parallel = choose_parallel(config, target.comm, target.dtype, target.device)
        if parallel == "leader" and target.comm.rank:
            return AbsentDrafter(config, target)
        weights = Checkpoint(directory, DRAFTER_PREFIXES, device=target.device)
        return cls(
            config,
            weights,
            target.embedding,
            theirs.num_hidden_layers,
            target.comm,
            target.dtype,
            parallel,
        )

    def new_cache(self, num_pages: int, page_size: int) -> Tensor:
        """K/V cache ``[P, page, 2, Hkv, D]`` of zeros: one row a token, K then V."""
        size = (num_pages, page_size, 2, self.num_kv_heads, self.config.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def fuse(self, captured: Tensor) -> Tensor:
        """Features of committed rows: ``captured [T, 3, H]`` (target's streams) -> ``[T, H]``."""
        x = captured
        if self.feature_norms:
            normed = torch.empty_like(x)
            for i, weight in enumerate(self.feature_norms):
                norm(x[:, i], weight, self.config.rms_norm_eps, normed[:, i])
            x = normed
        x = x.reshape(x.shape[0], -1)
        if self.joint_norm is not None:
            normed = torch.empty_like(x)
            norm(x, self.joint_norm, self.config.rms_norm_eps, normed)
            x = normed
        return torch.mm(x, self.fc_t)

    def forward(self, step: Step, feature: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over ``step``'s rows, whose K/V are written to ``cache`` first.

        Args:
            step: ``[B, N]``: tokens t + 1 at positions t.
            feature: ``[B * N, H]``; overwritten.
            cache: ``[P, page, 2, Hkv, D]``.

        Returns:
            The feature for the next drafted row and ``norm(r)``, the input of ``logits``; both
            ``[B * N, H]``. The second is a static buffer that the next call of this shape reuses.
        """
        config, eps = self.config, self.config.rms_norm_eps
        b = self._buffers.get(step.shape)
        if b is None:
            b = self._buffers[step.shape] = _Buffers(self, step.shape)
        self.embedding.lookup(step.tokens.reshape(-1), b.embedded)
        norm(b.embedded, self.input_norm, eps, b.normed_embedding)
        norm(feature, self.hidden_norm, eps, b.normed_feature)
        torch.mm(b.joined, self.qkv_t, out=b.qkv)
        rotation = step.rotation
        if rotation is None:
            rotation = self.rotary.rotation(step.positions)
        if cache is not self._cache:
            self._cache, self._keys, self._values = cache, cache[:, :, 0], cache[:, :, 1]
        _ops.rope_append.default(
            b.q,
            b.k,
            b.v,
            *b.places.arguments(step, rotation),
            None,
            None,
            False,
            b.q,
            self._keys,
            self._values,
        )
        _ops.tree_attention.default(
            b.q,
            self._keys,
            self._values,
            step.block_tables,
            step.context_lens,
            step.ancestors,
            None,
            None,
            None,
            self.scale,
            0.0,
            0,
            0,
            1,
            1,
            b.attended,
            b.lse,
        )
        torch.mm(b.attended_rows, self.o_t, out=b.block)
        r = b.normed_feature.clone() if config.norm_before_residual else feature
        add_norm(self.comm, b.block, r, self.mlp_norm, eps, b.normed)
        self.mlp.forward(b.normed, b.block)
        add_norm(self.comm, b.block, r, self.final_norm, eps, b.normed)
        return (b.normed.clone() if config.norm_output else r), b.normed

    def logits(self, normed: Tensor) -> Tensor:
        """``[T, H]`` of ``forward``'s second result -> ``[T, Vd]``, over draft ids."""
        return self.head.forward(normed)
