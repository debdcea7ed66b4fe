"""Imports go one way, and the core needs the five array packages alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oxidize_jax"

# Each layer may import itself and those before it.
LAYERS = [
    {"types", "arrays", "messages"},
    {"config"},
    {"blocks"},
    {"sampling"},
    {"scheduler"},
    {"batch"},
    {"model"},
    {"compile_cache", "compile_clock", "fingerprint", "progress"},
    {"executables"},
    {"checkpoints"},
    {"text"},
    {"engine", "scoring"},
    {"structured"},
    {"outputs", "options", "prompts"},
    {"score_outputs"},
    {"beam_search", "completion", "startup"},
    {"runner", "llm_saves", "llm_scores"},
    {"llm"},
    {"bench", "serve"},
    {"cli"},
    {"__init__", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
CORE = [
    "types",
    "arrays",
    "messages",
    "config",
    "blocks",
    "sampling",
    "scheduler",
    "batch",
    "model",
    "engine",
    "scoring",
]
CARD = ["jax", "flax", "optax", "numpy", "chex"]


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_before_it(path):
    assert part_of(path) in RANK, f"give {path.name} a place in LAYERS"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            absolute = [alias.name for alias in node.names]
            assert not any(name.startswith("oxidize_jax") for name in absolute), "use from-imports"
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            check_import(path, node)


def check_import(path, node):
    top, *rest = (node.module or "").split(".")
    if top != "oxidize_jax":
        return
    if not rest:
        assert [alias.name for alias in node.names] == ["__version__"], "name the module"
        return
    assert RANK[rest[0]] <= RANK[part_of(path)], f"{path.name}:{node.lineno}: {node.module}"


def test_the_core_imports_without_any_other_package():
    code = f"""
import importlib, importlib.abc, pkgutil, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"gguf", "jinja2", "tokenizers", "tqdm", "safetensors",
                                  "huggingface_hub", "fastapi", "hypothesis", "llguidance"}}:
            raise ImportError(f"the core imported {{name}}")

sys.meta_path.insert(0, Refuse())
import oxidize_jax
from oxidize_jax import EngineConfig, SamplingParams
for part in {CORE!r}:
    module = importlib.import_module("oxidize_jax." + part)
    for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
        importlib.import_module(f"oxidize_jax.{{part}}.{{info.name}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_import_jax():
    code = "import sys, oxidize_jax; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
