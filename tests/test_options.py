"""Options become an engine's sizes; presets are read, and what is wrong with one is named."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from oxidize_jax import options as module
from oxidize_jax.config import EngineConfig
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.options import (
    Options,
    cache_dtype,
    engine_config,
    kv_block_bytes,
    load_options,
    weight_dtype,
)

PRESETS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, max_position_embeddings=8192)
SMOLLM2_1B7 = ModelConfig(
    49152, 2048, 8192, 24, 32, 32, 64, tie_word_embeddings=True, max_position_embeddings=8192
)
LLAMA3_8B = ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, max_position_embeddings=8192)
LLAMA2_7B = ModelConfig(32000, 4096, 11008, 32, 32, 32, 128, max_position_embeddings=4096)
TINY = ModelConfig(97, 24, 40, 2, 4, 2, 8, max_position_embeddings=64)
GIB = 2**30


@pytest.fixture
def preset(tmp_path):
    """``preset(text)``: a file with it."""

    def write(text):
        path = tmp_path / "p.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def accelerator(monkeypatch):
    """``accelerator(**stats)``: pretend that JAX runs on a GPU with these memory statistics."""

    def pretend(stats):
        device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    return pretend


def test_keys_of_all_tables_are_read(preset):
    text = (
        "seed = 3\n[model]\nmodel = 'm'\n[engine]\nkv_cache_gib = 1\n[engine.more]\nblock_size = 8"
    )
    assert load_options(preset(text)) == {
        "seed": 3,
        "model": "m",
        "kv_cache_gib": 1,
        "block_size": 8,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seq = 3", ["unknown key 'max_num_seq'", "Did you mean 'max_num_seqs'?"]),
        ("[engine]\nzzz = 3", ["unknown key 'zzz'", "Known keys: attention, block_size"]),
        ("[a]\nseed = 1\n[b]\nseed = 2", ["'seed' stands twice"]),
        ("seed = 1\nseed =! 2", ["not valid TOML", "line 2"]),
    ],
)
def test_what_is_wrong_with_a_preset_is_named(preset, text, words):
    path = preset(text)
    with pytest.raises(ValueError, match="config=") as caught:
        load_options(path)
    message = str(caught.value)
    for word in [str(path), *words]:
        assert word in message
    assert "\n" not in message


def test_preset_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml.*No such file"):
        load_options(tmp_path / "none.toml")
    (tmp_path / "latin1.toml").write_bytes(b"model = '\xe9'")
    with pytest.raises(ValueError, match=r"latin1\.toml.*not valid TOML"):
        load_options(tmp_path / "latin1.toml")
    with pytest.raises(ValueError, match=r"give a \.toml file"):
        load_options(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("dtype", 32),
        ("kv_cache_dtype", "int8"),
        ("kv_cache_gib", 0),
        ("kv_cache_gib", float("nan")),
        ("kv_cache_gib", "2"),
        ("kv_cache_gib", True),
        ("seed", -1),
        ("seed", True),
        ("seed", None),
        ("max_num_seqs", "16"),
        ("max_num_seqs", [1]),
        ("max_model_len", 100.0),
        ("tokenizer", 5),
        ("attention", ["gather"]),
        ("enable_prefix_caching", "no"),
        ("check_invariants", 1),
        ("deterministic", "yes"),
    ],
)
def test_wrong_values_and_types_are_named(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: must be ")):
        Options(**{name: value})


def test_paths_and_none_where_they_are_meant():
    assert Options(tokenizer=Path("x"), max_model_len=None, kv_cache_gib=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("block_size", 0), ("policy", "fair"), ("max_model_len", 1)],
)
def test_sizes_that_an_engine_cannot_have_are_named(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: must be ")):
        engine_config(Options(**{name: value}), TINY)


def test_every_size_goes_into_the_engine_config():
    chosen = Options(
        max_model_len=48,
        max_num_seqs=40,
        max_num_batched_tokens=33,
        block_size=8,
        num_blocks=77,
        policy="decode_first",
        enable_prefix_caching=False,
        deterministic=True,
        max_logprobs=2,
        max_logit_bias=7,
        max_bad_words=3,
    )
    assert engine_config(chosen, TINY) == EngineConfig(
        max_model_len=48,
        max_num_seqs=40,
        max_num_batched_tokens=33,
        block_size=8,
        num_blocks=77,
        max_num_requests=80,
        policy="decode_first",
        enable_prefix_caching=False,
        deterministic=True,
        max_logprobs=2,
        max_logit_bias=7,
        max_bad_words=3,
        token_mask_size=TINY.vocab_size,
        prefill_tile=32,
    )


def test_prefill_tiles_are_larger_on_cpus(accelerator):
    assert engine_config(Options(), TINY).prefill_tile == 32
    accelerator({"bytes_limit": GIB})
    assert engine_config(Options(), TINY).prefill_tile == EngineConfig.prefill_tile == 16


def test_length_is_the_models_unless_chosen():
    assert engine_config(Options(), TINY).max_model_len == 64
    with pytest.raises(ValueError, match=r"max_model_len=65 is more than the 64 positions"):
        engine_config(Options(max_model_len=65), TINY)


def test_blocks_for_all_sequences_where_the_memory_allows():
    config = engine_config(Options(max_num_seqs=3, max_model_len=50, kv_cache_gib=1), TINY)
    assert config.num_blocks == 3 * 4  # ceil(50 / 16) blocks each


def test_blocks_that_fit_the_given_memory():
    block = kv_block_bytes(Options(), SMOLLM2, 16)
    chosen = Options(kv_cache_gib=0.5, max_model_len=2048)
    config = engine_config(chosen, SMOLLM2)
    assert config.num_blocks == GIB // 2 // block
    assert config.num_blocks < 16 * config.blocks_per_seq


def test_memory_for_less_than_one_sequence_is_refused_with_what_would_fit():
    chosen = Options(dtype="float32", kv_cache_gib=0.25)
    with pytest.raises(ValueError, match="lower max_model_len") as caught:
        engine_config(chosen, SMOLLM2)
    message = str(caught.value)
    assert "max_model_len=8192 needs 0.352 GiB" in message
    assert "0.25 GiB are given" in message
    (length,) = re.findall(r"lower max_model_len to (\d+)", message)
    assert engine_config(dataclasses.replace(chosen, max_model_len=int(length)), SMOLLM2)
    longer = dataclasses.replace(chosen, max_model_len=int(length) + 1)
    with pytest.raises(ValueError, match="raise kv_cache_gib"):
        engine_config(longer, SMOLLM2)


def test_block_bytes_are_those_of_the_cache():
    # keys and values x layers x kv heads x head size x tokens x bytes
    assert kv_block_bytes(Options(dtype="float32"), SMOLLM2, 16) == 2 * 30 * 3 * 64 * 16 * 4
    both = Options(dtype="float32", kv_cache_dtype="bfloat16")
    assert kv_block_bytes(both, SMOLLM2, 16) == 2 * 30 * 3 * 64 * 16 * 2
    assert kv_block_bytes(both, SMOLLM2, 1) == 2 * 30 * 3 * 64 * 2


def types(**options):
    return weight_dtype(Options(**options)), cache_dtype(Options(**options))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile", "bfloat16"),
        ("flags\t\t: fpu avx512_bf16", "float32"),
        ("vmx flags\t: amx_bf16\nFeatures\t: asimd bf16", "float32"),
        (None, "float32"),
    ],
)
def test_types_follow_the_features_of_the_cpu(monkeypatch, flags, expected):
    def read_text(path):
        assert str(path) == "/proc/cpuinfo"
        if flags is None:
            raise FileNotFoundError
        return f"processor\t: 0\n{flags}\n\nprocessor\t: 1\n"

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(Path, "read_text", read_text)
    assert types() == (expected, expected)


def test_types_follow_the_accelerator(accelerator):
    accelerator({})
    assert types() == ("bfloat16", "bfloat16")


def test_types_that_are_named_are_used(accelerator):
    assert types(dtype="float32") == ("float32", "float32")
    assert types(dtype="bfloat16") == ("bfloat16", "bfloat16")
    assert types(dtype="int8") == ("int8", "bfloat16")
    assert types(dtype="int8", kv_cache_dtype="float32") == ("int8", "float32")
    accelerator({})
    assert types(dtype="float32", kv_cache_dtype="bfloat16") == ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("free_kib", "expected"), [(10 * 2**20, 2 * GIB), (2 * 2**20, 1 * GIB), (2**10, 2**19)]
)
def test_memory_of_a_cpu_is_two_gib_or_half_of_what_is_free(monkeypatch, free_kib, expected):
    text = f"MemTotal: 1 kB\nMemAvailable:  {free_kib} kB\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert module._kv_memory(Options(), 0) == expected
    assert module._kv_memory(Options(kv_cache_gib=0.5), 0) == GIB // 2


def test_memory_of_a_system_without_proc(monkeypatch):
    def missing(self):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.get)
    assert module._kv_memory(Options(), 0) == 4096 * 1000 // 4


def test_memory_of_an_accelerator_is_nine_tenths_of_what_is_free(accelerator):
    accelerator({"bytes_limit": 100 * GIB, "bytes_in_use": 20 * GIB})
    assert module._kv_memory(Options(), 0) == int(0.9 * 80 * GIB)
    assert module._kv_memory(Options(kv_cache_gib=3), 0) == 3 * GIB
    accelerator(None)
    assert module._kv_memory(Options(), 0) == int(0.9 * 4 * GIB)


def test_memory_for_parameters_still_to_be_loaded_is_left_free(accelerator):
    accelerator({"bytes_limit": 100 * GIB, "bytes_in_use": 20 * GIB})
    assert module._kv_memory(Options(), 30 * GIB) == int(0.9 * 50 * GIB)
    assert module._kv_memory(Options(), 81 * GIB) == 0
    assert module._kv_memory(Options(kv_cache_gib=3), 30 * GIB) == 3 * GIB
    with pytest.raises(ValueError, match="GiB are free: lower them"):
        engine_config(Options(num_blocks=100), SMOLLM2, reserved=80 * GIB)


def test_blocks_are_the_same_though_the_free_memory_is_not_quite(accelerator):
    """Each number of blocks is a program of its own, which the compile cache may hold."""
    block = kv_block_bytes(Options(dtype="float32"), SMOLLM2, 16)
    chosen = Options(dtype="float32", max_num_seqs=40)
    numbers = set()
    for blocks in range(4000, 4096, 7):
        accelerator({"bytes_limit": int((blocks + 0.5) * block / 0.9)})
        numbers.add(engine_config(chosen, SMOLLM2).num_blocks)
    assert numbers == {3968}  # 31 x 128
    given = dataclasses.replace(chosen, kv_cache_gib=4001 * block / GIB)
    assert engine_config(given, SMOLLM2).num_blocks == 4001


def test_far_too_many_rows_are_refused_by_their_own_name():
    for rows in (2**30, 2**31 - 1, 2**31):
        with pytest.raises(ValueError, match=f"max_num_seqs={rows}"):
            engine_config(Options(max_num_seqs=rows, kv_cache_gib=1), TINY)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_loads_and_sizes_an_engine(path):
    values = load_options(path)
    config = engine_config(Options(**values), SMOLLM2)
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        assert getattr(config, name) == values[name]
    assert config.num_blocks >= config.blocks_per_seq
    assert f"--config configs/{path.name}" in path.read_text()


def test_presets_are_there():
    assert {path.stem for path in PRESETS} == {"cpu", "gpu-large", "low-memory", "tpu"}


def kib_per_token(model, dtype):
    return kv_block_bytes(Options(dtype=dtype), model, 1) / 1024


@pytest.mark.parametrize(
    ("name", "model", "dtype", "label"),
    [
        ("cpu", SMOLLM2, "float32", "SmolLM2-135M"),
        ("cpu", LLAMA3_8B, "float32", "8B Llama"),
        ("low-memory", SMOLLM2, "bfloat16", "SmolLM2-135M"),
        ("low-memory", LLAMA3_8B, "bfloat16", "8B Llama"),
        ("gpu-large", LLAMA3_8B, "bfloat16", "Llama 3 8B"),
        ("tpu", SMOLLM2_1B7, "bfloat16", "SmolLM2-1.7B"),
        ("tpu", LLAMA2_7B, "bfloat16", "Llama 2 7B"),
    ],
)
def test_sizes_in_the_comments_are_right(name, model, dtype, label):
    (path,) = [path for path in PRESETS if path.stem == name]
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines())
    about = comments[comments.index(label) :]
    (stated,) = re.findall(r"([\d.]+)(?: KiB)", about)[:1]
    assert float(stated) == kib_per_token(model, dtype)


@pytest.mark.parametrize(("gpu", "total"), [("H200", 139), ("H100", 79)])
def test_table_of_the_gpu_preset_is_right(accelerator, gpu, total):
    (path,) = [path for path in PRESETS if path.stem == "gpu-large"]
    (row,) = re.findall(rf"#   {gpu} \( ?{total} GiB\)(.*)", path.read_text())
    stated = [
        (int(gib), int(tokens.replace(",", "")))
        for gib, tokens in re.findall(r"(\d+) GiB: +([\d,]+) tokens", row)
    ]
    weights = 2 * LLAMA3_8B.num_parameters
    for (gib, tokens), share in zip(stated, (0.75, 0.92), strict=True):
        accelerator({"bytes_limit": int(share * total * GIB), "bytes_in_use": weights})
        memory = module._kv_memory(Options(), 0)
        assert memory / GIB == pytest.approx(gib, abs=0.6)
        per_token = kv_block_bytes(Options(), LLAMA3_8B, 1)
        assert memory / per_token == pytest.approx(tokens, rel=0.01)


def test_numbers_of_numpy_are_plain_numbers():
    options = Options(max_num_seqs=np.int64(4))
    assert type(options.max_num_seqs) is int


def test_a_preset_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf" + b"max_num_seqs = 3\n")
    assert load_options(path) == {"max_num_seqs": 3}


def test_a_preset_that_is_no_path_is_refused():
    with pytest.raises(ValueError, match="config=None"):
        load_options(None)
