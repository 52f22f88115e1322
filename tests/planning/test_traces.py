"""Traces: what is recorded is what the loop does, and what replaying them tells."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_kernels.decode.drafting import DraftPlan, static_paths
from spec_kernels.decode.engine import Engine
from spec_kernels.decode.kv_cache import KVCache
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.models.layers import Step
from spec_kernels.models.pair import ASSETS, load_pair
from spec_kernels.planning import recorder as recording
from spec_kernels.planning.recorder import Recorder
from spec_kernels.planning.traces import (
    FORMAT,
    VERSION,
    Text,
    Trace,
    chain_paths,
    path_rates,
    rates_by_depth,
    replay,
    replay_best,
    right_drafts,
)
from spec_kernels.planning.tree_shape import accept_length, best_tree
from spec_kernels.testing.tiny_models import PROMPTS, Tiny

NEW, DEPTH, NUM_RANKS = 40, 4, 5
PATHS = [*static_paths(3, 3, 10), (0,) * 4]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    return Tiny.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def record(tiny, prompt, tokens) -> Text:
    recorder = Recorder(*tiny.models(), PATHS, depth=DEPTH, num_ranks=NUM_RANKS, max_tokens=80)
    return Text("a prompt", 0.0, *recorder.record([*prompt, *tokens], len(prompt)))


def loop(tiny, plan, prompt, temperature):
    """Tokens of plain decoding, with DEPTH more; and what the loop accepts of them."""
    engine = tiny.engine(plan)
    sampling = SamplingParams(temperature, seed=7)
    plain = engine.generate(prompt, NEW + DEPTH, speculative=False, sampling=sampling).result()
    speculative = engine.generate(prompt, NEW, sampling=sampling).result()
    return plain.tokens, speculative.accepted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long", "one"])
@pytest.mark.parametrize(
    "plan, paths",
    [
        (DraftPlan("chain", 3), chain_paths(3)),
        (DraftPlan("static", 3, 3, 10), static_paths(3, 3, 10)),
    ],
    ids=["chain", "tree"],
)
def test_replay_is_what_the_loop_accepts(tiny, plan, paths, prompt, temperature):
    tokens, accepted = loop(tiny, plan, prompt, temperature)
    right = right_drafts(record(tiny, prompt, tokens), paths).tolist()
    assert len(right) == NEW
    expected, place = [], 0
    for _ in accepted:
        expected.append(right[place])
        place += right[place] + 1
    assert accepted == expected
    assert sum(accepted) > 0
    assert replay(record(tiny, prompt, tokens), paths, 2.0).num_cycles >= len(accepted)


@pytest.mark.parametrize("places", [1, 3, 16])
def test_confidences_are_those_of_drafting_one_by_one(tiny, places, monkeypatch):
    """Each path drafted alone, after the text's rows; and ranks of what follows in the text."""
    monkeypatch.setattr(recording, "_PLACES", places)
    prompt = PROMPTS[1]
    tokens, _ = loop(tiny, DraftPlan("chain", 3), prompt, 0.9)
    ids = [*prompt, *tokens[:20]]
    text = record(tiny, prompt, tokens[:20])
    target, drafter = tiny.models()
    cache = KVCache(target, drafter, 1, 80)
    cache.reserve(0, 80)

    def forward(model, chain, first, *rest):
        words = recording._words([(2 << i) - 1 for i in range(first, first + len(chain))], 80)
        slots = torch.arange(first, first + len(chain)).unsqueeze(0)
        zero = torch.zeros(1, dtype=torch.int64)
        step = Step(torch.tensor([chain]), slots, words, slots, cache.block_tables, zero)
        return model.forward(step, *rest)

    def candidates(normed):
        chances = drafter.logits(normed[-1:]).float().softmax(-1)[0]
        order = chances.argsort(descending=True)
        return drafter.target_ids[order].tolist(), chances[order].tolist()

    for place in (0, 5, len(text) - 1):
        root = len(prompt) + place
        capture = target.new_capture(root)
        forward(target, ids[:root], 0, cache.target, capture)
        features = drafter.fuse(capture)

        def drafted(path, root=root, features=features):
            """Candidates after the drafts of a path, each one's rank or the token itself."""
            feature, normed = forward(drafter, ids[1 : root + 1], 0, features.clone(), cache.draft)
            feature = feature[-1:]
            for depth, pick in enumerate(path):
                token = pick(candidates(normed)[0])
                feature, normed = forward(drafter, [token], root + depth, feature, cache.draft)
            return candidates(normed)

        for column, path in enumerate(PATHS):
            above = [lambda found, rank=rank: found[rank] for rank in path[:-1]]
            expected = drafted(above)[1][path[-1]]
            assert text.confidence[place, column] == pytest.approx(expected, abs=1e-5)
        for depth in range(DEPTH):
            above = [lambda _, i=i, root=root: ids[root + 1 + i] for i in range(depth)]
            found = drafted(above)[0]
            truth = ids[root + 1 + depth]
            rank = found.index(truth) if truth in found else -1
            assert text.ranks[place, depth] == (rank if rank < NUM_RANKS else -1)


def test_long_texts_run_in_parts(tiny, monkeypatch):
    tokens, _ = loop(tiny, DraftPlan("chain", 3), PROMPTS[1], 0.9)
    whole = record(tiny, PROMPTS[1], tokens)
    monkeypatch.setattr(recording, "_PLACES", 2)
    monkeypatch.setattr(recording, "_MAX_ROWS", 40)
    parts = record(tiny, PROMPTS[1], tokens)
    assert (parts.ranks == whole.ranks).all()
    assert np.abs(parts.confidence - whole.confidence).max() < 1e-5


def some_text(seed=0, num_places=60, depth=3):
    """Places whose drafts are right more often where the drafter is confident."""
    generator = np.random.default_rng(seed)
    sure = generator.uniform(0.2, 0.9, (num_places, depth))
    ranks = np.where(generator.uniform(size=sure.shape) < sure, 0, generator.integers(-1, 3))
    return Text(f"text {seed}", 0.0, ranks.astype(np.int8), sure)


def some_trace(count=3, **kinds):
    paths = tuple(chain_paths(3))
    return Trace(paths, 3, tuple(some_text(seed, **kinds) for seed in range(count)), {"by": "us"})


def header(**fields) -> str:
    return json.dumps({"format": FORMAT, "version": VERSION, **fields})


def test_files_come_back(tmp_path):
    trace = some_trace()
    trace.save(tmp_path / "t.jsonl")
    again = Trace.load(tmp_path / "t.jsonl")
    assert (again.paths, again.num_ranks, again.source) == (trace.paths, 3, {"by": "us"})
    for ours, theirs in zip(trace.texts, again.texts, strict=True):
        assert (ours.name, ours.temperature) == (theirs.name, theirs.temperature)
        assert (ours.ranks == theirs.ranks).all()
        assert np.abs(ours.confidence - theirs.confidence).max() <= 5e-4
    again.save(tmp_path / "u.jsonl")
    assert (tmp_path / "t.jsonl").read_text() == (tmp_path / "u.jsonl").read_text()


@pytest.mark.parametrize(
    "number, line, wrong",
    [
        (0, '{"format": "other"}', "line 1: expected the header"),
        (1, "[]", "line 2: expected an object"),
        (1, '{"ranks": [0, 0, 0], "confidence": [1, 2, 3]}', "line 2: expected a text before"),
        (2, "{", "line 3: expected JSON"),
        (2, '{"confidence": [1, 2, 3]}', "line 3: expected ranks of 3 depths below 3, got None"),
        (2, '{"ranks": [0, 0, 3], "confidence": [1, 2, 3]}', "line 3: expected ranks"),
        (2, '{"ranks": [0, 0], "confidence": [1, 2, 3]}', "line 3: expected ranks of 3 depths"),
        (2, '{"ranks": [0, 0, 0], "confidence": [1, 2]}', "line 3: expected 3 thousandths"),
        (2, '{"ranks": [0, 0, 0], "confidence": [1, 2, 1001]}', "line 3: expected 3 thousandths"),
        (3, '{"ranks": [0, 0, 0, 0], "confidence": [1, 2, 3]}', "line 4: expected 3 ranks"),
        (0, header(), "line 1: expected paths"),
        (0, header(paths=7), "line 1: expected paths"),
        (0, header(paths=[["a"]]), "line 1: expected paths"),
        (0, header(paths=[[0, 0]], num_ranks=3), "line 1: .*paths: .*each with its parent"),
        (0, header(paths=[[0]], num_ranks=300), "line 1: expected num_ranks of 1 to 127"),
        (1, '{"text": 5, "temperature": 0}', "line 2: expected a text's name"),
        (1, '{"text": "a"}', "line 2: expected a temperature >= 0"),
        (1, '{"text": "a", "temperature": "hot"}', "line 2: expected a temperature >= 0"),
    ],
)
def test_files_that_are_none(number, line, wrong, tmp_path):
    path = tmp_path / "t.jsonl"
    some_trace(1).save(path)
    lines = path.read_text().splitlines()
    lines[number] = line
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=wrong):
        Trace.load(path)


def test_texts_of_different_depths_are_no_trace(tmp_path):
    trace = some_trace(2)
    deeper = trace.texts[1].ranks[:, [0, 1, 2, 2]]
    with pytest.raises(ValueError, match="expected ranks of 3 depths as in the first text, got 4"):
        dataclasses.replace(
            trace, texts=(trace.texts[0], dataclasses.replace(trace.texts[1], ranks=deeper))
        )
    path = tmp_path / "t.jsonl"
    trace.save(path)
    lines = path.read_text().splitlines()
    # Behind the header, the first text with its name, and the second one's name.
    at = 3 + len(trace.texts[0])
    lines[at] = lines[at].replace('"ranks":[', '"ranks":[0,')
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"line {at + 1}: expected 3 ranks as in the lines before"):
        Trace.load(path)


def test_files_without_records(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="expected texts and their records"):
        Trace.load(path)
    some_trace(1).save(path)
    path.write_text("\n".join(path.read_text().splitlines()[:2]))
    with pytest.raises(ValueError, match="expected texts and their records"):
        Trace.load(path)
    with pytest.raises(OSError):
        Trace.load(tmp_path / "none.jsonl")


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="t.jsonl: expected UTF-8 text"):
        Trace.load(path)


def test_right_drafts_by_hand():
    ranks = np.array([[0, 1, 0], [1, 0, 0], [0, 0, -1], [-1, 0, 0], [2, 0, 0]], np.int8)
    text = Text("x", 0.0, ranks, np.zeros((5, 0)))
    assert right_drafts(text, chain_paths(3)).tolist() == [1, 0, 2, 0, 0]
    assert right_drafts(text, [(0,), (1,), (0, 1), (0, 1, 0)]).tolist() == [3, 1, 1, 0, 0]
    assert right_drafts(text, []).tolist() == [0] * 5
    with pytest.raises(ValueError, match="right_drafts: paths: expected depths of at most 3"):
        right_drafts(text, chain_paths(4))


def test_replay_by_hand():
    # Accepted by a chain of 2: 2 0 1 0 0; cycles start at 0, 3, 4.
    ranks = np.array([[0, 0], [1, 0], [0, 2], [-1, 0], [1, 1]], np.int8)
    text = Text("x", 0.0, ranks, np.zeros((5, 0)))
    run = replay(text, chain_paths(2), 3.0)
    assert (run.num_tokens, run.num_cycles, run.ms) == (5, 3, 9.0)
    # One who knows drafts at the first place only.
    best = replay_best(text, {1: ([], 1.0), 3: (chain_paths(2), 1.5)})
    assert (best.num_tokens, best.num_cycles, best.ms) == (5, 3, 3.5)


def test_the_best_possible_of_all_choices():
    text = some_text(num_places=9)
    sizes = {1: ([], 1.0), 2: (chain_paths(1), 1.3), 4: (chain_paths(3), 1.7)}
    accepted = {n: right_drafts(text, paths) for n, (paths, _) in sizes.items()}
    best = np.inf
    for chosen in itertools.product(sizes, repeat=9):
        place, ms = 0, 0.0
        while place < 9:
            ms += sizes[chosen[place]][1]
            place += accepted[chosen[place]][place] + 1
        best = min(best, ms)
    assert replay_best(text, sizes).ms == pytest.approx(best)


def test_rates_are_shares_of_places():
    ranks = np.array([[0, 1], [0, 0], [0, 1], [1, 0], [-1, 0], [2, 0]], np.int8)
    texts = [Text("x", 0.0, ranks, np.zeros((6, 0)))]
    rates = path_rates(texts, 3)
    assert rates(()) == pytest.approx([1 / 2, 1 / 6, 1 / 6])
    assert rates((0,)) == pytest.approx([1 / 3, 2 / 3, 0])
    assert rates((1,)) == [1, 0, 0] and rates((0, 0)) == []
    assert rates((1, 1)) == []
    assert rates_by_depth(texts, 2) == [
        pytest.approx([1 / 2, 1 / 6]),
        pytest.approx([1 / 2, 1 / 2]),
    ]


def test_accept_length_of_all_places_is_that_of_their_rates():
    """Path by path, so that no independence is assumed."""
    trace = some_trace()
    rates = path_rates(trace.texts, 3)
    for num_nodes in (2, 4, 7):
        shape = best_tree(rates, num_nodes)
        found = np.concatenate([right_drafts(t, shape.paths) for t in trace.texts]).mean() + 1
        assert accept_length(*shape.nodes(), rates) == pytest.approx(found)
        for other in ([(0,), (1,)], [(0,), (0, 0)], chain_paths(3), [(0,), (1,), (0, 1)]):
            if len(other) == num_nodes - 1:
                theirs = np.concatenate([right_drafts(t, other) for t in trace.texts]).mean()
                assert found >= theirs + 1 - 1e-12


def test_a_trace_of_fewer_paths():
    trace = some_trace()
    chain = trace.keep([(0, 0), (0,)][::-1])
    assert chain.paths == ((0,), (0, 0))
    assert (chain.texts[0].confidence == trace.texts[0].confidence[:, :2]).all()
    with pytest.raises(ValueError, match="trace: paths: expected some of those recorded"):
        trace.keep([(1,)])
    with pytest.raises(ValueError, match="paths: expected distinct paths"):
        trace.keep([(0, 0)])
    assert trace.at(0.0).texts == trace.texts and trace.temperatures == [0.0]
    with pytest.raises(ValueError, match="trace: temperature: expected one of"):
        trace.at(0.5)


def test_texts_that_do_not_fit():
    text = some_text()
    with pytest.raises(ValueError, match="expected confidences of 60 places and 2 drafts"):
        Trace(((0,), (1,)), 3, (text,))
    flat = dataclasses.replace(text, ranks=text.ranks[:, :2])
    with pytest.raises(ValueError, match="expected ranks to the deepest path's depth"):
        Trace(tuple(chain_paths(3)), 3, (flat,))


def test_bad_recorders(tiny):
    models = tiny.models()
    options = {"num_ranks": 3, "max_tokens": 40}
    with pytest.raises(ValueError, match="recorder: depth: expected at least 3, got 2"):
        Recorder(*models, chain_paths(3), depth=2, **options)
    with pytest.raises(ValueError, match="recorder: paths: expected at most 63 rows"):
        Recorder(*models, static_paths(4, 4, 300), depth=4, **options)
    with pytest.raises(ValueError, match="paths: expected distinct paths"):
        Recorder(*models, [(0, 0)], depth=2, **options)
    recorder = Recorder(*models, chain_paths(2), depth=2, **options)
    for ids, first in (([1, 2, 3], 1), ([1] * 9, 0), ([1] * 41, 2)):
        with pytest.raises(ValueError, match="recorder: ids: expected 1 <= first"):
            recorder.record(ids, first)
    ranks, confidence = recorder.record([1, 2, 3, 4], 1)
    assert ranks.shape == (1, 2) and confidence.shape == (1, 2)


RECORDED = Path(__file__).parents[2] / "benchmarks/results/2026-11-29-traces.jsonl"
recorded = pytest.mark.skipif(not RECORDED.exists(), reason=f"no trace at {RECORDED}")


@recorded
def test_the_recorded_trace_is_what_the_bundled_model_card_says():
    """Accept lengths of chains of 1 to 5, of which the card's are of longer texts."""
    trace = Trace.load(RECORDED)
    card = {0.0: [1.73, 2.26, 2.66, 2.96, 3.15], 0.8: [1.41, 1.58, 1.66, 1.71, 1.73]}
    assert trace.temperatures == list(card)
    for temperature, expected in card.items():
        texts = trace.at(temperature).texts
        for steps, length in enumerate(expected, 1):
            runs = [replay(text, chain_paths(steps), 1.0) for text in texts]
            found = sum(r.num_tokens for r in runs) / sum(r.num_cycles for r in runs)
            assert found == pytest.approx(length, rel=0.05)


@recorded
def test_the_bundled_model_gives_the_recorded_trace():
    """Recorded again, a text's first places; a near tie of another machine's sums may differ."""
    trace, count = Trace.load(RECORDED), 12
    target, drafter = load_pair()
    text = trace.texts[0]
    depth = text.ranks.shape[1]
    prompt = json.loads((ASSETS / "prompts.json").read_text())[0]["token_ids"]
    longest = len(prompt) + count + depth
    engine = Engine(target, max_tokens=longest)
    tokens = engine.generate(prompt, count + depth, speculative=False).result().tokens
    recorder = Recorder(
        target, drafter, trace.paths, depth=depth, num_ranks=trace.num_ranks, max_tokens=longest
    )
    ranks, confidence = recorder.record([*prompt, *tokens], len(prompt))
    assert (ranks == text.ranks[:count]).mean() > 0.9
    assert (np.abs(confidence - text.confidence[:count]) < 0.01).mean() > 0.9
