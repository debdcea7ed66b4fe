"""Qwen 2, 2.5 and 3: Llama with biases of queries, keys and values, or with norms of q and k.

Of Qwen 3 there are mixtures of experts as well.
"""

from __future__ import annotations

from typing import Any

from oxidize_jax.checkpoints.families.family import HF_NAMES, Family, GGUFFormat, HFFormat
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


def _qwen3_moe(fields: HFFields) -> ModelConfig:
    # Where it has a window, all of its layers have it.
    sliding = fields.sliding_layers(lambda layer: True)
    window = fields.optional_count("sliding_window") if fields.flag("use_sliding_window") else None
    return fields.model_config(
        "qwen3_moe",
        attention_bias=fields.flag("attention_bias"),
        qk_norm="head",
        layer_windows=fields.windows(window, sliding),
        intermediate_size=fields.count("moe_intermediate_size"),
        num_experts=fields.count("num_experts", default=fields.count("num_local_experts")),
        num_experts_per_token=fields.count("num_experts_per_tok"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
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


def _qwen3_moe_gguf(fields: GGUFFields) -> ModelConfig:
    return fields.model_config("qwen3_moe", qk_norm="head", **fields.experts())


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
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen 3, mixtures of experts",
    HFFormat(
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        names=HF_NAMES
        | {
            "layers.router": "model.layers.{}.mlp.gate",
            "layers.experts.gate": "model.layers.{}.mlp.experts.{}.gate_proj",
            "layers.experts.up": "model.layers.{}.mlp.experts.{}.up_proj",
            "layers.experts.down": "model.layers.{}.mlp.experts.{}.down_proj",
        },
        neutral={
            "hidden_act": ("silu",),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
            "shared_expert_intermediate_size": (0,),
        },
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    GGUFFormat("qwen3moe", _qwen3_moe_gguf),
)
