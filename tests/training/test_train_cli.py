"""The command: light to import, and clear about what it cannot use."""

import argparse
import subprocess
import sys

import pytest

from spec_kernels.training import cli


def _parse(*arguments):
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["train", *arguments])


def test_parsing_imports_nothing_heavy():
    program = (
        "import sys, spec_kernels\n"
        "before = set(sys.modules)\n"
        "import argparse\n"
        "from spec_kernels.training import cli\n"
        "cli.add_parser(argparse.ArgumentParser().add_subparsers())\n"
        "new = set(sys.modules) - before\n"
        "assert not {'tokenizers', 'safetensors', 'spec_kernels.training.stages'} & new, new\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    "flag, value",
    [("--minutes", "-1"), ("--steps", "0"), ("--workers", "0"), ("--learning-rate", "nan")],
)
def test_bad_numbers(flag, value, capsys):
    args = _parse(flag, value)
    assert args.func(args) == 2
    assert f"{flag}: expected more than 0, got" in capsys.readouterr().err


def test_a_stage_without_what_came_before(tmp_path, capsys):
    args = _parse("--stage", "target", "--steps", "1", "--out", str(tmp_path))
    assert args.func(args) == 2
    assert "corpus.json" in capsys.readouterr().err


def test_unknown_stage():
    with pytest.raises(SystemExit):
        _parse("--stage", "everything")
