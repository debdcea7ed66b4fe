"""Tiny models of every family: their config.json, and weights drawn from the tensors' names.

Plain numpy, so that the script that records what transformers computes
(``make_family_goldens.py``) and the tests make the same weights, and only results are stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""Heads of another size than hidden_size / num_attention_heads; three to a kv head."""


def _rope(theta: float = 10_000.0, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"} | fields}


_ORIGINAL = {"original_max_position_embeddings": 16}

_FACTORS = {"short_factor": [1.0, 1.25, 2.0, 3.0], "long_factor": [1.5, 3.0, 5.0, 9.0]}
_PHI3 = _LLAMA | {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "pad_token_id": 0,
    "hidden_size": 48,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = (
    _LLAMA
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 3,
        "moe_intermediate_size": 13,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    | _rope(1000.0)
)
_GEMMA = _LLAMA | {
    "sliding_window": 9,
    "query_pre_attn_scalar": 12,
    "tie_word_embeddings": True,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama_rope_llama3": _LLAMA
    | _rope(
        100.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "llama_rope_linear": _LLAMA | _rope(rope_type="linear", factor=3.0),
    "llama_rope_dynamic": _LLAMA | _rope(rope_type="dynamic", factor=3.0),
    "llama_rope_yarn": _LLAMA | _rope(1000.0, rope_type="yarn", factor=4.0, **_ORIGINAL),
    "mistral": _LLAMA
    | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 7,
    }
    | _rope(),
    "qwen2": _LLAMA
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    }
    | _rope(1000.0),
    "qwen3": _LLAMA
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 3}
    | _rope(1000.0),
    "smollm3": _LLAMA
    | {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "num_hidden_layers": 5,
        "no_rope_layer_interval": 4,
        "pad_token_id": 0,
        "attention_bias": True,
    }
    | _rope(500.0),
    "olmo2": _LLAMA | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]} | _rope(500.0),
    "phi3_longrope_short": _PHI3
    | _rope(rope_type="longrope", **_FACTORS)
    | {"max_position_embeddings": 128, "original_max_position_embeddings": 64},
    "phi3_longrope_long": _PHI3
    | _rope(rope_type="longrope", **_FACTORS)
    | {"max_position_embeddings": 128, "original_max_position_embeddings": 16},
    "phi3_partial": _PHI3
    | {"sliding_window": 11, "original_max_position_embeddings": 64}
    | _rope(partial_rotary_factor=0.75),
    "gemma2": _GEMMA
    | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }
    | _rope(),
    "gemma3": _GEMMA
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "mixtral": _LLAMA
    | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": None,
        "intermediate_size": 21,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    }
    | _rope(500.0),
    "mixtral_window": _LLAMA
    | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": 7,
        "intermediate_size": 22,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
    }
    | _rope(500.0),
    "qwen3_moe": _QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3_moe_unnormed": _QWEN3_MOE | {"norm_topk_prob": False, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 61,
        "n_embd": 30,
        "n_head": 3,
        "n_layer": 2,
        "n_positions": 60,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
}
"""Name -> config.json."""

PROMPT_LENGTH = 21
NUM_OUTPUTS = 32


def draw(seed: int, fields: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """f32 tensors by the names and shapes that Hugging Face stores.

    Matrices have about unit gain, norms lie round 1, biases and embeddings are small enough that
    a tied head does not repeat its input. What a tensor gets depends on its name alone.
    """
    tensors = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(tuple(shape), dtype=np.float32)
        if name.endswith("bias") or _is_table(name):
            tensors[name] = np.float32(0.3) * values
        elif len(shape) == 1:
            middle = np.float32(0 if fields["model_type"].startswith("gemma") else 1)
            tensors[name] = middle + np.float32(0.2) * values
        else:
            inner = shape[0] if ".c_" in name else shape[1]  # GPT-2 stores [in, out]
            tensors[name] = np.float32(1.2 / np.sqrt(inner)) * values
    return tensors


def _is_table(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight"))


def prompt(seed: int, fields: Mapping[str, Any], length: int) -> np.ndarray:
    """i32[length]: a random prompt."""
    rng = np.random.default_rng([seed, length])
    return rng.integers(0, fields["vocab_size"], length).astype(np.int32)
