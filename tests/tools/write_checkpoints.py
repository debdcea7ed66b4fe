"""Write small checkpoints: a flat tree of parameters as a Hugging Face folder or as GGUF.

The parameters are those of ``oxidize_jax.model.transformer.parameter_shapes``, as f32 numpy
arrays; what is written is what Hugging Face and llama.cpp's converter would have written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import save_file

from oxidize_jax.checkpoints.mapping import Naming, stored_names
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.transformer import parameter_shapes

Params = dict[str, np.ndarray]

TINY_LLAMA = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
"""A decoder with grouped heads that compiles quickly."""


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """f32 parameters: matrices of about unit gain, norms round 1, biases not zero."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            params[name] = np.float32(1) + np.float32(0.2) * values
        elif name.endswith("bias") or name == "embed.weight":
            params[name] = np.float32(0.3) * values
        else:
            params[name] = values * np.float32(shape[-1] ** -0.5)
    return params


def split_layers(config: ModelConfig, params: Params, naming: Naming) -> Params:
    """Tensors by their names in a file, one per layer; rows as in Hugging Face."""
    tensors = {}
    for parameter, names in stored_names(config, naming).items():
        values = params[parameter]
        layers = values if parameter.startswith("layers.") else values[None]
        tensors |= dict(zip(names, layers, strict=True))
    return tensors


def hf_config(config: ModelConfig, *, transformers: int = 5) -> dict[str, Any]:
    """The fields of a config.json as transformers 4 or 5 writes them."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if transformers >= 5:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    else:
        fields |= {"rope_theta": config.rope_theta, "rope_scaling": None}
    return fields


def write_hf_folder(
    folder: Path,
    config: ModelConfig,
    params: Params,
    *,
    shards: int = 1,
    dtype: Any = np.float32,
    changes: Mapping[str, Any] | None = None,
    extra: Params | None = None,
) -> Path:
    """Write config.json and safetensors to ``folder``, in ``shards`` files.

    ``changes`` are laid over config.json, ``extra`` tensors are written along.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = hf_config(config) | dict(changes or {})
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    tensors = {
        name: np.ascontiguousarray(values.astype(dtype))
        for name, values in split_layers(config, params, "hf").items()
    }
    write_safetensors(folder, tensors | (extra or {}), shards)
    return folder


def write_safetensors(folder: Path, tensors: Params, shards: int = 1) -> None:
    """model.safetensors, or shards dealt out in turn and their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        dealt = {name: tensors[name] for name in list(tensors)[shard::shards]}
        save_file(dealt, folder / file)
        weight_map |= dict.fromkeys(dealt, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gguf(
    path: Path,
    config: ModelConfig,
    params: Params,
    *,
    kind: str = "F32",
    changes: Mapping[str, Any] | None = None,
    extra: Params | None = None,
    raw: Mapping[str, tuple[np.ndarray, str]] | None = None,
) -> Path:
    """Write a ``llama`` GGUF whose matrices are of ``GGMLQuantizationType[kind]``.

    ``changes`` are metadata below ``llama.`` (None leaves a key out); ``extra`` tensors are
    written along as they are; a tensor in ``raw`` is given as its bytes and their type.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (gguf_metadata(config) | dict(changes or {})).items():
        _add_metadata(writer, f"llama.{key}", value)
    for name, values in gguf_tensors(config, params).items():
        if raw and name in raw:
            stored, type_name = raw[name]
        else:
            type_name = kind if values.ndim == 2 else "F32"
            stored = quantize(values, gguf.GGMLQuantizationType[type_name])
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[type_name])
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    """What a converter records of ``config``, by key below ``llama.``."""
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def gguf_tensors(config: ModelConfig, params: Params) -> Params:
    """Tensors by GGUF name, f32, with the rows of q and k in the order of a converter."""
    tensors = split_layers(config, params, "gguf")
    for name, values in tensors.items():
        if ".attn_q." in name:
            tensors[name] = interleave_halves(values, config.num_heads)
        if ".attn_k." in name:
            tensors[name] = interleave_halves(values, config.num_kv_heads)
    return tensors


def interleave_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Within each head put row i of the first half and row i of the second side by side."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 -> the nearest bf16 value, as f32."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
