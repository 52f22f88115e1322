"""Reading checkpoints: prefixes, slices, and every way in which a file can be wrong."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from spec_kernels.comm import Communicator
from spec_kernels.models.target import Target
from spec_kernels.models.weights import DRAFTER_PREFIXES, Checkpoint, Shard
from spec_kernels.testing.checkpoints import TARGET, target_tensors, write_checkpoint


@pytest.fixture(scope="module")
def tensors():
    return target_tensors(TARGET)


def load(directory):
    return Target.load(directory, Communicator.single())


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n,
        lambda n: n.removeprefix("model."),
        lambda n: "language_model." + n,
        lambda n: "language_model." + n.removeprefix("model."),
        lambda n: n.replace("model.", "model.language_model.", 1),
    ],
    ids=["published", "no prefix", "language_model.model", "language_model.layers", "nested"],
)
def test_case_41_prefixes_are_found_and_vision_is_skipped(tmp_path, tensors, rename):
    renamed = {rename(name): t for name, t in tensors.items()}
    renamed["vision_tower.encoder.weight"] = torch.zeros(2)
    renamed["mm_projector.proj.weight"] = torch.zeros(2)
    target = load(write_checkpoint(tmp_path, TARGET, renamed))
    assert torch.equal(target.embedding.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(target.head.weight_t.t(), tensors["lm_head.weight"])


def test_case_41_leftovers_are_named(tmp_path, tensors):
    extra = {**tensors, "model.layers.4.input_layernorm.weight": torch.ones(48)}
    with pytest.raises(ValueError, match=r"1 tensors that no layer uses: model\.layers\.4\.input"):
        load(write_checkpoint(tmp_path, TARGET, extra))


def test_every_tensor_is_used_exactly_once(tmp_path, tensors):
    weights = Checkpoint(write_checkpoint(tmp_path, TARGET, tensors))
    shape = (TARGET["hidden_size"],)
    weights.read("model.norm.weight", shape, torch.float32)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: asked for twice"):
        weights.read("model.norm.weight", shape, torch.float32)


def test_shards_under_an_index_equal_one_file(tmp_path, tensors):
    one = Checkpoint(write_checkpoint(tmp_path / "one", TARGET, tensors))
    many = Checkpoint(write_checkpoint(tmp_path / "many", TARGET, tensors, num_shards=3))
    for name, t in tensors.items():
        a, b = (w.read(name, tuple(t.shape), torch.float32) for w in (one, many))
        assert torch.equal(a, b) and torch.equal(a, t)
    one.finish()
    many.finish()


def test_ranks_read_their_slices_only(tmp_path, tensors):
    directory = write_checkpoint(tmp_path, TARGET, tensors)
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = tensors[name]
    parts, rows = [], []
    for rank in range(4):
        shard = Shard(rank, 4)
        columns = shard.of(whole.shape[1], "columns")
        parts.append(
            Checkpoint(directory).read(name, tuple(whole.shape), torch.float32, columns=columns)
        )
        rows.append(
            Checkpoint(directory).read(
                name, tuple(whole.shape), torch.float32, rows=shard.of(whole.shape[0], "rows")
            )
        )
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(torch.cat(rows), whole)


def test_dtypes_convert_among_floats_only(tmp_path):
    save_file(
        {"a": torch.ones(3, dtype=torch.float16), "b": torch.ones(3, dtype=torch.int32)},
        tmp_path / "model.safetensors",
    )
    weights = Checkpoint(tmp_path, DRAFTER_PREFIXES)
    assert weights.read("a", (3,), torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="b: expected dtype F32/BF16/F16, got I32"):
        weights.read("b", (3,), torch.float32)


def test_missing_tensor_is_named(tmp_path, tensors):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    rest = {n: t for n, t in tensors.items() if n != name}
    with pytest.raises(ValueError, match=r"missing tensor model\.layers\.2\.mlp\.experts\.3\.up"):
        load(write_checkpoint(tmp_path, TARGET, rest))


def test_wrong_shape_names_file_and_tensor(tmp_path, tensors):
    wrong = {**tensors, "model.norm.weight": torch.ones(47)}
    message = r"model\.safetensors: model\.norm\.weight: expected shape \[48\], got \[47\]"
    with pytest.raises(ValueError, match=message):
        load(write_checkpoint(tmp_path, TARGET, wrong))


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_file_is_named(tmp_path, tensors, keep):
    file = write_checkpoint(tmp_path, TARGET, tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or not safetensors"):
        load(tmp_path)


def test_missing_shard_is_named(tmp_path, tensors):
    write_checkpoint(tmp_path, TARGET, tensors, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="00002-of-00002.safetensors: expected a safetensors file"):
        load(tmp_path)


def test_index_must_agree_with_the_files(tmp_path, tensors):
    write_checkpoint(tmp_path, TARGET, tensors, num_shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.ghost\.weight: listed in the index, not in the"):
        load(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="expected JSON with a weight_map"):
        load(tmp_path)


def test_no_or_several_files_are_refused(tmp_path, tensors):
    write_checkpoint(tmp_path, TARGET, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="expected one safetensors file.*got none"):
        load(tmp_path)
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="got a.safetensors, b.safetensors"):
        load(tmp_path)


def test_one_tensor_under_two_names_is_refused(tmp_path):
    save_file(
        {"norm.weight": torch.ones(1), "model.norm.weight": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="the same tensor as"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change, what",
    [
        ({"num_attention_heads": 6}, "num_attention_heads = 6"),
        ({"moe_intermediate_size": 18}, "moe_intermediate_size = 18"),
        ({"intermediate_size": 66}, "intermediate size = 66"),
        ({"vocab_size": 42}, "vocab_size = 42"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(tmp_path, change, what):
    config = {**TARGET, **change}
    write_checkpoint(tmp_path, config, target_tensors(config))

    class FourRanks:
        rank, world_size = 1, 4

    with pytest.raises(ValueError, match=f"{what} does not divide by 4"):
        Target.load(tmp_path, FourRanks())
