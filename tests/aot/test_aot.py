"""The engine's loop compiled for a TPU v5e and an H200 without the chip: in place there too.

What XLA copies differs from platform to platform, so a CPU's program proves nothing of
theirs. Each compile is a process of its own, since the plugins read its environment.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.aot, pytest.mark.slow]

PLUGINS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
WHEELS = {
    "tpu": "libtpu",
    "gpu": "--no-deps jax-cuda13-plugin jax-cuda13-pjrt",
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module", params=PLUGINS)
def platform(request):
    """``tpu`` or ``gpu``, where its compiler is installed."""
    if not is_installed(PLUGINS[request.param]):
        pytest.skip(
            f"the compiler for {request.param} is not installed: pip install "
            f"{WHEELS[request.param]}, of the versions that belong to this jax"
        )
    return request.param


def compile_for(*arguments):
    """What ``compile_engine.py`` found."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_engine.py")), *arguments],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("head_dim", ["64", "128"])
def test_the_loop_works_in_place(platform, head_dim):
    found = compile_for(platform, "run_steps", head_dim)
    assert found["num_shapes"] == 3
    assert found["mentions"] > 0, "the cache is not in the program"
    assert found["made_anew"] == []
    assert found["temp_bytes"] < found["kv_bytes"] / 10
    assert found["alias_bytes"] >= found["kv_bytes"]


def test_generate_makes_the_cache_once(platform):
    found = compile_for(platform, "generate", "128")
    assert found["mentions"] > 0, "the cache is not in the program"
    assert found["made_anew"] == []
    assert found["kv_bytes"] <= found["temp_bytes"] < 1.1 * found["kv_bytes"]


def test_the_check_sees_a_copy(platform):
    found = compile_for(platform, "not_donated", "128")
    assert found["made_anew"]
    assert found["temp_bytes"] + found["output_bytes"] >= found["kv_bytes"]
