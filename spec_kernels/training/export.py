"""Stage ``export``: the published files, their figures, and the model card."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import tokenizers
import torch

from spec_kernels.models.config import DrafterConfig, TargetConfig
from spec_kernels.training import eagle, evaluate
from spec_kernels.training import model as target_model
from spec_kernels.training.loop import load_weights
from spec_kernels.training.target import BUNDLED, EVALUATION_CONTEXT, held_out_loss

MAX_BYTES = 16_000_000
_LOG_LINES = 200
_TEMPERATURES = (0.0, 0.6, 0.8, 1.0)


def load_target(
    directory: Path, compute_dtype: torch.dtype = torch.bfloat16
) -> target_model.Target:
    """The published target of ``directory`` (config.json, model.safetensors) for a dense pass."""
    config = TargetConfig.from_json(directory)
    model = target_model.Target(config, compute_dtype)
    state = safetensors.torch.load_file(directory / "model.safetensors")
    target_model.load_published(model, state)
    return model.eval()


def load_drafter(directory: Path, compute_dtype: torch.dtype = torch.bfloat16) -> eagle.Drafter:
    """The published drafter of ``directory``; ValueError names what is missing or left over."""
    config = DrafterConfig.from_json(directory)
    state = safetensors.torch.load_file(directory / "model.safetensors")
    if "d2t" not in state:
        raise ValueError(f"load_drafter: d2t: expected an offset table in {directory}, got none")
    draft_ids = torch.arange(len(state["d2t"])) + state["d2t"]
    model = eagle.Drafter(config, draft_ids, compute_dtype)
    difference = sorted(model.state_dict().keys() ^ state.keys())
    if difference:
        raise ValueError(f"load_drafter: tensors missing or left over: {difference}")
    model.load_state_dict(state)
    return model.eval()


def _write_model(directory: Path, config: dict, state: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = directory / "model.safetensors"
    safetensors.torch.save_file(state, weights, {"format": "pt"})
    # The library writes a file that only its owner may read, and packages keep modes.
    weights.chmod(0o644)


def publish_target(
    out: Path, assets: Path, checkpoint: str = "settle.safetensors", config: TargetConfig = BUNDLED
) -> None:
    """A checkpoint of the target -> assets/target, rounded to bfloat16."""
    model = target_model.Target(config)
    load_weights(out / checkpoint, model)
    values = config.to_dict() | {"bos_token_id": None, "pad_token_id": None}
    _write_model(assets / "target", values, target_model.published_state(model))
    shutil.copyfile(out / "tokenizer.json", assets / "target" / "tokenizer.json")


def publish_drafter(out: Path, assets: Path, config: DrafterConfig) -> None:
    """drafter.safetensors -> assets/drafter, with its log thinned."""
    drafter = eagle.Drafter(config, torch.arange(config.draft_vocab_size))
    load_weights(out / "drafter.safetensors", drafter)
    _write_model(assets / "drafter", config.to_dict(), eagle.published_state(drafter))
    lines = (out / "drafter.jsonl").read_text().splitlines()
    # Every validation line stays; of the training lines, evenly spaced ones and the last.
    kept = [line for line in lines if "greedy_accept_length" in line]
    training = [line for line in lines if "greedy_accept_length" not in line]
    stride = max(len(training) // _LOG_LINES, 1)
    kept += training[::-stride]
    kept.sort(key=lambda line: json.loads(line)["step"])
    (assets / "drafter" / "train_log.jsonl").write_text("\n".join(kept) + "\n")


def _size(assets: Path, without: str = "") -> int:
    files = [p for p in assets.rglob("*") if p.is_file() and p.name != without]
    return sum(p.stat().st_size for p in files)


def figures(out: Path, assets: Path) -> dict:
    """Everything measured that the card states, from the published files alone."""
    target, drafter = load_target(assets / "target"), load_drafter(assets / "drafter")
    corpus = json.loads((out / "corpus.json").read_text())
    prompts = json.loads((assets / "prompts.json").read_text())
    ids = torch.tensor([p["token_ids"] for p in prompts])
    layers = drafter.config.captured_layers(target.config.num_hidden_layers)
    loss = held_out_loss(target, np.load(out / "held_out.npy"))
    return {
        "held_out_loss": loss,
        "held_out_bits_per_byte": target_model.bits_per_byte(
            loss, corpus["held_out"]["bytes_per_token"]
        ),
        "parameters": sum(p.numel() for p in target.parameters()),
        "drafter_parameters": sum(p.numel() for p in drafter.parameters()),
        "reports": [
            dataclasses.asdict(report)
            for report in evaluate.evaluate(target, drafter, layers, ids, _TEMPERATURES)
        ],
    }


def _table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _runs(out: Path) -> str:
    rows = []
    for stage in ("target", "settle", "drafter"):
        path = out / f"{stage}.jsonl"
        if path.is_file():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            last = [line for line in lines if "tokens" in line][-1]
            tokens, minutes = f"{last['tokens']:,}", f"{last['minutes']:.1f}"
            rows.append([stage, last["step"], tokens, minutes, f"{last['loss']:.3f}"])
    return _table(["stage", "steps", "tokens", "minutes", "last training loss"], rows)


def _parts(corpus: dict) -> str:
    rows = []
    for name, title in (("train", "training"), ("held_out", "held out")):
        part = corpus[name]
        sizes = [f"{part['bytes']:,}", f"{part['tokens']:,}", f"{part['bytes_per_token']:.3f}"]
        rows.append([title, part["files"], part["test_files"], *sizes])
    return _table(["part", "files", "of them tests", "bytes", "tokens", "bytes a token"], rows)


def _figures(reports: list[dict]) -> str:
    def numbers(values: list[float]) -> str:
        return " ".join(f"{value:.2f}" for value in values)

    rows = [
        [
            report["temperature"],
            numbers(report["accept_lengths"]),
            numbers(report["full_accuracy"]),
            f"{report['distinct_4grams']:.2f}",
        ]
        for report in reports
    ]
    head = ["temperature", "accept length, chain of 1, 2, 3, ...", "full accuracy by step"]
    return _table([*head, f"distinct {evaluate.NGRAM}-grams"], rows)


def _commands(settings: dict) -> str:
    """What makes the files again: settings.json holds each stage's own options."""
    lines = ["spec-kernels train --stage corpus"]
    for stage, values in settings.items():
        options = [f"--{name.replace('_', '-')} {value}" for name, value in values.items()]
        lines.append(" ".join([f"spec-kernels train --stage {stage}", *options]))
    return "\n".join([*lines, "spec-kernels train --stage export"])


def write_card(out: Path, assets: Path, measured: dict) -> None:
    """assets/README.md, from the run's own records; notes.txt of ``out`` says what they do not."""
    corpus = json.loads((out / "corpus.json").read_text())
    settings = json.loads((out / "settings.json").read_text())
    prompts = json.loads((assets / "prompts.json").read_text())
    target = TargetConfig.from_json(assets / "target")
    drafter = DrafterConfig.from_json(assets / "drafter")
    layers = drafter.captured_layers(target.num_hidden_layers)
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"tokenizers {tokenizers.__version__}, safetensors {safetensors.__version__}"
    )
    notes = out / "notes.txt"
    remarks = "\n" + notes.read_text() if notes.is_file() else ""
    loss, bits = measured["held_out_loss"], measured["held_out_bits_per_byte"]
    card = f"""# The bundled target and its EAGLE-3 drafter

A small DeepSeek-V3 / Kimi-K2.5 model and the drafter that belongs to it: real weights, so that the
main job decodes real text anywhere. What they write looks like Python's standard library and is
good for nothing else.

- Target: {measured["parameters"]:,} parameters, {target.num_hidden_layers} layers, hidden
  {target.hidden_size}, {target.num_attention_heads} MLA heads, {target.n_routed_experts} routed
  experts (top {target.num_experts_per_tok}) and {target.n_shared_experts} shared, vocabulary
  {target.vocab_size} (byte-level BPE), yarn factor {target.rope.factor:g} over
  {target.rope.original_max_position_embeddings} positions.
- Drafter: {measured["drafter_parameters"]:,} parameters, one Llama layer, captured streams
  h{list(layers)}, draft vocabulary {drafter.draft_vocab_size} of {drafter.vocab_size}.
- bfloat16 safetensors; all files without this card: {_size(assets, "README.md"):,} bytes.

## Corpus and licence

The standard library of Python {corpus["python"]} that ran the training: sources with their test
folders, and the documentation topics of `pydoc`. Python and its standard library are under the
Python Software Foundation License; the weights are derived from them and carry its notice:
Copyright (c) 2001 onwards Python Software Foundation; all rights reserved.

Dropped: exact duplicates, files that are not UTF-8, code pages and tables, parser inputs.
SHA-256 of the texts in order: `{corpus["sha256"]}`.

{_parts(corpus)}

Split by file: held out is every file whose path's SHA-256 (first 8 bytes), modulo 1000, is below
{corpus["held_out_per_mille"]}. `prompts.json` holds the first {len(prompts[0]["token_ids"])} tokens
of every n-th held-out top-level definition, {len(prompts)} in all.

## Training

{_runs(out)}

Versions: {versions}. Made again by (minutes are of wall time: a faster or idler machine sees more
tokens; `--steps` fixes their number instead):

```
{_commands(settings)}
```
{remarks}
## Figures

Held-out loss {loss:.3f} nats a token = **{bits:.3f} bits a byte** (windows of
{EVALUATION_CONTEXT} tokens).

{len(prompts)} held-out prompts, {evaluate.NUM_NEW_TOKENS} new tokens each, by exact replay of the
TTT pass over the target's own output. Drafts are the drafter's top choices; accept length = tokens
a cycle, the bonus token included.

{_figures(measured["reports"])}
"""
    (assets / "README.md").write_text(card)


def export(out: Path, assets: Path) -> dict:
    """Writes all of ``assets`` and returns the figures. ValueError if it outgrows MAX_BYTES."""
    shutil.copyfile(out / "prompts.json", assets / "prompts.json")
    measured = figures(out, assets)
    (out / "figures.json").write_text(json.dumps(measured, indent=1) + "\n")
    write_card(out, assets, measured)
    if _size(assets) > MAX_BYTES:
        raise ValueError(f"export: assets: expected at most {MAX_BYTES} bytes, got {_size(assets)}")
    return measured
