"""Stage ``generate``: text that the target itself writes, for the drafter to learn from."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spec_kernels.training.loop import Log
from spec_kernels.training.model import Target
from spec_kernels.training.workers import SINGLE, Workers

# Greedy use and sampled use both count, so both are written.
TEMPERATURES = (0.0, 0.0, 0.6, 0.8, 1.0)


@torch.no_grad()
def continue_text(
    model: Target, prompts: Tensor, num_new: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """prompts [B, P] int64 -> [B, P + num_new]; temperatures [B], 0 = greedy."""
    batch, length = prompts.shape
    cache = model.new_cache(batch, length + num_new)
    is_greedy = temperatures == 0
    divisor = torch.where(is_greedy, 1.0, temperatures).unsqueeze(1)
    tokens, latest = [prompts], prompts
    for _ in range(num_new):
        logits = model.step(latest, cache).float()
        sampled = torch.multinomial(torch.softmax(logits / divisor, -1), 1, generator=generator)
        latest = torch.where(is_greedy.unsqueeze(1), logits.argmax(-1, keepdim=True), sampled)
        tokens.append(latest)
    return torch.cat(tokens, dim=1)


def random_prompts(ids: np.ndarray, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """[batch, length] int64 from random places of ``ids``."""
    starts = torch.randint(len(ids) - length, (batch,), generator=generator)
    rows = [ids[start : start + length] for start in starts.tolist()]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def generate(
    out: Path,
    model: Target,
    num_sequences: int,
    length: int,
    *,
    prompt_tokens: int = 64,
    batch: int = 160,
    seed: int = 0,
    minutes: float | None = None,
    temperatures: tuple[float, ...] = TEMPERATURES,
    name: str = "generated",
    workers: Workers = SINGLE,
) -> None:
    """Writes this worker's share as NAME.RANK.npy under ``out``; ``merge`` joins the shares.

    Each text has ``length`` tokens, led by a prompt from the training split. The batch of a number
    depends on the seed and that number alone, so the number of workers changes nothing. With
    ``minutes`` each worker stops after the batch during which they are over.
    """
    ids = np.load(out / "train.npy")
    log = Log(out / f"{name}.jsonl", is_resumed=False, is_silent=workers.rank > 0)
    model.eval()
    parts, started = [], time.monotonic()
    for number in range(workers.rank, -(-num_sequences // batch), workers.size):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        prompts = random_prompts(ids, batch, prompt_tokens, generator)
        rows = torch.tensor(temperatures).repeat(-(-batch // len(temperatures)))[:batch]
        texts = continue_text(model, prompts, length - prompt_tokens, rows, generator)
        parts.append(texts.numpy().astype(np.uint16))
        seconds = time.monotonic() - started
        tokens = len(parts) * batch * (length - prompt_tokens)
        log.write(
            {
                "stage": name,
                "sequences": len(parts) * batch * workers.size,
                "tokens": tokens * workers.size,
                "tok_s": tokens * workers.size / seconds,
            }
        )
        if minutes is not None and seconds > minutes * 60.0:
            break
    log.close()
    np.save(out / f"{name}.{workers.rank}.npy", np.stack(parts))


def merge(out: Path, num_workers: int, num_sequences: int, name: str = "generated") -> np.ndarray:
    """NAME.npy: uint16 [sequences, length], the batches of all workers in their own order."""
    shares = [np.load(out / f"{name}.{rank}.npy") for rank in range(num_workers)]
    batches = []
    for number in range(max(map(len, shares))):
        batches.extend(share[number] for share in shares if number < len(share))
    texts = np.concatenate(batches)[:num_sequences]
    np.save(out / f"{name}.npy", texts)
    for rank in range(num_workers):
        (out / f"{name}.{rank}.npy").unlink()
    return texts
