"""Write the tiny models of ``family_models.py`` as GGUF, as llama.cpp's converter writes them.

From Hugging Face's names and config.json, by way of the gguf package's own table of names:
nothing here is shared with the package's reader. After llama.cpp's ``conversion/*.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from write_checkpoints import interleave_halves

Fields = Mapping[str, Any]

ARCHITECTURES: dict[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}
"""``model_type`` -> what it is converted to."""
_PERMUTED = ("llama", "mistral", "mixtral", "smollm3")


def write_family_gguf(path: Path, fields: Fields, tensors: Mapping[str, np.ndarray]) -> Path:
    """All tensors in F32."""
    kind = fields["model_type"]
    architecture = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_token_list([f"t{i}" for i in range(fields["vocab_size"])])
    (_add_gpt2 if kind == "gpt2" else _add_sizes)(writer, fields)
    layers = fields["n_layer"] if kind == "gpt2" else fields["num_hidden_layers"]
    table = gguf.get_tensor_name_map(architecture, layers)
    for name, values in _merged_experts(tensors).items():
        new_name = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        writer.add_tensor(new_name, np.ascontiguousarray(_converted(fields, name, values)))
    for name, values in _rope_factors(fields).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _merged_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of a layer as one tensor, under the name that the table of names has for it."""
    merged: dict[str, Any] = {}
    for name, values in tensors.items():
        if ".experts." not in name:
            merged[name] = values
            continue
        before, after = name.split(".experts.")
        index, kind = after.split(".", 1)
        # The only merged names of Mixtral's w1, w2 and w3 that the table has are these.
        before = before.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        if not kind.startswith("w"):
            before = f"model.{before}"
        of_layer = merged.setdefault(f"{before}.experts.{kind}", [])
        assert len(of_layer) == int(index), "experts come in order"
        of_layer.append(values)
    return {n: np.stack(v) if isinstance(v, list) else v for n, v in merged.items()}


def _converted(fields: Fields, name: str, values: np.ndarray) -> np.ndarray:
    kind = fields["model_type"]
    if kind in _PERMUTED and ".q_proj." in name:
        return interleave_halves(values, fields["num_attention_heads"])
    if kind in _PERMUTED and ".k_proj." in name:
        return interleave_halves(values, fields["num_key_value_heads"])
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return values.T
    return values


def _add_sizes(writer: gguf.GGUFWriter, fields: Fields) -> None:
    rope = _rope(fields)
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    if "head_dim" in fields:
        head_dim = fields["head_dim"]
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if fields["model_type"] in ("llama", "mistral", "mixtral", "phi3"):
        writer.add_rope_dimension_count(int(partial * head_dim))
    if fields["model_type"] != "gemma2":
        writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if fields["model_type"] in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(fields.get("num_experts") or fields["num_local_experts"])
        writer.add_expert_used_count(fields["num_experts_per_tok"])
    if "moe_intermediate_size" in fields:
        writer.add_expert_feed_forward_length(fields["moe_intermediate_size"])
    if fields["model_type"] == "phi3":
        _add_phi3(writer, fields, rope)
    if fields["model_type"].startswith("gemma"):
        writer.add_sliding_window(fields["sliding_window"])
    if fields["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(fields["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(fields["final_logit_softcapping"])


def _add_phi3(writer: gguf.GGUFWriter, fields: Fields, rope: Fields) -> None:
    length = fields["max_position_embeddings"]
    original = fields["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(fields.get("sliding_window") or 0)
    if "long_factor" in rope:
        scale = length / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _add_gpt2(writer: gguf.GGUFWriter, fields: Fields) -> None:
    writer.add_block_count(fields["n_layer"])
    writer.add_context_length(fields["n_positions"])
    writer.add_embedding_length(fields["n_embd"])
    writer.add_feed_forward_length(4 * fields["n_embd"])
    writer.add_head_count(fields["n_head"])
    writer.add_layer_norm_eps(fields["layer_norm_epsilon"])


def _rope_factors(fields: Fields) -> dict[str, list[float]]:
    rope = _rope(fields)
    if "long_factor" in rope:
        return {
            "rope_factors_long.weight": rope["long_factor"],
            "rope_factors_short.weight": rope["short_factor"],
        }
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim, length = fields["head_dim"], rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = (length / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        quick, slow = wavelength < length / high, wavelength > length / low
        factors.append(1.0 if quick else factor if slow else between)
    assert len(set(factors)) > 2, "a tiny model should have all three kinds"
    return {"rope_freqs.weight": factors}


def _rope(fields: Fields) -> Fields:
    rope = fields.get("rope_parameters", {})
    return rope.get("full_attention", rope)
