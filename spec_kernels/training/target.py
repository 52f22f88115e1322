"""Stage ``target``: next-token training of the bundled target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from spec_kernels.models.config import RopeConfig, TargetConfig
from spec_kernels.training import loop
from spec_kernels.training.corpus import SEPARATOR_ID, VOCAB_SIZE
from spec_kernels.training.model import Target, bits_per_byte, cross_entropy
from spec_kernels.training.optim import Optimizer
from spec_kernels.training.workers import SINGLE, Workers

BIAS_SPEED = 1e-3
EVALUATION_WINDOWS, EVALUATION_CONTEXT = 96, 512

# Kimi-K2.5 in small: every dimension divides over 8 ranks, and no two that a wrong index could
# confuse are equal by construction (nope 16 and v 32 in kv_b_proj, latent 64 and rotary 16).
BUNDLED = TargetConfig(
    hidden_size=192,
    num_hidden_layers=8,
    num_attention_heads=8,
    vocab_size=VOCAB_SIZE,
    intermediate_size=512,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.0,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    rope=RopeConfig(
        theta=10000.0,
        kind="yarn",
        factor=8.0,
        original_max_position_embeddings=512,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    eos_token_ids=(SEPARATOR_ID,),
)


def uses_muon(name: str, parameter: torch.Tensor) -> bool:
    """Matrices between hidden spaces; not embeddings, head or router, whose rows are classes."""
    return parameter.ndim > 1 and not name.endswith(("embed_tokens", "lm_head.weight", "router"))


@torch.no_grad()
def held_out_loss(
    model: Target, ids: np.ndarray, context: int = EVALUATION_CONTEXT, batch: int = 16
) -> float:
    """Mean nats a token over evenly spaced windows of ``context`` tokens, or what there is."""
    context = min(context, len(ids) - 1)
    available = (len(ids) - 1) // context
    starts = np.linspace(0, available - 1, min(available, EVALUATION_WINDOWS)).astype(int)
    windows = np.stack([ids[s * context : (s + 1) * context + 1] for s in np.unique(starts)])
    windows = torch.from_numpy(windows.astype(np.int64))
    total = 0.0
    for part in windows.split(batch):
        logits, _, _ = model(part[:, :-1])
        total += cross_entropy(logits, part[:, 1:]).item() * len(part)
    return total / len(windows)


def train(
    out: Path,
    schedule: loop.Schedule,
    *,
    config: TargetConfig = BUNDLED,
    seed: int = 0,
    batch: int = 32,
    context: int = 256,
    weight_decay: float = 0.1,
    use_muon: bool = True,
    use_compile: bool = True,
    compute_dtype: torch.dtype = torch.bfloat16,
    resume: bool = False,
    stop_after: int | None = None,
    workers: Workers = SINGLE,
) -> Target:
    """Reads train.npy, held_out.npy and corpus.json of ``out``; writes
    target.safetensors and target.jsonl.

    Windows of ``context`` tokens, ``batch`` a step. Longer contexts follow in stage ``settle``:
    attention to them is dear, and is learnt late.
    """
    corpus = json.loads((out / "corpus.json").read_text())
    training, held_out = np.load(out / "train.npy"), np.load(out / "held_out.npy")
    torch.manual_seed(seed)
    model = Target(config, compute_dtype)
    optimizer = Optimizer(
        model, uses_muon if use_muon else lambda name, parameter: False, weight_decay
    )
    if use_compile:
        model.compile_layers()

    def step_of(windows: torch.Tensor) -> loop.Step:
        logits, _, loads = model(windows[:, :-1])
        loss = cross_entropy(logits, windows[:, 1:])
        load = torch.stack(loads).double() if loads else torch.ones(1, 1)
        report = {
            "loss": loss,
            "bits_per_byte": bits_per_byte(loss.item(), corpus["train"]["bytes_per_token"]),
            # 1 is perfect balance; the mean over layers of the busiest expert's load.
            "max_load": (load.amax(1) / load.mean(1)).mean(),
        }
        return loop.Step(loss, report, loads)

    def evaluate() -> dict:
        loss = held_out_loss(model, held_out)
        return {
            "held_out_loss": loss,
            "held_out_bits_per_byte": bits_per_byte(loss, corpus["held_out"]["bytes_per_token"]),
        }

    loop.run(
        "target",
        out,
        model,
        optimizer,
        schedule,
        loop.Batches(training, batch, context, seed),
        step_of,
        resume,
        workers=workers,
        balance=lambda loads: model.balance(loads, BIAS_SPEED),
        evaluate=evaluate,
        stop_after=stop_after,
    )
    return model
