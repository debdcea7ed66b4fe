"""One tiny model behind a real port. The sizes are those of tests/llm: they compile once."""

from __future__ import annotations

import threading

import pytest
from serving import check_clean, eventually, serving
from tiny_model import SIZES, write_tiny_model

from oxidize_jax import LLM


@pytest.fixture(scope="session")
def llm(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("serve") / "tiny")
    llm = LLM(path, **SIZES, check_invariants=True)
    llm.generate(["a"], use_tqdm=False)  # what it compiles is not part of a test's time
    return llm


@pytest.fixture(scope="session")
def served(llm):
    with serving(llm) as one:
        yield one


@pytest.fixture
def client(served):
    with served.client() as one:
        yield one


@pytest.fixture
def http(served):
    with served.http() as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    yield
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        eventually(served.is_idle)
        assert served.service.thread.trouble() is None
    if "llm" in request.fixturenames:
        check_clean(request.getfixturevalue("llm"))


@pytest.fixture
def gate(llm, monkeypatch):
    """Steps wait while it is closed. It is open at first, and in the end."""
    opened, step = threading.Event(), llm.engine.step
    opened.set()

    def wait(max_steps):
        opened.wait(120)
        return step(max_steps)

    monkeypatch.setattr(llm.engine, "step", wait)
    yield opened
    opened.set()
    eventually(lambda: llm.engine.num_unfinished == 0)
