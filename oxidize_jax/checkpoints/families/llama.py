"""Llama 2 and 3, Mistral and SmolLM3: pre-norms, a gated MLP, rotary positions."""

from __future__ import annotations

from oxidize_jax.checkpoints.families.family import Family, GGUFFormat, HFFormat
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
    # A converted Mistral is a "llama" as well.
    return fields.model_config("llama", layer_windows=fields.windows())


def _mistral(fields: HFFields) -> ModelConfig:
    sliding = fields.sliding_layers(lambda layer: True)
    windows = fields.windows(fields.optional_count("sliding_window"), sliding)
    return fields.model_config("mistral", layer_windows=windows)


LLAMA = Family(
    "llama",
    HFFormat("LlamaForCausalLM", _llama),
    GGUFFormat("llama", _llama_gguf, interleaved=True),
)
MISTRAL = Family(
    "mistral",
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
