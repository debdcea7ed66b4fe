"""What one layer of experts costs on this machine, by formulation, the package's own as 1.

``python benchmarks/experts.py [--shape mixtral qwen3] [--dtype float32 bfloat16 int8]``

``used``: the package's loop over the experts that have tokens, tile by tile; ``whole``: the same
with each matrix cut out at once; ``grouped``: ``jax.lax.ragged_dot``, as accelerators have it;
``all``: a loop over all experts with all tokens. The formulations take turns; figures are
medians. Layers are narrower than the real ones, with as many experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oxidize_jax.engine.programs import COMPILER_OPTIONS
from oxidize_jax.model import experts
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.experts import Step, choose
from oxidize_jax.model.quantize import quantize, stays_float32
from oxidize_jax.model.storage import stored
from oxidize_jax.model.transformer import merge, parameter_shapes, split_modules

LAYERS = 2
_BASE = ModelConfig(
    vocab_size=8,
    hidden_size=1024,
    intermediate_size=1792,
    num_layers=LAYERS,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    num_experts=8,
    num_experts_per_token=2,
)
SHAPES = {
    "mixtral": _BASE,
    "qwen3": dataclasses.replace(
        _BASE, intermediate_size=384, num_experts=64, num_experts_per_token=8
    ),
}

Run = Callable[[dict[str, jax.Array], jax.Array, jax.Array], jax.Array]
"""``run(parameters of all layers, h, layer) -> out``"""


def parameters(config: ModelConfig, dtype: str) -> dict[str, jax.Array]:
    """The router and the experts of all layers."""
    rng = np.random.default_rng(0)
    params: dict[str, jax.Array] = {}
    for name, shape in parameter_shapes(config).items():
        if not name.startswith(("layers.experts.", "layers.router.")):
            continue
        values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        keeps = dtype != "bfloat16" or stays_float32(name)
        params[name] = jnp.asarray(values, jnp.float32 if keeps else jnp.bfloat16)
    return quantize(params) if dtype == "int8" else params


def formulations(config: ModelConfig, quantized: bool) -> dict[str, Run]:
    """Each as a function of the same arguments."""
    graph = split_modules(config, quantized)[0][1]

    def layer_of(params: dict[str, jax.Array], layer: jax.Array, platform: str) -> Any:
        mine = {}
        for name, leaf in params.items():
            whole = platform == "cpu" and ".experts." in name
            mine[name.removeprefix("layers.")] = (
                stored(name, leaf, platform) if whole else leaf[layer]
            )
        return merge(graph, mine)

    def on(platform: str) -> Run:
        def run(params: dict[str, jax.Array], h: jax.Array, layer: jax.Array) -> jax.Array:
            module = layer_of(params, layer, platform)
            step = Step(None, layer, platform)
            return module.experts(h, module.router(h), step)

        return run

    def every(params: dict[str, jax.Array], h: jax.Array, layer: jax.Array) -> jax.Array:
        module = layer_of(params, layer, "cpu")
        weights, chosen = choose(config, module.router(h))
        share = jnp.zeros((len(h), config.num_experts)).at[jnp.arange(len(h))[:, None], chosen]
        share = share.set(weights)
        matrices = module.experts

        def one(e: jax.Array, out: jax.Array) -> jax.Array:
            which = layer * config.num_experts + e
            x = experts._rounded(matrices.gate, h)
            gate, up = (experts._by_rows(m, which, x) for m in (matrices.gate, matrices.up))
            hidden = experts._rounded(matrices.down, jax.nn.silu(gate) * up)
            return out + share[:, e, None] * experts._by_rows(matrices.down, which, hidden)

        return lax.fori_loop(0, config.num_experts, one, jnp.zeros_like(h))

    return {"used": on("cpu"), "whole": on("cpu"), "grouped": on("gpu"), "all": every}


def compiled(config: ModelConfig, dtype: str, tokens: int) -> dict[str, Callable[[], Any]]:
    """Programs that run through the layers, ready to be called."""
    params = parameters(config, dtype)
    h = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, 1024), np.float32))
    options = COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
    calls = {}
    usual = experts._TILE_BYTES
    for name, run in formulations(config, dtype == "int8").items():

        def layers(params: dict[str, jax.Array], h: jax.Array, run: Run = run) -> jax.Array:
            return lax.fori_loop(0, LAYERS, lambda i, x: x + run(params, x, i), h)

        experts._TILE_BYTES = 2**40 if name == "whole" else usual
        program = jax.jit(layers, compiler_options=options).lower(params, h).compile()
        calls[name] = lambda program=program: program(params, h).block_until_ready()
    experts._TILE_BYTES = usual
    return calls


def measure(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Median milliseconds of a layer."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeat):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 / LAYERS * statistics.median(all_) for name, all_ in times.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    dtypes = ["float32", "bfloat16", "int8"]
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 64, 256])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    arguments = parser.parse_args()
    rows = []
    print(f"{'shape':8} {'dtype':9} {'tokens':>6} {'used, ms':>9}   times of it: whole grouped all")
    for shape in arguments.shape:
        for dtype in arguments.dtype:
            for tokens in arguments.tokens:
                calls = compiled(SHAPES[shape], dtype, tokens)
                times = measure(calls, arguments.repeat)
                rows.append({"shape": shape, "dtype": dtype, "tokens": tokens, "ms": times})
                ratios = " ".join(f"{times[n] / times['used']:7.2f}" for n in list(times)[1:])
                print(f"{shape:8} {dtype:9} {tokens:6} {times['used']:9.2f}   {ratios}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
