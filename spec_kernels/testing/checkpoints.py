"""Tiny random checkpoints in the published formats, for tests of loading and of the decode loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spec_kernels.ops.moe_experts import dequantize_int4
from spec_kernels.testing.int4 import quantize_int4

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 40,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}

# Its experts split into whole INT4 groups, over two ranks too.
INT4_TARGET = TARGET | {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "actorder": None,
                    "dynamic": False,
                },
            }
        },
    },
}

DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 6,
    "intermediate_size": 64,
    "vocab_size": 40,
    "draft_vocab_size": 32,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "layer_ids_mean": "input",
        "use_aux_hidden_state": True,
    },
}


def target_tensors(
    config: dict[str, Any], seed: int = 0, gain: float = 1.0
) -> dict[str, torch.Tensor]:
    """Random float32 tensors under their published names; ``gain`` scales the projections."""
    g = torch.Generator().manual_seed(seed)
    c = config
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) * (gain * columns**-0.5)

    def vector(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=g)

    tensors = {
        "model.embed_tokens.weight": torch.randn(c["vocab_size"], hidden, generator=g),
        "model.norm.weight": vector(hidden),
    }
    if not c["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(c["vocab_size"], hidden)

    def mlp(prefix: str, inner: int) -> None:
        tensors[f"{prefix}.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}.down_proj.weight"] = matrix(hidden, inner)

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        tensors |= {
            f"{layer}.input_layernorm.weight": vector(hidden),
            f"{layer}.post_attention_layernorm.weight": vector(hidden),
            f"{attention}.q_a_proj.weight": matrix(c["q_lora_rank"], hidden),
            f"{attention}.q_a_layernorm.weight": vector(c["q_lora_rank"]),
            f"{attention}.q_b_proj.weight": matrix(heads * (nope + rope), c["q_lora_rank"]),
            f"{attention}.kv_a_proj_with_mqa.weight": matrix(c["kv_lora_rank"] + rope, hidden),
            f"{attention}.kv_a_layernorm.weight": vector(c["kv_lora_rank"]),
            f"{attention}.kv_b_proj.weight": matrix(heads * (nope + v), c["kv_lora_rank"]),
            f"{attention}.o_proj.weight": matrix(hidden, heads * v),
        }
        if i < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        tensors[f"{layer}.mlp.gate.weight"] = matrix(c["n_routed_experts"], hidden)
        bias = 0.1 * torch.randn(c["n_routed_experts"], generator=g)
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = bias
        for e in range(c["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{e}", c["moe_intermediate_size"])
        if c["n_shared_experts"]:
            inner = c["n_shared_experts"] * c["moe_intermediate_size"]
            mlp(f"{layer}.mlp.shared_experts", inner)
    return tensors


def pack_experts(
    tensors: dict[str, torch.Tensor], group: int = 32
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """``tensors`` with routed experts as packed INT4, and with what these stand for in float32."""
    packed, plain = {}, {}
    for name, t in tensors.items():
        if ".mlp.experts." not in name:
            packed[name] = plain[name] = t
            continue
        words, scale = quantize_int4(t, group)
        packed |= {
            f"{name}_packed": words,
            f"{name}_scale": scale,
            f"{name}_shape": torch.tensor(t.shape),
        }
        plain[name] = dequantize_int4(words, scale)
    return packed, plain


def drafter_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Random float32 tensors of an EAGLE-3 drafter; d2t leads to a random subset of the ids."""
    g = torch.Generator().manual_seed(seed)
    c = config
    hidden, dim = c["hidden_size"], c["head_dim"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) * columns**-0.5

    def vector(size: int = hidden) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=g)

    features = c.get("target_hidden_size", hidden)
    tensors = {
        "fc.weight": matrix(hidden, 3 * features),
        "norm.weight": vector(),
        "lm_head.weight": matrix(c["draft_vocab_size"], hidden),
        "midlayer.input_layernorm.weight": vector(),
        "midlayer.hidden_norm.weight": vector(),
        "midlayer.post_attention_layernorm.weight": vector(),
        "midlayer.mlp.gate_proj.weight": matrix(c["intermediate_size"], hidden),
        "midlayer.mlp.up_proj.weight": matrix(c["intermediate_size"], hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, c["intermediate_size"]),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, c["num_attention_heads"] * dim),
    }
    for name, heads in (
        ("q", c["num_attention_heads"]),
        ("k", c["num_key_value_heads"]),
        ("v", c["num_key_value_heads"]),
    ):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = matrix(heads * dim, 2 * hidden)
    if c.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": vector(features) for i in range(3)}
    if c.get("norm_before_fc"):
        tensors["input_norm.weight"] = vector(3 * features)
    vocab, draft = c["vocab_size"], c["draft_vocab_size"]
    if draft != vocab:
        ids = torch.randperm(vocab, generator=g)[:draft].sort().values
        tensors["d2t"] = ids - torch.arange(draft)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def write_checkpoint(
    directory: str | Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    num_shards: int = 0,
) -> Path:
    """``config.json`` and safetensors: one file, or ``num_shards`` under an index."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    if not num_shards:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::num_shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def knowing_drafter_tensors(
    config: dict[str, Any], target: dict[str, torch.Tensor], seed: int = 1
) -> dict[str, torch.Tensor]:
    """A drafter that is right often, for targets whose layers add little to the embedding.

    Such a target's choice hangs mostly on its last token. The drafter's attention looks at its own
    row and passes the embedding on (heads * head_dim = hidden), and its head is the target's.
    """
    tensors = drafter_tensors(config, seed)
    hidden = config["hidden_size"]
    eye = torch.eye(hidden)
    ids = torch.arange(config["draft_vocab_size"]) + tensors.get("d2t", 0)
    tensors |= {
        "lm_head.weight": target["lm_head.weight"][ids],
        "norm.weight": target["model.norm.weight"],
        "midlayer.self_attn.o_proj.weight": 4.0 * eye,
        "fc.weight": 0.05 * tensors["fc.weight"],
        "midlayer.mlp.down_proj.weight": 0.05 * tensors["midlayer.mlp.down_proj.weight"],
    }
    for name, gain in (("q", 4.0), ("k", 4.0), ("v", 1.0)):
        weight = 0.05 * tensors[f"midlayer.self_attn.{name}_proj.weight"]
        weight[:, :hidden] += gain * eye
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = weight
    return tensors
