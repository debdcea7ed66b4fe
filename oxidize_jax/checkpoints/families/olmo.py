"""OLMo 2: norms after attention and MLP, none before; queries and keys normed as a whole."""

from __future__ import annotations

from typing import Any

from oxidize_jax.checkpoints.families.family import HF_NAMES, Family, GGUFFormat, HFFormat
from oxidize_jax.checkpoints.families.gguf_fields import GGUFFields
from oxidize_jax.checkpoints.families.hf_fields import HFFields
from oxidize_jax.model.config import ModelConfig

_FEATURES: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": "full"}


def _olmo2(fields: HFFields) -> ModelConfig:
    return fields.model_config("olmo2", attention_bias=fields.flag("attention_bias"), **_FEATURES)


def _olmo2_gguf(fields: GGUFFields) -> ModelConfig:
    # OLMo 3 has this architecture too, with windows, hence is refused.
    return fields.model_config("olmo2", **_FEATURES)


OLMO2 = Family(
    "olmo2",
    "OLMo 2",
    HFFormat(
        "Olmo2ForCausalLM",
        _olmo2,
        names=HF_NAMES
        | {
            "layers.attention_out_norm": "model.layers.{}.post_attention_layernorm",
            "layers.mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
    GGUFFormat("olmo2", _olmo2_gguf),
)
