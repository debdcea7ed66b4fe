from __future__ import annotations

import dataclasses
import math

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from write_checkpoints import (
    gguf_tensors,
    interleave_halves,
    random_params,
    write_gguf,
    write_hf_folder,
)

from oxidize_jax.checkpoints import gguf_header
from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.gguf import config_from_gguf, open_gguf, rotary_row_map
from oxidize_jax.checkpoints.gguf_header import read_gguf_header
from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint
from oxidize_jax.model.config import RopeScaling

# Written and read by the gguf package, with blocks of 32 values or none.
SIMPLE_KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
# The package can read these but not write them; blocks of up to 256 values.
READ_ONLY_KINDS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S"]


@pytest.fixture
def wide(config):
    """Rows of whole blocks of 32."""
    return dataclasses.replace(config, hidden_size=64, intermediate_size=96)


def test_header_agrees_with_the_gguf_package(tmp_path, config):
    changes = {"a.flag": True, "a.text": "héllo", "a.numbers": [1, -2, 3], "a.texts": ["x", ""]}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == expected
    assert header.version == 3
    assert [info.name for info in header.tensors] == [t.name for t in reader.tensors]
    for info, tensor in zip(header.tensors, reader.tensors, strict=True):
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.type_id) == (tensor.data_offset, tensor.tensor_type)


def test_config_is_that_of_the_same_model_in_a_hugging_face_folder(tmp_path, config):
    params = random_params(config)
    path = write_gguf(tmp_path / "m.gguf", config, params)
    assert config_from_gguf(read_gguf_header(path)) == config
    folder = write_hf_folder(tmp_path / "hf", config, params)
    assert load_checkpoint(folder).config == load_checkpoint(path).config


def test_config_defaults(tmp_path, config):
    plain = dataclasses.replace(
        config, num_kv_heads=4, head_dim=6, rope_theta=10_000.0, tie_word_embeddings=True
    )
    optional = ("head_count_kv", "key_length", "value_length")
    left_out = dict.fromkeys(f"attention.{key}" for key in optional)
    left_out |= {"rope.dimension_count": None, "rope.freq_base": None}
    path = write_gguf(tmp_path / "m.gguf", plain, random_params(plain), changes=left_out)
    assert config_from_gguf(read_gguf_header(path)) == plain


def test_vocabulary_size_from_the_tokens(tmp_path, config):
    changes = {"vocab_size": None}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)
    header = read_gguf_header(path)
    with pytest.raises(CheckpointError, match=r"llama\.vocab_size"):
        config_from_gguf(header)
    metadata = header.metadata | {"tokenizer.ggml.tokens": ["t"] * 97}
    assert config_from_gguf(dataclasses.replace(header, metadata=metadata)).vocab_size == 97


@pytest.mark.parametrize("biases", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_ld01_rotary_rows_are_put_back_with_each_projections_own_heads(
    tmp_path, config, biases, assert_same_params
):
    config = dataclasses.replace(config, **biases)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    params = random_params(config)
    path = write_gguf(tmp_path / "m.gguf", config, params)
    assert np.any(
        gguf_tensors(config, params)["blk.0.attn_k.weight"] != params["layers.k.weight"][0]
    )
    folder = write_hf_folder(tmp_path / "hf", config, params)
    loaded = load_checkpoint(path).params
    assert_same_params(loaded, params)
    assert_same_params(loaded, load_checkpoint(folder).params)


def test_ld01_row_map_of_a_head_of_eight():
    from_file = [0, 2, 4, 6, 1, 3, 5, 7]
    rows = np.arange(16)
    restored = np.empty(16, np.int64)
    restored[rotary_row_map(2, 8)] = rows
    assert restored.tolist() == from_file + [8 + row for row in from_file]
    np.testing.assert_array_equal(rotary_row_map(2, 8), interleave_halves(rows, 2))


@pytest.mark.parametrize("kind", SIMPLE_KINDS)
def test_types_decode_as_the_gguf_package_decodes_them(tmp_path, wide, kind, assert_same_params):
    params = random_params(wide)
    path = write_gguf(tmp_path / "m.gguf", wide, params, kind=kind)
    tensors = {
        t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors
    }
    loaded = load_checkpoint(path).params
    for name, ours in (("ffn_up", "up"), ("ffn_down", "down"), ("attn_output", "o")):
        for layer in range(2):
            stored = tensors[f"blk.{layer}.{name}.weight"]
            np.testing.assert_array_equal(loaded[f"layers.{ours}.weight"][layer], stored)
            if kind not in ("F32", "MXFP4"):
                error = np.abs(stored - params[f"layers.{ours}.weight"][layer]).max()
                assert 0 < error < 0.1
    # Blocks lie along a row, so quantising and reordering rows do not mix.
    stored = tensors["blk.1.attn_k.weight"].reshape(2, 4, 2, 64).swapaxes(1, 2).reshape(16, 64)
    np.testing.assert_array_equal(loaded["layers.k.weight"][1], stored)
    assert describe_checkpoint(path).tensor_types[kind] >= 16


@pytest.mark.parametrize("kind", READ_ONLY_KINDS)
def test_k_and_i_quants_decode_as_the_gguf_package_decodes_them(tmp_path, config, kind):
    config = dataclasses.replace(config, hidden_size=256, tie_word_embeddings=True)
    stored = _random_blocks(config.vocab_size, config.hidden_size, kind)
    raw = {"token_embd.weight": (stored, kind)}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), raw=raw)
    loaded = load_checkpoint(path)
    assert describe_checkpoint(path).tensor_types[kind] == 1
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(loaded.params["embed.weight"], expected)
    assert np.std(expected) > 0


def _random_blocks(rows: int, columns: int, kind: str) -> np.ndarray:
    """u8[rows, bytes]: random blocks; small bytes, so that no f16 scale is NaN or infinite."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    shape = (rows, columns // block * block_bytes)
    return np.random.default_rng(0).integers(0, 0x7B, shape, np.uint8)


def test_type_that_cannot_be_decoded_is_refused_by_name(tmp_path, config):
    raw = {"output.weight": (np.ones((config.vocab_size, config.hidden_size), np.int32), "I32")}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), raw=raw)
    with pytest.raises(UnsupportedModelError, match=r"'output\.weight'.*I32"):
        load_checkpoint(path)
    assert "I32" in describe_checkpoint(path).reason


def test_ld06_gguf_head_is_tied_exactly_when_output_is_absent(tmp_path, config):
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    absent = write_gguf(tmp_path / "absent.gguf", tied, random_params(tied))
    loaded = load_checkpoint(absent)
    assert loaded.config.tie_word_embeddings
    assert "lm_head.weight" not in loaded.params
    params = random_params(config)
    loaded = load_checkpoint(write_gguf(tmp_path / "present.gguf", config, params))
    assert not loaded.config.tie_word_embeddings
    np.testing.assert_array_equal(loaded.params["lm_head.weight"], params["lm_head.weight"])


def test_rope_factors_of_one_are_none_and_others_scale_the_frequencies(tmp_path, config):
    params = random_params(config)
    factors = np.ones(4, np.float32)
    fine = write_gguf(tmp_path / "1.gguf", config, params, extra={"rope_freqs.weight": factors})
    assert load_checkpoint(fine).config == config
    factors[3] = 8
    scaled = write_gguf(tmp_path / "8.gguf", config, params, extra={"rope_freqs.weight": factors})
    scaling = RopeScaling("factors", factors=(1.0, 1.0, 1.0, 8.0))
    assert load_checkpoint(scaled).config == dataclasses.replace(config, rope_scaling=scaling)
    info = describe_checkpoint(scaled)
    assert info.supported


def test_rope_factors_that_are_none_are_refused(tmp_path, config):
    for number, value in enumerate((0.0, np.nan, -1.0)):
        factors = np.array([1, 1, 1, value], np.float32)
        path = tmp_path / f"{number}.gguf"
        write_gguf(path, config, random_params(config), extra={"rope_freqs.weight": factors})
        with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight'.*positive"):
            load_checkpoint(path)
        assert not describe_checkpoint(path).supported


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"type": "linear", "factor": 4.0}, RopeScaling("linear", factor=4.0)),
        ({"type": "none", "factor": 0.0}, RopeScaling()),
        ({"type": "yarn", "factor": 1.0}, RopeScaling()),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16},
            RopeScaling(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                attention_factor=0.1 * math.log(4) + 1,
            ),
        ),
    ],
)
def test_rope_scaling_by_its_keys(tmp_path, config, changes, scaling):
    changes = {f"rope.scaling.{key}": value for key, value in changes.items()}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)
    assert load_checkpoint(path).config == dataclasses.replace(config, rope_scaling=scaling)


def test_numbers_are_of_any_type_and_fit_float32(tmp_path, config):
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf", config, random_params(config)))

    def read(key, value):
        metadata = header.metadata | {f"llama.{key}": value}
        return config_from_gguf(dataclasses.replace(header, metadata=metadata))

    assert read("rope.freq_base", 20_000).rope_theta == 20_000.0
    for value in (1e-60, 1e-40, 1e300):
        with pytest.raises(CheckpointError, match=r"llama\.attention\.layer_norm_rms_eps.*float32"):
            read("attention.layer_norm_rms_epsilon", value)
    for value in (True, 0, -1.0, "x"):
        with pytest.raises(CheckpointError, match=r"freq_base=.*must be a positive number"):
            read("rope.freq_base", value)
    with pytest.raises(CheckpointError, match=r"rope_theta=0\.5: must be at least 1"):
        read("rope.freq_base", 0.5)


def test_factors_more_than_a_head_has_are_refused_before_they_are_read(tmp_path, config):
    extra = {"rope_freqs.weight": np.ones(4096, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), extra=extra)
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' has 4096 numbers, but there"):
        load_checkpoint(path)


def test_an_array_of_very_many_items_is_not_read(tmp_path, config, monkeypatch):
    changes = {"a.numbers": [1, 2, 3, 4]}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)
    monkeypatch.setattr(gguf_header, "_MAX_ITEMS", 3)
    with pytest.raises(
        CheckpointError, match=r"'llama\.a\.numbers' is an array of 4 items; at most 3"
    ):
        read_gguf_header(path)


def test_a_window_is_that_of_all_layers(tmp_path, config):
    def windows(window):
        changes = {"attention.sliding_window": window}
        path = tmp_path / f"{window}.gguf"
        write_gguf(path, config, random_params(config), changes=changes)
        return load_checkpoint(path).config.layer_windows

    assert config.max_position_embeddings == 64
    assert [windows(window) for window in (0, 9, 63, 64)] == [(), (9, 9), (63, 63), ()]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope.scaling.type": "su"}, r"llama\.rope\.scaling\.type='su'"),
        ({"rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.factor=4\.0"),
        ({"rope.dimension_count": 4}, r"rope\.dimension_count=4.*8"),
        ({"attention.value_length": 16}, r"attention\.value_length=16"),
    ],
)
def test_what_the_model_cannot_run_is_refused_by_name(tmp_path, config, changes, named):
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)
    with pytest.raises(UnsupportedModelError, match=named):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("general.architecture", "mamba", "general.architecture='mamba'.*'llama'"),
        ("general.type", "adapter", "general.type='adapter'"),
        ("split.count", 3, "split.count=3.*merge"),
    ],
)
def test_other_kinds_of_file_are_refused_by_name(tmp_path, config, key, value, named):
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config))
    header = read_gguf_header(path)
    header = dataclasses.replace(header, metadata=header.metadata | {key: value})
    with pytest.raises(UnsupportedModelError, match=named):
        config_from_gguf(header)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_count": None}, r"'llama\.block_count' is missing"),
        ({"block_count": 3}, r"blk\.2\.attn_norm\.weight|blk\.2\."),
        ({"block_count": 2**31 - 1}, "num_layers=2147483647"),
        ({"attention.head_count": "four"}, "head_count='four'"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv="),
        ({"attention.head_count_kv": 3}, "num_kv_heads=3"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        ({"expert_count": 8}, r"llama\.expert_used_count' is missing"),
        ({"rope.freq_base": float("inf")}, "freq_base=inf"),
        ({"vocab_size": 98}, r"'token_embd\.weight'.*\[97, 24\].*\[98, 24\]"),
        ({"embedding_length": 32}, "token_embd"),
    ],
)
def test_contradictions_are_errors_that_name_the_key_or_tensor(tmp_path, config, changes, named):
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(path)


def test_per_layer_list_of_equal_counts_is_one_count(tmp_path, config):
    changes = {"attention.head_count_kv": [2, 2]}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)
    assert load_checkpoint(path).config == config


def test_bf16_target_rounds_to_nearest_and_keeps_norms_in_f32(tmp_path, config):
    params = random_params(config)
    loaded = load_checkpoint(write_gguf(tmp_path / "m.gguf", config, params), jnp.bfloat16).params
    for name, values in params.items():
        dtype = jnp.float32 if name.endswith("norm.weight") else jnp.bfloat16
        assert loaded[name].dtype == dtype
        np.testing.assert_array_equal(loaded[name], values.astype(dtype))


def test_opening_reads_no_weights(tmp_path, config, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config))

    def fail(*args, **kwargs):
        raise AssertionError("read weights")

    monkeypatch.setattr(np, "fromfile", fail)
    assert open_gguf(path).config == config
    assert describe_checkpoint(path).supported
