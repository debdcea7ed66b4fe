"""Tiny models and the checks that several test files share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.load import load_checkpoint
from oxidize_jax.model.config import ModelConfig


@pytest.fixture
def config() -> ModelConfig:
    """Grouped heads of a size that is not hidden_size / num_heads; an untied head."""
    return ModelConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        max_position_embeddings=64,
    )


@pytest.fixture
def assert_same_params():
    """Same names, shapes and bits; ``expected`` may be numpy or JAX arrays."""

    def check(actual, expected) -> None:
        assert set(actual) == set(expected)
        for name in expected:
            np.testing.assert_array_equal(
                np.asarray(actual[name]), np.asarray(expected[name]), err_msg=name, strict=True
            )

    return check


@pytest.fixture
def assert_loads_or_names():
    """A damaged checkpoint gives finite parameters, or a one-line error that names it."""

    def check(path: Path, name: str) -> None:
        message = ""
        try:
            loaded = load_checkpoint(path)
        except CheckpointError as error:
            message = str(error)
        else:
            assert all(np.all(np.isfinite(values)) for values in loaded.params.values())
        assert not message or name in message
        assert "\n" not in message

    return check


@pytest.fixture
def goldens() -> Path:
    """Folder of the recorded reference results."""
    return Path(__file__).parents[1] / "goldens"
