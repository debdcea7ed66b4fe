from __future__ import annotations

import dataclasses

import gguf
import pytest

from oxidize_jax.checkpoints.mapping import stored_names
from oxidize_jax.model.transformer import parameter_shapes


@pytest.mark.parametrize("naming", ["hf", "gguf"])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"mlp_bias": True}])
def test_every_parameter_has_tensors_of_its_own(config, naming, options):
    config = dataclasses.replace(config, **options)
    names = stored_names(config, naming)
    assert list(names) == list(parameter_shapes(config))
    flat = [name for group in names.values() for name in group]
    assert len(set(flat)) == len(flat)
    for parameter, group in names.items():
        assert len(group) == (config.num_layers if parameter.startswith("layers.") else 1)


def test_names_of_both_formats(config):
    config = dataclasses.replace(config, attention_bias=True)
    hf, ours = stored_names(config, "hf"), stored_names(config, "gguf")
    assert hf["layers.o.bias"] == (
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.1.self_attn.o_proj.bias",
    )
    assert ours["layers.o.bias"] == ("blk.0.attn_output.bias", "blk.1.attn_output.bias")
    assert hf["lm_head.weight"] == ("lm_head.weight",)
    assert ours["lm_head.weight"] == ("output.weight",)


def test_gguf_names_are_those_the_gguf_package_maps_hugging_face_names_to(config):
    config = dataclasses.replace(config, attention_bias=True, mlp_bias=True)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    ours = stored_names(config, "gguf")
    for parameter, names in stored_names(config, "hf").items():
        mapped = [table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names]
        assert tuple(mapped) == ours[parameter]
