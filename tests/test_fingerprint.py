"""The digest of code: equal in every process, and another one for every change in memory."""

import ast
import functools
import json
import subprocess
import sys
import types
import unittest.mock
from pathlib import Path

import jax
import numpy as np
import pytest

import oxidize_jax
from oxidize_jax.blocks import hashing
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.warmup import _CODE_OF_A_RUN
from oxidize_jax.fingerprint import fingerprint
from oxidize_jax.scheduler import commit, state

SOURCE = """
import dataclasses, functools
import jax
import numpy as np

TABLE = {"a": (1, 2.0), "b": frozenset({"x", "y"})}
ARRAY = np.arange(3)
KIND = np.dtype("int8")

def outer(x, scale=2):
    def inner(y):
        return y * scale
    return inner(x)

def made(n):
    def inner(y):
        return y * n
    return inner

closed = made(3)
cached = functools.lru_cache(outer)
jitted = jax.jit(outer)
part = functools.partial(outer, scale=4)

@dataclasses.dataclass(frozen=True)
class Thing:
    size: int = 3
    @property
    def twice(self):
        return self.size * 2
    @classmethod
    def one(cls):
        return cls(1)
    @staticmethod
    def zero():
        return 0
    @functools.cached_property
    def late(self):
        return 7

THING = Thing(5)
"""


@pytest.fixture
def module():
    made = types.ModuleType("fingerprinted")
    sys.modules["fingerprinted"] = made
    exec(compile(SOURCE, "fingerprinted.py", "exec"), made.__dict__)
    yield made
    del sys.modules["fingerprinted"]


def digest():
    return fingerprint(["fingerprinted"])


def redefined(module, old, new):
    """The module as it would be with another source."""
    assert old in SOURCE
    exec(compile(SOURCE.replace(old, new), "elsewhere.py", "exec"), module.__dict__)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y * scale", "y + scale"),
        ("scale=2", "scale=3"),
        ("made(3)", "made(4)"),
        ("scale=4", "scale=5"),
        ("(1, 2.0)", "(1, 2)"),
        ("(1, 2.0)", "(True, 2.0)"),
        ('"y"}', '"z"}'),
        ("np.arange(3)", "np.arange(4)"),
        ("np.arange(3)", "np.arange(3.0)"),
        ('"int8"', '"int16"'),
        ("size: int = 3", "size: int = 4"),
        ("self.size * 2", "self.size * 3"),
        ("cls(1)", "cls(2)"),
        ("return 0", "return 1"),
        ("return 7", "return 8"),
        ("Thing(5)", "Thing(6)"),
        ("lru_cache(outer)", "lru_cache(made)"),
        ("jax.jit(outer)", "jax.jit(made)"),
    ],
)
def test_every_change_of_what_a_module_does_is_another_digest(module, old, new):
    before = digest()
    redefined(module, old, new)
    assert before != digest()
    redefined(module, old, old)
    assert before == digest()


def test_where_it_stands_and_what_it_says_is_no_change(module):
    before = digest()
    redefined(module, "import dataclasses", "# a remark\n\nimport dataclasses")
    assert before == digest()


def test_a_function_that_was_replaced_is_seen(module, monkeypatch):
    before = digest()
    monkeypatch.setattr(module.Thing, "zero", staticmethod(lambda: 0.0))
    assert digest() not in (before, None)


@pytest.mark.parametrize(
    "stranger",
    [unittest.mock.MagicMock(), object(), iter([1]), functools.singledispatch(len), jax.numpy.ones],
    ids=["mock", "object", "iterator", "dispatcher", "wrapped by jax"],
)
def test_what_is_not_known_gives_no_digest_or_its_own(module, monkeypatch, stranger):
    before = digest()
    monkeypatch.setattr(module, "outer", stranger)
    assert digest() != before


def test_a_mock_gives_no_digest(module, monkeypatch):
    monkeypatch.setattr(module, "outer", unittest.mock.MagicMock())
    assert digest() is None


def test_what_refers_to_itself_comes_to_an_end(module):
    module.TABLE["self"] = module.TABLE
    assert digest() is not None


CODE = """
import json, sys
if len(sys.argv) > 1:
    import oxidize_jax.llm, oxidize_jax.cli.bench
from oxidize_jax.engine.warmup import _CODE_OF_A_RUN
from oxidize_jax.fingerprint import fingerprint
print(json.dumps([fingerprint(_CODE_OF_A_RUN)] * 2))
"""


def test_processes_agree_whatever_else_they_have_imported():
    digests = set()
    for seed, *arguments in (("1",), ("2", "more")):
        done = subprocess.run(
            [sys.executable, "-c", CODE, *arguments],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PATH": "", "JAX_PLATFORMS": "cpu"},
        )
        assert done.returncode == 0, done.stderr
        digests.update(json.loads(done.stdout))
    assert len(digests) == 1
    assert None not in digests


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (commit, "_LANES", 16),
        (commit, "advance", lambda config, state: state),
        (state, "LENGTH", 7),
        (EngineConfig, "blocks_per_seq", property(lambda self: 1)),
        (hashing, "run_hashes", lambda *_: None),
    ],
    ids=["constant", "function", "number of a state", "property", "hash"],
)
def test_a_change_to_the_engine_is_seen(monkeypatch, where, name, value):
    before = fingerprint(_CODE_OF_A_RUN)
    assert before is not None
    monkeypatch.setattr(where, name, value)
    assert fingerprint(_CODE_OF_A_RUN) != before


def test_a_run_is_traced_from_these_modules_alone():
    """What the layers of a step import of this package is among them."""
    package = Path(oxidize_jax.__file__).parent
    for name in _CODE_OF_A_RUN:
        place = package.joinpath(*name.split(".")[1:])
        paths = [place.with_suffix(".py")] if not place.is_dir() else sorted(place.rglob("*.py"))
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oxidize"):
                    inside = [f"{node.module}.".startswith(f"{root}.") for root in _CODE_OF_A_RUN]
                    assert any(inside), (path, node.module)


def test_arrays_are_seen_by_their_values(module):
    before = digest()
    module.ARRAY[1] = 5
    changed = digest()
    module.ARRAY[1] = 1
    assert (changed == before, digest() == before) == (False, True)
    assert isinstance(module.ARRAY, np.ndarray)
