"""Whatever a file says, reading it is a CheckpointError in one line, and quick."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
from family_goldens import read_golden
from family_models import MODELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from write_checkpoints import random_params, write_gguf, write_hf_folder
from write_family_gguf import write_family_gguf

from oxidize_jax.checkpoints import hf_config
from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.gguf import config_from_gguf
from oxidize_jax.checkpoints.gguf_header import read_gguf_header
from oxidize_jax.checkpoints.hf_config import config_from_hf, read_json_object
from oxidize_jax.checkpoints.hf_limits import MAX_LAYERS
from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint
from oxidize_jax.checkpoints.safetensors import open_safetensors

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST = 700

ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
SCALARS = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 2, 3, 7, 61, 2**31 - 1, 2**31, 2**63, 10**400),
        *(0.0, -1.0, 0.5, 1.5, 1e308, 1e-308, float("nan"), float("inf")),
        *("", "x", "2", "silu", "full_attention", "yarn", "longrope", "x" * 5000),
    ]
)
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["full_attention", "sliding_attention", "rope_type", "factor"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
ROPES = st.sampled_from(
    [
        ROPE,
        ROPE | {"original_max_position_embeddings": 1},
        {"rope_type": "yarn", "factor": 1e308},
        {"rope_type": "yarn", "factor": 2, "mscale": 1e308, "mscale_all_dim": 1e-308},
        {"full_attention": ROPE, "sliding_attention": 3},
    ]
)
KEYS = sorted(
    set().union(*MODELS.values())
    | {"rope_scaling", "rope_theta", "partial_rotary_factor", "layer_types", "no_rope_layers"}
    | {"sliding_window_pattern", "attn_logit_softcapping", "quantization_config", "bos_token_id"}
    | {"rope_local_base_freq", "n_inner", "mlp_bias", "attention_bias", "eos_token_id"}
)


@settings(max_examples=150, deadline=2000)
@given(
    name=st.sampled_from(sorted(MODELS)),
    changes=st.dictionaries(st.sampled_from(KEYS), SCALARS | NESTED | ROPES, max_size=3),
    inside=st.dictionaries(
        st.sampled_from(["factor", "rope_theta", "mscale", "partial_rotary_factor", "type"]),
        SCALARS,
        max_size=2,
    ),
)
def test_any_value_of_a_config_is_read_or_refused_in_a_line(name, changes, inside):
    fields = MODELS[name] | changes
    if isinstance(fields.get("rope_parameters"), dict):
        fields = fields | {"rope_parameters": fields["rope_parameters"] | inside}
    try:
        config = config_from_hf(fields, source="config.json")
    except CheckpointError as error:
        _assert_one_line(error, "config.json: ")
    else:
        assert config.num_layers <= MAX_LAYERS
        assert all(0 < size < 2**31 for size in (config.vocab_size, config.hidden_size))


def _assert_one_line(error: CheckpointError, start: str) -> None:
    assert str(error).startswith(start)
    assert "\n" not in str(error)
    assert len(str(error)) < LONGEST


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers=2147483647: must be at most"),
        ({"vocab_size": 10**5000}, "vocab_size=a number of over .* digits: must be below"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.*: must be below"),
        ({"x": [{"y": [1, 2**64]}]}, r"x\[0\]\.y\[1\]=18446744073709551616"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention=3: must be"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor=1e.308: must be at most 1"),
        (
            {"rope_scaling": ROPE | {"original_max_position_embeddings": 1}},
            "rope_scaling.original_max_position_embeddings=1: must be at least 2",
        ),
        ({"bos_token_id": 97}, "bos_token_id=97 is outside the vocabulary: vocab_size=97"),
        ({"eos_token_id": [2, 97]}, r"eos_token_id=\[2, 97\] is outside the vocabulary"),
        ({"eos_token_id": -1}, "eos_token_id=-1: must be an id"),
        ({"bos_token_id": "1"}, "bos_token_id='1': must be an id"),
        ({"bos_token_id": True}, "bos_token_id=True: must be an id"),
    ],
)
def test_values_that_no_family_has_are_named(tmp_path, config, changes, named):
    fields = {"bos_token_id": None} | changes
    folder = write_hf_folder(tmp_path, config, random_params(config))
    raw = json.loads((folder / "config.json").read_text()) | fields
    with pytest.raises(CheckpointError, match=named):
        config_from_hf(raw)


@pytest.fixture(scope="module")
def headers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    made = {}
    for name in ("llama_rope_yarn", "phi3_longrope_short", "gemma2", "gemma3", "gpt2", "qwen3"):
        golden = read_golden(name)
        path = write_family_gguf(folder / f"{name}.gguf", golden.fields, golden.tensors)
        made[name] = read_gguf_header(path)
    return made


GGUF_SCALARS = st.sampled_from(
    [
        *(True, False, 0, -1, 1, 2, 3, 7, 2**31 - 1, 2**63 - 1, 2**64 - 1),
        *(0.0, -1.0, 0.5, 1e38, 1e-38, 1e308, float("nan"), float("inf")),
        *("", "x", "yarn", "linear"),
    ]
)
GGUF_KEYS = ["attention.sliding_window", "attention.sliding_window_pattern", "vocab_size"]
GGUF_KEYS += ["rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "expert_count"]
GGUF_KEYS += ["rope.scaling.original_context_length", "rope.scaling.attn_factor"]
GGUF_KEYS += ["final_logit_softcapping", "rope.dimension_count", "rope.freq_base", "block_count"]


@settings(
    max_examples=120, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_value_of_a_gguf_is_read_or_refused_in_a_line(headers, data):
    header = headers[data.draw(st.sampled_from(sorted(headers)))]
    metadata = dict(header.metadata)
    prefix = metadata["general.architecture"]
    keys = sorted({*metadata, *(f"{prefix}.{key}" for key in GGUF_KEYS), "split.count"})
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
        metadata[key] = data.draw(GGUF_SCALARS | st.lists(GGUF_SCALARS, max_size=3), label=key)
    try:
        config = config_from_gguf(dataclasses.replace(header, metadata=metadata))
    except CheckpointError as error:
        _assert_one_line(error, str(header.path))
    else:
        assert np.isfinite([config.rope_theta, config.rms_norm_eps]).all()


def test_a_number_beyond_float32_is_named(headers):
    header = headers["qwen3"]
    metadata = {**header.metadata, "qwen3.rope.freq_base": 1e300}
    with pytest.raises(CheckpointError, match=r"qwen3\.rope\.freq_base=1e\+300: must fit float32"):
        config_from_gguf(dataclasses.replace(header, metadata=metadata))


def test_a_gguf_without_tensors_is_no_model(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in {"block_count": 2, "embedding_length": 24, "vocab_size": 97}.items():
        writer.add_uint32(f"llama.{key}", value)
    for key in ("attention.head_count", "feed_forward_length", "context_length"):
        writer.add_uint32(f"llama.{key}", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"m\.gguf: num_layers=2, but there are only 0"):
        load_checkpoint(tmp_path / "m.gguf")
    assert "only 0 tensors" in describe_checkpoint(tmp_path / "m.gguf").reason


@pytest.fixture
def folder(tmp_path, config):
    return write_hf_folder(tmp_path / "m", config, random_params(config), shards=2)


def _folder(path):
    path.unlink()
    path.mkdir()


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _dangling(path):
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def _loop(path):
    path.unlink()
    path.symlink_to(path)


def _device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def _empty(path):
    path.write_bytes(b"")


def _zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def _latin(path):
    path.write_bytes('{"é": 1}'.encode("latin-1"))


FAULTS = (_folder, _pipe, _dangling, _loop, _device, _empty, _zeros, _latin)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00002-of-00002.safetensors"])
def test_what_is_in_the_place_of_a_file_is_named(folder, name, fault):
    fault(folder / name)
    for read in (load_checkpoint, describe_checkpoint):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
            read(folder)
        _assert_one_line(caught.value, str(folder))


def test_a_file_that_may_not_be_read_is_named(folder, monkeypatch):
    """As root nothing is forbidden."""
    from oxidize_jax.checkpoints import safetensors

    def forbidden(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(safetensors, "open", forbidden, raising=False)
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors: Permission denied"):
        load_checkpoint(folder)


def test_a_file_that_goes_away_while_it_is_read_is_named(folder):
    tensor = next(iter(open_safetensors(folder).tensors.values()))
    tensor.path.unlink()
    with pytest.raises(CheckpointError, match=rf"{tensor.path.name}: cannot read '.*No such file"):
        tensor.read_rows(0, 1)


def test_shards_may_be_links_out_of_the_folder(folder, tmp_path):
    """As in the cache of huggingface_hub; the index itself may not name such a file."""
    expected = load_checkpoint(folder).params
    for shard in folder.glob("*.safetensors"):
        shard.rename(tmp_path / shard.name)
        shard.symlink_to(tmp_path / shard.name)
    loaded = load_checkpoint(folder).params
    assert all(np.array_equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../b", "..", "", ".", "a\\b", "a\0b", "x" * 5000, None, ["a"], {}],
)
def test_an_index_names_files_in_its_folder_only(folder, name):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    _assert_one_line(caught.value, str(folder))


def _put(folder, header: bytes, data: bytes = bytes(64)) -> None:
    (folder / INDEX).unlink(missing_ok=True)
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_a_header_of_very_many_equal_names_is_quick(folder):
    names = ",".join(f'"t{i}":0' for i in range(200_000))
    _put(folder, f'{{{names},"t199999":0}}'.encode())
    with pytest.raises(CheckpointError, match="'t199999' occurs twice"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (",".join(["1"] * 17), "malformed"),
        ("9223372036854775808", "malformed"),
        ("1e400", "malformed"),
        ("4294967296,4294967296", "cannot be 4"),
        ("9" * 5000, "too many digits"),
    ],
)
def test_absurd_shapes_take_no_memory(folder, shape, named):
    _put(folder, f'{{"t":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,4]}}}}'.encode())
    with pytest.raises(CheckpointError, match=named) as caught:
        load_checkpoint(folder)
    _assert_one_line(caught.value, str(folder))


def test_names_of_any_length_and_alphabet_are_one_short_line(folder):
    for name in ("x" * 10**6, "a\nb", "\ud800", "\0"):
        _put(folder, json.dumps({name: 1}).encode())
        with pytest.raises(CheckpointError, match="is malformed") as caught:
            load_checkpoint(folder)
        _assert_one_line(caught.value, str(folder))
        str(caught.value).encode("utf-8", "replace")


def test_a_config_of_very_many_bytes_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_config, "_MAX_JSON", 10)
    (tmp_path / "config.json").write_text(json.dumps({"a": "b" * 10}))
    with pytest.raises(CheckpointError, match=r"config\.json: has 19 bytes; at most 10 are read"):
        read_json_object(tmp_path / "config.json")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_tensor_less_more_or_otherwise_is_named(folder, data):
    path = folder / "model-00001-of-00002.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    name = data.draw(st.sampled_from(sorted(tensors)))
    fault = data.draw(st.sampled_from(["drop", "shape", "dtype", "nan", "rename"]))
    values = tensors.pop(name)
    if fault == "shape":
        tensors[name] = np.ascontiguousarray(values.reshape(-1)[:-1])
    elif fault == "dtype":
        tensors[name] = values.astype(data.draw(st.sampled_from([np.int8, np.int64, np.bool_])))
    elif fault == "nan":
        at = data.draw(st.integers(0, values.size - 1))
        bad = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        tensors[name] = values.copy()
        tensors[name].reshape(-1)[at] = bad
    elif fault == "rename":
        tensors[f"{name}.x"] = values
    save_file(tensors, path)
    try:
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
            load_checkpoint(folder)
        _assert_one_line(caught.value, str(folder))
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("command", ["models", "generate"])
def test_the_command_line_says_it_in_a_line(folder, command):
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 64)
    arguments = ["models", str(folder)]
    if command == "generate":
        arguments = ["generate", "--model", str(folder), "--dtype", "float32", "x"]
    done = subprocess.run(
        [sys.executable, "-m", "oxidize_jax", *arguments], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"oxidize-jax: error: {folder}/model-00002-of-00002.safetensors")
    assert done.stderr.count("\n") == 1


def test_a_gguf_written_in_the_wrong_types_is_named(tmp_path, config):
    changes = {"block_count": "two"}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)
    with pytest.raises(CheckpointError, match=r"llama\.block_count='two': must be a positive"):
        load_checkpoint(path)
