"""Configurations of the target and the drafter, read from Hugging Face ``config.json`` files.

Whatever a checkpoint's own file says wins; a default stands here only where published files leave
the field out and every engine agrees on its value. Each refusal is a ``ValueError`` that names the
field, what was expected and what was found, and it comes before any weight is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REQUIRED = object()

TARGET_ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
DRAFTER_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle",
    "Eagle3Speculator",
)
MLA_DRAFTER_ARCHITECTURES = (
    "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
    "DeepseekV2ForCausalLMEagle3",
    "DeepseekV3ForCausalLMEagle3",
)

ROPE_TYPES = ("default", "linear", "yarn")
NUM_CAPTURED_LAYERS = 3


def _fail(config: str, field: str, expected: object, got: object) -> ValueError:
    return ValueError(f"{config}: {field}: expected {expected}, got {got!r}")


class _Fields:
    """Typed reads from a parsed ``config.json``, so that every refusal has the same wording."""

    def __init__(self, config: str, values: Mapping[str, Any]):
        if not isinstance(values, Mapping):
            raise _fail(config, "config.json", "an object", values)
        self.config, self.values = config, values

    def _get(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.config}: missing field {field}")
            return default
        return value

    def integer(self, field: str, default: Any = _REQUIRED, minimum: int = 1) -> Any:
        value = self._get(field, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise _fail(self.config, field, f"an integer >= {minimum}", value)
        return value

    def number(self, field: str, default: Any = _REQUIRED, positive: bool = True) -> Any:
        value = self._get(field, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _fail(self.config, field, "a number", value)
        if not math.isfinite(value) or (positive and value <= 0):
            raise _fail(self.config, field, "a finite number" + " > 0" * positive, value)
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise _fail(self.config, field, "true or false", value)
        return value

    def only(self, field: str, allowed: object) -> None:
        """Refuses a field that is present with any value but the one that is implemented."""
        value = self._get(field, allowed)
        if value != allowed:
            raise _fail(self.config, field, f"{allowed!r} (the only one supported)", value)


def _read_json(directory: str | Path) -> Mapping[str, Any]:
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"config.json: expected a file at {path}, got none")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected JSON, got: {error}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _architecture(config: str, values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise _fail(config, "architectures", "a list of one name", names)
    return names[0]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. ``kind`` is ``default``, ``linear`` (positions / factor) or ``yarn``.

    ``attention_factor`` None means: derive it from mscale and mscale_all_dim (see ``rope.py``).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @classmethod
    def from_fields(cls, config: str, values: Mapping[str, Any]) -> RopeConfig:
        """Reads ``rope_theta`` + ``rope_scaling``, or transformers' newer ``rope_parameters``.

        Where both are present, ``rope_parameters`` must not contradict ``rope_theta``.
        """
        top = _Fields(config, values)
        merged = values.get("rope_parameters")
        scaling = merged if merged is not None else values.get("rope_scaling")
        name = "rope_parameters" if merged is not None else "rope_scaling"
        if scaling is None:
            return cls(theta=top.number("rope_theta"))
        if not isinstance(scaling, Mapping):
            raise _fail(config, name, "an object or null", scaling)
        fields = _Fields(f"{config}: {name}", scaling)
        theta = fields.number("rope_theta", None)
        outer = top.number("rope_theta", theta if theta is not None else _REQUIRED)
        if theta is not None and outer != theta:
            raise _fail(config, "rope_theta", f"{theta} as in {name}", outer)
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind not in ROPE_TYPES:
            raise _fail(f"{config}: {name}", "rope_type", f"one of {', '.join(ROPE_TYPES)}", kind)
        if kind == "default":
            return cls(theta=outer)
        factor = fields.number("factor")
        if factor < 1.0:
            raise _fail(f"{config}: {name}", "factor", "a number >= 1", factor)
        if kind == "linear":
            return cls(theta=outer, kind=kind, factor=factor)
        return cls(
            theta=outer,
            kind=kind,
            factor=factor,
            original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
            beta_fast=fields.number("beta_fast", 32.0),
            beta_slow=fields.number("beta_slow", 1.0),
            mscale=fields.number("mscale", None, positive=False),
            mscale_all_dim=fields.number("mscale_all_dim", None, positive=False),
            attention_factor=fields.number("attention_factor", None),
            truncate=fields.flag("truncate", True),
        )

    def to_scaling(self) -> dict[str, Any] | None:
        """The value of ``rope_scaling`` that reads back as this."""
        if self.kind == "default":
            return None
        scaling: dict[str, Any] = {"type": self.kind, "rope_type": self.kind, "factor": self.factor}
        if self.kind == "yarn":
            scaling |= {
                "original_max_position_embeddings": self.original_max_position_embeddings,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
            }
            optional = {
                "mscale": self.mscale,
                "mscale_all_dim": self.mscale_all_dim,
                "attention_factor": self.attention_factor,
                "truncate": None if self.truncate else False,
            }
            scaling |= {key: value for key, value in optional.items() if value is not None}
        return scaling


def _token_ids(config: str, field: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise _fail(config, field, f"token ids in [0, {vocab_size})", value)
    return ids


def _check_quantization(name: str, values: Any) -> None:
    """Refuses formats other than W4A16 ``pack-quantized``: symmetric, a scale for each group.

    Which tensors are packed is told by their names, and the size of a group by their shapes.
    """
    if values is None:
        return
    name = f"{name}: quantization_config"
    if not isinstance(values, Mapping):
        raise _fail(name, "quantization_config", "an object or null", values)
    fields = _Fields(name, values)
    fields.only("quant_method", "compressed-tensors")
    fields.only("format", "pack-quantized")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping):
        raise _fail(name, "config_groups", "an object", groups)
    for key, group in groups.items():
        where = f"{name}: {key}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise _fail(where, "weights", "an object", group)
        if group.get("input_activations") is not None:
            raise _fail(where, "input_activations", "null", group["input_activations"])
        scheme = _Fields(f"{where}: weights", group["weights"])
        for field, value in (
            ("num_bits", 4),
            ("type", "int"),
            ("symmetric", True),
            ("strategy", "group"),
            ("dynamic", False),
        ):
            scheme.only(field, value)
        if group["weights"].get("actorder") is not None:
            raise _fail(f"{where}: weights", "actorder", "null", group["weights"]["actorder"])


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A DeepSeek-V3 / Kimi-K2 target: MLA attention, sigmoid-routed experts, first layers dense.

    ``latent_norm_eps`` is the epsilon of q_a_layernorm and kv_a_layernorm, which engines take
    differently (1e-6 in transformers, ``rms_norm_eps`` in others): one named setting.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
    latent_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = "DeepseekV3ForCausalLM"

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of one cached row: the latent, then the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_json(cls, directory: str | Path) -> TargetConfig:
        """Reads ``directory/config.json``. ValueError if absent, malformed or unsupported."""
        return cls.from_dict(_read_json(directory))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TargetConfig:
        """``values`` is a parsed config.json; a multimodal one is read from ``text_config``."""
        name = "target config"
        architecture = _architecture(name, values)
        if architecture not in TARGET_ARCHITECTURES:
            expected = f"one of {', '.join(TARGET_ARCHITECTURES)}"
            raise _fail(name, "architectures", expected, architecture)
        nested = values.get("text_config")
        if nested is not None:
            if not isinstance(nested, Mapping):
                raise _fail(name, "text_config", "an object", nested)
            if nested.get("architectures") is not None:
                inner = _architecture(f"{name}: text_config", nested)
                if inner != "DeepseekV3ForCausalLM":
                    raise _fail(
                        f"{name}: text_config", "architectures", "DeepseekV3ForCausalLM", inner
                    )
            # The word embeddings are tied or not for the model as a whole.
            whole = {n: values.get(n) for n in ("tie_word_embeddings", "quantization_config")}
            values = {**whole, **{n: v for n, v in nested.items() if v is not None}}
        fields = _Fields(name, values)
        fields.only("hidden_act", "silu")
        fields.only("scoring_func", "sigmoid")
        fields.only("topk_method", "noaux_tc")
        fields.only("moe_layer_freq", 1)
        fields.only("attention_bias", False)
        fields.only("rope_interleave", True)
        _check_quantization(name, values.get("quantization_config"))
        vocab_size = fields.integer("vocab_size")
        config = cls(
            hidden_size=fields.integer("hidden_size"),
            num_hidden_layers=fields.integer("num_hidden_layers"),
            num_attention_heads=fields.integer("num_attention_heads"),
            vocab_size=vocab_size,
            intermediate_size=fields.integer("intermediate_size"),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            first_k_dense_replace=fields.integer("first_k_dense_replace", minimum=0),
            n_routed_experts=fields.integer("n_routed_experts"),
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            n_shared_experts=fields.integer("n_shared_experts", 0, minimum=0),
            n_group=fields.integer("n_group", 1),
            topk_group=fields.integer("topk_group", 1),
            norm_topk_prob=fields.flag("norm_topk_prob", True),
            routed_scaling_factor=fields.number("routed_scaling_factor"),
            q_lora_rank=fields.integer("q_lora_rank"),
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
            v_head_dim=fields.integer("v_head_dim"),
            rope=RopeConfig.from_fields(name, values),
            rms_norm_eps=fields.number("rms_norm_eps"),
            latent_norm_eps=fields.number("latent_norm_eps", 1e-6),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=_token_ids(name, "eos_token_id", values.get("eos_token_id"), vocab_size),
            architecture=architecture,
        )
        config._check(name)
        return config

    def _check(self, name: str) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        if self.qk_rope_head_dim % 2:
            raise _fail(name, "qk_rope_head_dim", "an even number", self.qk_rope_head_dim)
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise _fail(
                name,
                "first_k_dense_replace",
                f"at most num_hidden_layers = {self.num_hidden_layers}",
                self.first_k_dense_replace,
            )
        if experts % groups:
            raise _fail(name, "n_group", f"a divisor of n_routed_experts = {experts}", groups)
        if self.topk_group > groups:
            raise _fail(name, "topk_group", f"at most n_group = {groups}", self.topk_group)
        if groups > 1 and experts // groups < 2:
            raise _fail(name, "n_group", "at least 2 experts a group", groups)
        reachable = experts // groups * self.topk_group
        if self.num_experts_per_tok > reachable:
            raise _fail(
                name,
                "num_experts_per_tok",
                f"at most the {reachable} experts of topk_group groups",
                self.num_experts_per_tok,
            )

    def to_dict(self) -> dict[str, Any]:
        """A config.json of the DeepSeek-V3 layout that reads back as this configuration."""
        skipped = {"rope", "eos_token_ids", "architecture"}
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in skipped
        }
        eos = list(self.eos_token_ids)
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "num_key_value_heads": self.num_attention_heads,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.to_scaling(),
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
            "torch_dtype": "bfloat16",
            **values,
        }


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE-3 drafter of one Llama layer.

    ``aux_layers`` are the ids as written in the file (None: not written); use
    ``captured_layers`` for ids with one meaning. ``layer_ids_mean`` says what a written id names:
    ``"input"`` (h[id], the residual stream entering layer id), ``"output"`` (the stream after layer
    id, h[id + 1]) or None (the rule of ``captured_layers`` decides).

    The optional norms: ``norm_output`` feeds norm(r) rather than r to the next step;
    ``norm_before_residual`` takes hidden_norm(g) as the residual; ``norm_before_fc`` is one norm
    over the concatenated features (``input_norm``); ``fc_norm`` is one norm for each feature
    (``fc_norm.{0,1,2}``).
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
    aux_layers: tuple[int, ...] | None = None
    layer_ids_mean: str | None = None
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    architecture: str = "LlamaForCausalLMEagle3"

    @classmethod
    def from_json(cls, directory: str | Path) -> DrafterConfig:
        """Reads ``directory/config.json``. ValueError if absent, malformed or unsupported."""
        return cls.from_dict(_read_json(directory))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterConfig:
        name = "drafter config"
        architecture = _architecture(name, values)
        if architecture in MLA_DRAFTER_ARCHITECTURES or (
            "kv_lora_rank" in values and architecture not in DRAFTER_ARCHITECTURES
        ):
            raise ValueError(
                f"{name}: architectures: {architecture} is a drafter with MLA attention, which is "
                f"not supported yet; supported: {', '.join(DRAFTER_ARCHITECTURES)}"
            )
        if architecture not in DRAFTER_ARCHITECTURES:
            expected = f"one of {', '.join(DRAFTER_ARCHITECTURES)}"
            raise _fail(name, "architectures", expected, architecture)
        fields = _Fields(name, values)
        fields.only("hidden_act", "silu")
        fields.only("num_hidden_layers", 1)
        fields.only("attention_bias", False)
        fields.only("mlp_bias", False)
        eagle = values.get("eagle_config")
        if eagle is not None and not isinstance(eagle, Mapping):
            raise _fail(name, "eagle_config", "an object", eagle)
        eagle_fields = _Fields(f"{name}: eagle_config", eagle or {})
        eagle_fields.only("use_aux_hidden_state", True)
        # Releases write the switches either at the top or inside eagle_config.
        switches = _Fields(name, {**(eagle or {}), **values})
        aux = (eagle or {}).get(
            "eagle_aux_hidden_state_layer_ids", values.get("eagle_aux_hidden_state_layer_ids")
        )
        if aux is not None:
            valid = isinstance(aux, list) and len(aux) == NUM_CAPTURED_LAYERS
            if not valid or any(isinstance(i, bool) or not isinstance(i, int) for i in aux):
                raise _fail(
                    name,
                    "eagle_aux_hidden_state_layer_ids",
                    f"a list of {NUM_CAPTURED_LAYERS} layer ids",
                    aux,
                )
            aux = tuple(aux)
        meaning = switches.values.get("layer_ids_mean")
        if meaning not in (None, "input", "output"):
            raise _fail(name, "layer_ids_mean", '"input" or "output"', meaning)
        hidden_size = fields.integer("hidden_size")
        num_heads = fields.integer("num_attention_heads")
        vocab_size = fields.integer("vocab_size")
        if values.get("head_dim") is None and hidden_size % num_heads:
            raise _fail(
                name, "num_attention_heads", f"a divisor of hidden_size = {hidden_size}", num_heads
            )
        config = cls(
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            num_key_value_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", hidden_size // num_heads),
            intermediate_size=fields.integer("intermediate_size"),
            vocab_size=vocab_size,
            draft_vocab_size=fields.integer("draft_vocab_size", vocab_size),
            target_hidden_size=fields.integer("target_hidden_size", hidden_size),
            rope=RopeConfig.from_fields(name, {"rope_theta": 10000.0, **values}),
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            aux_layers=aux,
            layer_ids_mean=meaning,
            norm_output=switches.flag("norm_output", False),
            norm_before_residual=switches.flag("norm_before_residual", False),
            norm_before_fc=switches.flag("norm_before_fc", False),
            fc_norm=switches.flag("fc_norm", False),
            architecture=architecture,
        )
        if config.head_dim % 2:
            raise _fail(name, "head_dim", "an even number", config.head_dim)
        if num_heads % config.num_key_value_heads:
            raise _fail(
                name,
                "num_key_value_heads",
                f"a divisor of num_attention_heads = {num_heads}",
                config.num_key_value_heads,
            )
        if config.draft_vocab_size > vocab_size:
            raise _fail(
                name,
                "draft_vocab_size",
                f"at most vocab_size = {vocab_size}",
                config.draft_vocab_size,
            )
        return config

    def captured_layers(
        self, num_layers: int, layer_ids_mean: str | None = None
    ) -> tuple[int, int, int]:
        """Three ids i into h[0..num_layers], h[i] = the residual stream entering layer i.

        ``num_layers`` (of the target) is itself a valid id: the stream after the last layer, before
        the final norm. Not written: (2, N // 2, N - 3). A first id of 1 marks a file that names
        layers by their output, since no published drafter captures the input of layer 1; the
        setting, or the argument, overrides that guess. ValueError if an id is out of range or two
        ids name the same stream.
        """
        name = "drafter config"
        if self.aux_layers is None:
            if num_layers < 1:
                raise _fail(name, "num_layers", "at least 1", num_layers)
            ids = (2, num_layers // 2, num_layers - 3)
        else:
            meaning = layer_ids_mean or self.layer_ids_mean
            if meaning not in (None, "input", "output"):
                raise _fail(name, "layer_ids_mean", '"input" or "output"', meaning)
            is_output = meaning == "output" or (meaning is None and self.aux_layers[0] == 1)
            ids = tuple(i + is_output for i in self.aux_layers)
        if any(not 0 <= i <= num_layers for i in ids) or len(set(ids)) != len(ids):
            raise _fail(
                name,
                "eagle_aux_hidden_state_layer_ids",
                f"{NUM_CAPTURED_LAYERS} different ids h[0..{num_layers}]",
                list(ids),
            )
        return ids

    def to_dict(self) -> dict[str, Any]:
        """A config.json that reads back as this configuration."""
        same = (
            "hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size "
            "vocab_size draft_vocab_size target_hidden_size rms_norm_eps max_position_embeddings "
            "norm_output norm_before_residual norm_before_fc fc_norm"
        ).split()
        eagle: dict[str, Any] = {"use_aux_hidden_state": True}
        if self.aux_layers is not None:
            eagle["eagle_aux_hidden_state_layer_ids"] = list(self.aux_layers)
        if self.layer_ids_mean is not None:
            eagle["layer_ids_mean"] = self.layer_ids_mean
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.to_scaling(),
            "eagle_config": eagle,
            "torch_dtype": "bfloat16",
            **{name: getattr(self, name) for name in same},
        }
