"""Whichever file the weights come from, the model computes what transformers recorded."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from write_checkpoints import write_gguf

from oxidize_jax.checkpoints.load import load_checkpoint
from oxidize_jax.model.reference import reference_forward


@pytest.mark.parametrize("name", ["gqa_wide_heads", "mha_biased", "gqa_tied"])
def test_ld01_logits_from_safetensors_and_from_gguf_are_those_of_transformers(
    tmp_path, goldens, name
):
    folder = goldens / "llama_tiny" / name
    saved = load_checkpoint(folder)
    as_numpy = {key: np.asarray(values) for key, values in saved.params.items()}
    converted = load_checkpoint(write_gguf(tmp_path / "m.gguf", saved.config, as_numpy))
    with np.load(folder / "golden.npz") as golden:
        tokens = np.concatenate([golden["prompt_ids"], golden["output_ids"][:-1]])
        expected = golden["logits"]
    for loaded in (saved, converted):
        logits = reference_forward(loaded.config, loaded.params, jnp.asarray(tokens))
        np.testing.assert_allclose(logits, expected, atol=2e-5)
