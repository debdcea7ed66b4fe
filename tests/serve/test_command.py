"""``oxidize-jax serve``."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from tiny_model import write_tiny_model

from oxidize_jax.cli import main

# A shell's background jobs ignore Ctrl-C. No preexec_fn: that forks, which JAX warns of.
START = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("oxidize_jax", run_name="__main__")
"""
COMMAND = [sys.executable, "-c", START, "serve"]
SIZES = ["--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]
SIZES += ["--block-size", "4", "--dtype", "float32"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a", "b"], "give one model"),
        (["a", "--model", "b"], "give one model"),
        (["--port", "-1"], "--port"),
        (["--port", "99999"], "port=99999"),
        (["--steps-per-dispatch", "99"], "steps_per_dispatch=99"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--host", "999.1.1.1"], "cannot listen"),
    ],
)
def test_arguments_that_are_refused(argv, said, capsys, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    assert main(["serve", *argv]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        assert main(["serve", "no/such.gguf", "--port", port]) == 2
    assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_in_mid_stream_lets_it_end(tmp_path, number, status):
    path = write_tiny_model(tmp_path / "tiny")
    as_json = ["--log-format", "json"] if number == signal.SIGTERM else []
    process = subprocess.Popen(
        [*COMMAND, str(path), "--port", "0", *SIZES, *as_json],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "THE_KEY": "k"},
    )
    killer = threading.Timer(300, process.kill)
    killer.start()
    with process:
        url = ""
        while not url:
            line = process.stderr.readline()
            assert line, "it ended"
            line = json.loads(line)["event"] if as_json else line
            match = re.search(r"serving tiny at (http://127\.0\.0\.1:\d+)", line)
            url = match.group(1) if match else ""
        body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True, "n": 16}
        reasons, last = [], ""
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            for i, line in enumerate(response.iter_lines()):
                if i == 4:
                    process.send_signal(number)
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                last = line or last
        rest = process.stderr.read()
    killer.cancel()
    assert last == "data: [DONE]"
    assert reasons == ["length"] * 16
    assert process.returncode == status
    assert "Traceback" not in rest
    (told,) = [line for line in rest.splitlines() if "/v1/completions" in line]
    if as_json:
        assert all(json.loads(line)["level"] == "info" for line in rest.splitlines())
        assert json.loads(told)["generated_tokens"] == 16 * 60
    else:
        assert " generated_tokens=960 " in told
