"""What the training stages share: batches, schedule, checkpoints, progress lines.

A run is a function of (seed, number of steps): batches are computed from the number of tokens seen,
and a checkpoint holds weights, optimizer, counters and the random state. So a stopped and resumed
run ends with the same weights as one that was never stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_kernels.training.optim import Optimizer
from spec_kernels.training.workers import SINGLE, Workers

_CHECKPOINT_SECONDS = 180.0
_LOG_EVERY = 10

# Names in a checkpoint file.
_MODEL, _RNG, _COUNTERS, _OPTIMIZER_STEPS = "model.", "rng", "counters", "optimizer_steps"


class Batches:
    """Windows of ``context`` + 1 tokens; every epoch is another permutation with another offset."""

    def __init__(self, ids: np.ndarray, batch: int, context: int, seed: int):
        if len(ids) < (batch + 2) * (context + 1):
            raise ValueError(
                f"batches: ids: expected at least {(batch + 2) * (context + 1)} tokens, "
                f"got {len(ids)}"
            )
        self.ids, self.batch, self.context, self.seed = ids, batch, context, seed
        # One window fewer than fit leaves room for the offset.
        self.num_windows = (len(ids) - 1) // context - 1
        self._epoch, self._order, self._offset = -1, np.empty(0, np.int64), 0

    def at(self, num_tokens: int) -> Tensor:
        """The batch that follows ``num_tokens`` seen tokens: int64 [batch, context + 1]."""
        first = num_tokens // self.context
        rows = []
        for number in range(first, first + self.batch):
            epoch, index = divmod(number, self.num_windows)
            if epoch != self._epoch:
                generator = np.random.default_rng((self.seed, epoch))
                self._order = generator.permutation(self.num_windows)
                self._offset = int(generator.integers(self.context))
                self._epoch = epoch
            start = self._offset + int(self._order[index]) * self.context
            rows.append(self.ids[start : start + self.context + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate over a run of ``num_steps`` steps, or of ``minutes`` of training time.

    It warms up over ``warmup`` steps, stays at ``peak``, and falls linearly to final_share * peak
    over the last ``decay_share`` of the run.
    """

    peak: float
    num_steps: int | None = None
    minutes: float | None = None
    warmup: int = 50
    decay_share: float = 0.4
    final_share: float = 0.0

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.minutes is None):
            raise ValueError("schedule: expected either a number of steps or minutes")

    def progress(self, step: int, seconds: float) -> float:
        """The share of the run that is over."""
        if self.num_steps is not None:
            return step / self.num_steps
        return seconds / (self.minutes * 60.0)

    def rate(self, step: int, seconds: float) -> float:
        warmup = self.warmup if self.num_steps is None else min(self.warmup, self.num_steps // 4)
        left = max(1.0 - self.progress(step, seconds), 0.0)
        fallen = min(left / self.decay_share, 1.0)
        rate = self.peak * (self.final_share + (1.0 - self.final_share) * fallen)
        return rate * min((step + 1) / max(warmup, 1), 1.0)

    def is_done(self, step: int, seconds: float) -> bool:
        return self.progress(step, seconds) >= 1.0


@dataclasses.dataclass
class Step:
    """What a batch gave: the loss to differentiate, values to log, expert loads to balance."""

    loss: Tensor
    report: dict
    loads: list[Tensor] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Counters:
    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


def _replace(path: Path, write) -> None:
    """A reader, or a run that is killed, never meets half a file."""
    temporary = path.with_suffix(path.suffix + ".partial")
    write(temporary)
    os.replace(temporary, path)


def save_checkpoint(
    path: Path,
    model: torch.nn.Module,
    optimizer: Optimizer,
    counters: Counters,
) -> None:
    """One safetensors file; the counters and the optimizer's step stand in its metadata."""
    tensors = {f"{_MODEL}{name}": value for name, value in model.state_dict().items()}
    for part, values in optimizer.tensors().items():
        tensors |= {f"{part}.{name}": value for name, value in values.items()}
    tensors[_RNG] = torch.get_rng_state()
    tensors = {name: value.detach().contiguous() for name, value in tensors.items()}
    numbers = {**dataclasses.asdict(counters), _OPTIMIZER_STEPS: optimizer.num_steps}
    metadata = {_COUNTERS: json.dumps(numbers)}
    _replace(path, lambda temporary: save_file(tensors, temporary, metadata))


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: Optimizer) -> Counters:
    """Restores all of it in place."""
    load_weights(path, model)
    with safe_open(path, "pt") as file:
        optimizer.load(
            {
                part: {name: file.get_tensor(f"{part}.{name}") for name in values}
                for part, values in optimizer.tensors().items()
            }
        )
        torch.set_rng_state(file.get_tensor(_RNG))
        numbers = json.loads(file.metadata()[_COUNTERS])
    optimizer.num_steps = numbers.pop(_OPTIMIZER_STEPS)
    return Counters(**numbers)


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """The model's part of a checkpoint."""
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.startswith(_MODEL)]
        model.load_state_dict({name.removeprefix(_MODEL): file.get_tensor(name) for name in names})


class Log:
    """One line on the terminal and one JSON object in ``path`` for each report."""

    def __init__(self, path: Path, is_resumed: bool, is_silent: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = "a" if is_resumed else "w"
        self.file = None if is_silent else path.open(mode, encoding="utf-8")

    def write(self, values: dict) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        parts = []
        for key, value in values.items():
            if isinstance(value, float):
                value = f"{value:.4g}"
            elif isinstance(value, list):
                value = " ".join(f"{v:.3f}" for v in value)
            parts.append(f"{key} {value}")
        print("  ".join(parts), flush=True)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def run(
    stage: str,
    out: Path,
    model: torch.nn.Module,
    optimizer: Optimizer,
    schedule: Schedule,
    batches: Batches,
    step_of: Callable[[Tensor], Step],
    resume: bool,
    *,
    workers: Workers = SINGLE,
    balance: Callable[[list[Tensor]], None] | None = None,
    evaluate: Callable[[], dict] | None = None,
    evaluate_every: int = 500,
    stop_after: int | None = None,
) -> Counters:
    """Trains until the schedule ends, or ``stop_after`` steps of this call.

    ``step_of(batch)`` runs the forward pass; its report's tensors and lists are averaged between
    log lines. ``balance`` gets the expert loads after each step; ``evaluate()`` values to log.
    """
    checkpoint = out / f"{stage}.safetensors"
    counters = Counters()
    is_resumed = resume and checkpoint.is_file()
    if is_resumed:
        counters = load_checkpoint(checkpoint, model, optimizer)
    is_first = workers.rank == 0
    log = Log(out / f"{stage}.jsonl", is_resumed, is_silent=not is_first)
    last_saved = started = time.monotonic()
    before = counters.seconds
    sums: dict[str, Tensor] = {}
    since, window_start, window_tokens = 0, started, 0
    stop = None if stop_after is None else counters.step + stop_after
    model.train()
    while not schedule.is_done(counters.step, counters.seconds) and counters.step != stop:
        result = step_of(workers.part(batches.at(counters.num_tokens)))
        (result.loss / workers.size).backward()
        # The first worker's clock is the one that counts, so that all end at the same step.
        seconds = before + time.monotonic() - started
        clock = torch.tensor(seconds if is_first else 0.0)
        loads = [load.float() for load in result.loads]
        workers.sum_([*optimizer.gradients(), *loads, clock])
        rate = schedule.rate(counters.step, clock.item())
        norm = optimizer.step(rate)
        if balance is not None:
            balance(loads)
        num_tokens = batches.batch * batches.context
        counters.step += 1
        counters.num_tokens += num_tokens
        counters.seconds = clock.item()
        since, window_tokens = since + 1, window_tokens + num_tokens
        for key, value in result.report.items():
            value = torch.as_tensor(value).detach().double()
            sums[key] = sums[key] + value if key in sums else value
        is_done = schedule.is_done(counters.step, counters.seconds)
        if counters.step % _LOG_EVERY == 0 or is_done:
            now = time.monotonic()
            log.write(
                {
                    "stage": stage,
                    "step": counters.step,
                    "tokens": counters.num_tokens,
                    "minutes": round(counters.seconds / 60.0, 2),
                    **{key: (value / since).tolist() for key, value in sums.items()},
                    "lr": rate,
                    "grad_norm": norm,
                    "tok_s": window_tokens / (now - window_start),
                }
            )
            sums, since, window_start, window_tokens = {}, 0, now, 0
        if evaluate is not None and is_first and (counters.step % evaluate_every == 0 or is_done):
            model.eval()
            # Evaluation shapes differ from training's and are too few to compile for.
            with torch.compiler.set_stance("force_eager"):
                log.write({"stage": stage, "step": counters.step, **evaluate()})
            model.train()
        if is_first and time.monotonic() - last_saved > _CHECKPOINT_SECONDS:
            save_checkpoint(checkpoint, model, optimizer, counters)
            last_saved = time.monotonic()
    if is_first:
        save_checkpoint(checkpoint, model, optimizer, counters)
    log.close()
    return counters
