"""A tiny corpus and configuration, so that every stage runs in seconds."""

import dataclasses

import pytest
import torch

from spec_kernels.training import corpus
from spec_kernels.training.target import BUNDLED

TINY = dataclasses.replace(
    BUNDLED,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    vocab_size=300,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    return TINY


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """A stand-in for the standard library: sixty small sources, with and without tests."""
    root = tmp_path_factory.mktemp("library")
    for i in range(60):
        folder = root / ("test" if i % 2 else "package")
        folder.mkdir(exist_ok=True)
        text = f'"""Module {i}."""\n\n\n' + "\n\n".join(
            f"def function_{j}(argument, other):\n"
            f"    value = argument + other * {i + j}\n"
            f"    return [value for item in range({j})]\n"
            for j in range(6)
        )
        (folder / f"module_{i}.py").write_text(text)
    return root


@pytest.fixture(scope="session")
def prepared(library, tmp_path_factory):
    """What the corpus stage leaves, for the tiny vocabulary."""
    out = tmp_path_factory.mktemp("prepared")
    corpus.prepare(out, 0, library, TINY.vocab_size, num_prompts=2)
    return out


@pytest.fixture
def out(prepared, tmp_path):
    """A private copy, so that no test sees another's checkpoints."""
    for path in prepared.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.manual_seed(0)
    return tmp_path
