"""``spec-kernels decode``: decodes prompts plainly and speculatively, and compares the two."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DEFAULT_TP = 8
DEFAULT_PROMPTS = 3
DEFAULT_NEW_TOKENS = 64
# The default run also decodes once with sampling: a greedy accept length alone flatters.
SECOND_TEMPERATURE = 0.8
_MESSAGE_BYTES = 4096
DTYPES = ("auto", "float32", "bfloat16")
DRAFT_SAMPLING = ("auto", "on", "off")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "decode",
        help="decode text with the target and its drafter, plainly and speculatively",
        description="Decodes prompts plainly and speculatively with tensor-parallel ranks, streams "
        "the text, checks that both give the same tokens, and prints a table. Without arguments: "
        "the bundled target and drafter, a few held-out prompts, greedily and at temperature "
        f"{SECOND_TEMPERATURE}. Exit code 1 if any token differs. With drafts that are drawn (see "
        "--draft-sampling) the text is distributed as plain decoding's, not the same; the check is "
        "then that it comes out the same again, on every rank.",
    )
    add = parser.add_argument
    add("--prompt", action="append", help="text to continue (may be given several times)")
    add("--prompt-file", action="append", type=Path, help="file whose text to continue")
    add("--num-prompts", type=int, help=f"held-out prompts, if none is given ({DEFAULT_PROMPTS})")
    add("--target", type=Path, help="directory of the target checkpoint (the bundled one)")
    add("--drafter", type=Path, help="directory of the drafter checkpoint (the bundled one)")
    add("--tp", type=int, help=f"tensor-parallel ranks ({DEFAULT_TP}; under torchrun WORLD_SIZE)")
    add("--draft-steps", type=int, default=3, help="deepest draft (3)")
    add("--topk", type=int, default=1, help="children of a node; 1 = chain (1)")
    add("--num-nodes", type=int, help="nodes to verify, root included (chain: steps + 1; tree: 16)")
    add(
        "--tree",
        choices=("auto", "chain", "static", "dynamic"),
        default="auto",
        help="shape of the draft (auto: chain if --topk is 1, else dynamic)",
    )
    add(
        "--draft-sampling",
        choices=DRAFT_SAMPLING,
        default="auto",
        help="above temperature 0, draw drafts from the drafter's distribution: more are accepted, "
        "and the text keeps the target's distribution; off: drafts are its likeliest tokens, and "
        "the text is plain decoding's, token for token (auto: on, but for dynamic trees)",
    )
    add("--temperature", type=float, help="0 = greedy (greedy, then 0.8)")
    add("--top-k", type=int, default=0, help="0 = off")
    add("--top-p", type=float, default=1.0, help="1 = off")
    add("--min-p", type=float, default=0.0, help="0 = off")
    add("--seed", type=int, default=0, help="of the sampled tokens (0)")
    add("--max-new-tokens", type=int, default=DEFAULT_NEW_TOKENS, help=f"({DEFAULT_NEW_TOKENS})")
    add("--device", default="cpu", help="cpu or cuda[:N] (cpu)")
    add("--dtype", choices=DTYPES, default="auto", help="auto: float32 on cpu, bfloat16 on cuda")
    add("--json", type=Path, help="write the figures to this file")
    add("--timeout", type=float, default=60.0, help="seconds that a rank waits for another (60)")
    parser.set_defaults(func=main)


@dataclasses.dataclass(frozen=True)
class Prompt:
    name: str
    text: str
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class Pass:
    """One way of choosing tokens; every prompt is decoded plainly and speculatively."""

    name: str
    sampling: object


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked command line: what every rank is to do."""

    target: Path
    drafter: Path
    tp: int
    plan: object
    passes: list[Pass]
    prompts: list[Prompt]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    device: str
    dtype: str
    json: Path | None
    timeout_ms: int
    tokenizer: object
    started: float

    def draws(self, one: Pass) -> bool:
        """Whether drafts are drawn, so that the text is not plain decoding's token for token."""
        return self.plan.sampled and one.sampling.temperature > 0

    def agreed(self) -> dict[str, object]:
        """What all ranks must have alike."""
        return {
            "target": str(self.target),
            "drafter": str(self.drafter),
            "plan": dataclasses.asdict(self.plan),
            "passes": [dataclasses.asdict(p.sampling) for p in self.passes],
            "prompts": [p.ids for p in self.prompts],
            "max_new_tokens": self.max_new_tokens,
            "device": self.device.split(":")[0],
            "dtype": self.dtype,
        }


def main(args: argparse.Namespace) -> int:
    try:
        job = _check(args)
        report = _run(job)
    except (ValueError, OSError) as error:
        print(f"spec-kernels decode: error: {error}", file=sys.stderr)
        return 2
    speaks = not report.get("rank_0_elsewhere")
    if "error" in report:
        if speaks:
            print(f"spec-kernels decode: error: {report['error']}", file=sys.stderr)
        return 2
    passed = report["ranks_agree"] and all(
        report[check] in (True, None) for check in ("identical", "repeatable")
    )
    if speaks:
        print(render(report))
        if job.json is not None:
            job.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if passed else 1


def _process_start() -> float:
    """``time.monotonic()`` when this process began, or now, where that cannot be known."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - age
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic()


def _check(args: argparse.Namespace) -> Job:
    """Everything that can be wrong with the command line and its files, short of the weights."""
    import torch

    from spec_kernels.decode.drafting import DraftPlan
    from spec_kernels.decode.sampling import SamplingParams
    from spec_kernels.models.config import DrafterConfig, TargetConfig

    started = _process_start()
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    tp = args.tp if args.tp is not None else DEFAULT_TP
    if under_torchrun:
        size = os.environ["WORLD_SIZE"]
        if not size.isdecimal():
            raise ValueError(f"WORLD_SIZE: expected a number, got {size!r}")
        world = int(size)
        if args.tp not in (None, world):
            raise ValueError(f"--tp: expected {world} as WORLD_SIZE says, got {args.tp}")
        tp = world
    if not 1 <= tp <= 8:
        raise ValueError(f"--tp: expected 1 to 8 ranks, got {tp}")
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens: expected at least 1, got {args.max_new_tokens}")
    if not 0 < args.timeout * 1e3 < 1 << 31:
        raise ValueError(f"--timeout: expected a number > 0 below 2147483, got {args.timeout}")
    if (args.target is None) != (args.drafter is None):
        given, other = (
            ("--target", "--drafter") if args.drafter is None else ("--drafter", "--target")
        )
        raise ValueError(f"{given}: a checkpoint of one's own needs {other} too")
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        raise ValueError(f"--device: expected cpu or cuda[:N], got {args.device!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda[:N], got {args.device!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device: cuda: this torch finds no CUDA device")
        if tp > 1:
            raise ValueError(
                "--device: cuda: several ranks on GPUs are not supported yet; use --tp 1"
            )
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"

    kind = args.tree if args.tree != "auto" else "chain" if args.topk == 1 else "dynamic"
    drawn = args.draft_sampling == "on" or args.draft_sampling == "auto" and kind != "dynamic"
    plan = DraftPlan(kind, args.draft_steps, args.topk, args.num_nodes, drawn)
    temperatures = [0.0, SECOND_TEMPERATURE] if args.temperature is None else [args.temperature]
    passes = [
        Pass(
            "greedy" if t == 0 else f"temperature {t:g}",
            SamplingParams(t, args.top_k, args.top_p, args.min_p, args.seed),
        )
        for t in temperatures
    ]
    target, drafter = args.target or ASSETS / "target", args.drafter or ASSETS / "drafter"
    config = TargetConfig.from_json(target)
    DrafterConfig.from_json(drafter).captured_layers(config.num_hidden_layers)
    tokenizer = _tokenizer(target, config.vocab_size)
    prompts = _prompts(args, tokenizer)
    longest = max(len(p.ids) for p in prompts) + args.max_new_tokens
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"prompt and --max-new-tokens: expected at most {config.max_position_embeddings} "
            f"tokens (max_position_embeddings), got {longest}"
        )
    if args.json is not None and args.json.is_dir():
        raise ValueError(f"--json: expected a file, got the directory {args.json}")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise ValueError(f"--json: no directory {args.json.resolve().parent}")
    return Job(
        target=target,
        drafter=drafter,
        tp=tp,
        plan=plan,
        passes=passes,
        prompts=prompts,
        max_new_tokens=args.max_new_tokens,
        stop_ids=config.eos_token_ids,
        device=args.device,
        dtype=dtype,
        json=args.json,
        timeout_ms=int(args.timeout * 1e3),
        tokenizer=tokenizer,
        started=started,
    )


def _tokenizer(directory: Path, vocab_size: int):
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"tokenizer: expected a file at {path}, got none")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"{path}: expected at most vocab_size = {vocab_size} tokens, got "
            f"{tokenizer.get_vocab_size()}"
        )
    return tokenizer


def _prompts(args: argparse.Namespace, tokenizer) -> list[Prompt]:
    given = [(f"prompt {i}", text) for i, text in enumerate(args.prompt or [], 1)]
    for path in args.prompt_file or []:
        try:
            given.append((str(path), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file: {path}: not UTF-8: {error}") from error
    if given:
        if args.num_prompts is not None:
            raise ValueError("--num-prompts: only for the held-out prompts, but prompts were given")
        prompts = [Prompt(name, text, tokenizer.encode(text).ids) for name, text in given]
    else:
        path = ASSETS / "prompts.json"
        if not path.is_file():
            raise ValueError(f"prompts: expected a file at {path}, got none; give --prompt")
        held_out = json.loads(path.read_text(encoding="utf-8"))
        count = DEFAULT_PROMPTS if args.num_prompts is None else args.num_prompts
        if not 1 <= count <= len(held_out):
            raise ValueError(f"--num-prompts: expected 1 to {len(held_out)}, got {count}")
        # Spread over the list, which follows the order of the files.
        chosen = [held_out[i * len(held_out) // count] for i in range(count)]
        is_bundled = args.target is None
        prompts = [
            Prompt(
                f"{p['file']} (held out)",
                p["text"],
                p["token_ids"] if is_bundled else tokenizer.encode(p["text"]).ids,
            )
            for p in chosen
        ]
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"{prompt.name}: expected at least one token, got an empty prompt")
    return prompts


def _run(job: Job) -> dict:
    """This process's report; under torchrun all but rank 0's say ``rank_0_elsewhere``."""
    from spec_kernels.comm import Communicator, from_environment
    from spec_kernels.comm.launch import RankError, launch

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        with from_environment(job.agreed(), timeout_ms=job.timeout_ms) as comm:
            return {**run_rank(comm, job), "rank_0_elsewhere": comm.rank != 0}
    if job.tp == 1:
        return run_rank(Communicator.single(), job)
    try:
        options = {"config": job.agreed(), "timeout_ms": job.timeout_ms}
        reports = launch(run_rank, job.tp, job, **options)
    except RankError as error:
        print(f"spec-kernels decode: {error}", file=sys.stderr)
        sys.exit(1)
    return reports[0]


def run_rank(comm, job: Job) -> dict:
    """What one rank does; every rank returns the same figures but for its own times.

    A checkpoint that cannot be used gives ``{"error": message}`` on every rank, also where only
    one of them found fault.
    """
    import torch

    with torch.inference_mode():
        engine, message = None, ""
        try:
            engine = _load(comm, job)
        except ValueError as error:
            message = str(error)
        # A rank may find fault with what the others do not read.
        text = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        encoded = message.encode()[:_MESSAGE_BYTES]
        text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        for row in comm.all_gather(text):
            found = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            if found:
                return {"error": found}
        return _decode(comm, job, engine)


def _load(comm, job: Job):
    import torch

    from spec_kernels.decode.engine import Engine
    from spec_kernels.models.config import DrafterConfig, TargetConfig
    from spec_kernels.models.drafter import Drafter
    from spec_kernels.models.target import Target

    num_layers = TargetConfig.from_json(job.target).num_hidden_layers
    layers = DrafterConfig.from_json(job.drafter).captured_layers(num_layers)
    dtype = getattr(torch, job.dtype)
    target = Target.load(job.target, comm, dtype, job.device, layers)
    drafter = Drafter.load(job.drafter, target)
    longest = max(len(p.ids) for p in job.prompts) + job.max_new_tokens
    return Engine(target, drafter, job.plan, max_tokens=longest)


def _decode(comm, job: Job, engine) -> dict:
    show = Stream(job.tokenizer) if comm.rank == 0 else None
    # Buffers of every step shape are made by their first use.
    warm = min(8, job.max_new_tokens)
    for speculative in (False, True):
        engine.generate(job.prompts[0].ids, warm, speculative=speculative).result()
    seconds_to_start = time.monotonic() - job.started
    if show:
        show.header(comm, job, seconds_to_start)
    figures = []
    for one in job.passes:
        rows = []
        for prompt in job.prompts:
            options = {"sampling": one.sampling, "stop_ids": job.stop_ids}
            plain = engine.generate(prompt.ids, job.max_new_tokens, speculative=False, **options)
            plain = plain.result()
            if show:
                show.prompt(prompt, one)
            stream = engine.generate(prompt.ids, job.max_new_tokens, **options)
            for part in stream.parts():
                if show:
                    show.tokens(part.tokens, part.num_accepted or 0)
            speculative = stream.result()
            if show:
                show.end()
            row = {"prompt": prompt, "plain": plain, "speculative": speculative}
            expected = plain
            if job.draws(one):
                expected = engine.generate(prompt.ids, job.max_new_tokens, **options).result()
            row["difference"] = _difference(engine, prompt.ids, expected.tokens, speculative.tokens)
            rows.append(row)
        figures.append(_figures(job, one, rows))
    first = figures[0]
    return {
        **first,
        **{name: _all(f[name] for f in figures) for name in ("identical", "repeatable")},
        "ranks_agree": _ranks_agree(comm, figures),
        "tp": job.tp,
        "transport": comm.transport,
        "device": job.device,
        "dtype": job.dtype,
        "target": str(job.target),
        "drafter": str(job.drafter),
        "draft": dataclasses.asdict(job.plan),
        "seconds_to_start": round(seconds_to_start, 2),
        "passes": figures,
    }


def _all(outcomes) -> bool | None:
    """Whether all checks held, of those that were made; None if none was."""
    made = [x for x in outcomes if x is not None]
    return all(made) if made else None


def _ranks_agree(comm, figures: list[dict]) -> bool:
    """Whether every rank decoded the same tokens, for which they exchange nothing but logits."""
    import torch

    tokens = [prompt["tokens"] for one in figures for prompt in one["prompts"]]
    digest = hashlib.sha256(json.dumps(tokens).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
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


def _figures(job: Job, one: Pass, rows: list[dict]) -> dict:
    """One pass's figures. The first token of a prompt belongs to its prefill, not to decoding."""

    def rate(kind: str) -> float:
        num = sum(len(r[kind].tokens) - 1 for r in rows)
        seconds = sum(r[kind].seconds for r in rows)
        return num / seconds if seconds > 0 and num else 0.0

    accepted = [a for r in rows for a in r["speculative"].accepted]
    cycles = max(1, len(accepted))
    steps = max(1, sum(len(r["plain"].accepted) for r in rows))
    phases = {
        name: 1e3 * sum(r["speculative"].phase_seconds[name] for r in rows) / cycles
        for name in rows[0]["speculative"].phase_seconds
    }
    plain_tok_s, speculative_tok_s = rate("plain"), rate("speculative")
    as_expected, drawn = all(r["difference"] is None for r in rows), job.draws(one)
    histogram = {
        str(length): sum(a + 1 == length for a in accepted)
        for length in range(1, job.plan.steps + 2)
    }
    return {
        "name": one.name,
        "sampling": dataclasses.asdict(one.sampling),
        "plain_tok_s": plain_tok_s,
        "speculative_tok_s": speculative_tok_s,
        "speedup": speculative_tok_s / plain_tok_s if plain_tok_s else 0.0,
        "accept_length": sum(a + 1 for a in accepted) / cycles if accepted else 0.0,
        "accept_histogram": histogram,
        "drafts": "drawn" if drawn else "likeliest",
        "identical": None if drawn else as_expected,
        "repeatable": as_expected if drawn else None,
        "num_tokens": sum(len(r["speculative"].tokens) for r in rows),
        "num_cycles": len(accepted),
        "phases_ms": phases,
        "plain_step_ms": 1e3 * sum(r["plain"].seconds for r in rows) / steps,
        "prompts": [
            {
                "name": r["prompt"].name,
                "num_prompt_tokens": len(r["prompt"].ids),
                "tokens": r["speculative"].tokens,
                "text": job.tokenizer.decode(r["speculative"].tokens),
                "accepted": r["speculative"].accepted,
                "as_expected": r["difference"] is None,
                "first_difference": r["difference"],
            }
            for r in rows
        ],
    }


class Stream:
    """Prints text as it comes; on a terminal accepted drafts are green and bonus tokens plain."""

    def __init__(self, tokenizer, out=None):
        self.tokenizer, self.out = tokenizer, out or sys.stdout
        self.colour = self.out.isatty() and "NO_COLOR" not in os.environ
        self._ids: list[int] = []
        self._from = self._shown = 0

    def header(self, comm, job: Job, seconds: float) -> None:
        draft = f"{job.plan.kind} of {job.plan.steps} drafts"
        if job.plan.kind != "chain":
            draft += f", top-{job.plan.topk}, {job.plan.num_nodes} nodes"
        self._write(
            f"{job.tp} rank{'s' * (job.tp > 1)} ({comm.transport}), {job.dtype} on {job.device}, "
            f"{draft}; decoding {seconds:.1f} s after the start of the command\n"
        )
        if self.colour:
            self._write(f"{self._style('accepted drafts', '32')}, bonus tokens\n")

    def prompt(self, prompt: Prompt, one: Pass) -> None:
        self._write(f"\n{self._style(f'== {prompt.name}, {one.name}', '1')}\n")
        tail = prompt.text if len(prompt.text) < 400 else "..." + prompt.text[-397:]
        self._write(self._style(tail, "2"))
        self._ids, self._from, self._shown = list(prompt.ids[-8:]), 0, min(8, len(prompt.ids))

    def tokens(self, tokens: list[int], num_accepted: int) -> None:
        if num_accepted:
            self._feed(tokens[:num_accepted], "32")
        if len(tokens) > num_accepted:
            self._feed(tokens[num_accepted:], None)

    def end(self) -> None:
        self._write("\n")

    def _feed(self, tokens: list[int], style: str | None) -> None:
        """Writes what these tokens add to the text; half a character waits for its other half."""
        self._ids += tokens
        before = self.tokenizer.decode(self._ids[self._from : self._shown])
        after = self.tokenizer.decode(self._ids[self._from :])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            text = after[len(before) :]
            self._write(self._style(text, style) if style else text)
            self._from, self._shown = self._shown, len(self._ids)

    def _style(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def _write(self, text: str) -> None:
        encoding = getattr(self.out, "encoding", None) or "utf-8"
        try:
            self.out.write(text.encode(encoding, "replace").decode(encoding))
            self.out.flush()
        except BrokenPipeError:
            # Nobody reads on; the figures are wanted all the same (--json, the exit code).
            self.out = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _verdict(outcome: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[outcome]


def render(report: dict) -> str:
    """The table at the end of a run."""
    passes = report["passes"]
    width = max(16, *(len(p["name"]) + 2 for p in passes))

    def line(label: str, cell) -> str:
        return f"{label:<26}" + "".join(f"{cell(p):>{width}}" for p in passes)

    def histogram(p: dict) -> str:
        total = max(1, p["num_cycles"])
        return " ".join(f"{100 * n / total:.0f}" for n in p["accept_histogram"].values())

    lengths = ", ".join(passes[0]["accept_histogram"])
    rows = [
        "",
        line("", lambda p: p["name"]),
        line("plain tok/s", lambda p: f"{p['plain_tok_s']:.1f}"),
        line("speculative tok/s", lambda p: f"{p['speculative_tok_s']:.1f}"),
        line("speedup", lambda p: f"{p['speedup']:.2f}x"),
        line("accept length", lambda p: f"{p['accept_length']:.2f}"),
        line("% of cycles by length", histogram) + f"   (lengths {lengths})",
        line("tokens / cycles", lambda p: f"{p['num_tokens']} / {p['num_cycles']}"),
        line("plain step, ms", lambda p: f"{p['plain_step_ms']:.2f}"),
        line("speculative cycle, ms", lambda p: f"{sum(p['phases_ms'].values()):.2f}"),
        *(
            line(f"  {phase}", lambda p, phase=phase: f"{p['phases_ms'][phase]:.3f}")
            for phase in passes[0]["phases_ms"]
        ),
        line("drafts", lambda p: p["drafts"]),
        line("identical to plain", lambda p: _verdict(p["identical"])),
    ]
    if report["repeatable"] is not None:
        rows.append(line("the same again", lambda p: _verdict(p["repeatable"])))
    rows.append("")
    if report["identical"] is not None:
        rows.append(f"identical to plain decoding: {'yes' if report['identical'] else 'no'}")
    if report["repeatable"] is not None:
        verdict = "yes" if report["repeatable"] else "no"
        rows.append(
            "drafts drawn: plain decoding's distribution, not its text; the same text when decoded "
            f"again: {verdict}"
        )
    if not report["ranks_agree"]:
        rows.append("ranks decoded different texts")
    for p in passes:
        for prompt in p["prompts"]:
            d = prompt["first_difference"]
            if d is None:
                continue
            gap = (
                "one text ends there"
                if d["logit_gap"] is None
                else (
                    f"{'speculative before' if p['drafts'] == 'drawn' else 'plain'} chose "
                    f"{d['expected']}, speculative {d['speculative']}, logit gap "
                    f"{d['logit_gap']:.3g}"
                )
            )
            rows.append(
                f"  {prompt['name']}, {p['name']}: differs at new token {d['index']}: {gap}"
            )
    return "\n".join(rows)
