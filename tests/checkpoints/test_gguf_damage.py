"""A cut or damaged GGUF is a CheckpointError that names the file, wherever the damage is."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from write_checkpoints import random_params, write_gguf

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.gguf import open_gguf
from oxidize_jax.checkpoints.gguf_header import read_gguf_header
from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint

_COUNTS = struct.Struct("<4sIQQ")


@pytest.fixture
def path(tmp_path, config):
    changes = {"a.texts": ["some", "tökens"], "a.numbers": [1.5, 2.5], "a.flag": True}
    return write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=changes)


def test_every_truncation_is_an_error(path):
    whole = path.read_bytes()
    opened = open_gguf(path)
    start = min(t.offset for t in opened.tensors.values())
    end = max(t.offset + t.nbytes for t in opened.tensors.values())
    cuts = [*range(0, start + 40, 3), *range(start, end, 1009), end - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"m\.gguf.*(truncated|not a GGUF)"):
            load_checkpoint(path)
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            describe_checkpoint(path)
    path.write_bytes(whole[:end])
    assert load_checkpoint(path).params


def test_file_that_shrinks_after_it_was_opened(path):
    tensor = open_gguf(path).tensors["output.weight"]
    path.write_bytes(path.read_bytes()[: tensor.offset + 8])
    with pytest.raises(CheckpointError, match=r"truncated inside 'output\.weight'"):
        tensor.read_rows(0, 2)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bytes_load_or_are_an_error(path, assert_loads_or_names, data):
    whole = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, _header_bytes(path) - 1), label="position")
    for offset, byte in enumerate(data.draw(st.binary(min_size=1, max_size=9), label="bytes")):
        whole[position + offset] = byte
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(whole)
    assert_loads_or_names(damaged, "damaged.gguf")


def _header_bytes(path) -> int:
    return min(info.offset for info in read_gguf_header(path).tensors)


@pytest.mark.parametrize("start", [b"", b"GG", b"GGML", b"PK\x03\x04" + bytes(100)])
def test_other_files_are_named_as_such(tmp_path, start):
    path = tmp_path / "other.gguf"
    path.write_bytes(start)
    with pytest.raises(CheckpointError, match=r"other\.gguf: not a GGUF file"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("version", "named"),
    [(1, "version 1 is not supported"), (4, "version 4"), (3 << 24, "big-endian")],
)
def test_other_versions_are_refused(tmp_path, version, named):
    path = tmp_path / "m.gguf"
    path.write_bytes(_COUNTS.pack(b"GGUF", version, 0, 0))
    with pytest.raises(UnsupportedModelError, match=named):
        read_gguf_header(path)


@pytest.mark.parametrize("counts", [(2**62, 0), (0, 2**62), (2**63 + 1, 1)])
def test_impossible_counts_do_not_take_time_or_memory(tmp_path, counts):
    path = tmp_path / "m.gguf"
    path.write_bytes(_COUNTS.pack(b"GGUF", 3, *counts) + bytes(200))
    with pytest.raises(CheckpointError, match="truncated or damaged: 'number of"):
        read_gguf_header(path)


def _with_metadata(path, *entries: bytes) -> None:
    path.write_bytes(_COUNTS.pack(b"GGUF", 3, 0, len(entries)) + b"".join(entries) + bytes(64))


def _entry(key: bytes, type_id: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type_id) + value


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([_entry(b"k", 4, bytes(4))] * 2, "'k' occurs twice"),
        ([_entry(b"k", 77, bytes(4))], "'k' has the unknown value type 77"),
        ([_entry(b"k", 9, struct.pack("<IQ", 9, 1))], "'k' is an array of value type 9"),
        ([_entry(b"k", 9, struct.pack("<IQ", 4, 2**61))], "'k' at byte"),
        ([_entry(b"k", 8, struct.pack("<Q", 2) + b"\xff\xfe")], "'k' is not UTF-8"),
        ([_entry(b"general.alignment", 4, struct.pack("<I", 24))], "general.alignment=24"),
    ],
)
def test_malformed_metadata_is_named(tmp_path, entries, named):
    path = tmp_path / "m.gguf"
    _with_metadata(path, *entries)
    with pytest.raises(CheckpointError, match=named):
        read_gguf_header(path)


def _tensor(name: bytes, dims: list[int], type_id: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", type_id, offset)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ([_tensor(b"t", [4], 0, 0), _tensor(b"t", [4], 0, 32)], "'t' is listed twice"),
        ([_tensor(b"t", [4], 0, 0), _tensor(b"u", [4], 0, 8)], "'t' and 'u' overlap"),
        ([_tensor(b"t", [], 0, 0)], "'t' has 0 dimensions"),
        ([_tensor(b"t", [1] * 5, 0, 0)], "'t' has 5 dimensions"),
        ([_tensor(b"t", [4, 0], 0, 0)], "'t' has the impossible shape"),
        ([_tensor(b"t", [2**40, 2**40], 0, 0)], "'t' has the impossible shape"),
        ([_tensor(b"t", [4], 999, 0)], "'t' has the unknown type 999"),
        ([_tensor(b"t", [33], 8, 0)], "'t' has rows of 33 values.*32 in a Q8_0"),
        ([_tensor(b"t", [4], 0, 2**63)], "truncated: tensor 't'"),
    ],
)
def test_malformed_tensor_lists_are_named(tmp_path, tensors, named):
    path = tmp_path / "m.gguf"
    path.write_bytes(_COUNTS.pack(b"GGUF", 3, len(tensors), 0) + b"".join(tensors) + bytes(256))
    with pytest.raises(CheckpointError, match=named):
        open_gguf(path)


def test_scale_that_is_not_finite_is_refused_by_name(tmp_path, config):
    values = np.zeros((config.vocab_size, 32), np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    stored[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    config = type(config)(**{**vars(config), "hidden_size": 32})
    raw = {"output.weight": (stored, "Q8_0")}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), raw=raw)
    with pytest.raises(CheckpointError, match=r"'output\.weight' holds NaN or infinite"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["blk.0.attn_rot_embd", "blk.7.attn_q.weight", "adapter.weight"])
def test_surplus_tensor_is_refused_by_name(tmp_path, config, name):
    extra = {name: np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), extra=extra)
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        load_checkpoint(path)


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv"])
def test_impossible_head_counts_do_not_take_memory(tmp_path, config, key):
    heads = {"attention.head_count": 2**31 - 2, key: 2**31 - 2}
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes=heads)
    named = r"m\.gguf: tensor 'blk\.0\.attn_\w+\.weight' has shape"
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(path)
    info = describe_checkpoint(path)
    assert not info.supported
    assert "blk.0.attn_" in info.reason
