"""Cost of the scheduler by itself: ``commit + schedule`` on states of a busy engine.

No model runs; steps are made within one program, as the engine makes them, since one
dispatch of a program costs more than such a step.
"""

from __future__ import annotations

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
from oxidize_jax.sampling.fields import plain_sampling
from oxidize_jax.sampling.sampler import SampleOutput
from oxidize_jax.scheduler.commit import commit
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import NO_TOKEN, WAITING, SchedulerState, init_scheduler
from oxidize_jax.scheduler.submit import NewRequest, submit

PROMPT = (32, 64)
"""Least and most tokens of a prompt."""
STEPS = 8
"""In one dispatch."""
ADMISSIONS = (0, 1, 8)
"""Requests admitted in each step."""
SIZES = ("max_num_seqs", "num_blocks", "max_num_requests")


def config_of(
    rows: int, blocks: int, requests: int, max_model_len: int = 1024, block_size: int = 16
) -> EngineConfig:
    """Sizes of a scheduler to measure alone."""
    return EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        max_model_len=max_model_len,
        num_blocks=blocks,
        block_size=block_size,
        max_num_requests=requests,
        max_logprobs=0,
        max_stop_token_ids=4,
    )


def scaled(config: EngineConfig, *names: str) -> EngineConfig:
    """``config`` with the sizes ``names`` times four."""
    return dataclasses.replace(config, **{name: 4 * getattr(config, name) for name in names})


def measure(config: EngineConfig, dispatches: int) -> tuple[float, float, float, float]:
    """Median microseconds of a step that admits 0, 1 and 8; least of one that admits 0.

    Raises ValueError where ``config`` has too few request slots or blocks for it.
    """
    # The first dispatch, which compiles, and one that is timed.
    needed = config.max_num_seqs + 2 * STEPS * max(ADMISSIONS)
    if config.max_num_requests < needed:
        raise ValueError(
            f"max_num_requests={config.max_num_requests}: {needed} are needed to have some "
            f"waiting while {max(ADMISSIONS)} are admitted in each step; raise it."
        )
    medians, least = [], 0.0
    for count in ADMISSIONS:
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
        if admitted != count * STEPS * turns:
            raise ValueError(
                f"num_blocks={config.num_blocks}: {admitted} requests were admitted where "
                f"{count * STEPS * turns} should have been; raise it."
            )
        medians.append(statistics.median(times))
        least = least or min(times)
    decode, one, eight = medians
    return decode, one, eight, least


def run(config: EngineConfig, count: int, state: SchedulerState) -> SchedulerState:
    """``STEPS`` steps in each of which ``count`` requests finish and as many are admitted."""

    def body(_: Any, state: SchedulerState) -> SchedulerState:
        return one_step(config, end_rows(state, count) if count else state)

    return lax.fori_loop(0, STEPS, body, state)


def one_step(config: EngineConfig, state: SchedulerState) -> SchedulerState:
    """``commit + schedule``; a row's token is a number of its own."""
    row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    sample_rows = jnp.where(sampling_rows(state), row, config.max_num_seqs)
    none = jnp.zeros((row.size, config.max_logprobs), jnp.int32)
    sampled = SampleOutput(
        tokens=row + state.totals.steps,
        logprobs=jnp.zeros(row.shape, jnp.float32),
        top_ids=none,
        top_logprobs=none.astype(jnp.float32),
        ranks=jnp.zeros(row.shape, jnp.int32),
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
    """Every slot submitted, and steps made until every row decodes. Raises ValueError if
    they do not.
    """
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
    raise ValueError(f"num_blocks={config.num_blocks}: the rows do not fill; raise it.")


def request(config: EngineConfig, rng: np.random.Generator, slot: int) -> NewRequest:
    """A greedy request of random ids that does not end by itself."""
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
        "salt": np.int32(0),
        "use_cache": np.bool_(True),
        "fork_of": np.int32(config.max_num_requests),
    }
    return NewRequest(**fields, **plain_sampling(config))
