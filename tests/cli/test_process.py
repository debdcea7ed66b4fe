"""The command as a process of its own: Ctrl-C while XLA compiles, streams that are closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from oxidize_jax.progress import is_watched

COMMAND = [sys.executable, "-m", "oxidize_jax"]
INTERRUPTED = """
import atexit, os, signal, time
from oxidize_jax import cli
def command(args):
    atexit.register(print, "shut down")
    print("text")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
cli.models.run_models = command
cli.sys.argv = ["oxidize-jax", "models"]
cli.run_process()
"""


def environment(tmp_path, **more):
    """With a cold cache of compiled programs."""
    variables = {**os.environ, "OXIDIZE_JAX_CACHE": str(tmp_path / "cache"), **more}
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)
    return variables


def test_interrupt_leaves_without_shutting_the_interpreter_down():
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "text\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [4, 6])
def test_interrupt_of_the_first_compilation_is_quiet_and_quick(config, tmp_path, seconds):
    process = subprocess.Popen(
        [*COMMAND, "generate", "--config", str(config), "--raw", "once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    )
    with process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        start = time.time()
        assert process.communicate() == (b"", b"")
    assert process.returncode == 130
    assert time.time() - start < 3


@pytest.mark.parametrize("backend", ["cuda", "warp"])
@pytest.mark.parametrize("argv", [["--version"], ["generate", "x", "--model"], ["models"]])
def test_backend_that_does_not_start_is_one_line(tiny, tmp_path, backend, argv):
    done = subprocess.run(
        [*COMMAND, *argv, *([] if argv == ["--version"] else [str(tiny)])],
        capture_output=True,
        text=True,
        env=environment(tmp_path, JAX_PLATFORMS=backend),
    )
    if backend == "cuda" and done.returncode == 0:
        pytest.skip("there is a GPU")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    start = f"oxidize-jax: error: JAX could not start the backend {backend}"
    assert done.stderr.startswith(start)
    assert done.stderr.endswith("; unset JAX_PLATFORMS or set JAX_PLATFORMS=cpu.\n")


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_take_nothing_and_break_nothing(stream):
    command = f'"$@" {stream}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *COMMAND, "models"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Built-in models" in done.stdout) == (" >" not in f" {stream}")


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "answers"), [(">&-", False), ("2>&-", True)])
def test_generate_with_a_closed_stream(config, tmp_path, stream, answers):
    argv = ["generate", "--config", str(config), "--raw", "once", "--max-tokens", "8"]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {stream}', "sh", *COMMAND, *argv],
        capture_output=True,
        env=environment(tmp_path),
    )
    assert (done.returncode, bool(done.stdout)) == (0, answers)
    assert b"Traceback" not in done.stderr


def test_closed_error_stream_is_not_watched(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    assert is_watched() is ("ipykernel" in sys.modules)
