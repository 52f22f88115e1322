"""Stage ``drafter``: the EAGLE-3 drafter, by TTT on the target's own text and the corpus."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spec_kernels.models.config import DrafterConfig, RopeConfig, TargetConfig
from spec_kernels.training import eagle, loop
from spec_kernels.training.evaluate import ttt_right
from spec_kernels.training.generate import continue_text
from spec_kernels.training.model import Target
from spec_kernels.training.optim import Optimizer
from spec_kernels.training.workers import SINGLE, Workers

STEP_WEIGHT = 0.8
VALIDATION_TOKENS = 64
VALIDATION_TEMPERATURES = (0.0, 0.8)


def bundled_config(target: TargetConfig) -> DrafterConfig:
    """The drafter of the bundled target: three quarters of its vocabulary, heads for 8 ranks."""
    num_layers = target.num_hidden_layers
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads,
        head_dim=32,
        intermediate_size=768,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size * 3 // 4,
        target_hidden_size=target.hidden_size,
        rope=RopeConfig(theta=10000.0),
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        # The default ids fall together on small targets, so they are written out.
        aux_layers=(2, num_layers // 2 + 1, num_layers),
    )


def frequent_ids(texts: list[np.ndarray], vocab_size: int, count: int) -> tuple[Tensor, float]:
    """(the ``count`` most frequent ids, ascending, ties to the lower id; their share of tokens)."""
    totals = sum(np.bincount(text.ravel(), minlength=vocab_size) for text in texts)
    chosen = np.argsort(-totals, kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen)), float(totals[chosen].sum() / totals.sum())


def ttt_loss(
    drafter: eagle.Drafter,
    logits: list[Tensor],
    target_logits: Tensor,
    target_temperature: float,
) -> Tensor:
    """sum over steps of 0.8^i times the mean cross entropy against the target's distribution.

    That distribution is restricted to the draft vocabulary and, below temperature 1, sharpened:
    the drafter is used through its top choices, so its capacity belongs there.
    target_logits [B, N, V] are the target's over the same positions.
    """
    ids, num_rows = drafter.draft_ids(), logits[0].shape[1]
    wanted = torch.softmax(target_logits[..., ids].float() / target_temperature, dim=-1)
    loss = torch.zeros(())
    for i, step in enumerate(logits):
        log_q = F.log_softmax(step.float(), dim=-1)
        entropy = -(wanted[:, i + 1 : i + 1 + num_rows] * log_q).sum(-1)
        loss = loss + STEP_WEIGHT**i * entropy.mean()
    return loss


@torch.no_grad()
def start_from_target(
    drafter: eagle.Drafter, target: Target, captured_layers: tuple[int, ...], tokens: Tensor
) -> None:
    """Gives the drafter the target's head and final norm, and features of unit size.

    The residual stream grows with depth, and what a fresh layer adds to a large feature counts for
    nothing: fc is scaled by the streams' sizes on ``tokens [B, N]``.
    """
    drafter.lm_head.weight.copy_(target.lm_head.weight[drafter.draft_ids()])
    drafter.norm.weight.copy_(target.norm.weight)
    _, captured, _ = target(tokens, captured_layers)
    sizes = captured.float().unflatten(-1, (len(captured_layers), -1)).square().mean((0, 1, 3))
    columns = drafter.fc.weight.view(len(drafter.fc.weight), len(captured_layers), -1)
    columns.div_(sizes.sqrt().view(1, -1, 1))


class Mixture:
    """Half of each batch is text of the target's own, half is corpus, of the same length."""

    def __init__(self, generated: np.ndarray, ids: np.ndarray, batch: int, seed: int):
        if batch < 2 or batch % 2:
            raise ValueError(f"drafter: batch: expected an even number >= 2, got {batch}")
        self.batch, self.context = batch, generated.shape[1] - 1
        self.generated, self.seed = generated, seed
        self.corpus = loop.Batches(ids, batch // 2, self.context, seed + 1)

    def at(self, num_tokens: int) -> Tensor:
        """The batch after ``num_tokens``: int64 [batch, context + 1]."""
        half = num_tokens // 2
        first = half // self.context
        rows = []
        for number in range(first, first + self.batch // 2):
            epoch, index = divmod(number, len(self.generated))
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.generated))
            rows.append(self.generated[order[index]])
        own = torch.from_numpy(np.stack(rows).astype(np.int64))
        # Alternating, so that every worker's part has half of each.
        return torch.stack((own, self.corpus.at(half)), dim=1).flatten(0, 1)


def validation_texts(target: Target, out: Path) -> dict[float, Tensor]:
    """What the target writes after the held-out prompts: {temperature: [prompts, P + new]}."""
    prompts = json.loads((out / "prompts.json").read_text())
    ids = torch.tensor([p["token_ids"] for p in prompts])
    temperatures = torch.tensor(VALIDATION_TEMPERATURES).repeat_interleave(len(ids))
    texts = continue_text(
        target,
        ids.repeat(len(VALIDATION_TEMPERATURES), 1),
        VALIDATION_TOKENS,
        temperatures,
        torch.Generator().manual_seed(1),
    )
    return dict(zip(VALIDATION_TEMPERATURES, texts.split(len(ids)), strict=True))


def train(
    out: Path,
    target: Target,
    schedule: loop.Schedule,
    *,
    seed: int = 0,
    batch: int = 16,
    num_steps: int = 5,
    weight_decay: float = 0.1,
    target_temperature: float = 0.8,
    use_compile: bool = True,
    resume: bool = False,
    stop_after: int | None = None,
    config: DrafterConfig | None = None,
    validation: dict | None = None,
    workers: Workers = SINGLE,
) -> eagle.Drafter:
    """Reads generated.npy and train.npy of ``out``; writes drafter.safetensors
    and drafter.jsonl.

    ``num_steps`` TTT steps of training and validation (step 0 included). ``target`` is frozen.
    """
    generated, ids = np.load(out / "generated.npy"), np.load(out / "train.npy")
    config = config or bundled_config(target.config)
    captured_layers = config.captured_layers(target.config.num_hidden_layers)
    draft_ids, coverage = frequent_ids(
        [generated, ids[: generated.size]], config.vocab_size, config.draft_vocab_size
    )
    torch.manual_seed(seed)
    drafter = eagle.Drafter(config, draft_ids, target.compute_dtype)
    target.eval()
    probe = torch.from_numpy(generated[:4, :-1].astype(np.int64))
    start_from_target(drafter, target, captured_layers, probe)
    optimizer = Optimizer(
        drafter,
        lambda name, parameter: parameter.ndim > 1 and name != "lm_head.weight",
        weight_decay,
    )
    if use_compile:
        target.compile_layers()
        drafter.midlayer.compile(dynamic=False)
    texts = validation
    if texts is None and workers.rank == 0:
        texts = validation_texts(target, out)

    def step_of(windows: Tensor) -> loop.Step:
        inputs = windows[:, :-1]
        with torch.no_grad():
            target_logits, captured, _ = target(inputs, captured_layers)
        logits = drafter(inputs, captured, target.embed_tokens.detach(), num_steps)
        loss = ttt_loss(drafter, logits, target_logits, target_temperature)
        full, conditional, predicted = eagle.accuracies(
            eagle.are_right(drafter, [step.detach() for step in logits], windows)
        )
        report = {
            "loss": loss,
            "full_accuracy": full,
            "conditional_accuracy": conditional,
            "accept_length": predicted,
        }
        return loop.Step(loss, report)

    def evaluate() -> dict:
        report = {"draft_vocab_share": coverage}
        for temperature, text in texts.items():
            # Row t has root x[t + 1], and the first root is the first token that the target wrote.
            first = text.shape[1] - VALIDATION_TOKENS - 1
            right = ttt_right(target, drafter, captured_layers, text, num_steps)
            full, conditional, predicted = eagle.accuracies(right[:, :, first:])
            name = "greedy" if temperature == 0 else f"temperature_{temperature}"
            report[f"{name}_full_accuracy"] = full
            report[f"{name}_conditional_accuracy"] = conditional
            report[f"{name}_accept_length"] = predicted
        return report

    loop.run(
        "drafter",
        out,
        drafter,
        optimizer,
        schedule,
        Mixture(generated, ids, batch, seed),
        step_of,
        resume,
        workers=workers,
        evaluate=evaluate,
        evaluate_every=250,
        stop_after=stop_after,
    )
    return drafter
