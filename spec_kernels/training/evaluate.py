"""What the model card states: distinct n-grams, and accept lengths by replay of TTT passes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from spec_kernels.training import eagle
from spec_kernels.training.generate import continue_text
from spec_kernels.training.model import Target

NGRAM = 4
NUM_NEW_TOKENS = 128


def distinct_ngrams(tokens: list[int], n: int = NGRAM) -> float:
    """Different n-grams over n-grams of one text; 1 if it is shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


@dataclasses.dataclass(frozen=True)
class Report:
    """Means over prompts for one temperature; accept lengths are for chains of 1, 2, ... drafts."""

    temperature: float
    num_prompts: int
    distinct_4grams: float
    accept_lengths: list[float]
    full_accuracy: list[float]


@torch.no_grad()
def ttt_right(
    target: Target,
    drafter: eagle.Drafter,
    captured_layers: tuple[int, ...],
    texts: Tensor,
    num_steps: int,
) -> Tensor:
    """TTT pass over texts [S, L]: bool ``[num_steps, S, L - 1 - num_steps]``, see ``are_right``."""
    inputs = texts[:, :-1]
    _, captured, _ = target(inputs, captured_layers)
    logits = drafter(inputs, captured, target.embed_tokens, num_steps)
    return eagle.are_right(drafter, logits, texts)


@torch.no_grad()
def evaluate(
    target: Target,
    drafter: eagle.Drafter,
    captured_layers: tuple[int, ...],
    prompts: Tensor,
    temperatures: tuple[float, ...],
    num_steps: int = 5,
    num_new: int = NUM_NEW_TOKENS,
    seed: int = 0,
) -> list[Report]:
    """Continues prompts [B, P] plainly, then replays speculative decoding over what came out.

    Replaying is exact: whatever the drafts, verified output is the target's own, so the accept
    length of a chain follows from where the drafts of the TTT pass agree with the text. The first
    root is the first new token, which prefill gives; row t has root x[t + 1].
    """
    num_prompts, length = prompts.shape
    # The chains that start last must still have text to be compared with. One batch for all
    # temperatures: a step costs nearly the same for few rows and for many.
    texts = continue_text(
        target,
        prompts.repeat(len(temperatures), 1),
        num_new + num_steps,
        torch.tensor(temperatures).repeat_interleave(num_prompts),
        torch.Generator().manual_seed(seed),
    )
    first, reports = length - 1, []
    for temperature, part in zip(temperatures, texts.split(num_prompts), strict=True):
        new = part[:, length : length + num_new].tolist()
        right = ttt_right(target, drafter, captured_layers, part, num_steps)
        full, _, _ = eagle.accuracies(right[:, :, first:])
        accept_lengths = []
        for chain in range(1, num_steps + 1):
            counts = [
                eagle.replay(right[:chain, row], first, right.shape[2])
                for row in range(num_prompts)
            ]
            emitted, cycles = (sum(column) for column in zip(*counts, strict=True))
            accept_lengths.append(emitted / cycles)
        distinct = sum(map(distinct_ngrams, new)) / num_prompts
        reports.append(Report(temperature, num_prompts, distinct, accept_lengths, full))
    return reports
