"""Saved models: bit for bit what was in memory, and nothing that is damaged or half there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import write_tiny_model
from write_checkpoints import random_params, write_gguf, write_hf_folder

from oxidize_jax.checkpoints import save as saving
from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint
from oxidize_jax.checkpoints.resolve import ResolvedModel, resolve_model
from oxidize_jax.checkpoints.save import check_folder, save_model
from oxidize_jax.checkpoints.saved import (
    MANIFEST,
    array_checksum,
    is_saved,
    manifest_checksum,
    tokenizer_of,
)
from oxidize_jax.model.config import ModelConfig, RopeScaling

DTYPES = ["float32", "bfloat16", "int8"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """A saved model, not to be changed."""
    checkpoint = load_checkpoint(source, "int8")
    folder = tmp_path_factory.mktemp("saved") / "whole"
    return save_model(folder, checkpoint.config, checkpoint.params, source)


@pytest.fixture
def saved(whole, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(whole, tmp_path / "m")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_bit_for_bit_what_was_loaded(
    tmp_path, config, dtype, tied, assert_same_params
):
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    source = write_hf_folder(tmp_path / "hf", config, random_params(config))
    loaded = load_checkpoint(source, dtype)
    folder = save_model(tmp_path / "saved", loaded.config, loaded.params, source)
    restored = load_checkpoint(folder, dtype)
    assert restored.config == loaded.config
    assert list(restored.params) == list(loaded.params)
    assert_same_params(restored.params, loaded.params)
    assert ("lm_head.weight" in restored.params) == (not tied)
    info, of_source = describe_checkpoint(folder), describe_checkpoint(source)
    assert (info.format, info.supported, info.config) == ("saved", True, loaded.config)
    assert info.num_parameters == of_source.num_parameters
    size = {"float32": info.bytes_float32, "bfloat16": info.bytes_bfloat16}.get(dtype)
    assert info.file_bytes > (size or info.bytes_int8)
    assert resolve_model(folder) == ResolvedModel("saved", folder)
    other = DTYPES[DTYPES.index(dtype) - 1]
    with pytest.raises(CheckpointError, match=f"saved with weights in {dtype}, but dtype={other}"):
        load_checkpoint(folder, other)


def test_every_field_of_a_configuration_comes_back(tmp_path, source):
    config = ModelConfig(
        **(vars(load_checkpoint(source).config) | {"max_position_embeddings": 32}),
    )
    longrope = RopeScaling(
        "longrope", 2.0, 16, 1.25, factors=(1.0, 2.0, 3.0, 4.5), long_factors=(1.0,) * 4
    )
    config = dataclasses.replace(
        config,
        rope_scaling=longrope,
        layer_windows=(4, 0),
        layer_ropes=("global", "none"),
        attention_scale=0.1,
        rms_norm_eps=1e-7,
    )
    params = {name: jnp.asarray(values) for name, values in random_params(config).items()}
    folder = save_model(tmp_path / "m", config, params, source)
    assert load_checkpoint(folder).config == config


def test_orbax_restores_the_same_arrays(whole):
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        restored = checkpointer.restore(whole / "params")
    loaded = load_checkpoint(whole, "int8").params
    assert set(restored) == set(loaded)
    for name, values in restored.items():
        np.testing.assert_array_equal(np.asarray(values), np.asarray(loaded[name]), strict=True)


def test_reading_takes_neither_orbax_nor_tensorstore(whole, monkeypatch):
    for name in ("orbax", "orbax.checkpoint", "tensorstore"):
        monkeypatch.setitem(sys.modules, name, None)
    assert load_checkpoint(whole, "int8").params
    with pytest.raises(ImportError, match=r"pip install 'oxidize_jax\[orbax\]'"):
        save_model("anywhere", None, {}, whole)


def test_a_tokenizer_is_copied_from_a_folder_from_a_gguf_and_from_a_saved_model(
    tmp_path, config, source, whole
):
    copied = {path.name for path in tokenizer_of(whole).iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    gguf = write_gguf(tmp_path / "m.gguf", config, random_params(config), changes={"a.b": ["ö"]})
    loaded = load_checkpoint(gguf)
    again = tmp_path / "first"
    for tokenizer in (gguf, again):
        folder = tmp_path / ("first" if tokenizer is gguf else "second")
        save_model(folder, loaded.config, loaded.params, tokenizer)
        from oxidize_jax.checkpoints.gguf_header import read_gguf_header

        kept = read_gguf_header(tokenizer_of(folder))
        assert kept.metadata == read_gguf_header(gguf).metadata
        assert kept.tensors == ()
    with pytest.raises(CheckpointError, match=r"tokenizer\.gguf: num_layers=2, but there are"):
        load_checkpoint(tokenizer_of(again))


def _files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_file_that_is_gone_cut_off_or_changed_is_named(saved):
    """But for those that Orbax alone reads."""
    read = [p for p in _files(saved) if p.parent.name != "params"]
    assert len(read) > 30
    for path in read:
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]
        for damage in (None, b"", content[:-1], content + b"\0", bytes(len(content)), flipped):
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage)
            if path.name == ".zarray" and damage in (flipped, content + b"\0"):
                continue  # it may say the same, or what is not looked at
            with pytest.raises(CheckpointError, match=path.name) as caught:
                load_checkpoint(saved, "int8")
            assert str(saved) in str(caught.value)
            assert "\n" not in str(caught.value)
        path.write_bytes(content)
    load_checkpoint(saved, "int8")


def test_a_folder_in_the_place_of_a_file_is_named(saved):
    path = saved / "params" / "embed.weight" / "0.0"
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"embed\.weight/0\.0: is not there"):
        load_checkpoint(saved, "int8")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda m: m.update(version=2), "version=2: this package reads version 1"),
        (lambda m: m.update(version=None), "version=None"),
        (lambda m: m.update(dtype="float16"), "dtype='float16'"),
        (lambda m: m["config"].update(new_field=1), "cannot read.*new_field"),
        (lambda m: m["config"].update(num_heads=3), "cannot read.*num_heads=3"),
        (lambda m: m.pop("config"), "cannot read.*config"),
        (lambda m: m.update(parameters=[]), "cannot read"),
        (lambda m: m["parameters"].pop("embed.weight"), "'embed.weight' is absent"),
        (lambda m: m["parameters"]["layers.q.scale"].update(shape=[1]), r"is float32\[1\]"),
        (lambda m: m["files"].update({"tokenizer/../x": {"size": 0, "checksum": 0}}), "not a file"),
        (lambda m: m["files"].update({"/etc/hosts": {"size": 0, "checksum": 0}}), "not a file"),
    ],
)
def test_a_manifest_of_another_version_is_refused(saved, edit, named):
    path = saved / MANIFEST
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    if content.get("version") == 1:
        with pytest.raises(CheckpointError, match="its checksum is another"):
            describe_checkpoint(saved)
    del content["checksum"]
    content["checksum"] = manifest_checksum(content)
    path.write_text(json.dumps(content))
    for read in (describe_checkpoint, lambda folder: load_checkpoint(folder, "int8")):
        with pytest.raises(CheckpointError, match=named):
            read(saved)


@pytest.mark.parametrize("last", ["params", "tokenizer", "manifest"])
@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError])
def test_a_save_that_is_interrupted_leaves_nothing(tmp_path, source, monkeypatch, last, how):
    def interrupted(*args, **kwargs):
        raise how("stop")

    name = {"params": "_write_params", "tokenizer": "_copy_tokenizer", "manifest": "os.fsync"}
    if last == "manifest":
        monkeypatch.setattr(saving.os, "fsync", interrupted)
    else:
        monkeypatch.setattr(saving, name[last], interrupted)
    loaded = load_checkpoint(source)
    with pytest.raises(KeyboardInterrupt if how is KeyboardInterrupt else CheckpointError):
        save_model(tmp_path / "m", loaded.config, loaded.params, source)
    assert list(tmp_path.iterdir()) == []


def test_a_save_whose_process_died_cannot_be_loaded(saved):
    (saved / MANIFEST).unlink()
    assert is_saved(saved)
    for read in (resolve_model, describe_checkpoint, load_checkpoint):
        if read is resolve_model:
            assert read(saved).kind == "saved"
            continue
        with pytest.raises(CheckpointError, match="not saved to its end"):
            read(saved)
    shutil.rmtree(saved / "params")
    with pytest.raises(CheckpointError, match=r"no config\.json and no \.gguf"):
        resolve_model(saved)


def test_a_folder_that_is_taken_is_left_alone(tmp_path, source, whole):
    loaded = load_checkpoint(source)
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "full", "link"):
        with pytest.raises(CheckpointError, match=f"{name}'?: is there already"):
            save_model(tmp_path / name, loaded.config, loaded.params, source)
    with pytest.raises(CheckpointError, match="file"):
        save_model(tmp_path / "file" / "m", loaded.config, loaded.params, source)
    (tmp_path / "empty").mkdir()
    folder = save_model(tmp_path / "empty", loaded.config, loaded.params, source)
    assert load_checkpoint(folder).params
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full", "link"]


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in ("file/m", "file/deep/m", "m" * 245, f"new/{'m' * 245}"):
        with pytest.raises(CheckpointError, match=r"folder=.*: cannot be made: "):
            check_folder(tmp_path / path)
    assert check_folder(tmp_path / "new" / "m") == tmp_path / "new" / "m"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(tmp_path, source, monkeypatch):
    loaded = load_checkpoint(source)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="only 1e-06 GB are free"):
        save_model(tmp_path / "m", loaded.config, loaded.params, source)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_tensorstore_names_the_folder(tmp_path, source, monkeypatch):
    def full(*args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing:\nNo space left on device")

    loaded = load_checkpoint(source)
    monkeypatch.setattr(saving.import_orbax().Checkpointer, "save", full)
    with pytest.raises(CheckpointError, match=r"params: cannot be written: .*: No space left"):
        save_model(tmp_path / "m", loaded.config, loaded.params, source)
    assert list(tmp_path.iterdir()) == []


def test_the_checksum_sees_blocks_that_changed_places():
    values = np.arange(1 << 16, dtype=np.float32)
    swapped = np.roll(values, 1 << 14)
    assert array_checksum(values) != array_checksum(swapped)
    assert array_checksum(values) == array_checksum(values.copy())
    for size in (1, 7, 1 << 16):
        flipped = values[:size].copy()
        flipped.view(np.uint8)[-1] ^= 1
        assert array_checksum(values[:size]) != array_checksum(flipped)


@pytest.mark.parametrize(
    "name", ["tokenizer.gguf", "chat_template.jinja", "generation_config.json"]
)
def test_a_tokenizer_file_that_came_later_is_refused(saved, name):
    assert tokenizer_of(saved) == saved / "tokenizer"
    (saved / "tokenizer" / "notes.txt").write_text("nothing reads this")
    assert tokenizer_of(saved) == saved / "tokenizer"
    (saved / "tokenizer" / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{name}: was not saved with the model"):
        tokenizer_of(saved)


def test_the_tokenizer_alone_is_checked_too(saved):
    (saved / "tokenizer" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: has 2 bytes and should"):
        tokenizer_of(saved)
