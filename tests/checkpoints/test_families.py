"""The same model from safetensors and from GGUF, for every family that both know."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from family_goldens import FOLDER, read_golden, write_golden_folder
from family_models import MODELS
from write_family_gguf import write_family_gguf

from oxidize_jax.checkpoints import CheckpointError, describe_checkpoint, load_checkpoint
from oxidize_jax.checkpoints.families import FAMILIES
from oxidize_jax.model.config import ModelConfig, RopeScaling
from oxidize_jax.model.rope import layer_frequencies

NOT_IN_GGUF = {"llama_rope_dynamic"}
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
    """What a GGUF may say in other words, such as factors for a formula."""
    if config.architecture == "mistral":
        # It is converted to a llama, which loses its window.
        config = dataclasses.replace(config, architecture="llama", layer_windows=())
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
