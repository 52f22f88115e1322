"""``spec-kernels decode``: decodes prompts plainly and speculatively, and compares the two."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

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
        "then that it comes out the same again, on every rank. Two requests of a batch are decoded "
        "alone, too, for the same text.",
    )
    add = parser.add_argument
    add("--prompt", action="append", help="text to continue (may be given several times)")
    add("--prompt-file", action="append", type=Path, help="file whose text to continue")
    add(
        "--num-prompts",
        type=int,
        help=f"held-out prompts, if none is given ({DEFAULT_PROMPTS}, or as many as --batch)",
    )
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
    add("--batch", type=int, default=1, help="prompts that are decoded together (1)")
    add(
        "--adaptive",
        action="store_true",
        help="verify as many drafts a cycle as pay, by what they cost here and how often they are "
        "right (chains and dynamic trees)",
    )
    add("--device", default="cpu", help="cpu or cuda[:N]; ranks take one GPU each (cpu)")
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
    batch: int
    adaptive: bool
    tokenizer: object
    started: float

    def draws(self, one: Pass) -> bool:
        """Whether drafts are drawn, so that the text is not plain decoding's token for token."""
        return self.plan.sampled and one.sampling.temperature > 0

    def repeats(self, one: Pass) -> bool:
        """Whether another run gives the same text: how many drafts are drawn changes it."""
        return not (self.draws(one) and self.adaptive)

    def agreed(self) -> dict[str, object]:
        """What all ranks must have alike."""
        return {
            "target": str(self.target),
            "drafter": str(self.drafter),
            "plan": dataclasses.asdict(self.plan),
            "passes": [dataclasses.asdict(p.sampling) for p in self.passes],
            "prompts": [p.ids for p in self.prompts],
            "max_new_tokens": self.max_new_tokens,
            "batch": self.batch,
            "adaptive": self.adaptive,
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
        report[check] in (True, None) for check in ("identical", "repeatable", "alone")
    )
    if speaks:
        from spec_kernels.decode.text import render

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

    from spec_kernels.decode.batch import MAX_REQUESTS
    from spec_kernels.decode.drafting import DraftPlan
    from spec_kernels.decode.sampling import SamplingParams
    from spec_kernels.models.config import DrafterConfig, TargetConfig
    from spec_kernels.models.pair import DRAFTER, TARGET

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
        num_devices = torch.cuda.device_count()
        if not num_devices:
            raise ValueError("--device: cuda: this torch finds no CUDA device")
        if tp > 1 and device.index is not None:
            raise ValueError(
                f"--device: expected cuda, of which every rank takes its own, got {args.device!r} "
                f"for {tp} ranks"
            )
        if tp > num_devices and not under_torchrun:
            raise ValueError(
                f"--tp: expected at most {num_devices} ranks, one for each CUDA device, got {tp}"
            )
    if not 1 <= args.batch <= MAX_REQUESTS:
        raise ValueError(f"--batch: expected 1 to {MAX_REQUESTS}, got {args.batch}")
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"

    kind = args.tree if args.tree != "auto" else "chain" if args.topk == 1 else "dynamic"
    drawn = args.draft_sampling == "on" or args.draft_sampling == "auto" and kind != "dynamic"
    plan = DraftPlan(kind, args.draft_steps, args.topk, args.num_nodes, drawn)
    if args.adaptive and kind == "static":
        raise ValueError("--adaptive: expected a chain or a dynamic tree, got a static tree")
    temperatures = [0.0, SECOND_TEMPERATURE] if args.temperature is None else [args.temperature]
    passes = [
        Pass(
            "greedy" if t == 0 else f"temperature {t:g}",
            SamplingParams(t, args.top_k, args.top_p, args.min_p, args.seed),
        )
        for t in temperatures
    ]
    target, drafter = args.target or TARGET, args.drafter or DRAFTER
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
        batch=args.batch,
        adaptive=args.adaptive,
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
        from spec_kernels.models.pair import ASSETS

        path = ASSETS / "prompts.json"
        if not path.is_file():
            raise ValueError(f"prompts: expected a file at {path}, got none; give --prompt")
        held_out = json.loads(path.read_text(encoding="utf-8"))
        count = max(DEFAULT_PROMPTS, args.batch)
        count = min(count, len(held_out)) if args.num_prompts is None else args.num_prompts
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

    from spec_kernels.decode.compare import compare

    with torch.inference_mode():
        engine, message = None, ""
        try:
            engine = _load(comm, job)
        except ValueError as error:
            message = str(error)
        # A rank may find fault with what the others do not read.
        text = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        encoded = message.encode()[:_MESSAGE_BYTES]
        text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device="cpu")
        for row in comm.all_gather(text):
            found = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
            if found:
                return {"error": found}
        return compare(comm, job, engine)


def _load(comm, job: Job):
    import torch

    from spec_kernels.decode.batch import Adaptive
    from spec_kernels.decode.engine import Engine
    from spec_kernels.models.pair import load_pair

    device = torch.device(job.device)
    if device.type == "cuda" and comm.world_size > 1:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", comm.rank)))
        torch.cuda.set_device(device)
        comm.attach_device(device)
    return Engine(
        *load_pair(job.target, job.drafter, comm, getattr(torch, job.dtype), device),
        job.plan,
        max_tokens=max(len(p.ids) for p in job.prompts) + job.max_new_tokens,
        max_requests=job.batch,
        adaptive=Adaptive() if job.adaptive else None,
    )
