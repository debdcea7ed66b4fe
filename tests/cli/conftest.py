"""One tiny model and one small engine configuration for all tests, so that it compiles once."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from oxidize_jax.cli import main

# The sizes of tests/llm: in one session, what is compiled there serves here.
CONFIG = """\
[model]
model = "{model}"

[engine]
max_model_len = 64
dtype = "float32"
max_num_seqs = 4
max_num_batched_tokens = 32
block_size = 4
max_logprobs = 3
"""


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive():
    """A shell starts what it runs in the background with interrupts ignored, and that is
    inherited: the processes that tests start and interrupt would go on."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer and a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def tiny_raw(tiny, tmp_path_factory) -> Path:
    """The same without a chat template."""
    folder = tmp_path_factory.mktemp("cli") / "raw"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def config(tiny, tmp_path_factory) -> Path:
    """The preset that every run of the tiny model uses."""
    path = tmp_path_factory.mktemp("cli") / "tiny.toml"
    path.write_text(CONFIG.format(model=tiny))
    return path


@pytest.fixture
def run(capsys, monkeypatch):
    """``run(*argv) -> (status, stdout, stderr)`` of the command in this process."""
    # JAX takes the folder of its compile cache once for the whole process.
    monkeypatch.setattr("oxidize_jax.llm.enable_compile_cache", lambda: None)
    # main sets it for jax; whatever it does is undone after the test.
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")

    def call(*argv):
        capsys.readouterr()
        status = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def generate(run, config):
    """``generate(*argv)``: the subcommand with the shared configuration, past random stops."""
    return lambda *argv: run("generate", "--config", config, "--ignore-eos", *argv)


@pytest.fixture
def refused(run):
    """``refused(*argv)``: the message of a command that must end with status 2."""

    def call(*argv, status=2):
        got, out, err = run(*argv)
        assert (got, out) == (status, "")
        assert err.startswith("oxidize-jax: error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err.removeprefix("oxidize-jax: error: ").rstrip("\n")

    return call
