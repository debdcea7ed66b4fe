"""The cache of compiled programs: chosen by the user, repaired after a kill."""

import os
import time
import zlib

import jax
import pytest

from oxidize_jax import compile_cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OXIDIZE_JAX_CACHE", str(tmp_path / "cache"))
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache" / "xla"
    for name, value in before.items():
        jax.config.update(name, value)


SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def test_the_cache_is_in_the_folder_of_the_environment(folder):
    compile_cache.enable_compile_cache()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.is_dir()


def test_a_cache_that_jax_has_already_is_left_alone(folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    compile_cache.enable_compile_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not folder.exists()


def test_a_cache_folder_that_cannot_be_made_is_no_error(folder):
    folder.parent.parent.mkdir(exist_ok=True)
    folder.parent.write_text("a file where the folder should be")
    compile_cache.enable_compile_cache()
    assert jax.config.jax_compilation_cache_dir is None


def test_torn_entries_go_and_whole_ones_stay(folder):
    folder.mkdir(parents=True)
    whole = zlib.compress(os.urandom(5000))
    entries = {
        "whole": whole,
        "half": whole[:2500],
        "one_byte_short": whole[:-1],
        "empty": b"",
        "garbage": b"\x78" + b"no zlib",
        "zstd": b"\x28\xb5\x2f\xfd" + b"not ours to judge",
    }
    for name, content in entries.items():
        (folder / f"{name}-cache").write_bytes(content)
    (folder / "other").write_bytes(b"")
    compile_cache.enable_compile_cache()
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert left == ["other", "whole-cache", "zstd-cache"]


def test_entries_are_read_once(folder, monkeypatch):
    folder.mkdir(parents=True)
    old, new = folder / "old-cache", folder / "new-cache"
    old.write_bytes(b"")
    past = time.time() - 1000
    os.utime(old, (past, past))
    (folder / ".checked").touch()
    new.write_bytes(b"")
    compile_cache.enable_compile_cache()
    assert old.exists()
    assert not new.exists()
