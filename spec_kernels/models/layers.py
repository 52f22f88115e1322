"""The layers of target and drafter, on the ops of this package.

A decode step is a few dozen small calls a layer, so calls are what it costs on a CPU: projections
that share an input are one matrix, buffers of a step shape are made once together with every view
of them, and ops are called at the dispatcher. The ops check their arguments themselves, and the
Python faces would check again what cannot change between two steps of the same shape.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from spec_kernels.comm import Communicator
from spec_kernels.models.config import RopeConfig, TargetConfig
from spec_kernels.models.rope import attention_factor, inverse_frequencies, softmax_scale
from spec_kernels.models.weights import Checkpoint, Shard

_ops = torch.ops.spec_kernels

# Below this a rank keeps the whole embedding: a lookup without an all-reduce is worth the memory.
REPLICATED_EMBEDDING_BYTES = 64 * 2**20


@dataclasses.dataclass
class Step:
    """One forward's rows: tokens and where they stand. All tensors are static in shape.

    Attributes:
        tokens: ``[B, N]`` int64 ids; any valid id where a row is absent.
        positions: ``[B, N]`` int64.
        ancestors: ``[B, N, W]`` int32 words as in ``tree_attention``; all zero = absent row.
        slots: ``[B, N]`` int64: a row's K/V go to the cache at ``context_lens + slots``; -1 = they
            go nowhere.
        block_tables: ``[B, M]`` int32.
        context_lens: ``[B]`` int64, committed tokens.
        rotation: ``Rotary.rotation`` of the positions, where the caller has it already.
    """

    tokens: Tensor
    positions: Tensor
    ancestors: Tensor
    slots: Tensor
    block_tables: Tensor
    context_lens: Tensor
    rotation: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.tokens.shape)


class Rotary:
    """The rotations of one model's rope; all its layers share a step's."""

    def __init__(self, rope: RopeConfig, dim: int, device: torch.device):
        self.frequencies = inverse_frequencies(rope, dim, device)
        self.factor = attention_factor(rope)
        self._buffers: dict[torch.Size, tuple[Tensor, ...]] = {}

    def rotation(self, positions: Tensor) -> Tensor:
        """Cosines, then sines of ``positions [B, N]``: float32 ``[B, N, dim]``.

        A static buffer that the next call of this shape reuses.
        """
        buffers = self._buffers.get(positions.shape)
        if buffers is None:
            angles = self.frequencies.repeat(*positions.shape, 1)
            rotation = angles.repeat(1, 1, 2)
            buffers = (angles, rotation, *rotation.chunk(2, -1))
            self._buffers[positions.shape] = buffers
        angles, rotation, cos, sin = buffers
        torch.mul(positions.unsqueeze(-1), self.frequencies, out=angles)
        torch.cos(angles, out=cos)
        torch.sin(angles, out=sin)
        return rotation if self.factor == 1.0 else rotation.mul_(self.factor)


class RowPlaces:
    """How ``rope_append`` finds the rotation of a step's rows: row t of a table of their own.

    Angles are computed from the positions of the step, so no table of some length can run out.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device):
        batch, nodes = shape
        self.row_ids = torch.arange(batch * nodes, device=device).view(batch, nodes)
        self.zeros = torch.zeros(batch, dtype=torch.int64, device=device)

    def arguments(self, step: Step, rotation: Tensor) -> tuple[Tensor, ...]:
        """cos_sin, depths, slots, context_lens, cache_lens, block_tables."""
        table = rotation.flatten(0, 1)
        return (
            table, self.row_ids, step.slots, self.zeros, step.context_lens, step.block_tables
        )  # fmt: skip


def sum_over_ranks(comm: Communicator, x: Tensor) -> None:
    """Adds up every rank's ``x`` in place, to the same bits on all."""
    if comm.world_size > 1:
        comm.all_reduce(x, out=x)


def add_norm(
    comm: Communicator,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    capture: Tensor | None = None,
    slot: int = 0,
) -> None:
    """``residual +=`` every rank's ``x``; ``out = rms_norm(residual) * weight``; and captured.

    One call either way, to the same bits on all ranks: what is captured is the sum over ranks.
    """
    if comm.world_size > 1:
        comm.all_reduce_norm(x, residual, weight, eps, out=out, capture=capture, slot=slot)
    else:
        _ops.hidden_capture.default(x, residual, weight, eps, out, capture, slot)


def per_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out [H, T, M] = x [H, T, K] @ weight [H, K, M]``, contiguous out.

    In bfloat16 on a CPU the batched product rounds a row by how many rows there are, and the plain
    product does not (oneDNN, measured for 1 to 64 rows): so verifying a draft gives the bits that
    decoding it gives.
    """
    if x.dtype == torch.float32 or x.device.type != "cpu":
        torch.bmm(x, weight, out=out)
        return
    for head in range(x.shape[0]):
        torch.mm(x[head], weight[head], out=out[head])


def norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    capture: Tensor | None = None,
    slot: int = 0,
) -> None:
    """``out = rms_norm(x) * weight`` for ``x [T, H]``, which stays as it is, and is captured."""
    _ops.hidden_capture.default(None, x, weight, eps, out, capture, slot)


class Embedding:
    """Token embedding ``[V, H]``, whole on every rank if small, else split by vocabulary."""

    def __init__(self, weights: Checkpoint, name: str, config, shard: Shard, comm, dtype):
        shape = (config.vocab_size, config.hidden_size)
        size = shape[0] * shape[1] * dtype.itemsize
        self.split = shard.size > 1 and size > REPLICATED_EMBEDDING_BYTES
        self.rows = shard.of(config.vocab_size, "vocab_size")
        self.weight = weights.read(name, shape, dtype, rows=self.rows if self.split else None)
        self.comm = comm

    def lookup(self, tokens: Tensor, out: Tensor) -> None:
        """Writes the rows of ``tokens [T]`` to ``out [T, H]``."""
        if not self.split:
            torch.index_select(self.weight, 0, tokens, out=out)
            return
        local = tokens - self.rows.start
        held = (local >= 0) & (local < self.weight.shape[0])
        torch.index_select(self.weight, 0, local * held, out=out)
        out.mul_(held.unsqueeze(1))
        sum_over_ranks(self.comm, out)


class LMHead:
    """Logits of hidden rows, split by vocabulary; every rank gets all, bit for bit alike."""

    def __init__(self, weight: Tensor, comm: Communicator):
        self.weight_t = weight.t()
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]`` -> ``[T, V]`` in x's dtype."""
        local = torch.mm(x, self.weight_t)
        if self.comm.world_size == 1:
            return local
        return self.comm.all_gather(local).transpose(0, 1).reshape(x.shape[0], -1)


class DenseMLP:
    """SwiGLU, ``down(silu(gate(x)) * up(x))``, split over ranks, whose sum is due afterwards.

    To ``moe_experts`` it is a shared expert beside no routed ones: one call, and a row's bits do
    not depend on how many rows there are.
    """

    def __init__(
        self, weights: Checkpoint, prefix: str, hidden: int, inner: int, shard: Shard, dtype
    ):
        rows = shard.of(inner, f"{prefix} intermediate size")
        gate = weights.read(f"{prefix}.gate_proj.weight", (inner, hidden), dtype, rows=rows)
        up = weights.read(f"{prefix}.up_proj.weight", (inner, hidden), dtype, rows=rows)
        down = weights.read(f"{prefix}.down_proj.weight", (hidden, inner), dtype, columns=rows)
        self.gate_up, self.down = torch.cat((gate, up)), down.contiguous()
        self.no_router = self.gate_up.new_empty(0, hidden)
        self.no_gate_up = self.gate_up.new_empty(0, 2, hidden)
        self.no_down = self.gate_up.new_empty(0, hidden, 1)

    def forward(self, x: Tensor, out: Tensor) -> None:
        """``x [T, H]`` -> ``out [T, H]``."""
        experts = (self.no_router, None, self.no_gate_up, self.no_down, None, None)
        _ops.moe_experts.default(x, *experts, self.gate_up, self.down, 0, 1, 1, 1.0, True, out)


class MoE:
    """Routed experts and the shared one, each split over ranks, whose sum is due afterwards.

    Routed experts that a checkpoint holds as packed INT4 stay packed in memory.
    """

    def __init__(self, weights: Checkpoint, prefix: str, config: TargetConfig, shard: Shard, dtype):
        hidden, experts = config.hidden_size, config.n_routed_experts
        self.router = weights.read(f"{prefix}.gate.weight", (experts, hidden), dtype)
        self.bias = weights.read(
            f"{prefix}.gate.e_score_correction_bias", (experts,), torch.float32
        )
        self._read_routed(weights, f"{prefix}.experts", config, shard, dtype)
        self.shared_gate_up = self.shared_down = None
        if config.n_shared_experts:
            shared, name = config.shared_intermediate_size, f"{prefix}.shared_experts"
            rows = shard.of(shared, "shared expert intermediate size")
            self.shared_gate_up = torch.cat(
                [
                    weights.read(f"{name}.{part}_proj.weight", (shared, hidden), dtype, rows=rows)
                    for part in ("gate", "up")
                ]
            )
            self.shared_down = weights.read(
                f"{name}.down_proj.weight", (hidden, shared), dtype, columns=rows
            ).contiguous()
        self.settings = (
            config.num_experts_per_tok,
            config.n_group,
            config.topk_group,
            config.routed_scaling_factor,
            config.norm_topk_prob,
        )

    def _read_routed(
        self, weights: Checkpoint, prefix: str, config: TargetConfig, shard: Shard, dtype
    ) -> None:
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        is_int4 = weights.holds_int4(f"{prefix}.0.gate_proj")
        in_group = weights.int4_group(f"{prefix}.0.gate_proj", hidden) if is_int4 else 1
        out_group = weights.int4_group(f"{prefix}.0.down_proj", inner) if is_int4 else 1
        mine = shard.of(inner, "moe_intermediate_size", out_group)

        def read(name: str, shape: tuple[int, int], group: int, **part) -> tuple[Tensor, ...]:
            """The weights, and the scales where there are some."""
            if is_int4:
                return weights.read_int4(name, shape, group, **part)
            return (weights.read(f"{name}.weight", shape, dtype, **part),)

        gate_up, down = [], []
        for e in range(config.n_routed_experts):
            name = f"{prefix}.{e}"
            gate = read(f"{name}.gate_proj", (inner, hidden), in_group, rows=mine)
            up = read(f"{name}.up_proj", (inner, hidden), in_group, rows=mine)
            last = read(f"{name}.down_proj", (hidden, inner), out_group, columns=mine)
            if e == 0:
                # Filled in place: a rank never holds more of the experts than its own part.
                size = (config.n_routed_experts, 2 * (mine.stop - mine.start))
                gate_up = [t.new_empty(*size, t.shape[1]) for t in gate]
                down = [t.new_empty(size[0], *t.shape) for t in last]
            for stack, *halves in zip(gate_up, gate, up, strict=True):
                torch.cat(halves, out=stack[e])
            for stack, t in zip(down, last, strict=True):
                stack[e] = t
        self.gate_up, self.gate_up_scale = (*gate_up, None)[:2]
        self.down, self.down_scale = (*down, None)[:2]

    def forward(self, x: Tensor, out: Tensor) -> None:
        """``x [T, H]`` -> ``out [T, H]``."""
        _ops.moe_experts.default(
            x,
            self.router,
            self.bias,
            self.gate_up,
            self.down,
            self.gate_up_scale,
            self.down_scale,
            self.shared_gate_up,
            self.shared_down,
            *self.settings,
            out,
        )


class MLABuffers:
    """Every intermediate of an MLA layer for one step shape, and the views that the layer uses.

    ``wide`` holds, side by side, what the two projections write: q latent, kv latent, rotary key,
    rotary queries (rotated in place), plain queries.
    """

    def __init__(self, config: TargetConfig, shape: tuple[int, int], num_heads: int, dtype, device):
        batch, nodes = shape
        num_rows = batch * nodes
        rank, rope, nope = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
        q_rank, v_dim = config.q_lora_rank, config.v_head_dim

        def new(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        down = q_rank + rank + rope
        wide = new(num_rows, down + num_heads * (rope + nope))
        self.down = wide[:, :down]
        self.q_down = wide[:, :q_rank]
        by_row = wide.view(batch, nodes, -1)
        self.latent = by_row[:, :, q_rank : q_rank + rank]
        self.k_rope = by_row[:, :, q_rank + rank : down]
        self.q = wide[:, down:]
        self.q_down_normed = new(num_rows, q_rank)
        self.q_rope = by_row[:, :, down : down + num_heads * rope].unflatten(2, (num_heads, rope))
        self.places = RowPlaces(shape, device)
        self.q_nope = (
            wide[:, down + num_heads * rope :].unflatten(1, (num_heads, nope)).transpose(0, 1)
        )
        # By head in memory, as the batched products want them; the attention follows the strides.
        self.q_latent_by_head = new(num_heads, num_rows, rank)
        self.q_latent = self.q_latent_by_head.view(num_heads, batch, nodes, rank).permute(
            1, 2, 0, 3
        )
        self.attended_by_head = new(num_heads, num_rows, rank)
        self.attended = self.attended_by_head.view(num_heads, batch, nodes, rank).permute(
            1, 2, 0, 3
        )
        self.lse = torch.zeros(batch, nodes, num_heads, dtype=torch.float32, device=device)
        self.values_by_head = new(num_heads, num_rows, v_dim)
        # One row or one head: the two orders are the same memory.
        self.reorder = num_rows > 1 and num_heads > 1
        self.values = new(num_rows, num_heads * v_dim)
        if not self.reorder:
            self.values = self.values_by_head.view(num_rows, num_heads * v_dim)
        self.values_by_row = self.values.view(num_rows, num_heads, v_dim)


class MLA:
    """Multi-head latent attention, absorbed: heads split by rank, latent cache on every rank.

    ``kv_b_proj`` holds for each head W_UK [nope, R], then W_UV [v, R]. W_UK goes into the query
    (q_latent = q_nope W_UK) and W_UV after the attention over latents, so that the cache keeps
    R + Dr numbers a token, whatever the number of heads. The sum over ranks is due afterwards.
    """

    def __init__(self, weights: Checkpoint, prefix: str, config: TargetConfig, shard: Shard, dtype):
        heads = config.num_attention_heads
        hidden, rank, q_rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
        nope, rope, v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        mine = shard.of(heads, "num_attention_heads")
        self.num_heads = local = mine.stop - mine.start

        def of_heads(width: int) -> slice:
            return slice(mine.start * width, mine.stop * width)

        q_a = weights.read(f"{prefix}.q_a_proj.weight", (q_rank, hidden), dtype)
        kv_a = weights.read(f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, hidden), dtype)
        self.down_t = torch.cat((q_a, kv_a)).t()
        q_b = weights.read(
            f"{prefix}.q_b_proj.weight",
            (heads * (nope + rope), q_rank),
            dtype,
            rows=of_heads(nope + rope),
        ).view(local, nope + rope, q_rank)
        # Rotary rows first, as MLABuffers lays them out.
        parts = (q_b[:, nope:].reshape(-1, q_rank), q_b[:, :nope].reshape(-1, q_rank))
        self.q_b_t = torch.cat(parts).t()
        kv_b = weights.read(
            f"{prefix}.kv_b_proj.weight",
            (heads * (nope + v_dim), rank),
            dtype,
            rows=of_heads(nope + v_dim),
        ).view(local, nope + v_dim, rank)
        self.w_uk = kv_b[:, :nope].contiguous()
        self.w_uv = kv_b[:, nope:].transpose(1, 2).contiguous()
        self.o_t = (
            weights.read(
                f"{prefix}.o_proj.weight", (hidden, heads * v_dim), dtype, columns=of_heads(v_dim)
            )
            .contiguous()
            .t()
        )
        self.q_norm = weights.read(f"{prefix}.q_a_layernorm.weight", (q_rank,), dtype)
        self.kv_norm = weights.read(f"{prefix}.kv_a_layernorm.weight", (rank,), dtype)
        self.eps = config.latent_norm_eps
        self.scale = softmax_scale(config.rope, config.qk_head_dim)

    def forward(
        self,
        x: Tensor,
        step: Step,
        places: tuple[Tensor, ...],
        cache: Tensor,
        buffers: MLABuffers,
        out: Tensor,
    ) -> None:
        """``x [T, H]`` -> ``out [T, H]``; their latents to ``cache [P, page, R + Dr]``."""
        b = buffers
        torch.mm(x, self.down_t, out=b.down)
        norm(b.q_down, self.q_norm, self.eps, b.q_down_normed)
        torch.mm(b.q_down_normed, self.q_b_t, out=b.q)
        _ops.rope_append_mla.default(
            b.q_rope,
            b.latent,
            b.k_rope,
            self.kv_norm,
            self.eps,
            *places,
            None,
            True,
            b.q_rope,
            cache,
        )
        per_head(b.q_nope, self.w_uk, b.q_latent_by_head)
        _ops.tree_attention_mla.default(
            b.q_latent,
            b.q_rope,
            cache,
            step.block_tables,
            step.context_lens,
            step.ancestors,
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
        per_head(b.attended_by_head, self.w_uv, b.values_by_head)
        if b.reorder:
            b.values_by_row.copy_(b.values_by_head.transpose(0, 1))
        torch.mm(b.values, self.o_t, out=out)
