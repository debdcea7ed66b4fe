from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from write_checkpoints import random_params, write_gguf, write_hf_folder

from oxidize_jax import progress
from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.functional import build
from oxidize_jax.model.quantize import quantize
from oxidize_jax.model.transformer import parameter_shapes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, "bfloat16", np.float32])
def test_loads_the_tree_that_the_model_asks_for(tmp_path, config, dtype):
    loaded = load_checkpoint(write_gguf(tmp_path / "m.gguf", config, random_params(config)), dtype)
    assert {n: v.shape for n, v in loaded.params.items()} == parameter_shapes(config)
    for name, values in loaded.params.items():
        assert isinstance(values, jax.Array)
        norm = name in ("final_norm.weight", "layers.input_norm.weight", "layers.post_norm.weight")
        assert values.dtype == (jnp.float32 if norm else jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.uint8, "float64"])
def test_other_target_types_are_refused(tmp_path, config, dtype):
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config))
    with pytest.raises(ValueError, match=r"dtype=.*float32, bfloat16 or int8"):
        load_checkpoint(path, dtype)


@pytest.mark.parametrize("write", [write_gguf, write_hf_folder])
@pytest.mark.parametrize("tied", [True, False])
def test_int8_is_what_quantize_makes_of_float32(tmp_path, config, write, tied):
    """Row by row in numpy while loading, or layer by layer in JAX afterwards."""
    biases = {"attention_bias": True, "mlp_bias": True} if write is write_hf_folder else {}
    config = dataclasses.replace(config, tie_word_embeddings=tied, **biases)
    path = write(tmp_path / "m.gguf", config, random_params(config))
    loaded = load_checkpoint(path, jnp.int8).params
    assert {n: v.shape for n, v in loaded.items()} == parameter_shapes(config, quantized=True)
    expected = quantize(load_checkpoint(path).params)
    assert loaded.keys() == expected.keys()
    for name, values in expected.items():
        assert loaded[name].dtype == values.dtype
        # Sums in another order: a number half way between two may go to the other.
        ours, theirs = np.asarray(loaded[name], np.float32), np.asarray(values, np.float32)
        step = 1 if values.dtype == jnp.int8 else 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=step)
        assert np.mean(np.abs(ours - theirs) >= 1) < 0.01
    build(config, loaded)


def test_parameters_are_placed_one_by_one_as_they_are_read(tmp_path, config):
    params = random_params(config)
    placed = []

    def place(name, array):
        np.testing.assert_array_equal(array, params[name])
        placed.append(name)
        return jnp.zeros((len(placed),), jnp.float32)

    path = write_hf_folder(tmp_path, config, params)
    loaded = load_checkpoint(path, place=place)
    assert placed == list(parameter_shapes(config))
    assert [values.shape for values in loaded.params.values()] == [
        (count + 1,) for count in range(len(placed))
    ]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about memory shared with the host")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cpu_arrays_are_the_memory_that_was_filled(tmp_path, config, dtype):
    from oxidize_jax.checkpoints.fill import place_on_default_device

    shared = []

    def place(name, array):
        placed = place_on_default_device(name, array)
        shared.append(placed.unsafe_buffer_pointer() == array.ctypes.data)
        return placed

    load_checkpoint(
        write_gguf(tmp_path / "m.gguf", config, random_params(config)), dtype, place=place
    )
    assert shared == [True] * len(parameter_shapes(config))


def test_progress_bar_counts_tensors_where_somebody_watches(tmp_path, config, capfd, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config))
    load_checkpoint(path, progress=True)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0)
    load_checkpoint(path)
    assert capfd.readouterr().err == ""
    load_checkpoint(path, progress=True)
    assert "/21" in capfd.readouterr().err


def test_progress_bar_without_tqdm_says_what_to_install(tmp_path, config, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config))
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    assert load_checkpoint(path).params
    with pytest.raises(ImportError, match="pip install tqdm"):
        load_checkpoint(path, progress=True)


def test_gguf_without_the_gguf_package_says_what_to_install(tmp_path, config, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", config, random_params(config))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        load_checkpoint(path)


@pytest.mark.parametrize("tied", [True, False])
def test_description_is_what_loading_gives(tmp_path, config, tied):
    config = dataclasses.replace(config, tie_word_embeddings=tied, attention_bias=True)
    params = random_params(config)
    gguf = write_gguf(tmp_path / "m.gguf", config, params)
    folder = write_hf_folder(tmp_path / "hf", config, params, shards=2)
    for path, kind in ((gguf, "gguf"), (folder, "safetensors")):
        info = describe_checkpoint(path)
        assert (info.format, info.architecture, info.supported, info.reason) == (
            (kind, "llama", True, "")
        )
        assert info.config == config
        assert info.num_parameters == sum(values.size for values in params.values())
        assert info.context_length == 64
        for dtype, size in ((jnp.float32, info.bytes_float32), (jnp.bfloat16, info.bytes_bfloat16)):
            loaded = load_checkpoint(path, dtype).params
            assert size == sum(values.nbytes for values in loaded.values())
    assert describe_checkpoint(gguf).file_bytes == gguf.stat().st_size
    shards = [p.stat().st_size for p in folder.glob("*.safetensors")]
    assert describe_checkpoint(folder).file_bytes == sum(shards)


def test_path_that_is_not_there_or_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_checkpoint(tmp_path / "none.gguf")
    (tmp_path / "m.safetensors").write_bytes(bytes(64))
    with pytest.raises(CheckpointError, match=r"give the folder that has config\.json"):
        load_checkpoint(tmp_path / "m.safetensors")


# The high-water mark in /proc starts afresh in a new program; that of getrusage is inherited.
MEASURE = """
import sys
import jax, jax.numpy as jnp, gguf
from oxidize_jax.checkpoints.load import load_checkpoint

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

jnp.zeros((1,), jnp.float32).block_until_ready()
before = peak()
params = load_checkpoint(sys.argv[1], sys.argv[2]).params
print((peak() - before) / sum(values.nbytes for values in params.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
@pytest.mark.parametrize(("file", "dtype"), [("hf", "bfloat16"), ("m.gguf", "float32")])
def test_peak_memory_is_that_of_the_parameters(large_checkpoints: Path, file, dtype):
    command = [sys.executable, "-c", MEASURE, str(large_checkpoints / file), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Measured 1.008 to 1.016: nothing is held twice.
    assert 0.9 < float(done.stdout) < 1.2


@pytest.fixture(scope="module")
def large_checkpoints(tmp_path_factory) -> Path:
    """55 M parameters (220 MB in f32) as bf16 safetensors and as Q8_0."""
    folder = tmp_path_factory.mktemp("large")
    config = ModelConfig(16_000, 768, 2048, 6, 12, 4, 64, tie_word_embeddings=True)
    params = {
        name: np.full(shape, 0.5, np.float32) for name, shape in parameter_shapes(config).items()
    }
    write_hf_folder(folder / "hf", config, params, dtype=jnp.bfloat16)
    write_gguf(folder / "m.gguf", config, params, kind="Q8_0")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures with /proc")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_peak_memory_of_a_gigabyte_in_shards(gigabyte: Path, dtype):
    """The parameters once."""
    command = [sys.executable, "-c", MEASURE, str(gigabyte), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < 1.2


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory) -> Path:
    """250 M parameters, 1.0 GB in f32, as 6 shards in bf16."""
    config = ModelConfig(32_000, 1024, 4096, 14, 16, 4, 64, tie_word_embeddings=True)
    params = {
        name: np.full(shape, 0.5, np.float32) for name, shape in parameter_shapes(config).items()
    }
    folder = tmp_path_factory.mktemp("gigabyte")
    return write_hf_folder(folder, config, params, dtype=jnp.bfloat16, shards=6)
