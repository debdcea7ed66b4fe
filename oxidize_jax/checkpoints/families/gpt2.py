"""GPT-2: learned positions, LayerNorms with biases, an MLP without a gate, matrices [in, out]."""

from __future__ import annotations

from typing import Any

from oxidize_jax.checkpoints.families.family import GGUF_NAMES, Family, GGUFFormat, HFFormat
from oxidize_jax.checkpoints.families.gguf_fields import GGUFFields
from oxidize_jax.checkpoints.families.hf_fields import HFFields
from oxidize_jax.model.config import ModelConfig

_FEATURES: dict[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "learned_positions": True,
    "layer_norm": True,
    "gated_mlp": False,
    "activation": "gelu_tanh",
}
_NAMES = {
    "embed": "transformer.wte",
    "position_embed": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "layers.input_norm": "transformer.h.{}.ln_1",
    "layers.q": "transformer.h.{}.attn.c_attn",
    "layers.k": "transformer.h.{}.attn.c_attn",
    "layers.v": "transformer.h.{}.attn.c_attn",
    "layers.o": "transformer.h.{}.attn.c_proj",
    "layers.post_norm": "transformer.h.{}.ln_2",
    "layers.up": "transformer.h.{}.mlp.c_fc",
    "layers.down": "transformer.h.{}.mlp.c_proj",
}


def _gpt2(fields: HFFields) -> ModelConfig:
    hidden, heads = fields.count("n_embd"), fields.count("n_head")
    if hidden % heads:
        raise ValueError(f"n_embd={hidden} is not a multiple of n_head={heads}.")
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("n_inner", default=4 * hidden),
        num_layers=fields.count("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        rms_norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        max_position_embeddings=fields.count("n_positions"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        architecture="gpt2",
        **_FEATURES,
    )


def _gpt2_gguf(fields: GGUFFields) -> ModelConfig:
    eps = fields.number("attention.layer_norm_epsilon")
    return fields.model_config("gpt2", rms_norm_eps=eps, **_FEATURES)


GPT2 = Family(
    "gpt2",
    "GPT-2",
    HFFormat(
        "GPT2LMHeadModel",
        _gpt2,
        names=_NAMES,
        neutral={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        defaults={
            "vocab_size": 50_257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "tie_word_embeddings": True,
        },
        prefix="transformer.",
        transposed=frozenset(f"layers.{name}" for name in ("q", "k", "v", "o", "up", "down")),
    ),
    GGUFFormat(
        "gpt2",
        _gpt2_gguf,
        names=GGUF_NAMES | {f"layers.{name}": "blk.{}.attn_qkv" for name in "qkv"},
    ),
)
