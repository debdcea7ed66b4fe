"""Qwen 2, 2.5 and 3: Llama with biases of queries, keys and values, or with norms of q and k."""

from __future__ import annotations

from typing import Any

from oxidize_jax.checkpoints.families.family import Family, GGUFFormat, HFFormat
from oxidize_jax.checkpoints.families.gguf_fields import GGUFFields
from oxidize_jax.checkpoints.families.hf_fields import HFFields
from oxidize_jax.model.config import ModelConfig

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _qwen2(fields: HFFields) -> ModelConfig:
    return fields.model_config(
        "qwen2", attention_bias=True, output_bias=False, layer_windows=_windows(fields)
    )


def _qwen3(fields: HFFields) -> ModelConfig:
    return fields.model_config(
        "qwen3",
        attention_bias=fields.flag("attention_bias"),
        qk_norm="head",
        layer_windows=_windows(fields),
    )


def _windows(fields: HFFields) -> tuple[int, ...]:
    """Layers from ``max_window_layers`` on have one, if ``use_sliding_window`` says so."""
    full = fields.zero_or_count("max_window_layers")
    sliding = fields.sliding_layers(lambda layer: layer >= full)
    window = fields.optional_count("sliding_window")
    return fields.windows(window if fields.flag("use_sliding_window") else None, sliding)


def _qwen2_gguf(fields: GGUFFields) -> ModelConfig:
    return fields.model_config("qwen2")


def _qwen3_gguf(fields: GGUFFields) -> ModelConfig:
    return fields.model_config("qwen3", qk_norm="head")


QWEN2 = Family(
    "qwen2",
    "Qwen 2 and 2.5",
    HFFormat("Qwen2ForCausalLM", _qwen2, defaults=_DEFAULTS),
    GGUFFormat("qwen2", _qwen2_gguf),
)
QWEN3 = Family(
    "qwen3",
    "Qwen 3, dense",
    HFFormat("Qwen3ForCausalLM", _qwen3, defaults=_DEFAULTS | {"head_dim": 128}),
    GGUFFormat("qwen3", _qwen3_gguf),
)
