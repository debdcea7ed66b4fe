"""Llama 2 and 3, Mistral, Mixtral and SmolLM3: pre-norms, a gated MLP, rotary positions."""

from __future__ import annotations

from oxidize_jax.checkpoints.families.family import HF_NAMES, Family, GGUFFormat, HFFormat
from oxidize_jax.checkpoints.families.gguf_fields import GGUFFields
from oxidize_jax.checkpoints.families.hf_fields import HFFields
from oxidize_jax.model.config import ModelConfig


def _llama(fields: HFFields) -> ModelConfig:
    return fields.model_config(
        "llama",
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def _llama_gguf(fields: GGUFFields) -> ModelConfig:
    # A converted Mistral is a "llama" as well, and so is a Mixtral.
    experts = fields.experts() if fields.has_experts() else {}
    windows = fields.windows(fields.every_layer())
    return fields.model_config("llama", layer_windows=windows, **experts)


def _mistral(fields: HFFields) -> ModelConfig:
    sliding = fields.sliding_layers(lambda layer: True)
    windows = fields.windows(fields.optional_count("sliding_window"), sliding)
    return fields.model_config("mistral", layer_windows=windows)


def _mixtral(fields: HFFields) -> ModelConfig:
    sliding = fields.sliding_layers(lambda layer: True)
    return fields.model_config(
        "mixtral",
        layer_windows=fields.windows(fields.optional_count("sliding_window"), sliding),
        num_experts=fields.count("num_local_experts"),
        num_experts_per_token=fields.count("num_experts_per_tok"),
    )


def _smollm3(fields: HFFields) -> ModelConfig:
    every = fields.count("no_rope_layer_interval", default=4)
    rotate = fields.layer_flags("no_rope_layers", lambda layer: (layer + 1) % every != 0)
    window = fields.optional_count("sliding_window") if fields.flag("use_sliding_window") else None
    sliding = fields.sliding_layers(lambda layer: not rotate[layer])
    return fields.model_config(
        "smollm3",
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        layer_ropes=_ropes(rotate),
        layer_windows=fields.windows(window, sliding),
    )


def _smollm3_gguf(fields: GGUFFields) -> ModelConfig:
    # llama.cpp knows no other interval.
    rotate = fields.layer_list(lambda layer: (layer + 1) % 4 != 0)
    return fields.model_config("smollm3", layer_ropes=_ropes(rotate))


def _ropes(rotate: list[bool]) -> tuple[str, ...]:
    return () if all(rotate) else tuple("global" if turns else "none" for turns in rotate)


LLAMA = Family(
    "llama",
    "Llama 2 and 3, TinyLlama, SmolLM2 and others of that shape",
    HFFormat("LlamaForCausalLM", _llama),
    GGUFFormat("llama", _llama_gguf, interleaved=True),
)
MISTRAL = Family(
    "mistral",
    "Mistral 7B, Nemo and Small 2 (text)",
    HFFormat(
        "MistralForCausalLM",
        _mistral,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
    ),
    None,  # llama.cpp has it as a llama
)
MIXTRAL = Family(
    "mixtral",
    "Mixtral 8x7B and 8x22B",
    HFFormat(
        "MixtralForCausalLM",
        _mixtral,
        names=HF_NAMES
        | {
            "layers.router": "model.layers.{}.block_sparse_moe.gate",
            "layers.experts.gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
            "layers.experts.up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
            "layers.experts.down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    None,  # llama.cpp has it as a llama
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3",
    HFFormat(
        "SmolLM3ForCausalLM",
        _smollm3,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
    GGUFFormat("smollm3", _smollm3_gguf, interleaved=True),
)
