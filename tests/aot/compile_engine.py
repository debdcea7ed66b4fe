"""Compile the engine's loop for a chip that is not here; print what was found as JSON.

``python compile_engine.py tpu|gpu run_steps|generate|not_donated HEAD_DIM [HLO_FILE]``, with
the environment that the platform's plugin asks for (``ENVIRONMENT`` in ``test_aot.py``).
"""

from __future__ import annotations

import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from oxidize_jax.batch.buckets import buckets
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.generate import GenerateConfig, generate
from oxidize_jax.engine.inputs import Prompts, Sampling
from oxidize_jax.engine.step import init_state, run_steps
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.functional import build
from oxidize_jax.model.transformer import parameter_shapes

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""

CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=256,
    num_blocks=16384,
    max_num_requests=4,
    max_logprobs=0,
    max_stop_token_ids=2,
)
"""Few step shapes, and a cache larger than everything else together."""


def chip(platform: str) -> Any:
    """One device of the topology, to compile for."""
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=H200, topology="1x1x1"
    )
    return topology.devices[0]


def model(platform: str, head_dim: int) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """A bfloat16 decoder of 4 layers, and its parameters without numbers."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
    )
    params = {
        name: jax.ShapeDtypeStruct(
            shape, jnp.float32 if name.endswith("norm.weight") else jnp.bfloat16
        )
        for name, shape in parameter_shapes(config).items()
    }
    return build(config, params, platform=platform, kv_dtype="bfloat16")


def made_anew(text: str, kv: jax.ShapeDtypeStruct, num_blocks: int) -> list[str]:
    """Instructions of the program that make another array of the cache's shape."""
    whole = ",".join(map(str, kv.shape))
    by_layer = ",".join(map(str, (kv.shape[0] // num_blocks, num_blocks, *kv.shape[1:])))
    made = re.compile(
        rf"= (?:\w+|\(\w+)\[(?:{whole}|{by_layer})\]\S* "
        r"(?:copy|copy-start|convert|bitcast-convert|transpose|select|pad|concatenate)\("
    )
    return [line.strip()[:300] for line in text.splitlines() if made.search(line)]


def lowered(program: str, decoder: Any, params: Any, place: Any) -> Any:
    """The program to compile, for arguments where ``place`` puts them."""
    state = jax.eval_shape(lambda: init_state(CONFIG, decoder))
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    if program == "run_steps":
        loop = jax.jit(partial(run_steps, CONFIG, decoder), donate_argnums=1)
        return loop.lower(place(params), place(state), place(limit))
    if program == "generate":
        config = GenerateConfig(
            decoder,
            max_new_tokens=64,
            max_num_seqs=CONFIG.max_num_seqs,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens,
            num_blocks=CONFIG.num_blocks,
        )
        ints = jax.ShapeDtypeStruct((8,), jnp.int32)
        prompts = Prompts(jax.ShapeDtypeStruct((8, 32), jnp.int32), ints)
        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        sampling = Sampling(
            key,
            jax.ShapeDtypeStruct((), jnp.float32),
            max_new_tokens=ints,
            stop_token_ids=jax.ShapeDtypeStruct((1,), jnp.int32),
        )
        run = jax.jit(partial(generate, config=config))
        return run.lower(place(params), place(prompts), place(sampling))
    # The cache of the caller is kept, so one write into it needs another.
    write = jax.jit(lambda kv, value: kv.at[5].set(value))
    page = jax.ShapeDtypeStruct(state.kv.shape[1:], state.kv.dtype)
    return write.lower(place(state.kv), place(page))


def main(platform: str, program: str, head_dim: int, hlo_file: str | None = None) -> None:
    """Compile and report."""
    decoder, params = model(platform, head_dim)
    on_chip = SingleDeviceSharding(chip(platform))

    def place(tree: Any) -> Any:
        def put(x: Any) -> Any:
            x = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_chip)

        return jax.tree.map(put, tree)

    compiled = lowered(program, decoder, params, place).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    kv = jax.eval_shape(lambda: decoder.init_kv(CONFIG.num_blocks, CONFIG.block_size))
    shape = ",".join(map(str, kv.shape))
    found = {
        "num_shapes": len(buckets(CONFIG)),
        "kv_bytes": math.prod(kv.shape) * kv.dtype.itemsize,
        "mentions": len(re.findall(rf"bf16\[{shape}\]", text)),
        "made_anew": made_anew(text, kv, CONFIG.num_blocks),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }
    if hlo_file is not None:
        Path(hlo_file).write_text(text, encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
