"""Stage ``settle``: a short last phase of the target against its own tendency to loop.

A small model that is decoded greedily soon repeats itself, because a repeated sentence makes its
next repetition likelier still. DITTO (arXiv 2206.02369) trains on sentences repeated on purpose and
asks that each repetition be less likely than the one before. A quarter of the batch is such text. A
quarter begins with what the target itself wrote greedily, where every token that ends an n-gram for
the second time is made less likely (unlikelihood, arXiv 1908.04319). Half goes on as ordinary
training, over longer contexts than before.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spec_kernels.models.config import TargetConfig
from spec_kernels.training import loop
from spec_kernels.training.evaluate import NGRAM
from spec_kernels.training.model import Target, bits_per_byte
from spec_kernels.training.optim import Optimizer
from spec_kernels.training.target import BIAS_SPEED, BUNDLED, held_out_loss, uses_muon
from spec_kernels.training.workers import SINGLE, Workers

# A token in its (n+1)-th repetition should have at most this share of its probability in the n-th.
REPEAT_SHARE = 0.5
_SHORTEST, _LONGEST = 1, 64
OWN_PROMPT_TOKENS, OWN_TOKENS = 64, 214
# Of the learning rate that the target was trained with.
RATE_SHARE = 0.5


class Repeats:
    """Corpus windows, of which every fourth is a passage and then one sentence over and over, and
    every fourth begins with a text of ``own`` (as an ordinary window if there is none).

    ``at`` gives int64 [batch, context + 3]: the window, then two numbers: where the second copy
    starts and the length of a copy; or minus the length of the own text's prompt and its length; or
    0 and 0 for an ordinary window.
    """

    def __init__(
        self,
        ids: np.ndarray,
        batch: int,
        context: int,
        seed: int,
        own: np.ndarray | None = None,
        prompt_tokens: int = OWN_PROMPT_TOKENS,
    ):
        if own is not None and own.shape[1] > context:
            raise ValueError(
                f"settle: own: expected texts of at most {context} tokens, got {own.shape[1]}"
            )
        self.source = loop.Batches(ids, batch, context, seed)
        self.batch, self.context, self.seed = batch, context, seed
        self.own, self.prompt_tokens = own, prompt_tokens

    def at(self, num_tokens: int) -> Tensor:
        windows = self.source.at(num_tokens)
        places = torch.zeros(self.batch, 2, dtype=torch.int64)
        generator = np.random.default_rng((self.seed, num_tokens))
        length = self.context + 1
        longest = min(_LONGEST, length // 4)
        for row in range(1, self.batch, 4):
            # Lengths even in their logarithm: real loops are short more often than long.
            bounds = np.log([_SHORTEST, longest + 1])
            period = int(np.exp(generator.uniform(*bounds)))
            start = int(generator.integers(0, length // 2 - period))
            copy = windows[row, start : start + period]
            count = -(-(length - start) // period)
            windows[row, start:] = copy.repeat(count)[: length - start]
            places[row] = torch.tensor([start + period, period])
        if self.own is not None:
            for row in range(3, self.batch, 4):
                text = self.own[generator.integers(len(self.own))]
                windows[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
                places[row] = torch.tensor([-self.prompt_tokens, len(text)])
        return torch.cat((windows, places), dim=1)


def ends_repeated_ngram(tokens: Tensor, first: Tensor, last: Tensor, n: int = NGRAM) -> Tensor:
    """Whether tokens[b, t] ends an n-gram that an earlier t of the same text ends too: bool [B, N].

    The text of row b is tokens[b, first[b] : last[b]]; first, last [B, 1].
    """
    length = tokens.shape[1]
    index = torch.arange(length)
    shifted = [F.pad(tokens, (i, 0), value=-1)[:, :length] for i in range(n)]
    same = torch.stack([s.unsqueeze(2) == s.unsqueeze(1) for s in shifted]).all(0)
    is_whole = (index >= first + n - 1) & (index < last)
    same &= is_whole.unsqueeze(2) & is_whole.unsqueeze(1) & (index.unsqueeze(1) > index)
    return same.any(2)


def repetition_loss(logits: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(likelihood loss, repetition loss, report): means over their own tokens.

    logits [B, N, V] of batch[:, :N], batch [B, N + 3] as ``Repeats.at`` gives it. The report says
    how likely a token of a copy, and one that ends a repeated n-gram of an own text, still is.
    """
    tokens, first, second = batch[:, 1:-2], batch[:, -2:-1], batch[:, -1:]
    log_p = torch.log_softmax(logits.float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    p = log_p.exp()
    index = torch.arange(1, tokens.shape[1] + 1)
    is_copy = (first > 0) & (index >= first)
    # The window's first token has no prediction, so the token one period later has none to obey.
    has_before = is_copy & (index - second >= 1)
    before = p.detach().gather(1, (index - 1 - second).clamp(min=0).expand_as(p))
    is_own = (first < 0) & (index < second)
    ends = ends_repeated_ngram(tokens, -first - 1, second - 1) & is_own
    excess = torch.where(has_before, (p - REPEAT_SHARE * before).abs(), p)
    penalty = -torch.log((1.0 - excess).clamp(min=1e-5))

    def mean(values: Tensor, mask: Tensor) -> Tensor:
        return (values * mask).sum() / mask.sum().clamp(min=1)

    likelihood = -mean(log_p, ~is_copy & ~is_own)
    report = {"copied_p": mean(p.detach(), has_before), "own_repeated_p": mean(p.detach(), ends)}
    return likelihood, mean(penalty, has_before) + mean(penalty, ends), report


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
    """Goes on from ``out``'s target.safetensors; writes settle.safetensors and settle.jsonl.

    own.npy of ``out``, if it is there, holds the target's own greedy texts.
    """
    own = out / "own.npy"
    corpus = json.loads((out / "corpus.json").read_text())
    training, held_out = np.load(out / "train.npy"), np.load(out / "held_out.npy")
    torch.manual_seed(seed)
    model = Target(config, compute_dtype)
    loop.load_weights(out / "target.safetensors", model)
    optimizer = Optimizer(model, uses_muon, weight_decay)
    if use_compile:
        model.compile_layers()

    def step_of(windows: Tensor) -> loop.Step:
        logits, _, loads = model(windows[:, :-3])
        likelihood, penalty, report = repetition_loss(logits, windows)
        report = {"loss": likelihood, "repetition_loss": penalty, **report}
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
        Repeats(training, batch, context, seed + 2, np.load(own) if own.is_file() else None),
        step_of,
        resume,
        workers=workers,
        balance=lambda loads: model.balance(loads, BIAS_SPEED),
        evaluate=evaluate,
        stop_after=stop_after,
    )
    return model
