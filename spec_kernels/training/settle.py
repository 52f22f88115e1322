"""Stage ``settle``: a short last phase of the target against its own tendency to loop.

A small model that is decoded greedily soon repeats itself, because a repeated sentence makes its
next repetition likelier still. DITTO (arXiv 2206.02369) trains on sentences repeated on purpose and
asks that each repetition be less likely than the one before. Half of the batch is such text, half
goes on as ordinary training, in both cases over longer contexts than before.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spec_kernels.models.config import TargetConfig
from spec_kernels.training import loop
from spec_kernels.training.model import Target, bits_per_byte
from spec_kernels.training.optim import Optimizer
from spec_kernels.training.target import BIAS_SPEED, BUNDLED, held_out_loss, uses_muon
from spec_kernels.training.workers import SINGLE, Workers

# A token in its (n+1)-th repetition should have at most this share of its probability in the n-th.
REPEAT_SHARE = 0.5
_SHORTEST, _LONGEST = 1, 64
# Of the learning rate that the target was trained with.
RATE_SHARE = 0.5


class Repeats:
    """Corpus windows of which every second one is a passage and then one sentence over and over.

    ``at`` gives int64 [batch, context + 3]: the window, then where the second copy starts (0 = an
    ordinary window) and the length of a copy.
    """

    def __init__(self, ids: np.ndarray, batch: int, context: int, seed: int):
        self.source = loop.Batches(ids, batch, context, seed)
        self.batch, self.context, self.seed = batch, context, seed

    def at(self, num_tokens: int) -> Tensor:
        windows = self.source.at(num_tokens)
        places = torch.zeros(self.batch, 2, dtype=torch.int64)
        generator = np.random.default_rng((self.seed, num_tokens))
        length = self.context + 1
        longest = min(_LONGEST, length // 4)
        for row in range(1, self.batch, 2):
            # Lengths even in their logarithm: real loops are short more often than long.
            bounds = np.log([_SHORTEST, longest + 1])
            period = int(np.exp(generator.uniform(*bounds)))
            start = int(generator.integers(0, length // 2 - period))
            copy = windows[row, start : start + period]
            count = -(-(length - start) // period)
            windows[row, start:] = copy.repeat(count)[: length - start]
            places[row] = torch.tensor([start + period, period])
        return torch.cat((windows, places), dim=1)


def repetition_loss(logits: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(likelihood loss, repetition loss, how likely a repeated token is): means over their tokens.

    logits [B, N, V] of batch[:, :N], batch [B, N + 3] as ``Repeats.at`` gives it.
    """
    tokens, second, period = batch[:, 1:-2], batch[:, -2:-1], batch[:, -1:]
    log_p = torch.log_softmax(logits.float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    index = torch.arange(1, tokens.shape[1] + 1)
    is_repeated = (second > 0) & (index >= second)
    p = log_p.exp()
    # The first token of the window has no prediction to look back to; no copy starts there twice.
    before = p.detach().gather(1, (index - 1 - period).clamp(min=0).expand_as(p))
    excess = (p - REPEAT_SHARE * before).abs()
    penalty = -torch.log((1.0 - excess).clamp(min=1e-5))
    has_before = is_repeated & (index - period >= 1)
    likelihood = -log_p[~is_repeated].mean()
    return likelihood, penalty[has_before].mean(), p.detach()[has_before].mean()


def train(
    out: Path,
    schedule: loop.Schedule,
    *,
    config: TargetConfig = BUNDLED,
    seed: int = 0,
    batch: int = 16,
    context: int = 512,
    weight: float = 2.0,
    weight_decay: float = 0.1,
    use_compile: bool = True,
    compute_dtype: torch.dtype = torch.bfloat16,
    resume: bool = False,
    stop_after: int | None = None,
    workers: Workers = SINGLE,
) -> Target:
    """Goes on from target.pt of ``out``; writes settle.pt and settle.jsonl."""
    corpus = json.loads((out / "corpus.json").read_text())
    training, held_out = np.load(out / "train.npy"), np.load(out / "held_out.npy")
    torch.manual_seed(seed)
    model = Target(config, compute_dtype)
    model.load_state_dict(torch.load(out / "target.pt", weights_only=True)["model"])
    optimizer = Optimizer(model, uses_muon, weight_decay)
    if use_compile:
        model.compile_layers()

    def step_of(windows: Tensor) -> loop.Step:
        logits, _, loads = model(windows[:, :-3])
        likelihood, penalty, repeated = repetition_loss(logits, windows)
        report = {"loss": likelihood, "repetition_loss": penalty, "repeated_p": repeated}
        return loop.Step(likelihood + weight * penalty, report, loads)

    def evaluate() -> dict:
        loss = held_out_loss(model, held_out)
        return {
            "held_out_loss": loss,
            "held_out_bits_per_byte": bits_per_byte(loss, corpus["held_out"]["bytes_per_token"]),
        }

    loop.run(
        "settle",
        out,
        model,
        optimizer,
        schedule,
        Repeats(training, batch, context, seed + 2),
        step_of,
        resume,
        workers=workers,
        balance=lambda loads: model.balance(loads, BIAS_SPEED),
        evaluate=evaluate,
        stop_after=stop_after,
    )
    return model
