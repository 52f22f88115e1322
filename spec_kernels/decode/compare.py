"""Decodes prompts plainly and speculatively, and compares texts and times."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter

import torch

from spec_kernels.decode.engine import Engine, Generation
from spec_kernels.decode.text import TextStream

# Requests of a batch that are decoded once more by themselves.
_NUM_ALONE = 2


@dataclasses.dataclass
class _Run:
    """All prompts decoded in one way.

    Attributes:
        generations: of every prompt.
        seconds: of decoding, prompts and their first tokens not counted.
        num_cycles: that were run.
        phase_seconds: of the cycles, by phase.
        by_nodes: how many cycles had so many nodes a request.
    """

    generations: list[Generation]
    seconds: float
    num_cycles: int
    phase_seconds: dict[str, float]
    by_nodes: Counter

    @property
    def tok_s(self) -> float:
        """Tokens a second; the first of a prompt belongs to its prefill, not to decoding."""
        num = sum(len(g.tokens) - 1 for g in self.generations)
        return num / self.seconds if self.seconds > 0 and num else 0.0


def compare(comm, job, engine: Engine) -> dict:
    """The report of one rank; every rank's is the same but for its own times.

    Args:
        comm: the ranks.
        job: ``decode.cli.Job``.
    """
    show = TextStream(job.tokenizer) if comm.rank == 0 else None
    # Buffers of every step shape are made by their first use, and kinds of cycles captured.
    warm = min(8, job.max_new_tokens)
    for speculative in (False, True):
        engine.generate(job.prompts[0].ids, warm, speculative=speculative).result()
    for draws in sorted({job.draws(one) for one in job.passes}):
        engine.batch.warm_up(draws=draws)
    seconds_to_start = time.monotonic() - job.started
    if show:
        show.header(comm, job, seconds_to_start)
    figures = [_compare_pass(job, one, engine, show) for one in job.passes]
    first = figures[0]
    return {
        **first,
        **{name: _all(f[name] for f in figures) for name in ("identical", "repeatable", "alone")},
        "ranks_agree": _ranks_agree(comm, figures),
        "tp": job.tp,
        "batch": job.batch,
        "adaptive": job.adaptive,
        "transport": comm.transport,
        "device": job.device,
        "dtype": job.dtype,
        "target": str(job.target),
        "drafter": str(job.drafter),
        "draft": dataclasses.asdict(job.plan),
        "seconds_to_start": round(seconds_to_start, 2),
        "passes": figures,
    }


def _compare_pass(job, one, engine: Engine, show: TextStream | None) -> dict:
    plain = _decode(job, one, engine, False, None)
    speculative = _decode(job, one, engine, True, show)
    expected = plain.generations
    if job.draws(one) and job.repeats(one):
        expected = _decode(job, one, engine, True, None).generations
    texts = [g.tokens for g in speculative.generations]
    differences, alone = [None] * len(texts), None
    if job.repeats(one):
        differences = [
            _difference(engine, prompt.ids, wanted.tokens, tokens)
            for prompt, wanted, tokens in zip(job.prompts, expected, texts, strict=True)
        ]
        if job.batch > 1:
            alone = all(
                _request(job, one, engine, i, True).result().tokens == texts[i]
                for i in range(min(_NUM_ALONE, len(texts)))
            )
    return _figures(job, one, plain, speculative, differences, alone)


def _request(job, one, engine: Engine, index: int, speculative: bool):
    """Each prompt has its own coins: neighbours with the same ones would make the same choices."""
    sampling = dataclasses.replace(one.sampling, seed=one.sampling.seed + index)
    return engine.generate(
        job.prompts[index].ids,
        job.max_new_tokens,
        speculative=speculative,
        sampling=sampling,
        stop_ids=job.stop_ids,
    )


def _decode(job, one, engine: Engine, speculative: bool, show: TextStream | None) -> _Run:
    batch = engine.batch
    phases, before = dict(batch.clock.seconds), batch.seconds_joining
    by_nodes, begun = Counter(batch.cycles_by_nodes), time.perf_counter()
    showing = 0.0
    streams, texts = [], []
    for index, prompt in enumerate(job.prompts):
        streams.append(_request(job, one, engine, index, speculative))
        # One at a time is shown as it comes; several at once when all are there.
        if job.batch == 1:
            showing += _show(show, job, prompt, one, streams[-1].parts())
            texts.append(streams[-1].result())
    if job.batch > 1:
        texts = [stream.result() for stream in streams]
    seconds = time.perf_counter() - begun - (batch.seconds_joining - before) - showing
    if job.batch > 1:
        for prompt, stream in zip(job.prompts, streams, strict=True):
            _show(show, job, prompt, one, stream.parts())
    by_nodes = Counter(batch.cycles_by_nodes) - by_nodes
    phases = {name: s - phases[name] for name, s in batch.clock.seconds.items()}
    return _Run(texts, seconds, by_nodes.total(), phases, by_nodes)


def _show(show: TextStream | None, job, prompt, one, parts) -> float:
    """Writes what comes; the seconds that the writing took."""
    if show is None:
        for _ in parts:
            pass
        return 0.0
    begun = time.perf_counter()
    show.prompt(prompt, one)
    seconds = time.perf_counter() - begun
    for part in parts:
        begun = time.perf_counter()
        show.tokens(part.tokens, part.num_accepted or 0)
        seconds += time.perf_counter() - begun
    show.end()
    return seconds


def _all(outcomes) -> bool | None:
    """Whether all checks held, of those that were made; None if none was."""
    made = [x for x in outcomes if x is not None]
    return all(made) if made else None


def _ranks_agree(comm, figures: list[dict]) -> bool:
    """Whether every rank decoded the same tokens, for which they exchange nothing but logits."""
    tokens = [prompt["tokens"] for one in figures for prompt in one["prompts"]]
    digest = hashlib.sha256(json.dumps(tokens).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device="cpu")
    return all(torch.equal(theirs, mine) for theirs in comm.all_gather(mine))


def _difference(
    engine, prompt: list[int], expected: list[int], speculative: list[int]
) -> dict | None:
    """The first place where the two disagree, and how far apart the target's logits are there."""
    if expected == speculative:
        return None
    pairs = zip(expected, speculative, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(speculative)))
    found = {"index": at, "expected": None, "speculative": None, "logit_gap": None}
    if at < min(len(expected), len(speculative)):
        logits = engine.logits_after([*prompt, *expected[:at]]).float()
        found |= {
            "expected": expected[at],
            "speculative": speculative[at],
            "logit_gap": float(logits[expected[at]] - logits[speculative[at]]),
        }
    return found


def _figures(
    job, one, plain: _Run, speculative: _Run, differences: list[dict | None], alone: bool | None
) -> dict:
    """One pass's figures."""
    generations = speculative.generations
    accepted = [a for g in generations for a in g.accepted]
    cycles, steps = max(1, speculative.num_cycles), max(1, plain.num_cycles)
    plain_tok_s, speculative_tok_s = plain.tok_s, speculative.tok_s
    drawn, as_expected = job.draws(one), all(d is None for d in differences)
    repeatable = as_expected if job.repeats(one) else None
    histogram = {
        str(length): sum(a + 1 == length for a in accepted)
        for length in range(1, job.plan.steps + 2)
    }
    return {
        "name": one.name,
        "sampling": {k: v for k, v in vars(one.sampling).items() if v is not None},
        "plain_tok_s": plain_tok_s,
        "speculative_tok_s": speculative_tok_s,
        "speedup": speculative_tok_s / plain_tok_s if plain_tok_s else 0.0,
        "accept_length": sum(a + 1 for a in accepted) / len(accepted) if accepted else 0.0,
        "accept_histogram": histogram,
        "drafts": "drawn" if drawn else "likeliest",
        "identical": None if drawn else as_expected,
        "repeatable": repeatable if drawn else None,
        "alone": alone,
        "num_tokens": sum(len(g.tokens) for g in generations),
        "num_cycles": speculative.num_cycles,
        "cycles_by_nodes": {str(n): c for n, c in sorted(speculative.by_nodes.items())},
        "phases_ms": {p: 1e3 * s / cycles for p, s in speculative.phase_seconds.items()},
        "plain_step_ms": 1e3 * plain.seconds / steps,
        "prompts": [
            {
                "name": prompt.name,
                "num_prompt_tokens": len(prompt.ids),
                "tokens": g.tokens,
                "text": job.tokenizer.decode(g.tokens),
                "accepted": g.accepted,
                "as_expected": d is None,
                "first_difference": d,
            }
            for prompt, g, d in zip(job.prompts, generations, differences, strict=True)
        ],
    }
