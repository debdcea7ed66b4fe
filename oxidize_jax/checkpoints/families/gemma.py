"""Gemma 2 and 3, text: norms before and after, scaled embeddings, windows in most layers.

Norms multiply by 1 + w. The file of Hugging Face holds w, a GGUF 1 + w, as do the parameters.
"""

from __future__ import annotations

import math
from typing import Any

from oxidize_jax.checkpoints.families.family import HF_NAMES, Family, GGUFFormat, HFFormat
from oxidize_jax.checkpoints.families.gguf_fields import GGUFFields
from oxidize_jax.checkpoints.families.hf_fields import HFFields
from oxidize_jax.model.config import ModelConfig

_NAMES = HF_NAMES | {
    "layers.attention_out_norm": "model.layers.{}.post_attention_layernorm",
    "layers.post_norm": "model.layers.{}.pre_feedforward_layernorm",
    "layers.mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
}
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""A GGUF does not say how scores are scaled: the largest model of either has a scale of its
own, and llama.cpp knows it by its layers."""
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _features(hidden: int) -> dict[str, Any]:
    """What both have."""
    return {
        "post_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(hidden),
    }


def _gemma2(fields: HFFields) -> ModelConfig:
    sliding = fields.sliding_layers(lambda layer: layer % 2 == 0)
    return fields.model_config(
        "gemma2",
        layer_windows=fields.windows(fields.optional_count("sliding_window"), sliding),
        **_hf_features(fields),
    )


def _gemma3(fields: HFFields) -> ModelConfig:
    pattern = fields.count("sliding_window_pattern", default=6)
    sliding = fields.sliding_layers(lambda layer: (layer + 1) % pattern != 0)
    everywhere, local = fields.rope("full_attention"), fields.local_rope("sliding_attention")
    return fields.model_config(
        "gemma3_text",
        qk_norm="head",
        rope_theta=everywhere.theta,
        rope_scaling=everywhere.scaling,
        local_rope_theta=local,
        layer_ropes=_ropes(sliding),
        layer_windows=fields.windows(fields.optional_count("sliding_window"), sliding),
        **_hf_features(fields),
    )


def _hf_features(fields: HFFields) -> dict[str, Any]:
    scalar = fields.number("query_pre_attn_scalar", 256)
    return _features(fields.count("hidden_size")) | {
        "attention_bias": fields.flag("attention_bias"),
        "attention_scale": None if scalar == fields.head_dim() else scalar**-0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping") or 0.0,
        "final_softcap": fields.optional_number("final_logit_softcapping") or 0.0,
    }


def _gemma2_gguf(fields: GGUFFields) -> ModelConfig:
    return fields.model_config(
        "gemma2",
        attention_softcap=fields.softcap("attn_logit_softcapping", 50.0),
        final_softcap=fields.softcap("final_logit_softcapping", 30.0),
        layer_windows=fields.windows(fields.sliding_layers(every=2)),
        **_gguf_features(fields, "gemma2"),
    )


def _gemma3_gguf(fields: GGUFFields) -> ModelConfig:
    sliding = fields.sliding_layers(every=6)
    return fields.model_config(
        "gemma3_text",
        qk_norm="head",
        rope_theta=fields.number("rope.freq_base", default=_GLOBAL_THETA),
        local_rope_theta=fields.number("rope.freq_base_swa", default=_LOCAL_THETA),
        layer_ropes=_ropes(sliding),
        final_softcap=fields.softcap("final_logit_softcapping"),
        layer_windows=fields.windows(sliding),
        **_gguf_features(fields, "gemma3_text"),
    )


def _gguf_features(fields: GGUFFields, name: str) -> dict[str, Any]:
    hidden = fields.count("embedding_length")
    scale = None
    if fields.count("block_count") == _LAYERS_OF_27B[name]:
        scale = (hidden // fields.count("attention.head_count")) ** -0.5
    return _features(hidden) | {"attention_scale": scale}


def _ropes(sliding: list[bool]) -> tuple[str, ...]:
    return tuple("local" if slides else "global" for slides in sliding)


GEMMA2 = Family(
    "gemma2",
    "Gemma 2",
    HFFormat(
        "Gemma2ForCausalLM",
        _gemma2,
        names=_NAMES,
        neutral=_NEUTRAL,
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norm_offset=1.0,
    ),
    GGUFFormat("gemma2", _gemma2_gguf),
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma 3, text: 270M and 1B, in GGUF the larger ones too",
    HFFormat(
        "Gemma3ForCausalLM",
        _gemma3,
        names=_NAMES,
        neutral=_NEUTRAL,
        defaults=_DEFAULTS
        | {
            "max_position_embeddings": 131_072,
            "rope_theta": _GLOBAL_THETA,
            "rope_local_base_freq": _LOCAL_THETA,
        },
        norm_offset=1.0,
    ),
    GGUFFormat("gemma3", _gemma3_gguf),
)
