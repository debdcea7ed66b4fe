from __future__ import annotations

import dataclasses
import json
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from write_checkpoints import random_params, split_layers, to_bf16, write_hf_folder

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def params(config):
    return random_params(config)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_single_file_and_shards_load_the_same(tmp_path, config, params, shards, assert_same_params):
    folder = write_hf_folder(tmp_path, config, params, shards=shards)
    assert (folder / INDEX).exists() == (shards > 1)
    loaded = load_checkpoint(folder)
    assert loaded.config == config
    assert loaded.source == str(folder)
    assert_same_params(loaded.params, params)


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16])
def test_float_types_convert_exactly_or_to_nearest(
    tmp_path, config, params, stored, target, assert_same_params
):
    config = dataclasses.replace(config, attention_bias=True, mlp_bias=True)
    params = random_params(config)
    loaded = load_checkpoint(write_hf_folder(tmp_path, config, params, dtype=stored), target)
    expected = {
        name: values.astype(stored).astype(np.float32 if name.endswith("norm.weight") else target)
        for name, values in params.items()
    }
    assert_same_params(loaded.params, expected)


def test_bf16_file_loads_bit_for_bit(tmp_path, config, params, assert_same_params):
    folder = write_hf_folder(tmp_path, config, params, dtype=ml_dtypes.bfloat16)
    in_f32 = {name: to_bf16(values) for name, values in params.items()}
    assert_same_params(load_checkpoint(folder).params, in_f32)
    assert describe_checkpoint(folder).tensor_types == {"BF16": 3 + 2 * 9}


@pytest.mark.parametrize("name", ["gqa_wide_heads", "mha_biased", "gqa_tied"])
def test_what_transformers_saved_loads_under_its_names(name, goldens):
    folder = goldens / "llama_tiny" / name
    loaded, saved = load_checkpoint(folder), load_file(folder / FILE)
    tied = loaded.config.tie_word_embeddings
    assert tied == (name == "gqa_tied")
    assert loaded.config.num_parameters == sum(values.size for values in saved.values())
    params = loaded.params
    assert set(saved) == set(split_layers(loaded.config, _as_numpy(params), "hf"))
    np.testing.assert_array_equal(params["embed.weight"], saved["model.embed_tokens.weight"])
    for ours, theirs in (("k", "self_attn.k_proj"), ("down", "mlp.down_proj")):
        np.testing.assert_array_equal(
            params[f"layers.{ours}.weight"][1], saved[f"model.layers.1.{theirs}.weight"]
        )
    assert ("layers.o.bias" in params) == (name == "mha_biased")


def _as_numpy(params):
    return {name: np.asarray(values) for name, values in params.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_ld06_head_comes_from_where_the_config_says(tmp_path, config, tied, present):
    params = random_params(config)
    untied_folder = write_hf_folder(tmp_path, config, params, changes={"tie_word_embeddings": tied})
    if not present:
        tensors = load_file(untied_folder / FILE)
        del tensors["lm_head.weight"]
        save_file(tensors, untied_folder / FILE)
    if not tied and not present:
        with pytest.raises(CheckpointError, match=r"'lm_head\.weight' missing.*tie_word_embed"):
            load_checkpoint(untied_folder)
        assert "lm_head.weight" in describe_checkpoint(untied_folder).reason
        return
    loaded = load_checkpoint(untied_folder)
    assert loaded.config.tie_word_embeddings == tied
    assert ("lm_head.weight" in loaded.params) == (not tied)
    np.testing.assert_array_equal(loaded.params["embed.weight"], params["embed.weight"])
    if not tied:
        np.testing.assert_array_equal(loaded.params["lm_head.weight"], params["lm_head.weight"])


def test_buffers_of_old_versions_are_left_unread(tmp_path, config, params, assert_same_params):
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.rotary_emb.inv_freq": np.full(4, np.nan, np.float32),
        "model.layers.0.attn.bias": np.ones((1, 1, 8, 8), np.bool_),
        "model.layers.0.attn.masked_bias": np.array(-1e4, np.float32),
    }
    folder = write_hf_folder(tmp_path, config, params, extra=buffers)
    assert_same_params(load_checkpoint(folder).params, params)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"model.layers.2.input_layernorm.weight": np.ones(24, np.float32)}, r"layers\.2\.input"),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}, r"q_proj\.bias"),
        ({"model.layers.0.mlp.gate_proj.weight_scale": np.ones(1, np.float32)}, "weight_scale"),
        ({f"t{i}": np.ones(1, np.float32) for i in range(9)}, "'t0', 't1', 't2' and 6 more"),
    ],
)
def test_surplus_tensor_is_refused_by_name(tmp_path, config, params, extra, named):
    folder = write_hf_folder(tmp_path, config, params, extra=extra)
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(folder)
    info = describe_checkpoint(folder)
    assert not info.supported
    assert info.reason


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.v_proj.weight", "lm_head.weight"]
)
@pytest.mark.parametrize("fault", ["missing", "shape", "transposed", "nan", "infinite", "integer"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_faulty_tensor_is_refused_by_name(tmp_path, config, params, name, fault, dtype):
    folder = write_hf_folder(tmp_path, config, params)
    tensors = load_file(folder / FILE)
    faulty = _with_fault(tensors.pop(name), fault)
    if faulty is not None:
        tensors[name] = faulty
    save_file(tensors, folder / FILE)
    with pytest.raises(CheckpointError, match=f"'{name}'") as caught:
        load_checkpoint(folder, dtype)
    assert isinstance(caught.value, UnsupportedModelError) == (fault == "integer")


def _with_fault(values: np.ndarray, fault: str) -> np.ndarray | None:
    if fault == "missing":
        return None
    if fault == "shape":
        return np.concatenate([values, values[:1]])
    if fault == "transposed":
        return np.ascontiguousarray(values.T) if values.ndim == 2 else values[None]
    if fault == "integer":
        return values.astype(np.int8)
    values = values.copy()
    values.reshape(-1)[-1] = np.nan if fault == "nan" else -np.inf
    return values


def test_value_beyond_the_target_type_is_refused(tmp_path, config, params):
    params["embed.weight"][3, 3] = 3.4e38
    folder = write_hf_folder(tmp_path, config, params)
    assert load_checkpoint(folder).params
    with pytest.raises(CheckpointError, match=r"embed_tokens.*bfloat16"):
        load_checkpoint(folder, jnp.bfloat16)


def test_every_truncation_is_an_error(tmp_path, config, params):
    folder = write_hf_folder(tmp_path, config, params)
    path = folder / FILE
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    cuts = [*range(9), *range(9, start + 40, 41), *range(start, len(whole), 2003), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
            load_checkpoint(folder)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bytes_load_or_are_an_error(tmp_path, config, assert_loads_or_names, data):
    folder = tmp_path / "m"
    if not folder.exists():
        write_hf_folder(folder, config, random_params(config))
        (folder / FILE).rename(folder / "whole")
    whole = bytearray((folder / "whole").read_bytes())
    position = data.draw(st.integers(0, 7 + int.from_bytes(whole[:8], "little")), label="position")
    for offset, byte in enumerate(data.draw(st.binary(min_size=1, max_size=9), label="bytes")):
        whole[position + offset] = byte
    (folder / FILE).write_bytes(whole)
    assert_loads_or_names(folder, str(folder))


def _write_raw(path, header, data=b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"", "damaged header"),
        (b"{", "damaged header"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "damaged header"),
        (b'{"a":{},"a":{}}', "'a' occurs twice"),
        ({"t": 1}, "'t' is malformed"),
        ({"t": {"dtype": "F32", "shape": [1]}}, "'t' is malformed"),
        ({"t": _entry(shape=1)}, "'t' is malformed"),
        ({"t": _entry(shape=[-1])}, "'t' is malformed"),
        ({"t": _entry(shape=[1.0])}, "'t' is malformed"),
        ({"t": _entry(offsets=[0, 4, 8])}, "'t' is malformed"),
        ({"t": _entry(dtype=4)}, "'t' is malformed"),
        ({"t": _entry(shape=[2])}, "'t' of shape .2. in F32 cannot be 4 bytes"),
        ({"t": _entry(shape=[0], offsets=[0, 0])}, "'t' .* holds no values"),
        ({"t": _entry(offsets=[4, 8])}, "'t' starts at byte"),
        ({"t": _entry(), "u": _entry()}, "'u' starts at byte"),
        ({"t": _entry(dtype="F99", offsets=[8, 4])}, "'t' .* holds no values"),
    ],
)
def test_malformed_header_is_named(tmp_path, config, params, header, named):
    folder = write_hf_folder(tmp_path, config, params)
    _write_raw(folder / FILE, header, bytes(8))
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(folder)


def test_unknown_type_is_refused_by_name(tmp_path, config, params):
    folder = write_hf_folder(tmp_path, config, params)
    tensors = split_layers(config, params, "hf")
    header, end = {}, 0
    for name, values in tensors.items():
        kind = "F8_E4M3" if name == "lm_head.weight" else "F32"
        begin, end = end, end + values.size * (1 if kind == "F8_E4M3" else 4)
        header[name] = _entry(kind, values.shape, (begin, end))
    _write_raw(folder / FILE, header, bytes(end))
    with pytest.raises(UnsupportedModelError, match=r"'lm_head\.weight' is stored as F8_E4M3"):
        load_checkpoint(folder)


def test_shard_that_is_not_there_is_named(tmp_path, config, params):
    folder = write_hf_folder(tmp_path, config, params, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names the shard 'model-00002-of-00003"):
        load_checkpoint(folder)


def test_tensor_in_two_shards_is_named(tmp_path, config, params):
    folder = write_hf_folder(tmp_path, config, params, shards=2)
    first, second = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file(load_file(second) | {"lm_head.weight": load_file(first)["lm_head.weight"]}, second)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is both in .*00001.*00002"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (
            lambda m: m.update({"lm_head.weight": m["model.norm.weight"]}),
            r"'lm_head\.weight' is in",
        ),
        (lambda m: m.update({"ghost": m["model.norm.weight"]}), "'ghost' is in"),
        (lambda m: m.pop("lm_head.weight"), r"'lm_head\.weight' is not in"),
        (lambda m: m.update({"lm_head.weight": "../x.safetensors"}), r"'\.\./x\.safetensors'"),
        (lambda m: m.update({"lm_head.weight": 7}), "7 is not the name"),
        (lambda m: m.clear(), "no 'weight_map'"),
    ],
)
def test_index_that_does_not_agree_with_the_shards(tmp_path, config, params, edit, named):
    folder = write_hf_folder(tmp_path, config, params, shards=2)
    index = json.loads((folder / INDEX).read_text())
    in_other_shard = (
        index["weight_map"]["lm_head.weight"] != index["weight_map"]["model.norm.weight"]
    )
    assert in_other_shard
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(folder)


def test_malformed_index_and_config_are_named(tmp_path, config, params):
    folder = write_hf_folder(tmp_path, config, params, shards=2)
    (folder / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: not valid JSON"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        load_checkpoint(folder)


def test_folder_without_weights_or_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is not there"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        load_checkpoint(tmp_path)


def test_unsupported_model_is_described_and_not_loaded(tmp_path, config, params):
    folder = write_hf_folder(tmp_path, config, params, changes={"model_type": "mamba"})
    info = describe_checkpoint(folder)
    assert (info.architecture, info.supported, info.config) == ("mamba", False, None)
    assert "model_type='mamba'" in info.reason
    assert info.num_parameters == config.num_parameters
    assert info.context_length == 64
    with pytest.raises(UnsupportedModelError, match=r"config\.json: model_type='mamba'"):
        load_checkpoint(folder)


def test_odd_config_is_not_called_unsupported(tmp_path, config, params):
    folder = write_hf_folder(tmp_path, config, params, changes={"vocab_size": -1})
    with pytest.raises(CheckpointError, match=r"config\.json: vocab_size=-1") as caught:
        load_checkpoint(folder)
    assert not isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize("layers", [3, 2**31 - 1])
def test_layers_that_are_not_in_the_file(tmp_path, config, params, layers):
    changes = {"num_hidden_layers": layers}
    folder = write_hf_folder(tmp_path, config, params, changes=changes)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.|num_hidden_layers=2147483647"):
        load_checkpoint(folder)
