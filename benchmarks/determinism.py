"""What makes a request's bits depend on its company, and whether ``deterministic`` ends it.

    python benchmarks/determinism.py products
    python benchmarks/determinism.py requests --dtype bfloat16 [--deterministic]
    python benchmarks/determinism.py cost --dtype bfloat16

``products``: is a row of a matrix product the same in any place, and for any number of rows?
``requests``: one request alone and in any company; where do its log probabilities differ?
``cost``: seconds with and without it, by turns in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax import LLM
from oxidize_jax.engine.engine import Engine
from oxidize_jax.engine.programs import COMPILER_OPTIONS
from oxidize_jax.engine.request import EngineRequest

SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536))
"""``[out, in]`` of SmolLM2's matrices."""
ROWS = (2, 8, 16, 32, 48, 64, 128, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("products", "requests", "cost"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    if args.what == "products":
        products()
    elif args.what == "requests":
        requests(args.dtype, args.deterministic)
    else:
        cost(args.dtype)


def products() -> None:
    """For each product: the places in which a row differs, and the numbers of rows that agree."""
    rng = np.random.default_rng(0)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        for out, inner in SHAPES:
            weight = jnp.asarray(rng.integers(-99, 99, (out, inner)), jnp.float32)
            row = rng.integers(-99, 99, inner)
            for weight_first in (False, True):
                agree: dict[bytes, list[int]] = {}
                moved = []
                for count in ROWS:
                    results = {
                        _row(row, count, place, weight, dtype, weight_first, rng)
                        for place in (0, 1, count // 2, count - 1, 5 % count, 17 % count)
                    }
                    moved += [count] if len(results) > 1 else []
                    agree.setdefault(min(results), []).append(count)
                print(
                    f"{jnp.dtype(dtype).name:9}{out:5} x {inner:5}"
                    f"{' weight first' if weight_first else '             '} "
                    f"differs by place: {moved or 'never'}; rows that agree: {[*agree.values()]}"
                )


def _row(
    row: np.ndarray,
    count: int,
    place: int,
    weight: jax.Array,
    dtype: jnp.dtype,
    weight_first: bool,
    rng: np.random.Generator,
) -> bytes:
    x = rng.integers(-99, 99, (count, row.size))
    x[place] = row
    scale = 1 if dtype == jnp.int8 else 0.37
    x = jnp.asarray(x * scale, jnp.float32).astype(dtype)
    return np.asarray(_product(x, weight.astype(dtype), weight_first))[place].tobytes()


@partial(jax.jit, static_argnums=2, compiler_options=COMPILER_OPTIONS)
def _product(x: jax.Array, weight: jax.Array, weight_first: bool) -> jax.Array:
    """As ``Matrix.times`` has it."""
    left, right = (weight, x) if weight_first else (x, weight)
    exact = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    total = jnp.int32 if weight.dtype == jnp.int8 else jnp.float32
    y = jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), exact, total)
    return jax.lax.optimization_barrier(y).T if weight_first else y


def requests(dtype: str, deterministic: bool) -> None:
    """A request at temperature 1 in several companies, pools and budgets."""
    llm = _llm(dtype, deterministic)
    rng = random.Random(1)
    one = _request(rng, 75, 24, 7)
    others = [_request(rng, rng.randrange(1, 90), rng.randrange(1, 24), i) for i in range(32)]
    expected = run(llm.engine, [one])[0]
    config = llm.config
    for name, company, changes in (
        ("alone again, its prompt cached", [one], None),
        ("32 neighbours", [one, *others], {}),
        ("32 neighbours, last", [*others, one], {}),
        ("32 neighbours, small pool", [*others[:16], one, *others[16:]], {"num_blocks": 24}),
        ("alone, budget of 20 tokens", [one], {"max_num_batched_tokens": 20}),
    ):
        engine = llm.engine
        if changes is not None:
            engine = Engine(dataclasses.replace(config, **changes), engine.model, engine.params)
        start = time.perf_counter()
        got = run(engine, company)[company.index(one)]
        seconds = time.perf_counter() - start
        preemptions = int(engine.state.scheduler.totals.preemptions)
        words = f"{compare(expected, got)} ({preemptions} preemptions, {seconds:.1f} s)"
        print(f"{name:31} {words}", flush=True)


def _llm(dtype: str, deterministic: bool) -> LLM:
    return LLM(
        dtype=dtype,
        deterministic=deterministic,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        num_blocks=256,
        max_logprobs=3,
        progress=False,
    )


def _request(rng: random.Random, length: int, tokens: int, key: int) -> EngineRequest:
    prompt = tuple(rng.randrange(100, 40000) for _ in range(length))
    return EngineRequest(prompt, tokens, temperature=1.0, key=(0, key), num_logprobs=3)


def cost(dtype: str, turns: int = 3) -> None:
    """Medians of loads of one sequence, of 16 that decode, and of long prompts."""
    engines = {on: _llm(dtype, on).engine for on in (False, True)}
    rng = random.Random(2)
    loads = {
        "1 sequence, 1 + 48 tokens": [_request(rng, 1, 48, 0)],
        "16 sequences, 1 + 48 tokens": [_request(rng, 1, 48, i) for i in range(16)],
        "16 sequences, 128 + 1 tokens": [_request(rng, 128, 1, i) for i in range(16)],
    }
    for name, load in loads.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * turns + 2):
            on = turn % 2 == 1
            engines[on].reset_prefix_cache()
            start = time.perf_counter()
            run(engines[on], load)
            seconds[on] += [time.perf_counter() - start] if turn > 1 else []
        off, on_ = (float(np.median(seconds[on])) for on in (False, True))
        ratios = [b / a for a, b in zip(seconds[False], seconds[True], strict=True)]
        print(
            f"{dtype:9}{name:30} off {off:.3f} s, on {on_:.3f} s; "
            f"on / off {float(np.median(ratios)):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def run(engine: Engine, company: list[EngineRequest]) -> list[tuple[tuple, tuple]]:
    """``(token ids, logprobs)`` of each, the alternatives' logprobs among them."""
    ids = [engine.add(request) for request in company]
    tokens: dict[int, list] = {i: [] for i in ids}
    logprobs: dict[int, list] = {i: [] for i in ids}
    while engine.num_unfinished:
        for update in engine.step():
            tokens[update.request_id] += update.token_ids
            logprobs[update.request_id] += zip(update.logprobs, update.top_logprobs, strict=True)
    return [(tuple(tokens[i]), tuple(logprobs[i])) for i in ids]


def compare(expected: tuple[tuple, tuple], got: tuple[tuple, tuple]) -> str:
    """In words."""
    if expected == got:
        return "same bits"
    same = sum(a == b for a, b in zip(expected[0], got[0], strict=False))
    bits = sum(a == b for a, b in zip(expected[1], got[1], strict=False))
    most = max(abs(a[0] - b[0]) for a, b in zip(expected[1], got[1], strict=False))
    total = len(expected[0])
    return f"{same}/{total} tokens, {bits}/{total} logprobs the same, off by up to {most:.2g}"


if __name__ == "__main__":
    main()
