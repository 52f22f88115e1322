"""The bundled target and drafter: lossless with eight ranks, and predicted exactly by replay."""

from __future__ import annotations

import json

import pytest
import torch

from spec_kernels.comm.launch import launch
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.engine import Engine
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.models.pair import ASSETS, load_pair
from spec_kernels.training import evaluate, export

if not (ASSETS / "drafter" / "model.safetensors").is_file():
    pytest.skip(f"no bundled model under {ASSETS}", allow_module_level=True)

NEW = 24
PROMPTS = [p["token_ids"] for p in json.loads((ASSETS / "prompts.json").read_text())[::7]]


def engine(plan, comm=None):
    return Engine(*load_pair(comm=comm), plan, max_tokens=max(map(len, PROMPTS)) + 2 * NEW)


def eight_ranks(comm, plan):
    torch.set_num_threads(1)
    with torch.inference_mode():
        e = engine(plan, comm)
        results = []
        for sampling in (SamplingParams(), SamplingParams(0.8, seed=1)):
            for prompt in PROMPTS:
                options = {"sampling": sampling}
                plain = e.generate(prompt, NEW, speculative=False, **options).result()
                speculative = e.generate(prompt, NEW, **options).result()
                results.append((plain.tokens, speculative.tokens, speculative.accepted))
        return results


@pytest.mark.parametrize(
    "plan", [DraftPlan(), DraftPlan("dynamic", 3, 4, 16)], ids=["chain", "tree"]
)
def test_eight_ranks_are_lossless(plan):
    every = launch(eight_ranks, 8, plan)
    assert all(results == every[0] for results in every)
    for plain, speculative, _ in every[0]:
        assert plain == speculative
    assert sum(sum(accepted) for _, _, accepted in every[0]) > 0


def test_exact_replay_of_the_bundled_model():
    steps = 3
    e = engine(DraftPlan("chain", steps))
    dense = export.load_target(ASSETS / "target", torch.float32)
    drafter = export.load_drafter(ASSETS / "drafter", torch.float32)
    for prompt in PROMPTS:
        speculative = e.generate(prompt, NEW).result()
        plain = e.generate(prompt, NEW + steps, speculative=False).result()
        text, layers = torch.tensor([prompt + plain.tokens]), e.batch.drafter.captured_layers
        right = evaluate.ttt_right(dense, drafter, layers, text, steps)[:, 0]
        accepted = right.cumprod(0).sum(0).tolist()
        predicted, row = [], len(prompt) - 1
        for _ in speculative.accepted:
            predicted.append(accepted[row])
            row += accepted[row] + 1
        assert speculative.accepted == predicted


def test_the_bundled_target_loads_into_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, report = transformers.DeepseekV3ForCausalLM.from_pretrained(
        ASSETS / "target", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    e = engine(DraftPlan())
    for prompt in PROMPTS:
        theirs = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(e.logits_after(prompt), theirs, rtol=1e-4, atol=1e-3)
