"""Executables on disk: found by what they were compiled for, and by nothing else."""

import concurrent.futures
import contextlib
import dataclasses
import os
import unittest.mock
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from oxidize_jax import executables
from oxidize_jax.executables import COMPILE_EVENT, HIT_EVENT, StoredExecutable
from tests.tools import scaled as code

THIS = "tests.tools.scaled"
SHAPE = jax.ShapeDtypeStruct((3,), np.float32)
ONES = np.ones((3,), np.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache that is on, for executables only."""
    monkeypatch.setenv("OXIDIZE_JAX_CACHE", str(tmp_path))
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "xla"),
        "jax_enable_compilation_cache": False,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()  # JAX looks at these settings once
    yield tmp_path / "executables"
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


PAIR = {"a": SHAPE}


def stored(static=(2,), arguments=(PAIR, SHAPE), result=None):
    return StoredExecutable("scaled", (THIS,), static, arguments, result or {"sum": SHAPE})


def lowered(factor=2):
    """Of a function of its own, hence of a program that this process has not compiled."""
    program = partial(code.scaled, factor)
    return jax.jit(program, donate_argnums=0).lower(PAIR, SHAPE)


def store(entry, factor=2):
    return entry.compile(lowered(factor))


def kept(folder):
    return [path for path in folder.iterdir() if path.suffix != ".note"] if folder.exists() else []


def test_what_one_process_stores_another_calls(folder):
    assert stored().load() is None
    store(stored())
    pair = {"a": jax.numpy.asarray(ONES) + np.float32(1)}
    loaded = stored().load()
    assert loaded is not None
    np.testing.assert_array_equal(loaded(pair, ONES)["sum"], [5, 5, 5])
    assert pair["a"].is_deleted()  # donated, as to the program itself
    assert loaded.memory_analysis().output_size_in_bytes >= 12
    assert sorted(path.name.partition("-")[0] for path in folder.iterdir()) == ["scaled"] * 2
    assert len(kept(folder)) == 1


def test_what_was_not_used_for_longest_goes(folder, monkeypatch):
    monkeypatch.setattr(executables, "_KEPT", 2)
    for second, factor in enumerate((2, 3)):
        entry = stored(static=(factor,))
        store(entry, factor)
        os.utime(entry._noted(), (second, second))
    assert stored(static=(2,)).load() is not None  # used now
    store(stored(static=(4,)), 4)
    assert [stored(static=(n,)).load() is not None for n in (2, 3, 4)] == [True, False, True]


def test_a_load_counts_as_a_program_from_the_disk_cache(folder):
    events = []
    store(stored())

    def listen(event, *_, **__):
        events.append(event)

    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(listen)
    stored().load()
    jax.monitoring.unregister_event_listener(listen)
    jax.monitoring.unregister_event_duration_listener(listen)
    assert [e for e in events if e in (HIT_EVENT, COMPILE_EVENT)] == [HIT_EVENT, COMPILE_EVENT]


def test_whatever_else_it_is_asked_for_is_not_there(folder, monkeypatch):
    store(stored())
    longer = jax.ShapeDtypeStruct((4,), np.float32)
    whole = jax.ShapeDtypeStruct((3,), np.int32)
    assert stored(static=(3,)).load() is None
    assert stored(arguments=(PAIR, longer)).load() is None
    assert stored(arguments=(PAIR, whole)).load() is None
    assert stored(arguments=({"b": SHAPE}, SHAPE)).load() is None
    assert stored(result={"product": SHAPE}).load() is None
    with monkeypatch.context() as patch:
        patch.setattr(executables, "_outside", lambda: "another version")
        assert stored().load() is None
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "float32")
    assert stored().load() is None
    jax.config.update("jax_default_matmul_precision", before)
    assert stored().load() is not None


def test_the_code_is_part_of_the_name(folder, monkeypatch):
    store(stored())
    with monkeypatch.context() as patch:
        patch.setattr(code, "scaled", lambda factor, pair, offset: {"sum": offset})
        assert stored().load() is None
    with monkeypatch.context() as patch:
        patch.setattr(code, "BIAS", np.float32(1))
        assert stored().load() is None
    assert stored().load() is not None


def test_a_change_of_code_that_changes_no_operation_compiles_nothing(folder, monkeypatch):
    assert not store(stored())[1]
    before = executables.compiles()
    with monkeypatch.context() as patch:
        patch.setattr(code, "OTHER", 1, raising=False)
        assert stored().load() is None
        executable, is_stored = store(stored())
        assert is_stored
        pair = {"a": jax.numpy.asarray(ONES)}
        np.testing.assert_array_equal(executable(pair, ONES)["sum"], [3, 3, 3])
        assert stored().load() is not None
        assert not store(stored(static=(3,)), 3)[1]
    assert executables.compiles() == before + 1
    assert stored().load() is not None
    assert len(kept(folder)) == 2


def test_a_note_of_what_is_gone_goes_with_the_next_that_is_kept(folder):
    store(stored())
    (path,) = kept(folder)
    path.unlink()
    assert stored().load() is None
    store(stored(static=(3,)), 3)
    assert len(list(folder.iterdir())) == 2


def test_nothing_is_kept_where_the_code_is_not_known(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(code, "scaled", unittest.mock.MagicMock(wraps=code.scaled))
        store(stored())
    assert not folder.exists()


@pytest.mark.parametrize("content", [b"", b"\x78garbage", "half"])
def test_a_damaged_file_is_as_good_as_none(folder, content):
    store(stored())
    (path,) = kept(folder)
    path.write_bytes(path.read_bytes()[:500] if content == "half" else content)
    assert stored().load() is None
    store(stored())
    assert stored().load() is not None
    assert kept(folder) == [path]
    entry = stored()
    entry.discard()
    assert kept(folder) == [path]
    entry.load()
    entry.discard()
    entry.discard()
    assert not kept(folder)
    assert stored().load() is None


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.write_text("a file where the folder should be")
    store(stored())
    assert stored().load() is None


@dataclasses.dataclass
class Opaque:
    inside: object


def test_nothing_is_kept_of_what_is_not_known_or_has_its_own_device(folder):
    for opaque in (object(), Opaque(object())):
        store(stored(static=(opaque,)))
    array = jax.device_put(ONES, jax.devices()[0])
    store(stored(arguments=(PAIR, array)))
    assert not folder.exists()


def test_without_the_cache_nothing_is_kept(folder):
    jax.config.update("jax_compilation_cache_dir", None)
    store(stored())
    assert stored().load() is None
    assert not folder.exists()


def test_nothing_is_kept_of_an_executable_from_the_disk_cache(folder):
    """What is serialised of it lacks functions: the next process would fail when it calls them.

    JAX gives the same executable to whoever compiles the program again, and counts nothing.
    """
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()
    with disk_cache_of_everything():
        lowered().compile()  # as another process might have left it
        program, before = lowered(), executables.compiles()
        for _ in range(2):
            stored().compile(program)
    assert executables.compiles() == before
    assert not folder.exists()


def test_nothing_is_kept_of_an_executable_that_is_there_already(folder):
    program = lowered()
    compiled = program.compile()
    assert stored().compile(program)[0].runtime_executable() is compiled.runtime_executable()
    assert not folder.exists()


@contextlib.contextmanager
def disk_cache_of_everything():
    names = (
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, 0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_that_are_compiled_are_counted_by_thread():
    before = executables.compiles()
    jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 1.0)
    assert executables.compiles() == before + 1
    jax.monitoring.record_event(HIT_EVENT)
    jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 1.0)
    assert executables.compiles() == before + 1
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(executables.compiles).result() == 0
