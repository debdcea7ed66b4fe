from __future__ import annotations

import dataclasses
import json
import math

import pytest
from write_checkpoints import hf_config

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.hf_config import config_from_hf, read_json_object
from oxidize_jax.model.config import ModelConfig, RopeScaling
from oxidize_jax.model.rope import layer_frequencies

CONFIG = ModelConfig(97, 24, 40, 2, 4, 2, 8, max_position_embeddings=64)


@pytest.mark.parametrize("transformers", [4, 5])
def test_reads_what_both_versions_of_transformers_write(config, transformers):
    config = dataclasses.replace(config, attention_bias=True, tie_word_embeddings=True)
    assert config_from_hf(hf_config(config, transformers=transformers)) == config


def test_absent_and_null_fields_take_the_defaults_of_llama_config(config):
    fields = hf_config(config)
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"):
        fields[key] = None
    for key in ("max_position_embeddings", "tie_word_embeddings", "mlp_bias", "architectures"):
        del fields[key]
    read = config_from_hf(fields)
    assert read.num_kv_heads == read.num_heads == 4
    assert read.head_dim == 24 // 4
    assert (read.rms_norm_eps, read.rope_theta) == (1e-6, 10_000.0)
    assert read.max_position_embeddings == 2048
    assert not read.tie_word_embeddings
    assert not read.mlp_bias


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}


def scaling(**rope) -> RopeScaling:
    """Of a Llama with these ``rope_parameters`` and a context of 64."""
    fields = hf_config(CONFIG) | {"rope_parameters": rope}
    return config_from_hf(fields).rope_scaling


def test_every_kind_of_rope_scaling_is_read():
    assert scaling(rope_type="linear", factor=2) == RopeScaling("linear", factor=2.0)
    assert scaling(type="dynamic", factor=2.5) == RopeScaling("dynamic", factor=2.5)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0}
    original = {"original_max_position_embeddings": 16}
    assert scaling(rope_type="llama3", **llama3, **original) == RopeScaling(
        "llama3", **llama3, **original
    )
    assert scaling(rope_type="yarn", factor=4.0) == RopeScaling(
        "yarn",
        factor=4.0,
        attention_factor=0.1 * math.log(4) + 1,
        original_max_position_embeddings=64,
    )
    yarn = scaling(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5, truncate=False)
    assert yarn.attention_factor == (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert not yarn.truncate
    assert scaling(rope_type="yarn", factor=4.0, attention_factor=1.5).attention_factor == 1.5


def test_ld05_the_attention_factor_of_a_longrope():
    rope = {"rope_type": "su", "short_factor": [1.0] * 4, "long_factor": [4] * 4}
    fields = hf_config(CONFIG) | {
        "rope_parameters": rope,
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131_072,
    }
    read = config_from_hf(fields)
    assert read.rope_scaling.attention_factor == pytest.approx(1.190238, abs=1e-6)
    for length, first in ((4096, 1.0), (4097, 0.25)):
        assert layer_frequencies(read, "global", length)[0][0] == first
    with pytest.raises(CheckpointError, match="long_factor"):
        config_from_hf(fields | {"rope_parameters": rope | {"long_factor": 4.0}})
    with pytest.raises(CheckpointError, match="factor' is missing"):
        scaling(rope_type="linear")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (4, 4)),
        ({"sliding_window": None}, ()),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (0, 4)),
        ({"sliding_window": 64}, ()),
    ],
)
def test_ld08_a_window_may_be_null_and_layer_types_win(changes, windows):
    fields = hf_config(CONFIG) | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 4,
    }
    assert config_from_hf(fields | changes).layer_windows == windows
    del fields["sliding_window"]
    fields["max_position_embeddings"] = 32_768
    assert config_from_hf(fields).layer_windows == (4096, 4096)
    with pytest.raises(UnsupportedModelError, match="layer_types='chunked_attention'"):
        config_from_hf(fields | {"layer_types": ["chunked_attention"] * 2})
    with pytest.raises(CheckpointError, match="layer_types"):
        config_from_hf(fields | {"layer_types": ["full_attention"]})


def test_rope_parameters_win_over_a_stale_rope_theta(config):
    assert config_from_hf(hf_config(config) | {"rope_theta": 7.0}).rope_theta == 50_000.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'.*'llama'"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\]"),
        ({"model_type": None}, "model_type=None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 8.0}}, "'ntk'.*'default'"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope'"),
        ({"rope_scaling": {"mrope_section": [1, 1, 2]}}, r"rope_scaling\.mrope_section"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_what_the_model_cannot_run_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        config_from_hf(hf_config(config) | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "24"}, "hidden_size='24'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"rms_norm_eps": 1e300}, r"rms_norm_eps=1e\+300: must fit float32: from 1.175e-38 to 3"),
        ({"rms_norm_eps": 1e-60}, "rms_norm_eps=1e-60: must fit float32"),
        ({"rms_norm_eps": 1e-40}, "rms_norm_eps=1e-40: must fit float32"),
        ({"rope_parameters": {"rope_theta": 1e39}}, r"rope_theta=1e\+39: must fit float32"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta=0.5: must be at least 1"),
        ({"rope_scaling": YARN | {"factor": 1e40}}, r"factor=1e\+40: must fit float32"),
        ({"rope_scaling": YARN | {"attention_factor": 1e40}}, r"attention_factor=1e\+40"),
        ({"rope_scaling": YARN | {"rope_theta": 1}}, r"rope_theta=1.0: must be above 1 .*'yarn'"),
        ({"rope_scaling": YARN | {"beta_fast": 1e308}}, r"beta_fast=1e\+308: must fit float32"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor=4.0: must be below"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 9}}, "low_freq_factor=9.0: must be below"),
    ],
)
def test_odd_values_are_errors_that_name_the_field(config, changes, named):
    with pytest.raises(CheckpointError, match=named):
        config_from_hf(hf_config(config) | changes)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1,}', "[1]", "\ufeff{}", "[" * 100_000])
def test_malformed_json_is_an_error_that_names_the_file(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, "utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json_object(path)


def test_json_that_is_not_text_or_not_there(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_json_object(path)
    with pytest.raises(CheckpointError, match=r"config\.json is not there"):
        read_json_object(tmp_path / "none" / "config.json")


def test_json_object_comes_back(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": [1, None]}))
    assert read_json_object(path) == {"a": [1, None]}


@pytest.mark.parametrize(
    "field",
    [
        *("model_type", "architectures", "hidden_size", "rms_norm_eps", "tie_word_embeddings"),
        *("hidden_act", "rope_scaling", "quantization_config"),
    ],
)
def test_a_deeply_nested_value_is_refused_in_a_line(config, field):
    nested: object = 1
    for _ in range(5000):  # more than repr can
        nested = [nested]
    with pytest.raises(CheckpointError, match=field) as caught:
        config_from_hf(hf_config(config) | {field: nested})
    assert len(str(caught.value)) < 500
