"""The target against transformers and against this package's dense training pass."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_kernels.comm import Communicator
from spec_kernels.comm.launch import launch
from spec_kernels.decode.cycle import causal_words
from spec_kernels.decode.kv_cache import KVCache
from spec_kernels.models import layers
from spec_kernels.models.config import RopeConfig
from spec_kernels.models.layers import Rotary, Step
from spec_kernels.models.rope import attention_factor, cos_sin
from spec_kernels.models.target import Target
from spec_kernels.testing.checkpoints import TARGET, target_tensors, write_checkpoint
from spec_kernels.training import export

NUM_TOKENS = 24
ALL_STREAMS = tuple(range(TARGET["num_hidden_layers"] + 1))
VARIANTS = {
    "as Kimi": {},
    "expert groups": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "two shared experts, all dense but one": {"n_shared_experts": 2, "first_k_dense_replace": 3},
    "plain rope, tied": {"rope_scaling": None, "tie_word_embeddings": True},
    "odd sizes": {"q_lora_rank": 23, "kv_lora_rank": 17, "v_head_dim": 6, "qk_nope_head_dim": 10},
}


def tokens(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, TARGET["vocab_size"], (1, NUM_TOKENS), generator=g)


def forward(target, ids, capture=None, logit_rows=None):
    """One chain of all tokens from an empty cache."""
    with torch.inference_mode():
        cache = KVCache(target, None, 1, 64)
        cache.reserve(0, 64)
        at = torch.arange(ids.shape[1]).unsqueeze(0)
        step = Step(
            ids,
            at,
            causal_words(ids.shape[1]),
            at,
            cache.block_tables,
            torch.zeros(1, dtype=torch.int64),
        )
        return target.forward(step, cache.target, capture, logit_rows)


def capture_all(directory, comm=None, dtype=torch.float32, ids=None):
    with torch.inference_mode():
        target = Target.load(
            directory, comm or Communicator.single(), dtype, captured_layers=ALL_STREAMS
        )
        capture = target.new_capture(NUM_TOKENS)
        return forward(target, tokens() if ids is None else ids, capture), capture


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_parity_with_transformers(tmp_path, change):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = {**TARGET, **change}
    if config["rope_scaling"] is not None:
        # transformers warns when factor is not this ratio, and takes factor all the same.
        config["max_position_embeddings"] = 256
    write_checkpoint(tmp_path / "ours", config, target_tensors(config))
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        theirs = model(tokens(), output_hidden_states=True)
    # Their q_a and kv_a norms take 1e-6, which is the default of our latent_norm_eps.
    for directory in ("ours", "theirs"):
        logits, capture = capture_all(tmp_path / directory)
        torch.testing.assert_close(logits, theirs.logits, rtol=1e-4, atol=2e-5)
        for i in range(TARGET["num_hidden_layers"]):
            stream = theirs.hidden_states[i][0]
            torch.testing.assert_close(capture[:, i], stream, rtol=1e-4, atol=2e-5)
        # hidden_states[N] is after the final norm; h[N] is before it.
        assert (capture[:, -1] - theirs.hidden_states[-1][0]).abs().max() > 1e-2


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_parity_with_the_dense_training_pass(tmp_path, change):
    config = {**TARGET, **change}
    # What that pass does not have is compared with transformers only.
    config |= {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "tie_word_embeddings": False}
    write_checkpoint(tmp_path, config, target_tensors(config))
    dense = export.load_target(tmp_path, torch.float32)
    logits, capture = capture_all(tmp_path)
    with torch.no_grad():
        theirs, streams, _ = dense(tokens(), ALL_STREAMS)
    torch.testing.assert_close(logits, theirs.float(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(capture.flatten(1), streams[0], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("plain"), TARGET, target_tensors(TARGET))


def _streams(comm, directory):
    torch.set_num_threads(1)
    return capture_all(directory, comm)


@pytest.mark.parametrize("tp", [2, 8])
def test_case_23_captured_streams_are_summed_over_ranks(plain, tp):
    """A partial sum would differ between ranks and from the one-rank stream."""
    logits, capture = capture_all(plain)
    results = launch(_streams, tp, plain)
    for other_logits, other_capture in results:
        torch.testing.assert_close(other_capture, capture, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other_logits, logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(other_capture, results[0][1])
        assert torch.equal(other_logits, results[0][0])


def _calls(comm, directory):
    torch.set_num_threads(1)
    target = Target.load(directory, comm)
    calls = collections.Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls[function] += 1
            return function(*args, **(kwargs or {}))

    with Counting():
        forward(target, tokens())
    ops = torch.ops.spec_kernels
    fused, apart = ops.pcie_allreduce_norm.default, ops.pcie_allreduce.default
    return len(target.layers), calls[fused], calls[apart], calls[ops.hidden_capture.default]


def test_sums_over_ranks_are_fused_with_the_norm_after_them(plain):
    """Two a layer; what is left are the norms of the embedding and of each layer's q latent."""
    for num_layers, fused, apart, norms in launch(_calls, 2, plain):
        assert (fused, apart, norms) == (2 * num_layers, 0, 1 + num_layers)
    num_layers, fused, apart, norms = _calls(Communicator.single(), plain)
    assert (fused, apart, norms) == (0, 0, 1 + 3 * num_layers)


def _split_embedding(comm, directory):
    torch.set_num_threads(1)
    layers.REPLICATED_EMBEDDING_BYTES = 0
    target = Target.load(directory, comm)
    assert target.embedding.split
    return forward(target, tokens())


def test_an_embedding_split_by_vocabulary_gives_the_same(plain):
    whole = launch(_streams, 2, plain)[0][0]
    for logits in launch(_split_embedding, 2, plain):
        assert torch.equal(logits, whole)


def test_case_24_captured_layers_come_from_ids(plain):
    """num_layers is a valid id, an unmatched one an error, and every slot is filled."""
    num_layers = TARGET["num_hidden_layers"]
    _, everything = capture_all(plain)
    for ids in ((1, 2, num_layers), (num_layers, 0, 3)):
        target = Target.load(plain, Communicator.single(), captured_layers=ids)
        capture = target.new_capture(NUM_TOKENS).fill_(float("nan"))
        assert capture.shape[1] == len(ids)
        forward(target, tokens(), capture)
        assert torch.equal(capture, everything[:, list(ids)])
    for ids in ((1, 2, num_layers + 1), (-1, 2, 3), (2, 2, 3)):
        with pytest.raises(ValueError, match="captured_layers"):
            Target.load(plain, Communicator.single(), captured_layers=ids)


def test_rows_of_logits_can_be_chosen(plain):
    target = Target.load(plain, Communicator.single())
    everything = forward(target, tokens())
    rows = torch.tensor([23, 0, 7])
    chosen = forward(target, tokens(), logit_rows=rows)
    torch.testing.assert_close(chosen, everything[0, rows], rtol=1e-5, atol=1e-6)


def test_a_tree_node_gets_what_its_path_alone_gets(plain):
    """Branches see their ancestors, not the rows before them."""
    target = Target.load(plain, Communicator.single())
    ids = tokens()[:, :5]
    with torch.inference_mode():
        cache = KVCache(target, None, 1, 32, page_size=3)
        cache.reserve(0, 32)
        # 0 -> 1 -> 3 and 0 -> 2 -> 4
        paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
        words = torch.tensor([[[sum(1 << n for n in path)] for path in paths]], dtype=torch.int32)
        depths = torch.tensor([[len(path) - 1 for path in paths]])
        slots = torch.arange(5).unsqueeze(0)
        start = torch.zeros(1, dtype=torch.int64)
        step = Step(ids, depths, words, slots, cache.block_tables, start)
        tree = target.forward(step, cache.target)
    for node in (3, 4):
        chain = forward(target, ids[:, paths[node]])
        torch.testing.assert_close(tree[0, node], chain[0, -1], rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_near_float32(plain):
    exact, _ = capture_all(plain)
    rounded, capture = capture_all(plain, dtype=torch.bfloat16)
    assert rounded.dtype == capture.dtype == torch.bfloat16
    with torch.no_grad():
        dense = export.load_target(plain, torch.bfloat16)(tokens(), ALL_STREAMS)[0]

    def error(logits):
        return (logits.float() - exact).norm() / exact.norm()

    assert error(rounded) < 2 * error(dense)


def test_rotation_of_positions_is_ropes_cos_and_sin():
    config = RopeConfig(10000.0, "yarn", 8.0, 64, mscale=1.0)
    rotary = Rotary(config, 16, torch.device("cpu"))
    positions = torch.tensor([[0, 1, 77], [4095, 2047, 100_000]])
    cos, sin = cos_sin(positions, rotary.frequencies, attention_factor(config))
    assert attention_factor(config) != 1.0
    rotation = rotary.rotation(positions)
    assert rotation.shape == (2, 3, 16)
    torch.testing.assert_close(rotation[..., :8], cos, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotation[..., 8:], sin, rtol=1e-6, atol=1e-6)
