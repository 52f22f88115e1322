"""The EAGLE-3 drafter: parity with the training module, its switches, its vocabulary."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spec_kernels.comm import Communicator
from spec_kernels.comm.launch import launch
from spec_kernels.decode.cycle import causal_words
from spec_kernels.decode.kv_cache import KVCache
from spec_kernels.models import drafter as drafter_module
from spec_kernels.models.config import DrafterConfig
from spec_kernels.models.drafter import Drafter, choose_parallel
from spec_kernels.models.layers import Step
from spec_kernels.models.target import Target
from spec_kernels.testing.checkpoints import (
    DRAFTER,
    TARGET,
    drafter_tensors,
    target_tensors,
    write_checkpoint,
)
from spec_kernels.training import export

NUM_ROWS = 12
LAYERS = (1, 2, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    write_checkpoint(directory, TARGET, target_tensors(TARGET))
    return Target.load(directory, Communicator.single(), captured_layers=LAYERS)


def make(tmp_path, target, change=None, tensors=None, edit=None):
    config = {**DRAFTER, **(change or {})}
    tensors = tensors if tensors is not None else drafter_tensors(config)
    if edit is not None:
        edit(tensors)
    directory = write_checkpoint(tmp_path / "drafter", config, tensors)
    return Drafter.load(directory, target)


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (1, NUM_ROWS + 1), generator=g)
    return ids, torch.randn(NUM_ROWS, 3, 48, generator=g)


def run_committed(drafter, ids, captured, first_position=0):
    """Logits and features of committed rows: row t takes token t + 1 and the streams of t."""
    with torch.inference_mode():

        class NoTarget:
            new_cache = staticmethod(lambda pages, size: torch.zeros(1, pages, size, 1))

        cache = KVCache(NoTarget, drafter, 1, 64)
        cache.reserve(0, 64)
        at = torch.arange(NUM_ROWS).unsqueeze(0)
        step = Step(
            ids[:, 1:],
            at + first_position,
            causal_words(NUM_ROWS),
            at,
            cache.block_tables,
            torch.zeros(1, dtype=torch.int64),
        )
        feature, normed = drafter.forward(step, drafter.fuse(captured), cache.draft)
        return drafter.logits(normed), feature


def test_parity_with_the_training_module(tmp_path, target):
    drafter = make(tmp_path, target)
    module = export.load_drafter(tmp_path / "drafter", torch.float32)
    ids, captured = inputs()
    with torch.no_grad():
        streams = torch.cat((captured.flatten(1), torch.zeros(1, 144))).unsqueeze(0)
        wanted = module(ids, streams, target.embedding.weight, 1)[0][0]
    logits, _ = run_committed(drafter, ids, captured)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_grouped_query_heads(tmp_path, target):
    """Two K/V heads equal eight of which four each are the same."""
    change = {"num_key_value_heads": 2}
    tensors = drafter_tensors({**DRAFTER, **change})
    wide = dict(tensors)
    for name in ("k", "v"):
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"].view(2, 6, -1)
        wide[f"midlayer.self_attn.{name}_proj.weight"] = weight.repeat_interleave(4, 0).flatten(
            0, 1
        )
    ids, captured = inputs()
    few = run_committed(make(tmp_path / "few", target, change, tensors), ids, captured)
    many = run_committed(make(tmp_path / "many", target, None, wide), ids, captured)
    for a, b in zip(few, many, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def rms(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize(
    "switch", ["norm_output", "norm_before_residual", "norm_before_fc", "fc_norm"]
)
def test_optional_norms(tmp_path, target, switch):
    """Each switch against its formula, on a single row whose attention sees only itself."""
    change = {switch: True}
    tensors = drafter_tensors({**DRAFTER, **change})
    drafter = make(tmp_path, target, change, tensors)
    ids, captured = inputs()
    logits, feature = run_committed(drafter, ids, captured)
    t = {name.removeprefix("midlayer."): w for name, w in tensors.items()}
    x = captured[0]
    if switch == "fc_norm":
        x = torch.stack([rms(x[i], t[f"fc_norm.{i}.weight"]) for i in range(3)])
    x = x.flatten()
    if switch == "norm_before_fc":
        x = rms(x, t["input_norm.weight"])
    g = t["fc.weight"] @ x
    e = rms(target.embedding.weight[ids[0, 1]], t["input_layernorm.weight"])
    normed = rms(g, t["hidden_norm.weight"])
    v = t["self_attn.v_proj.weight"] @ torch.cat((e, normed))
    r = (normed if switch == "norm_before_residual" else g) + t["self_attn.o_proj.weight"] @ v
    h = rms(r, t["post_attention_layernorm.weight"])
    inner = torch.nn.functional.silu(t["mlp.gate_proj.weight"] @ h) * (t["mlp.up_proj.weight"] @ h)
    r = r + t["mlp.down_proj.weight"] @ inner
    out = rms(r, t["norm.weight"])
    torch.testing.assert_close(logits[0], t["lm_head.weight"] @ out, rtol=1e-4, atol=1e-4)
    wanted = out if switch == "norm_output" else r
    torch.testing.assert_close(feature[0], wanted, rtol=1e-4, atol=1e-4)


def _logits(comm, target_dir, drafter_dir, parallel):
    torch.set_num_threads(1)
    with torch.inference_mode():
        target = Target.load(target_dir, comm, captured_layers=LAYERS)
        drafter = Drafter.load(drafter_dir, target, parallel)
        assert drafter.comm.world_size == (comm.world_size if parallel == "tp" else 1)
        return run_committed(drafter, *inputs())[0]


@pytest.mark.parametrize("parallel", ["tp", "replicated"])
def test_ranks_equal_one_rank(tmp_path, tiny, target, parallel):
    drafter = make(tmp_path, target)
    wanted, _ = run_committed(drafter, *inputs())
    target_dir = write_checkpoint(tmp_path / "target", TARGET, target_tensors(TARGET))
    results = launch(_logits, 4, target_dir, tmp_path / "drafter", parallel)
    for logits in results:
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, results[0])


def _who_drafts(comm, target_dir, drafter_dir):
    target = Target.load(target_dir, comm, captured_layers=LAYERS)
    drafter = Drafter.load(drafter_dir, target, "leader")
    return drafter.is_here, drafter.captured_layers, drafter.audience is comm


def test_a_leader_drafts_for_all(tmp_path, target):
    make(tmp_path, target)
    target_dir = write_checkpoint(tmp_path / "target", TARGET, target_tensors(TARGET))
    results = launch(_who_drafts, 2, target_dir, tmp_path / "drafter")
    assert results == [(True, LAYERS, True), (False, LAYERS, True)]


def test_how_a_drafter_is_shared(monkeypatch):
    """By the cost of what all ranks repeat: turns on a core, else exchange, else bytes."""

    class Ranks:
        def __init__(self, world_size):
            self.world_size = world_size

    config = DrafterConfig.from_dict(DRAFTER)
    large = dataclasses.replace(config, hidden_size=7168, intermediate_size=12288)
    monkeypatch.setattr(drafter_module, "num_cores", lambda: 4)

    def choice(config, ranks, device="cpu"):
        return choose_parallel(config, Ranks(ranks), torch.bfloat16, device)

    assert choice(config, 1) == choice(large, 1) == "replicated"
    assert choice(config, 8) == choice(large, 8) == "leader"
    assert choice(config, 4) == "replicated" and choice(large, 4) == "tp"
    assert choice(config, 8, "cuda") == "replicated" and choice(large, 8, "cuda") == "tp"


def test_case_43_d2t_is_an_offset(tmp_path, target):
    tensors = drafter_tensors(DRAFTER)
    drafter = make(tmp_path, target, tensors=tensors)
    ids = torch.arange(32) + tensors["d2t"]
    assert torch.equal(drafter.target_ids, ids)
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten())


def test_case_43_zeros_are_the_identity(tmp_path, target):
    def zeros(tensors):
        tensors["d2t"] = torch.zeros(32, dtype=torch.int64)
        tensors["t2d"] = torch.arange(40) < 32

    drafter = make(tmp_path, target, edit=zeros)
    assert torch.equal(drafter.target_ids, torch.arange(32))


def test_case_43_a_full_vocabulary_needs_no_d2t(tmp_path, target):
    drafter = make(tmp_path, target, {"draft_vocab_size": 40})
    assert torch.equal(drafter.target_ids, torch.arange(40))


def test_case_43_missing_d2t_is_an_error(tmp_path, target):
    with pytest.raises(
        ValueError, match="d2t: expected offsets for a draft vocabulary of 32 out of"
    ):
        make(tmp_path, target, edit=lambda t: [t.pop("d2t"), t.pop("t2d")])


@pytest.mark.parametrize("value", [-1, 39])
def test_case_43_d2t_outside_the_vocabulary_is_an_error(tmp_path, target, value):
    """39 for draft id 1 would be in range only as an index."""

    def edit(tensors):
        tensors["d2t"][0 if value < 0 else 1] = value if value < 0 else 39

    with pytest.raises(ValueError, match=r"d2t: expected draft id \+ d2t in \[0, 40\)"):
        make(tmp_path, target, edit=edit)


def test_t2d_must_agree_with_d2t(tmp_path, target):
    def edit(tensors):
        tensors["t2d"] = ~tensors["t2d"]

    with pytest.raises(ValueError, match="t2d: expected the ids that d2t leads to"):
        make(tmp_path, target, edit=edit)


def test_case_44_the_drafters_own_rope_at_any_position(tmp_path, target):
    """Own theta and scaling; angles are computed, so positions past 2048 are like any others."""
    scaling = {"type": "linear", "factor": 4.0}
    ids, captured = inputs()
    base = make(tmp_path / "a", target)
    scaled = make(tmp_path / "b", target, {"rope_scaling": scaling})
    other = make(tmp_path / "c", target, {"rope_theta": 50.0})
    logits, _ = run_committed(base, ids, captured)
    for drafter in (scaled, other):
        assert (run_committed(drafter, ids, captured)[0] - logits).abs().max() > 1e-3
    # A linear factor of 4 makes of position 4p what p is without it; exactly, as 4 is 2^2.
    positions = torch.tensor([[0, 1, 7, 2047, 2049, 100_000]])
    stretched = scaled.rotary.rotation(4 * positions)
    assert torch.equal(stretched, base.rotary.rotation(positions))
    # Attention depends on distances alone, so a shift by any amount changes rounding only.
    for shift in (5, 3000, 100_000):
        shifted, _ = run_committed(scaled, ids, captured, shift)
        unshifted, _ = run_committed(scaled, ids, captured)
        torch.testing.assert_close(shifted, unshifted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n.replace("midlayer.", "layers.0."),
        lambda n: n.replace("midlayer.", "model.layers.0."),
        lambda n: "model." + n,
    ],
)
def test_names_of_other_releases(tmp_path, target, rename):
    tensors = {rename(name): t for name, t in drafter_tensors(DRAFTER).items()}
    ids, captured = inputs()
    wanted, _ = run_committed(make(tmp_path / "a", target), ids, captured)
    got, _ = run_committed(make(tmp_path / "b", target, tensors=tensors), ids, captured)
    assert torch.equal(got, wanted)


def test_own_embeddings_are_used_when_present(tmp_path, target):
    def own(tensors):
        tensors["embed_tokens.weight"] = torch.zeros(40, 48)

    ids, captured = inputs()
    borrowed, _ = run_committed(make(tmp_path / "a", target), ids, captured)
    drafter = make(tmp_path / "b", target, edit=own)
    assert drafter.embedding is not target.embedding
    assert not torch.equal(run_committed(drafter, ids, captured)[0], borrowed)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vocab_size": 48}, "vocab_size: expected 40 as the target"),
        ({"target_hidden_size": 64}, "target_hidden_size: expected 48 as the target"),
        (
            {
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
                    "use_aux_hidden_state": True,
                }
            },
            r"captured layers \(2, 3, 4\): the target captures \(1, 2, 4\)",
        ),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path, target, change, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, target, change)


def test_parallel_is_checked(tmp_path, target):
    make(tmp_path, target)
    with pytest.raises(ValueError, match="parallel: expected one of"):
        Drafter.load(tmp_path / "drafter", target, "sharded")


def test_captured_layers_are_the_configs(tmp_path, target):
    assert make(tmp_path, target).captured_layers == LAYERS
    assert DrafterConfig.from_json(tmp_path / "drafter").captured_layers(4) == LAYERS
