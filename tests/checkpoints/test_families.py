"""The same model from safetensors and from GGUF, for every family that both know."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from family_goldens import FOLDER, read_golden, write_golden_folder
from family_models import MODELS, draw
from write_family_gguf import write_family_gguf

from oxidize_jax.checkpoints import CheckpointError, describe_checkpoint, fill, load_checkpoint
from oxidize_jax.checkpoints.families import FAMILIES
from oxidize_jax.checkpoints.gguf import config_from_gguf
from oxidize_jax.checkpoints.gguf_header import read_gguf_header
from oxidize_jax.checkpoints.hf_config import config_from_hf
from oxidize_jax.model.config import ModelConfig, RopeScaling
from oxidize_jax.model.quantize import dequantize_weight, scale_name
from oxidize_jax.model.rope import layer_frequencies

NOT_IN_GGUF = {"llama_rope_dynamic", "qwen3_moe_unnormed"}
"""No GGUF can say it."""


def test_every_family_has_a_golden():
    assert {path.stem for path in FOLDER.glob("*.npz")} == set(MODELS)
    assert {fields["model_type"] for fields in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_without_loading(tmp_path, name):
    golden = read_golden(name)
    assert golden.fields == MODELS[name], "make_family_goldens.py is to be run again"
    info = describe_checkpoint(write_golden_folder(tmp_path / "hf", golden))
    assert info.supported, info.reason
    assert info.num_parameters == sum(values.size for values in golden.tensors.values())
    assert info.config.architecture == golden.fields["model_type"]


@pytest.mark.parametrize("name", sorted(set(MODELS) - NOT_IN_GGUF))
def test_ld01_ld02_gguf_gives_the_parameters_and_the_config_of_safetensors(
    tmp_path, name, assert_same_params
):
    golden = read_golden(name)
    folder = load_checkpoint(write_golden_folder(tmp_path / "hf", golden))
    path = write_family_gguf(tmp_path / "m.gguf", golden.fields, golden.tensors)
    file = load_checkpoint(path)
    assert_same_params(file.params, folder.params)
    assert _without_rope(file.config) == _without_rope(folder.config)
    for kind in set(folder.config.ropes):
        for length in (16, 17, 64):
            ours, factor = layer_frequencies(file.config, kind, length)
            wanted, wanted_factor = layer_frequencies(folder.config, kind, length)
            np.testing.assert_allclose(ours, wanted, rtol=1e-6)
            assert factor == pytest.approx(wanted_factor, rel=1e-6)


def _without_rope(config: ModelConfig) -> ModelConfig:
    """What a GGUF may say in other words, such as factors for a formula, or cannot say."""
    if config.architecture in ("mistral", "mixtral"):
        # It is converted to a llama, which loses its window.
        config = dataclasses.replace(config, architecture="llama", layer_windows=())
    if config.architecture == "qwen2":
        config = dataclasses.replace(config, layer_windows=())
    if config.architecture.startswith("gemma"):
        config = dataclasses.replace(config, attention_scale=None)
    return dataclasses.replace(config, rope_scaling=RopeScaling())


@pytest.mark.parametrize("name", MODELS)
def test_ld06_a_tensor_less_or_more_is_named(tmp_path, name):
    golden = read_golden(name)
    dropped, kept = list(golden.tensors)[-1], dict(golden.tensors)
    del kept[dropped]
    fewer = dataclasses.replace(golden, tensors=kept)
    with pytest.raises(CheckpointError, match=f"'{dropped}' missing"):
        load_checkpoint(write_golden_folder(tmp_path / "fewer", fewer))
    first = next(iter(golden.tensors))
    more = dataclasses.replace(
        golden, tensors=golden.tensors | {"model.extra.weight": golden.tensors[first]}
    )
    with pytest.raises(CheckpointError, match=r"'model\.extra\.weight' in the file"):
        load_checkpoint(write_golden_folder(tmp_path / "more", more))


def test_ld02_a_stored_norm_of_zero_multiplies_by_one(tmp_path):
    golden = read_golden("gemma3")
    zeroed = dataclasses.replace(
        golden,
        tensors={
            name: np.zeros_like(values) if name.endswith("norm.weight") else values
            for name, values in golden.tensors.items()
        },
    )
    folder = load_checkpoint(write_golden_folder(tmp_path / "hf", zeroed), "bfloat16")
    path = write_family_gguf(tmp_path / "m.gguf", zeroed.fields, zeroed.tensors)
    norms = [name for name in folder.params if name.endswith("norm.weight")]
    assert len(norms) == 7
    for checkpoint in (folder, load_checkpoint(path)):
        for name in norms:
            np.testing.assert_array_equal(checkpoint.params[name], np.float32(1))


def test_the_scale_of_the_largest_gemmas_is_known_by_their_layers(tmp_path):
    for name, key, layers in (("gemma2", "gemma2", 46), ("gemma3", "gemma3", 62)):
        golden = read_golden(name)
        path = write_family_gguf(tmp_path / f"{name}.gguf", golden.fields, golden.tensors)
        header = read_gguf_header(path)
        assert config_from_gguf(header).attention_scale is None
        large = dataclasses.replace(
            header,
            metadata=header.metadata | {f"{key}.block_count": layers},
            tensors=header.tensors
            + tuple(dataclasses.replace(header.tensors[0], name=f"t{i}") for i in range(99)),
        )
        # Hidden size over heads, which is not the head size.
        assert config_from_gguf(large).attention_scale == (30 // 6) ** -0.5


def test_gpt2_with_and_without_the_prefix_of_its_names(tmp_path, assert_same_params):
    golden = read_golden("gpt2")
    bare = {name.removeprefix("transformer."): v for name, v in golden.tensors.items()}
    # Buffers of masks that old files have.
    mask = {f"h.{i}.attn.bias": np.ones((1, 1, 4, 4), np.float32) for i in range(2)}
    without = dataclasses.replace(golden, tensors=bare | mask)
    assert set(without.tensors) & {"wte.weight", "h.1.mlp.c_fc.bias"}
    assert_same_params(
        load_checkpoint(write_golden_folder(tmp_path / "a", golden)).params,
        load_checkpoint(write_golden_folder(tmp_path / "b", without)).params,
    )
    assert describe_checkpoint(tmp_path / "b").context_length == 60


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["gpt2", "phi3_partial", "gemma2", "mixtral"])
def test_fused_turned_and_shifted_tensors_in_every_type(tmp_path, name, dtype):
    folder = write_golden_folder(tmp_path, read_golden(name))
    exact, loaded = load_checkpoint(folder).params, load_checkpoint(folder, dtype).params
    for parameter, values in exact.items():
        ours = loaded[parameter]
        if scale_name(parameter) in loaded and parameter != scale_name(parameter):
            rows = ours.reshape(-1, ours.shape[-1])
            scale = loaded[scale_name(parameter)].reshape(-1)
            ours = dequantize_weight(rows, scale).reshape(ours.shape)
        error = np.abs(np.asarray(ours, np.float32) - np.asarray(values)).max()
        assert error <= 0.02 * np.abs(np.asarray(values)).max(), parameter


QWEN = MODELS["qwen2"] | {"sliding_window": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "max_window_layers": 0}, ()),
        ({"max_window_layers": 0}, (4, 4)),
        ({"max_window_layers": 1}, (0, 4)),
        ({"max_window_layers": 2}, ()),
        ({"sliding_window": None, "max_window_layers": 0}, ()),
        ({"layer_types": ["sliding_attention", "full_attention"]}, (4, 0)),
    ],
)
def test_ld08_which_layers_of_a_qwen_have_a_window(changes, windows):
    assert config_from_hf(QWEN | changes).layer_windows == windows


def test_ld09_the_scale_of_embeddings_is_not_rounded_to_bfloat16():
    """Of Gemma 3 270M it is sqrt(640) = 25.298, in bfloat16 25.25."""
    config = config_from_hf(MODELS["gemma3"] | {"hidden_size": 640, "num_attention_heads": 4})
    assert config.embedding_scale == pytest.approx(25.298, abs=1e-3)


def test_older_spellings_of_gemma_3():
    new = MODELS["gemma3"]
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {
        "rope_theta": 1000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    assert config_from_hf(old) == config_from_hf(new)
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config_from_hf(new | {"layer_types": types}) == config_from_hf(new)
    every_second = config_from_hf(new | {"sliding_window_pattern": 2})
    assert every_second.layer_windows == (9, 0, 9, 0, 9, 0, 9)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("phi3_partial", {"mlp_bias": True}, "mlp_bias=True"),
        ("phi3_partial", {"rope_parameters": {"rope_type": "mrope"}}, "'mrope'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Conditional"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [[1]] * 64}, r"no_rope_layers=.*0 or 1 for each"),
        ("gpt2", {"n_head": 4}, "n_embd=30 is not a multiple of n_head=4"),
        ("olmo2", {"model_type": "olmo3"}, "model_type='olmo3'.*'olmo2'"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"num_experts_per_tok": 8}, "num_experts_per_token=8.*num_experts=7"),
        ("qwen3_moe", {"model_type": "qwen2_moe"}, "model_type='qwen2_moe'.*'qwen3_moe'"),
        ("mixtral", {"model_type": "deepseek_v3"}, "model_type='deepseek_v3'"),
        ("mixtral", {"model_type": "gpt_oss"}, "model_type='gpt_oss'"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(name, changes, named):
    with pytest.raises(CheckpointError, match=named):
        config_from_hf(MODELS[name] | changes)


@pytest.mark.parametrize("name", ["olmo2", "qwen3"])
def test_a_window_that_a_family_does_not_have_in_a_gguf_is_refused(tmp_path, name):
    """With one an OLMo 2 is an OLMo 3, for instance."""
    golden = read_golden(name)
    path = write_family_gguf(tmp_path / "m.gguf", golden.fields, golden.tensors)
    header = read_gguf_header(path)
    window = header.metadata | {f"{name}.attention.sliding_window": 9}
    with pytest.raises(CheckpointError, match="sliding_window=9"):
        config_from_gguf(dataclasses.replace(header, metadata=window))


def test_a_window_pattern_in_a_gguf_wins(tmp_path):
    golden = read_golden("gemma3")
    path = write_family_gguf(tmp_path / "m.gguf", golden.fields, golden.tensors)
    header = read_gguf_header(path)

    def config(pattern):
        changes = {"gemma3.attention.sliding_window_pattern": pattern}
        return config_from_gguf(dataclasses.replace(header, metadata=header.metadata | changes))

    assert config(2).layer_windows == (9, 0, 9, 0, 9, 0, 9)
    listed = config([True, False, False, False, False, False, True])
    assert listed.layer_windows == (9, 0, 0, 0, 0, 0, 9)
    assert listed.layer_ropes == ("local", *["global"] * 5, "local")
    with pytest.raises(CheckpointError, match="names 2 layers"):
        config([True, False])


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mixtral", {"llama.expert_shared_count": 1}, "expert_shared_count"),
        ("mixtral", {"llama.expert_gating_func": 2}, "expert_gating_func"),
        ("mixtral", {"llama.expert_used_count": 6}, "num_experts_per_token=6.*num_experts=5"),
        ("qwen3_moe", {"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale=2.5"),
        ("qwen3_moe", {"qwen3moe.expert_count": 0}, "expert_count=0"),
        ("qwen3_moe", {"general.architecture": "qwen2moe"}, "'qwen2moe'.*'qwen3moe'"),
        ("qwen3", {"qwen3.expert_count": 4}, "expert_count"),
    ],
)
def test_experts_that_are_not_built_are_refused_in_a_gguf(tmp_path, name, changes, named):
    golden = read_golden(name)
    path = write_family_gguf(tmp_path / "m.gguf", golden.fields, golden.tensors)
    header = read_gguf_header(path)
    with pytest.raises(CheckpointError, match=named):
        config_from_gguf(dataclasses.replace(header, metadata=header.metadata | changes))


def test_ld06_an_expert_of_another_shape_or_too_many_of_them_are_named(tmp_path):
    golden = read_golden("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    wrong = dataclasses.replace(golden, tensors=golden.tensors | {name: golden.tensors[name].T})
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape"):
        load_checkpoint(write_golden_folder(tmp_path / "wrong", wrong))
    folder = write_golden_folder(tmp_path / "many", golden, num_local_experts=2**31 - 1)
    with pytest.raises(CheckpointError, match="num_experts=2147483647"):
        load_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_ld07_experts_are_filled_a_tensor_at_a_time_into_one_array(tmp_path, monkeypatch, dtype):
    """No array but the parameter's own is as large as the experts of a layer."""
    golden = read_golden("mixtral")
    wide = dict(golden.fields, intermediate_size=4096, num_hidden_layers=1)
    shapes = {n: v.shape for n, v in golden.tensors.items() if ".layers.1." not in n}
    for name in shapes:
        if ".w1." in name or ".w3." in name:
            shapes[name] = (4096, 30)
        if ".w2." in name:
            shapes[name] = (30, 4096)
    tensors = draw(0, wide, shapes)
    path = write_family_gguf(tmp_path / "m.gguf", wide, tensors)
    folder = write_golden_folder(
        tmp_path / "hf", dataclasses.replace(golden, fields=wide, tensors=tensors)
    )
    one = 4096 * 30 * 4
    monkeypatch.setattr(fill, "_CHUNK", 1 << 12)
    for source in (path, folder):
        load_checkpoint(source, dtype)  # imports and programs, once
        tracemalloc.start()
        params = load_checkpoint(source, dtype).params
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        held = sum(leaf.nbytes for leaf in params.values())
        assert peak < held + one // 2, (peak, held)
