"""The main job: its table and JSON, its refusals, and its ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spec_kernels import cli
from spec_kernels.decode import cli as decode_cli
from spec_kernels.decode import compare, text
from spec_kernels.decode.engine import Engine
from spec_kernels.decode.graph import GraphRunner
from spec_kernels.testing import checkpoints

ROOT = Path(decode_cli.__file__).resolve().parents[2]
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.:()0123456\u00e9"
KEYS = {
    "plain_tok_s",
    "speculative_tok_s",
    "speedup",
    "accept_length",
    "accept_histogram",
    "identical",
    "num_tokens",
    "tp",
    "phases_ms",
    "prompts",
}


@pytest.fixture(scope="module")
def texts(tiny):
    """The tiny target's directory with a tokenizer of one letter a token."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tiny.target / "tokenizer.json"))
    return tiny


def decode(texts, *options):
    directories = ["--target", str(texts.target), "--drafter", str(texts.drafter)]
    return cli.main(["decode", *directories, *options])


def test_the_main_job_reports(texts, tmp_path, capfd):
    path = tmp_path / "report.json"
    prompts = ["--prompt", "def f(a, b):", "--prompt", "abc"]
    code = decode(texts, *prompts, "--tp", "2", "--max-new-tokens", "12", "--json", str(path))
    out = capfd.readouterr().out
    assert code == 0, out
    report = json.loads(path.read_text())
    assert report.keys() >= KEYS
    assert report["identical"] is True and report["tp"] == 2
    assert report["num_tokens"] == 24
    assert [p["num_prompt_tokens"] for p in report["prompts"]] == [12, 3]
    assert sum(report["accept_histogram"].values()) == report["num_cycles"]
    mean = sum(int(k) * n for k, n in report["accept_histogram"].items()) / report["num_cycles"]
    assert report["accept_length"] == pytest.approx(mean)
    assert list(report["phases_ms"]) == ["draft", "build", "verify", "accept", "extend"]
    assert [p["name"] for p in report["passes"]] == ["greedy", "temperature 0.8"]
    assert [p["drafts"] for p in report["passes"]] == ["likeliest", "drawn"]
    assert [p["identical"] for p in report["passes"]] == [True, None]
    assert [p["repeatable"] for p in report["passes"]] == [None, True]
    assert report["repeatable"] is True and report["ranks_agree"] is True
    for one in report["passes"]:
        assert one["speedup"] == pytest.approx(one["speculative_tok_s"] / one["plain_tok_s"])
        for prompt in one["prompts"]:
            assert prompt["text"] in out
    assert "identical to plain decoding: yes" in out
    assert "the same text when decoded again: yes" in out
    assert "2 ranks (shared memory)" in out or "2 ranks (gloo" in out
    assert "\x1b[" not in out  # not a terminal


@pytest.mark.parametrize(
    "options",
    [
        ["--topk", "3", "--num-nodes", "10"],
        ["--tree", "static", "--topk", "2", "--draft-steps", "4"],
        [
            "--temperature",
            "1.2",
            "--top-k",
            "20",
            "--top-p",
            "0.9",
            "--min-p",
            "0.02",
            "--seed",
            "7",
        ],
        ["--dtype", "bfloat16"],
        ["--draft-sampling", "off"],
    ],
    ids=["dynamic", "static", "sampled", "bfloat16", "likeliest drafts"],
)
def test_options_reach_the_loop(texts, tmp_path, options):
    path = tmp_path / "report.json"
    common = ["--prompt", "import os", "--tp", "1", "--max-new-tokens", "16", "--json", str(path)]
    assert decode(texts, *common, *options) == 0
    report = json.loads(path.read_text())
    drawn = not {"off", "10"} & set(options)
    assert report["identical"] is (None if "--temperature" in options else True)
    assert report["repeatable"] is (True if drawn else None)
    assert report["draft"]["sampled"] is drawn
    if "--topk" in options:
        assert report["draft"]["topk"] == int(options[options.index("--topk") + 1])
    if "--seed" in options:
        wanted = {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 7}
        assert report["passes"][0]["sampling"] == wanted and len(report["passes"]) == 1
    if "--dtype" in options:
        assert report["dtype"] == "bfloat16"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_batch_gives_the_same_texts(texts, tmp_path, capfd, tp):
    prompts = [x for text in ("def f(a, b):", "abc", "import os", "x") for x in ("--prompt", text)]
    reports = []
    for batch in (1, 3):
        path = tmp_path / f"{batch}.json"
        options = ["--tp", str(tp), "--batch", str(batch), "--max-new-tokens", "12"]
        assert decode(texts, *prompts, *options, "--json", str(path)) == 0
        reports.append(json.loads(path.read_text()))
        out = capfd.readouterr().out
        assert all(prompt["text"] in out for prompt in reports[-1]["prompts"])
    one, three = reports
    for a, b in zip(one["passes"], three["passes"], strict=True):
        assert [p["tokens"] for p in a["prompts"]] == [p["tokens"] for p in b["prompts"]]
        assert b["alone"] is True and a["alone"] is None
        assert b["num_cycles"] < a["num_cycles"]
    assert three["batch"] == 3 and three["identical"] is True and three["repeatable"] is True


@pytest.mark.parametrize(
    "options", [[], ["--topk", "3", "--num-nodes", "8"]], ids=["chain", "tree"]
)
def test_adapting_leaves_the_text_as_it_is(texts, tmp_path, options):
    path = tmp_path / "report.json"
    common = ["--prompt", "import os", "--tp", "2", "--max-new-tokens", "16", "--json", str(path)]
    assert decode(texts, *common, "--adaptive", *options) == 0
    report = json.loads(path.read_text())
    assert report["adaptive"] is True and report["identical"] is True
    # How many drafts are drawn changes what is drawn: nothing that could be compared.
    assert report["repeatable"] is None
    assert sum(report["cycles_by_nodes"].values()) == report["num_cycles"]


def test_prompt_files_are_read(texts, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("class a:")
    options = ["--prompt-file", str(tmp_path / "a.txt"), "--tp", "1", "--max-new-tokens", "4"]
    assert decode(texts, *options, "--temperature", "0") == 0
    assert "a.txt, greedy" in capsys.readouterr().out


def test_a_difference_is_an_error_that_says_where(texts, monkeypatch, capsys):
    generate = Engine.generate

    def corrupted(self, prompt, new, *, speculative=True, **options):
        stream = generate(self, prompt, new, speculative=speculative, **options)
        if speculative and new == 10:
            tokens = stream.result().tokens
            tokens[6] = (tokens[6] + 1) % 40
        return stream

    monkeypatch.setattr(Engine, "generate", corrupted)
    options = ["--tp", "1", "--max-new-tokens", "10", "--temperature", "0"]
    assert decode(texts, "--prompt", "def", *options) == 1
    out = capsys.readouterr().out
    assert "identical to plain decoding: no" in out
    line = next(line for line in out.splitlines() if "differs at new token 6" in line)
    assert "plain chose" in line and float(line.rsplit("logit gap ", 1)[1]) > 0


def test_a_text_that_comes_out_otherwise_is_an_error(texts, monkeypatch, capsys):
    generate, calls = Engine.generate, []

    def unsteady(self, prompt, new, *, speculative=True, **options):
        stream = generate(self, prompt, new, speculative=speculative, **options)
        calls.append(speculative)
        if len(calls) == 5:  # after two to warm up, plain and speculative
            tokens = stream.result().tokens
            tokens[3] = (tokens[3] + 1) % 40
        return stream

    monkeypatch.setattr(Engine, "generate", unsteady)
    options = ["--tp", "1", "--max-new-tokens", "10", "--temperature", "1"]
    assert decode(texts, "--prompt", "def", *options) == 1
    out = capsys.readouterr().out
    assert calls == [False, True, False, True, True]
    assert "the same text when decoded again: no" in out and "differs at new token 3" in out


def test_a_text_that_is_another_alone_is_an_error(texts, monkeypatch, capsys):
    generate, calls = Engine.generate, []

    def swayed(self, prompt, new, *, speculative=True, **options):
        stream = generate(self, prompt, new, speculative=speculative, **options)
        calls.append(speculative)
        if len(calls) == 7:  # after two to warm up, two plain and two speculative
            tokens = stream.result().tokens
            tokens[3] = (tokens[3] + 1) % 40
        return stream

    monkeypatch.setattr(Engine, "generate", swayed)
    prompts = ["--prompt", "def", "--prompt", "abc", "--batch", "2"]
    assert decode(texts, *prompts, "--tp", "1", "--temperature", "0", "--max-new-tokens", "8") == 1
    out = capsys.readouterr().out
    assert "identical to plain decoding: yes" in out
    line = next(line for line in out.splitlines() if line.startswith("the same alone"))
    assert line.split()[-1] == "NO"


def test_the_first_timed_pass_captures_nothing(texts, monkeypatch):
    """All kinds of cycles that passes run are captured before: that is no part of a speed."""
    made, before = [], []
    capture, decode_all = GraphRunner.capture, compare._decode

    def counted(self):
        made.append(self)
        capture(self)

    def timed(*args):
        before.append(len(made))
        return decode_all(*args)

    monkeypatch.setattr(GraphRunner, "capture", counted)
    monkeypatch.setattr(compare, "_decode", timed)
    for options in ([], ["--adaptive"]):
        made.clear(), before.clear()
        prompts = ["--prompt", "def", "--prompt", "abc", "--batch", "2"]
        assert decode(texts, *prompts, "--tp", "1", "--max-new-tokens", "8", *options) == 0
        assert len(before) > 3 and {*before, len(made)} == {len(made)}


def test_ranks_that_differ_are_an_error(texts, monkeypatch, capsys):
    monkeypatch.setattr(compare, "_ranks_agree", lambda comm, figures: False)
    options = ["--tp", "1", "--max-new-tokens", "4", "--temperature", "0"]
    assert decode(texts, "--prompt", "def", *options) == 1
    assert "ranks decoded different texts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--prompt", ""], "empty prompt"),
        (
            ["--prompt", "a", "--topk", "2", "--draft-sampling", "on"],
            "draft-sampling: expected a chain or a static tree",
        ),
        (["--prompt", "a" * 600], "expected at most 512 tokens (max_position_embeddings), got 664"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens: expected at least 1"),
        (["--prompt", "a", "--tp", "9"], "--tp: expected 1 to 8 ranks, got 9"),
        (["--prompt", "a", "--tp", "3"], "does not divide by 3"),
        (["--prompt", "a", "--draft-steps", "0"], "draft-steps: expected at least 1"),
        (["--prompt", "a", "--topk", "0"], "topk: expected at least 1"),
        (["--prompt", "a", "--topk", "33"], "at most the draft vocabulary of 32"),
        (["--prompt", "a", "--num-nodes", "9"], "num-nodes: expected 4 for a chain of 3"),
        (["--prompt", "a", "--temperature", "-1"], "temperature: expected a finite number >= 0"),
        (["--prompt", "a", "--top-p", "0"], "top_p"),
        (["--prompt", "a", "--device", "tpu"], "--device: expected cpu or cuda"),
        (["--prompt", "a", "--device", "meta"], "--device: expected cpu or cuda"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["--prompt", "a", "--json", "/no/such/directory/x.json"], "--json: no directory"),
        (["--prompt", "a", "--num-prompts", "2"], "--num-prompts: only for the held-out prompts"),
        (["--prompt", "a", "--timeout", "0"], "--timeout: expected a number > 0"),
        (["--prompt", "a", "--timeout", "inf"], "--timeout: expected a number > 0"),
        (["--prompt", "a", "--json", "/"], "--json: expected a file"),
        (["--prompt", "a", "--temperature", "1e39"], "temperature: expected a finite number"),
        (["--prompt", "a", "--top-k", str(2**64)], "top_k: expected an integer"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(texts, capfd, options, message):
    assert decode(texts, *options) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1 and err.startswith("spec-kernels decode: error: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(texts, capsys):
    assert decode(texts, "--prompt", "a", "--device", "cuda") == 2
    assert "this torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--tree", "ring"], ["--dtype", "float8"], ["--nonsense"], ["--tp", "x"]]
)
def test_unknown_option_values_are_refused(texts, options):
    with pytest.raises(SystemExit) as end:
        decode(texts, "--prompt", "a", *options)
    assert end.value.code == 2


def broken(texts, tmp_path, which, edit):
    """The tiny checkpoints with one of them spoilt."""
    config, make = {
        "target": (checkpoints.TARGET, checkpoints.target_tensors),
        "drafter": (checkpoints.DRAFTER, checkpoints.drafter_tensors),
    }[which]
    config, tensors = dict(config), make(config)
    directory = checkpoints.write_checkpoint(tmp_path / which, config, tensors)
    if which == "target":
        (directory / "tokenizer.json").write_bytes((texts.target / "tokenizer.json").read_bytes())
    edit(directory, config, tensors)
    paths = {"target": texts.target, "drafter": texts.drafter, which: directory}
    return ["decode", "--target", str(paths["target"]), "--drafter", str(paths["drafter"])]


def _truncate(directory, config, tensors):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_d2t(directory, config, tensors):
    rest = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}
    checkpoints.write_checkpoint(directory, config, rest)


def _architecture(directory, config, tensors):
    checkpoints.write_checkpoint(directory, {**config, "architectures": ["GPT2"]}, tensors)


@pytest.mark.parametrize(
    "which, edit, message",
    [
        ("target", _truncate, "model.safetensors: truncated or not safetensors"),
        ("target", _architecture, "architectures: expected one of"),
        ("target", lambda d, c, t: (d / "model.safetensors").unlink(), "expected one safetensors"),
        ("target", lambda d, c, t: (d / "config.json").unlink(), "config.json: expected a file"),
        ("target", lambda d, c, t: (d / "tokenizer.json").unlink(), "tokenizer: expected a file"),
        ("target", lambda d, c, t: (d / "tokenizer.json").write_text("{}"), "not a tokenizer"),
        ("drafter", _no_d2t, "d2t: expected offsets for a draft vocabulary"),
        ("drafter", _truncate, "model.safetensors: truncated or not safetensors"),
    ],
    ids=["truncated", "architecture", "no weights", "no config", "no tokenizer", "tokenizer",
         "no d2t", "drafter truncated"],
)  # fmt: skip
@pytest.mark.parametrize("tp", [1, 4])
def test_bad_checkpoints_are_one_line_and_exit_code_2(
    texts, tmp_path, capfd, which, edit, message, tp
):
    command = broken(texts, tmp_path, which, edit)
    assert cli.main([*command, "--prompt", "a", "--tp", str(tp)]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1 and "Traceback" not in err


def test_a_checkpoint_of_ones_own_needs_both(texts, capsys):
    assert cli.main(["decode", "--target", str(texts.target)]) == 2
    assert "--target: a checkpoint of one's own needs --drafter too" in capsys.readouterr().err


def command(texts, *options):
    directories = ["--target", str(texts.target), "--drafter", str(texts.drafter)]
    return ["-m", "spec_kernels", "decode", *directories, *options]


def environment():
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_under_torchrun(texts, tmp_path):
    path = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        + command(texts, "--prompt", "def", "--max-new-tokens", "8", "--json", str(path)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(path.read_text())["tp"] == 2
    assert run.stdout.count("identical to plain decoding: yes") == 1


def _ranks_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(p)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for p in (task / "children").read_text().split()
    ]


def test_ctrl_c_ends_all_ranks(texts):
    process = subprocess.Popen(
        [sys.executable]
        + command(texts, "--prompt", "def", "--tp", "8", "--max-new-tokens", "500"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "8 ranks" in process.stdout.readline()
        ranks = _ranks_of(process.pid)
        assert len(ranks) == 8
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err == "spec-kernels decode: interrupted\n"
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    finally:
        process.kill()


@pytest.mark.parametrize(
    "sig, victim", [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)], ids=["killed", "stopped"]
)
def test_case_36_a_rank_lost_in_mid_decode_ends_all_and_is_named(texts, sig, victim):
    prompts = [x for i in range(4) for x in ("--prompt", f"def f{i}(")]
    options = ["--tp", "2", "--batch", "4", "--max-new-tokens", "480", "--timeout", "5"]
    process = subprocess.Popen(
        [sys.executable] + command(texts, *prompts, *options),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ranks = []
    try:
        head = process.stdout.readline()
        assert "2 ranks" in head, process.communicate(timeout=60)[1]
        ranks = _ranks_of(process.pid)
        assert len(ranks) == 2
        # Ranks are forked in order.
        os.kill(sorted(ranks)[victim], sig)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1, err
        assert err.startswith("spec-kernels decode: ") and f"rank {victim}" in err
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    finally:
        process.kill()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_accepted_drafts_are_told_apart_on_a_terminal(texts, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    tokenizer = Tokenizer.from_file(str(texts.target / "tokenizer.json"))
    out = Terminal()
    stream = text.TextStream(tokenizer, out)
    stream.prompt(decode_cli.Prompt("p", "ab", [0, 1]), decode_cli.Pass("greedy", None))
    out.truncate(0)
    out.seek(0)
    stream.tokens([2, 3, 4], 2)
    stream.tokens([5], 0)
    assert out.getvalue() == "\x1b[32mcd\x1b[0mef"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not text.TextStream(tokenizer, out).colour


def test_half_a_character_waits_for_its_other_half():
    byte_level = Tokenizer(models.BPE({c: i for i, c in enumerate("\u00c3\u00a9a")}, []))
    byte_level.decoder = decoders.ByteLevel()
    assert byte_level.decode([0, 1]) == "\u00e9"
    out = io.StringIO()
    stream = text.TextStream(byte_level, out)
    stream.prompt(decode_cli.Prompt("p", "a", [2]), decode_cli.Pass("greedy", None))
    out.truncate(0)
    out.seek(0)
    stream.tokens([2, 0], 1)
    assert out.getvalue() == "a"
    stream.tokens([1, 2], 0)
    assert out.getvalue() == "a\u00e9a"


def test_start_of_the_process_is_known():
    age = time.monotonic() - decode_cli._process_start()
    assert 0 <= age < 86400
