"""INT4 checkpoints: read packed, split over ranks between groups, and refused by name."""

from __future__ import annotations

import pytest
import torch

from spec_kernels.comm import Communicator
from spec_kernels.comm.launch import launch
from spec_kernels.decode.engine import Engine
from spec_kernels.models.config import DrafterConfig, TargetConfig
from spec_kernels.models.drafter import Drafter
from spec_kernels.models.target import Target
from spec_kernels.models.weights import Checkpoint, Shard
from spec_kernels.ops.moe_experts import dequantize_int4
from spec_kernels.testing.checkpoints import (
    DRAFTER,
    INT4_TARGET,
    knowing_drafter_tensors,
    pack_experts,
    target_tensors,
    write_checkpoint,
)
from spec_kernels.testing.compare import assert_same_bits
from spec_kernels.testing.tiny_models import PLANS, PROMPTS

EXPERT = "model.layers.1.mlp.experts.2"
INNER, HIDDEN = INT4_TARGET["moe_intermediate_size"], INT4_TARGET["hidden_size"]


@pytest.fixture(scope="module")
def tensors():
    return pack_experts(target_tensors(INT4_TARGET, gain=0.7))


@pytest.fixture(scope="module")
def both(tmp_path_factory, tensors):
    """Directories of the packed checkpoint and of the one it stands for, and their drafter."""
    root = tmp_path_factory.mktemp("int4")
    packed, plain = tensors
    config = DRAFTER | {"hidden_size": HIDDEN, "head_dim": 8}
    return (
        write_checkpoint(root / "packed", INT4_TARGET, packed, num_shards=2),
        write_checkpoint(root / "plain", INT4_TARGET | {"quantization_config": None}, plain),
        write_checkpoint(root / "drafter", config, knowing_drafter_tensors(config, plain)),
    )


def load(directory, comm=None, dtype=torch.float32):
    return Target.load(directory, comm or Communicator.single(), dtype)


def texts(comm, directory, drafter):
    torch.set_num_threads(1)
    with torch.inference_mode():
        config = DrafterConfig.from_json(drafter)
        layers = config.captured_layers(INT4_TARGET["num_hidden_layers"])
        target = Target.load(directory, comm, captured_layers=layers)
        engine = Engine(target, Drafter.load(drafter, target), PLANS["chain"], max_tokens=80)
        plain = [
            engine.generate(prompt, 20, speculative=False).result().tokens for prompt in PROMPTS
        ]
        drafted = [engine.generate(prompt, 20).result() for prompt in PROMPTS]
        return plain, [run.tokens for run in drafted], [run.accepted for run in drafted]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_decoding_equals_the_dequantised_target(both, num_ranks):
    packed, plain, drafter = both
    want, drafted, accepted = texts(Communicator.single(), plain, drafter)
    assert want == drafted and max(n for run in accepted for n in run) >= 1
    if num_ranks == 1:
        runs = [texts(Communicator.single(), packed, drafter)]
    else:
        runs = launch(texts, num_ranks, packed, drafter)
    assert [run[:2] for run in runs] == [(want, want)] * num_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_stay_packed(both, tensors, dtype):
    packed, plain = tensors
    mlp = load(both[0], dtype=dtype).layers[1].mlp
    assert mlp.gate_up.dtype == mlp.down.dtype == torch.int32
    assert mlp.gate_up_scale.dtype == mlp.down_scale.dtype == torch.bfloat16
    assert_same_bits(mlp.down[2], packed[f"{EXPERT}.down_proj.weight_packed"])
    assert_same_bits(mlp.gate_up_scale[2, INNER:], packed[f"{EXPERT}.up_proj.weight_scale"])
    got = dequantize_int4(mlp.gate_up[2], mlp.gate_up_scale[2])
    parts = [plain[f"{EXPERT}.{part}_proj.weight"] for part in ("gate", "up")]
    assert_same_bits(got, torch.cat(parts))
    assert mlp.shared_down.dtype == dtype  # case 45: the shared expert is not packed
    plain_mlp = load(both[1]).layers[1].mlp
    assert plain_mlp.gate_up_scale is None and plain_mlp.down.dtype == torch.float32


def test_case_42_parts_are_those_of_the_whole(both, tensors):
    """Words and scales of rows and of columns stay together."""
    plain = tensors[1]
    for part, shape in (("gate", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
        name, pieces = f"{EXPERT}.{part}_proj", []
        for rank in range(2):
            mine = Shard(rank, 2).of(INNER, "moe_intermediate_size", 32)
            where = {"columns" if part == "down" else "rows": mine}
            pieces.append(dequantize_int4(*Checkpoint(both[0]).read_int4(name, shape, 32, **where)))
        whole = torch.cat(pieces, 1 if part == "down" else 0)
        assert_same_bits(whole, plain[f"{name}.weight"])


def test_ranks_that_cut_groups_are_refused(both):
    class FourRanks:
        rank, world_size = 1, 4

    message = "moe_intermediate_size = 64 does not divide by 4 into multiples of 32"
    with pytest.raises(ValueError, match=message):
        load(both[0], FourRanks())
    with pytest.raises(ValueError, match="cut at multiples of the group of 32, got 16:32"):
        weights = Checkpoint(both[0])
        weights.read_int4(f"{EXPERT}.down_proj", (HIDDEN, INNER), 32, columns=slice(16, 32))


def test_the_stored_shape_is_not_believed(tmp_path, tensors):
    """Shards keep that of the whole; that it is absent is no error either."""
    packed = dict(tensors[0])
    packed[f"{EXPERT}.up_proj.weight_shape"] = torch.tensor([-1, 7])
    del packed[f"{EXPERT}.down_proj.weight_shape"]
    load(write_checkpoint(tmp_path, INT4_TARGET, packed))


def test_groups_of_other_sizes(tmp_path):
    packed, plain = pack_experts(target_tensors(INT4_TARGET), group=64)
    mlp = load(write_checkpoint(tmp_path, INT4_TARGET, packed)).layers[2].mlp
    assert mlp.down_scale.shape == (8, HIDDEN, 1)
    got = dequantize_int4(mlp.down[0], mlp.down_scale[0])
    assert_same_bits(got, plain["model.layers.2.mlp.experts.0.down_proj.weight"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"up_proj.weight_scale": None}, r"missing tensor .*experts\.2\.up_proj\.weight_scale"),
        ({"up_proj.weight_packed": None}, r"missing tensor .*experts\.2\.up_proj\.weight_packed"),
        (
            {"up_proj.weight_packed": torch.zeros(64, 7, dtype=torch.int32)},
            r"up_proj\.weight_packed: expected shape \[64, 8\], got \[64, 7\]",
        ),
        (
            {"up_proj.weight_packed": torch.zeros(64, 8)},
            r"up_proj\.weight_packed: expected dtype torch\.int32, got F32",
        ),
        (
            {"down_proj.weight_scale": torch.ones(64, 2)},
            r"down_proj\.weight_scale: expected dtype BF16, got F32",
        ),
        (
            {"down_proj.weight_scale": torch.ones(64, 4).bfloat16()},
            r"down_proj\.weight_scale: expected groups of a multiple of 32 among 64 columns",
        ),
        (
            {"down_proj.weight_scale": torch.ones(64).bfloat16()},
            r"down_proj\.weight_scale: expected groups of a multiple of 32 among 64 columns",
        ),
        (
            {"down_proj.weight_scale": torch.ones(64, 1).bfloat16()},
            r"down_proj\.weight_scale: expected shape \[64, 2\], got \[64, 1\]",
        ),
        (
            {"down_proj.weight_zero_point": torch.zeros(8, 2, dtype=torch.int32)},
            r"1 tensors that no layer uses: .*experts\.2\.down_proj\.weight_zero_point",
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_malformed_experts_are_named(tmp_path, tensors, change, message):
    packed = dict(tensors[0])
    for name, t in change.items():
        packed[f"{EXPERT}.{name}"] = t
        if t is None:
            del packed[f"{EXPERT}.{name}"]
    with pytest.raises(ValueError, match=message):
        load(write_checkpoint(tmp_path, INT4_TARGET, packed))


def test_other_packed_tensors_are_refused(tmp_path, tensors):
    """An expert of a layer whose first one is not packed, and an attention matrix."""
    packed, plain = tensors
    name = "model.layers.0.self_attn.o_proj.weight"
    some = dict(plain)
    del some[f"{EXPERT}.up_proj.weight"]
    key = f"{EXPERT}.up_proj.weight_packed"
    some[key] = packed[key]
    attention = {n: t for n, t in packed.items() if n != name}
    attention[f"{name}_packed"] = torch.zeros(64, 8, dtype=torch.int32)
    for i, (wrong, what) in enumerate(((some, "up_proj"), (attention, "o_proj"))):
        with pytest.raises(ValueError, match=f"{what}.weight_packed: expected .*INT4 is read for"):
            load(write_checkpoint(tmp_path / str(i), INT4_TARGET, wrong))


def scheme(**weights):
    config = INT4_TARGET["quantization_config"]
    group = config["config_groups"]["group_0"]
    group = group | {"weights": group["weights"] | weights}
    return config | {"config_groups": {"group_0": group}}


def test_the_published_scheme_is_taken_wherever_it_stands():
    outer = {"architectures": ["KimiK25ForConditionalGeneration"]}
    TargetConfig.from_dict(outer | {"text_config": INT4_TARGET})
    bad = {"quantization_config": scheme(num_bits=8)}
    text = {n: v for n, v in INT4_TARGET.items() if n != "quantization_config"}
    for values in (INT4_TARGET | bad, outer | {"text_config": text} | bad):
        with pytest.raises(ValueError, match="num_bits: expected 4"):
            TargetConfig.from_dict(values)


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "fp8"}, "quant_method: expected 'compressed-tensors'"),
        (scheme() | {"format": "naive-quantized"}, "format: expected 'pack-quantized'"),
        (scheme(symmetric=False), "symmetric: expected True"),
        (scheme(type="float"), "type: expected 'int'"),
        (scheme(strategy="channel"), "strategy: expected 'group'"),
        (scheme(actorder="weight"), "actorder: expected null"),
        (scheme(dynamic=True), "dynamic: expected False"),
        (scheme() | {"config_groups": None}, "config_groups: expected an object"),
        (scheme() | {"config_groups": {"a": {}}}, "weights: expected an object"),
        (
            scheme()
            | {"config_groups": {"a": {"weights": {}, "input_activations": {"num_bits": 8}}}},
            "input_activations: expected null",
        ),
        ([], "quantization_config: expected an object"),
    ],
    ids=str,
)
def test_other_schemes_are_refused(quantization, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_dict(INT4_TARGET | {"quantization_config": quantization})
