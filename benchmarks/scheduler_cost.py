"""Cost of `commit + schedule` on this machine, and how it grows with its sizes.

No model runs: every row that may sample is given a token, so the scheduler is timed alone, on
states that a busy engine passes through. Steps run within one program, as the engine runs
them (one dispatch of a program costs more than such a step), and a time is that of a dispatch
over its steps: the median of many dispatches, in microseconds.

* decode: every row decodes and nobody is admitted; one row in 16 fills a block, which is
  registered, and takes another;
* admit 1, admit 8: so many rows finish in each step, and as many requests are admitted.

    python benchmarks/scheduler_cost.py --growth
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oxidize_jax.batch.build import sampling_rows
from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.sampler import SampleOutput
from oxidize_jax.scheduler.commit import commit
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import NO_TOKEN, WAITING, SchedulerState, init_scheduler
from oxidize_jax.scheduler.submit import NewRequest, submit

PROMPT = (32, 64)
STEPS = 8
"""In one dispatch."""
SIZES = ("max_num_seqs", "num_blocks", "max_num_requests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=16_384)
    parser.add_argument("--requests", type=int, default=4_096)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--dispatches", type=int, default=12)
    parser.add_argument("--growth", action="store_true", help="also each size times four, and all")
    args = parser.parse_args()
    base = EngineConfig(
        max_num_seqs=args.rows,
        max_num_batched_tokens=2048,
        max_model_len=args.max_model_len,
        num_blocks=args.blocks,
        max_num_requests=args.requests,
        max_logprobs=0,
        max_stop_token_ids=4,
    )
    variants = {"base": base}
    if args.growth:
        for name in SIZES:
            variants[f"4x {name}"] = scaled(base, name)
        variants["4x all three"] = scaled(base, *SIZES)
    print(f"{'':20} rows  blocks requests  decode  admit 1  admit 8   us each (decode's minimum)")
    for name, config in variants.items():
        decode, one, eight, least = measure(config, args.dispatches)
        print(
            f"{name:20} {config.max_num_seqs:4} {config.num_blocks:7} {config.max_num_requests:8}"
            f" {decode:7.0f} {one:8.0f} {eight:8.0f}   ({least:.0f})",
            flush=True,
        )


def scaled(config: EngineConfig, *names: str) -> EngineConfig:
    return dataclasses.replace(config, **{name: 4 * getattr(config, name) for name in names})


def measure(config: EngineConfig, dispatches: int) -> tuple[float, float, float, float]:
    """Median microseconds of a step that admits 0, 1 and 8; least of one that admits 0."""
    medians, least = [], 0.0
    for count in (0, 1, 8):
        program = jax.jit(partial(run, config, count), donate_argnums=0)
        state = jax.block_until_ready(program(fill(config)))
        waiting = int(jnp.sum(state.requests.status == WAITING))
        turns = min(dispatches, waiting // (STEPS * count) if count else dispatches)
        times = []
        for _ in range(turns):
            start = time.perf_counter()
            state = jax.block_until_ready(program(state))
            times.append((time.perf_counter() - start) / STEPS * 1e6)
        admitted = waiting - int(jnp.sum(state.requests.status == WAITING))
        assert admitted == count * STEPS * turns, (admitted, count, turns)
        medians.append(statistics.median(times))
        least = least or min(times)
    return (*medians, least)


def run(config: EngineConfig, count: int, state: SchedulerState) -> SchedulerState:
    """``STEPS`` steps in each of which ``count`` requests finish and as many are admitted."""

    def body(_: Any, state: SchedulerState) -> SchedulerState:
        return one_step(config, end_rows(state, count) if count else state)

    return lax.fori_loop(0, STEPS, body, state)


def one_step(config: EngineConfig, state: SchedulerState) -> SchedulerState:
    row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    sample_rows = jnp.where(sampling_rows(state), row, config.max_num_seqs)
    none = jnp.zeros((row.size, config.max_logprobs), jnp.int32)
    sampled = SampleOutput(
        tokens=row + state.totals.steps,
        logprobs=jnp.zeros(row.shape, jnp.float32),
        top_ids=none,
        top_logprobs=none.astype(jnp.float32),
    )
    return schedule(config, commit(config, state, sample_rows, sampled))


def end_rows(state: SchedulerState, count: int) -> SchedulerState:
    """Let ``count`` decoding rows reach their limit with their next token, others each step."""
    requests, size = state.requests, state.rows.request.shape[0]
    row = (state.totals.steps * count + jnp.arange(count, dtype=jnp.int32)) % size
    request = state.rows.request[row]
    limit = requests.max_tokens.at[request].set(requests.num_tokens[request] + 1, mode="drop")
    return dataclasses.replace(state, requests=dataclasses.replace(requests, max_tokens=limit))


def fill(config: EngineConfig) -> SchedulerState:
    """Every slot submitted, and steps made until every row decodes."""
    rng = np.random.default_rng(0)
    put = jax.jit(partial(submit, config), donate_argnums=0)
    step = jax.jit(partial(one_step, config), donate_argnums=0)
    state = init_scheduler(config)
    for slot in range(config.max_num_requests):
        state = put(state, np.int32(slot), request(config, rng, slot))
    for _ in range(1000):
        state = step(state)
        if bool(jnp.all(state.plan.num_scheduled == 1)):
            return state
    raise RuntimeError("the rows did not fill: give more blocks")


def request(config: EngineConfig, rng: np.random.Generator, slot: int) -> NewRequest:
    tokens = np.zeros((config.max_model_len,), np.int32)
    length = int(rng.integers(*PROMPT))
    tokens[:length] = rng.integers(0, 30_000, length)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "prompt_len": np.int32(length),
        "max_new_tokens": np.int32(config.max_model_len),
        "min_new_tokens": np.int32(0),
        "arrival": np.int32(slot),
        "priority": np.int32(0),
        "stop_ids": np.full((config.max_stop_token_ids,), NO_TOKEN, np.int32),
        "temperature": np.float32(0),
        "top_k": np.int32(0),
        "top_p": np.float32(1),
        "key": np.zeros((2,), np.uint32),
        "salt": np.int32(0),
        "use_cache": np.bool_(True),
        "fork_of": np.int32(config.max_num_requests),
        "want_logprobs": np.bool_(False),
    }
    return NewRequest(**fields)


if __name__ == "__main__":
    main()
