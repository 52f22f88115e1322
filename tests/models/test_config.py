"""Rules of reading config.json: what is accepted, what is refused, and what the refusal names."""

import json

import pytest

from spec_kernels.models.config import DrafterConfig, RopeConfig, TargetConfig

YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def target_values(**changes):
    values = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "vocab_size": 163840,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 50000.0,
        "rope_scaling": YARN,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "eos_token_id": 163586,
    }
    values.update(changes)
    return {name: value for name, value in values.items() if value != "absent"}


def drafter_values(**changes):
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 163840,
        "draft_vocab_size": 32000,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
            "use_aux_hidden_state": True,
        },
    }
    values.update(changes)
    return {name: value for name, value in values.items() if value != "absent"}


def aux(ids, **more):
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, **more}
    return DrafterConfig.from_dict(drafter_values(eagle_config=eagle))


def test_kimi_target():
    config = TargetConfig.from_dict(target_values())
    assert config.qk_head_dim == 192 and config.latent_dim == 576
    assert not config.is_moe(0) and config.is_moe(1)
    assert config.rope == RopeConfig(50000.0, "yarn", 64.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.eos_token_ids == (163586,)


def test_case_41_nested_text_config():
    inner = target_values(tie_word_embeddings="absent")
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": inner,
        "tie_word_embeddings": False,
    }
    config = TargetConfig.from_dict(outer)
    assert config.n_routed_experts == 384
    assert config.architecture == "KimiK25ForConditionalGeneration"
    outer["text_config"] = inner | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match="text_config: architectures.*LlamaForCausalLM"):
        TargetConfig.from_dict(outer)


def test_rope_parameters_of_newer_transformers():
    old = TargetConfig.from_dict(target_values())
    parameters = {**YARN, "rope_type": "yarn", "rope_theta": 50000.0}
    del parameters["type"]
    new = target_values(rope_theta="absent", rope_scaling="absent", rope_parameters=parameters)
    assert TargetConfig.from_dict(new).rope == old.rope
    with pytest.raises(ValueError, match="rope_theta: expected 50000.0"):
        TargetConfig.from_dict(target_values(rope_parameters=parameters, rope_theta=10000.0))


def test_plain_rope():
    plain = RopeConfig(theta=50000.0)
    assert TargetConfig.from_dict(target_values(rope_scaling=None)).rope == plain
    default = {"rope_type": "default", "rope_theta": 50000.0}
    values = target_values(rope_scaling="absent", rope_theta="absent", rope_parameters=default)
    assert TargetConfig.from_dict(values).rope == plain


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures.*GPT2LMHeadModel"),
        ({"architectures": "absent"}, "architectures"),
        ({"hidden_size": "absent"}, "missing field hidden_size"),
        ({"kv_lora_rank": None}, "missing field kv_lora_rank"),
        ({"hidden_size": 0}, "hidden_size: expected an integer >= 1, got 0"),
        ({"hidden_size": 7168.0}, "hidden_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"scoring_func": "softmax"}, "scoring_func.*'sigmoid'.*got 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected an even"),
        ({"n_group": 5}, "n_group: expected a divisor of n_routed_experts"),
        ({"n_group": 384}, "n_group: expected at least 2 experts"),
        ({"topk_group": 2}, "topk_group: expected at most n_group"),
        ({"n_group": 48, "topk_group": 1, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok"),
        ({"first_k_dense_replace": 62}, "first_k_dense_replace"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"eos_token_id": 163840}, "eos_token_id"),
        ({"rope_theta": "absent"}, "missing field rope_theta"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_type.*llama3"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor: expected a number >= 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling: expected an object"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_bad_target(changes, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_dict(target_values(**changes))


def test_files(tmp_path):
    with pytest.raises(ValueError, match="config.json: expected a file"):
        TargetConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match="expected JSON"):
        TargetConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        DrafterConfig.from_json(tmp_path)


@pytest.mark.parametrize("rope_scaling", [None, YARN, {**YARN, "truncate": False}])
def test_target_round_trip(tmp_path, rope_scaling):
    config = TargetConfig.from_dict(target_values(rope_scaling=rope_scaling, eos_token_id=[1, 2]))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert TargetConfig.from_json(tmp_path) == config


@pytest.mark.parametrize("ids", [None, [1, 29, 57], [2, 30, 58]])
def test_drafter_round_trip(tmp_path, ids):
    eagle = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    scaling = {"rope_type": "linear", "factor": 2.0}
    values = drafter_values(eagle_config=eagle, rope_scaling=scaling, norm_output=True)
    config = DrafterConfig.from_dict(values)
    assert config.norm_output
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert DrafterConfig.from_json(tmp_path) == config


def test_case_44_drafter_keeps_its_own_rope_scaling():
    config = DrafterConfig.from_dict(drafter_values(rope_scaling=YARN))
    assert config.rope == RopeConfig(1e6, "yarn", 64.0, 4096, 32.0, 1.0, 1.0, 1.0)


def test_drafter_defaults():
    absent = ("num_key_value_heads", "head_dim", "draft_vocab_size", "rope_theta", "eagle_config")
    config = DrafterConfig.from_dict(drafter_values(**dict.fromkeys(absent, "absent")))
    assert (config.num_key_value_heads, config.head_dim) == (64, 112)
    assert config.draft_vocab_size == config.vocab_size == 163840
    assert config.target_hidden_size == 7168
    assert config.rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    "ids, num_layers, expected",
    [
        ([1, 29, 57], 61, (2, 30, 58)),  # a first id of 1 names layers by their output
        ([2, 30, 58], 61, (2, 30, 58)),
        ([0, 30, 61], 61, (0, 30, 61)),  # case 24: num_layers itself is valid
        ([1, 4, 7], 8, (2, 5, 8)),
    ],
)
def test_case_24_captured_layers(ids, num_layers, expected):
    assert aux(ids).captured_layers(num_layers) == expected


def test_case_24_explicit_meaning_overrides():
    assert aux([1, 4, 7]).captured_layers(8, "input") == (1, 4, 7)
    assert aux([1, 4, 7], layer_ids_mean="input").captured_layers(8) == (1, 4, 7)
    assert aux([2, 4, 7], layer_ids_mean="output").captured_layers(8) == (3, 5, 8)
    with pytest.raises(ValueError, match="layer_ids_mean"):
        aux([1, 4, 7], layer_ids_mean="after")
    with pytest.raises(ValueError, match="layer_ids_mean"):
        aux([1, 4, 7]).captured_layers(8, "after")


def test_case_24_default_ids():
    config = DrafterConfig.from_dict(drafter_values(eagle_config="absent"))
    assert config.captured_layers(61) == (2, 30, 58)
    # (2, 2, 2): a small target needs its ids written out.
    with pytest.raises(ValueError, match="different ids"):
        config.captured_layers(5)


@pytest.mark.parametrize("ids", [[2, 5, 9], [-1, 4, 7], [1, 4, 8], [2, 2, 5]])
def test_case_24_unmatched_ids_are_errors(ids):
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids"):
        aux(ids).captured_layers(8)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2.*not supported yet"),
        ({"architectures": ["MambaEagle"]}, "architectures.*MambaEagle"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"draft_vocab_size": 163841}, "draft_vocab_size: expected at most vocab_size"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: expected a divisor"),
        ({"head_dim": 127}, "head_dim: expected an even"),
        ({"head_dim": None, "num_attention_heads": 60}, "num_attention_heads: expected a divisor"),
        ({"eagle_config": []}, "eagle_config: expected an object"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "list of 3 layer ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "123"}}, "list of 3 layer ids"),
        ({"norm_output": "yes"}, "norm_output: expected true or false"),
        ({"intermediate_size": "absent"}, "missing field intermediate_size"),
    ],
)
def test_bad_drafter(changes, message):
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_dict(drafter_values(**changes))
