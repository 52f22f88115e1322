"""Schedules, batches, optimizer, and that a resumed run ends like one that never stopped."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_kernels.training import drafter, export, generate, loop, target, workers
from spec_kernels.training.optim import Optimizer, orthogonalise


def _train(out, config, **changes):
    options = {"batch": 4, "context": 32, "use_compile": False}
    options |= {"config": config, "compute_dtype": torch.float32}
    return target.train(out, loop.Schedule(1e-2, num_steps=24), **(options | changes))


def test_learning_rate_by_hand():
    schedule = loop.Schedule(1.0, num_steps=8, warmup=2, decay_share=0.5)
    rates = [schedule.rate(step, 0.0) for step in range(9)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert schedule.is_done(8, 0.0) and not schedule.is_done(7, 1e9)
    schedule = loop.Schedule(2.0, num_steps=8, warmup=0, decay_share=0.5, final_share=0.5)
    assert schedule.rate(0, 0.0) == 2.0 and schedule.rate(6, 0.0) == 1.5
    assert schedule.rate(8, 0.0) == 1.0


def test_a_schedule_in_minutes_goes_by_the_clock():
    schedule = loop.Schedule(1.0, minutes=10.0, warmup=2, decay_share=0.4)
    assert schedule.rate(0, 400.0) == pytest.approx(0.5 * (200 / 600) / 0.4)
    assert schedule.rate(100, 360.0) == 1.0
    assert schedule.rate(7, 480.0) == pytest.approx(0.5)
    assert schedule.is_done(7, 600.0) and not schedule.is_done(10**6, 599.0)
    with pytest.raises(ValueError, match="either a number of steps or minutes"):
        loop.Schedule(1.0)


def test_batches_cover_an_epoch_once_and_depend_on_the_position_alone():
    ids = np.arange(1000, dtype=np.uint16)
    batches = loop.Batches(ids, batch=4, context=20, seed=3)
    rows = torch.cat([batches.at(i * 80) for i in range(12)])
    assert rows.shape == (48, 21)
    assert torch.equal(rows.diff(), torch.ones(48, 20, dtype=torch.long))
    assert len(set(rows[:, 0].tolist())) == batches.num_windows == 48
    fresh = loop.Batches(ids, batch=4, context=20, seed=3)
    assert torch.equal(fresh.at(800), batches.at(800))
    assert not torch.equal(loop.Batches(ids, 4, 20, 4).at(0), batches.at(0))
    with pytest.raises(ValueError, match="batches: ids: expected at least"):
        loop.Batches(ids, batch=60, context=20, seed=0)


def test_orthogonalise():
    torch.manual_seed(0)
    for shape in ((3, 16, 40), (40, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.35


def test_stacked_projections_are_orthogonalised_apart():
    torch.manual_seed(0)

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up = torch.nn.Parameter(torch.zeros(2, 8, 6))

    model = Experts()
    optimizer = Optimizer(model, lambda name, p: True, weight_decay=0.0, momentum=0.0)
    gradient = torch.randn(2, 8, 6) * 1e-3
    model.gate_up.grad = gradient.clone()
    optimizer.step(0.1)
    halves = gradient.reshape(4, 4, 6)
    expected = -0.1 * 0.2 * 6**0.5 * orthogonalise(halves)
    torch.testing.assert_close(model.gate_up.detach().view(4, 4, 6), expected, atol=1e-3, rtol=0.05)


def test_a_few_steps_lower_the_loss_and_are_logged(out, tiny):
    _train(out, tiny)
    lines = [json.loads(line) for line in (out / "target.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert steps[-1]["step"] == 24 and steps[-1]["tokens"] == 24 * 4 * 32
    for key in ("bits_per_byte", "lr", "tok_s"):
        assert key in steps[-1]
    assert lines[-1]["held_out_bits_per_byte"] > 0


def test_resuming_equals_not_stopping(out, tiny):
    whole = _train(out, tiny).state_dict()
    (out / "target.safetensors").unlink()
    stopped = _train(out, tiny, stop_after=13).state_dict()
    assert not all(torch.equal(stopped[name], value) for name, value in whole.items())
    torch.manual_seed(99)
    resumed = _train(out, tiny, resume=True).state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def _rank(group, out, config):
    model = _train(out, config, workers=group, stop_after=3)
    save_file(model.state_dict(), out / f"rank{group.rank}.safetensors")


def test_two_workers_train_one_model(out, tiny):
    alone = _train(out, tiny, stop_after=3).state_dict()
    workers.launch(2, _rank, out, tiny)
    first, second = (load_file(out / f"rank{r}.safetensors") for r in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name, value in alone.items():
        torch.testing.assert_close(first[name], value, atol=5e-3, rtol=0.05)


def test_generation_is_seeded_and_greedy_where_asked(out, tiny):
    model = _train(out, tiny, stop_after=2).eval()
    prompts = torch.randint(300, (4, 6))
    temperatures = torch.tensor([0.0, 0.0, 1.0, 1.0])

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate.continue_text(model, prompts, 5, temperatures, generator)

    texts = run(0)
    assert torch.equal(texts, run(0)) and torch.equal(texts[:, :6], prompts)
    other = run(1)
    assert torch.equal(texts[:2], other[:2]) and not torch.equal(texts[2:], other[2:])
    logits, _, _ = model(texts[:2, :-1])
    assert torch.equal(logits[:, 5:].argmax(-1), texts[:2, 6:])


def test_drafter_trains_resumes_and_publishes(out, tiny):
    _train(out, tiny)
    assets = out / "assets"
    export.publish_target(out, assets, "target.safetensors", tiny)
    model = export.load_target(assets / "target", torch.float32)
    for rank in range(2):
        group = workers.Workers(rank, 2)
        generate.generate(out, model, 12, 33, prompt_tokens=8, batch=4, workers=group)
    texts = generate.merge(out, 2, 12)
    generate.generate(out, model, 12, 33, prompt_tokens=8, batch=4)
    assert np.array_equal(texts, generate.merge(out, 1, 12))
    assert texts.shape == (12, 33) and texts.dtype == np.uint16
    validation = {0.0: torch.from_numpy(texts[:2].astype(np.int64)).repeat(1, 5)}

    def train(**changes):
        schedule = loop.Schedule(1e-2, num_steps=14)
        options = {"batch": 4, "num_steps": 3, "use_compile": False, "validation": validation}
        return drafter.train(out, model, schedule, **options, **changes)

    whole = train().state_dict()
    lines = [json.loads(line) for line in (out / "drafter.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["loss"] < steps[0]["loss"]
    last = steps[-1]
    assert len(last["full_accuracy"]) == len(last["conditional_accuracy"]) == 3
    assert last["accept_length"] == pytest.approx(1 + sum(last["full_accuracy"]), abs=1e-6)
    assert len(lines[-1]["greedy_full_accuracy"]) == 3

    (out / "drafter.safetensors").unlink()
    train(stop_after=7)
    resumed = train(resume=True).state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())

    export.publish_drafter(out, assets, drafter.bundled_config(tiny))
    loaded = export.load_drafter(assets / "drafter", torch.float32)
    for name, value in whole.items():
        torch.testing.assert_close(loaded.state_dict()[name], value, atol=1e-2, rtol=1e-2)
    assert (assets / "drafter" / "train_log.jsonl").read_text().count("greedy_accept_length")

    (out / "settings.json").write_text('{"target": {"seed": 0, "learning_rate": 0.01}}')
    measured = export.export(out, assets)
    card = (assets / "README.md").read_text()
    for text in (
        f"{measured['held_out_bits_per_byte']:.3f} bits a byte",
        "spec-kernels train --stage target --seed 0 --learning-rate 0.01",
        "Python Software Foundation",
        f"h{list(drafter.bundled_config(tiny).aux_layers)}",
    ):
        assert text in card
    greedy = measured["reports"][0]
    assert greedy["num_prompts"] == 2 and len(greedy["accept_lengths"]) == 5
    assert all(1.0 <= length <= k + 2 for k, length in enumerate(greedy["accept_lengths"]))
