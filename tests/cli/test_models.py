"""oxidize-jax models and fetch."""

from __future__ import annotations

import json
import re

import gguf
import huggingface_hub
import numpy as np
import pytest
from gguf.quants import dequantize
from tiny_model import write_tiny_model
from write_checkpoints import random_params, write_gguf

from oxidize_jax.checkpoints import builtin
from oxidize_jax.cli.models import GGUF_TYPES
from oxidize_jax.cli.terminal import binary_size
from oxidize_jax.model.config import ModelConfig

NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("OXIDIZE_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fetched(cache, monkeypatch):
    """A built-in model of four bytes, as if it had been fetched."""
    model = builtin.BuiltinModel((), "m.gguf", 4, "0" * 64, "MIT", "Four bytes")
    monkeypatch.setitem(builtin.BUILTIN_MODELS, "four", model)
    path = builtin.builtin_path("four")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def table(out):
    """The two columns, with wrapped lines joined."""
    joined = re.sub(r"\n {4,}", " ", out)
    return dict(re.split(" {2,}", row.strip(), maxsplit=1) for row in joined.splitlines())


def test_list_says_what_there_is_and_what_is_here(run, fetched):
    status, out, err = run("models")
    assert (status, err) == (0, "")
    four = out.index("four")
    assert "Apache-2.0." in out[out.index(NAME) : four]
    assert "not fetched yet" in out[out.index(NAME) : four]
    assert "Gemma Terms of Use (https://ai.google.dev/gemma/terms)." in " ".join(out.split())
    assert f"here: {fetched}" in " ".join(out[four:].split())
    assert "MIT." in out
    assert str(fetched.parent.parent) in out.splitlines()[-1]
    assert "LlamaForCausalLM" in out
    assert max(map(len, out.splitlines())) <= max(100, len(str(fetched)) + 40)


def test_named_gguf_types_can_all_be_decoded():
    for name in GGUF_TYPES.split():
        kind = gguf.GGMLQuantizationType[name]
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        values = dequantize(np.zeros((1, nbytes), np.uint8), kind)
        assert values.shape == (1, block)


def test_table_of_a_folder(run, tiny):
    status, out, err = run("models", tiny)
    assert (status, err) == (0, "")
    rows = table(out)
    config = ModelConfig(259, 24, 40, 2, 4, 2, 8)
    assert rows["path"] == str(tiny)
    assert (rows["format"], rows["architecture"], rows["supported"]) == (
        "safetensors", "llama", "yes",
    )  # fmt: skip
    assert rows["parameters"] == f"{config.num_parameters / 1e6:.1f} million"
    assert rows["context"] == "128 tokens"
    assert rows["tensor types"].endswith(" x F32")
    # 2 (keys and values) x 2 layers x 2 heads x 8 numbers
    assert rows["KV per token"] == "256 B in float32, 128 B in bfloat16"
    assert rows["KV, whole context"] == "32.0 KiB in float32, 16.0 KiB in bfloat16"
    assert rows["weights take"].startswith(binary_size(4 * config.num_parameters))
    assert rows["shape"].startswith("2 layers, 4 query and 2 kv heads of 8, hidden 24")


def test_table_of_a_gguf(run, tmp_path):
    config = ModelConfig(64, 32, 64, 1, 2, 1, 16)
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config), kind="Q4_1")
    rows = table(run("models", path)[1])
    assert rows["format"] == "gguf"
    assert rows["file size"] == binary_size(path.stat().st_size)
    assert rows["tensor types"] == "9 x Q4_1, 3 x F32"


def test_model_that_cannot_be_run_is_described_with_the_reason(run, tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    fields = json.loads((folder / "config.json").read_text())
    fields["model_type"] = "mamba"
    (folder / "config.json").write_text(json.dumps(fields))
    status, out, _ = run("models", folder)
    rows = table(out)
    assert status == 0
    assert rows["supported"].startswith("no: ")
    assert "model_type='mamba' is not supported, only 'llama', 'mistral'" in rows["supported"]
    assert rows["architecture"] == "mamba"
    assert "shape" not in rows


def test_what_a_file_calls_its_architecture_is_printed_short_and_without_codes(run, tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    fields = json.loads((folder / "config.json").read_text())
    for name, shown in (("\x1b[31mred", r"'\x1b[31mred'"), ("x" * 5000, f"'{'x' * 39}...")):
        (folder / "config.json").write_text(json.dumps(fields | {"model_type": name}))
        status, out, err = run("models", folder)
        assert (status, err) == (0, "")
        assert table(out)["architecture"] == shown
        assert "\x1b" not in out


def test_a_model_without_a_tokenizer_is_described_so(run, tiny, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    rows = table(run("models", tmp_path)[1])
    assert rows["supported"] == "yes"
    assert rows["tokenizer"].startswith("no: ")
    assert "tokenizer.json: not found" in rows["tokenizer"]
    assert table(run("models", tiny)[1])["tokenizer"] == "yes"


def test_nothing_is_fetched_to_describe(refused, cache, monkeypatch):
    def never(*_, **options):
        assert options["local_files_only"]
        raise huggingface_hub.errors.LocalEntryNotFoundError("pass local_files_only=False")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    message = refused("models", "org/name")
    assert "'org/name'" in message
    assert "local_files_only" not in message
    assert f"`oxidize-jax fetch {NAME}` gets it (93.8 MiB)" in refused("models", NAME)
    assert not cache.exists()


def test_unknown_models(refused, tmp_path):
    assert "no such file" in refused("models", tmp_path / "m.gguf")
    assert f"these are: gemma-3-270m, {NAME}" in refused("fetch", "smol")


def test_fetch_prints_the_path_alone(run, fetched, monkeypatch):
    monkeypatch.setattr(builtin, "fetch_builtin", lambda name: fetched)
    assert run("fetch", "four") == (0, f"{fetched}\n", "")
    fetched.unlink()
    status, out, err = run("fetch", "four")
    assert (status, out) == (0, f"{fetched}\n")
    assert err == "fetching four (4 B) with pip, once ...\n"


def test_sizes_in_words():
    sizes = [0, 1023, 1024, 98_362_432, 3 * 2**30, 5 * 2**40]
    words = ["0 B", "1023 B", "1.0 KiB", "93.8 MiB", "3.0 GiB", "5.0 TiB"]
    assert [binary_size(size) for size in sizes] == words
