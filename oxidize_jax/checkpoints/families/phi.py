"""Phi-3 and Phi-4: fused projections, longrope, and heads that rotate in part (Phi-4 mini)."""

from __future__ import annotations

from oxidize_jax.checkpoints.families.family import (
    GGUF_NAMES,
    HF_NAMES,
    Family,
    GGUFFormat,
    HFFormat,
)
from oxidize_jax.checkpoints.families.gguf_fields import GGUFFields
from oxidize_jax.checkpoints.families.hf_fields import HFFields
from oxidize_jax.model.config import ModelConfig


def _phi3(fields: HFFields) -> ModelConfig:
    rope = fields.rope()
    rotary = int(fields.head_dim() * rope.partial)
    window = fields.optional_count("sliding_window")
    return fields.model_config(
        "phi3",
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=None if rope.partial == 1 else rotary,
        layer_windows=fields.windows(window, fields.sliding_layers(lambda layer: True)),
    )


def _phi3_gguf(fields: GGUFFields) -> ModelConfig:
    head_dim = fields.head_dim()
    rotary = fields.count("rope.dimension_count", default=head_dim)
    return fields.model_config(
        "phi3",
        rotary_dim=None if rotary == head_dim else rotary,
        layer_windows=fields.windows(fields.every_layer()),
    )


def _fused(qkv: str, gate_up: str) -> dict[str, str]:
    return {f"layers.{name}": qkv for name in "qkv"} | {
        "layers.gate": gate_up,
        "layers.up": gate_up,
    }


PHI3 = Family(
    "phi3",
    "Phi-3 and Phi-4, text",
    HFFormat(
        "Phi3ForCausalLM",
        _phi3,
        names=HF_NAMES
        | _fused("model.layers.{}.self_attn.qkv_proj", "model.layers.{}.mlp.gate_up_proj"),
        neutral={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "lm_head_bias": (False,),
            "full_attn_mod": (1,),
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    GGUFFormat("phi3", _phi3_gguf, names=GGUF_NAMES | _fused("blk.{}.attn_qkv", "blk.{}.ffn_up")),
)
