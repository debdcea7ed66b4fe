"""One tiny model and one engine configuration for all tests of the LLM interface."""

import pytest
from tiny_model import SIZES, write_tiny_model

from oxidize_jax import LLM


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def make_llm(tiny_path):
    def make(**options):
        return LLM(**{"model": tiny_path, **SIZES, **options})

    return make


@pytest.fixture(scope="session")
def llm(make_llm):
    return make_llm(check_invariants=True)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """After each test no request is left and every block is free or cached."""
    yield
    if "llm" not in request.fixturenames:
        return
    llm = request.getfixturevalue("llm")
    assert llm.engine.num_unfinished == 0
    llm.engine.step()
    pool = llm.engine.state.scheduler.pool
    assert int(pool.num_free) + int(pool.num_cached) == llm.config.num_blocks
