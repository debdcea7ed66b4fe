"""The jitted programs of the host engine. Donated: the state; static: config and model.

They are module-level, so engines of the same configuration share what is compiled.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.step import EngineState, Model, Params, run_steps
from oxidize_jax.scheduler import fork as forks
from oxidize_jax.scheduler import reset
from oxidize_jax.scheduler import submit as submission
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.types import replace, state


@state
class Drained:
    """What the host reads after a dispatch, for W steps and A logprob alternatives."""

    status: jax.Array
    """i32[R]"""
    finish_reason: jax.Array
    """i32[R]"""
    row: jax.Array
    """i32[R]"""
    num_tokens: jax.Array
    """i32[R]"""
    num_cached: jax.Array
    """i32[R]"""
    num_preemptions: jax.Array
    """i32[R]"""
    tokens: jax.Array
    """i32[R, W]: tokens from the cursor of each request on."""
    logprobs: jax.Array
    """f32[R, W]"""
    top_ids: jax.Array
    """i32[R, W, A]"""
    top_logprobs: jax.Array
    """f32[R, W, A]"""
    steps: jax.Array
    """i32[]: made since the state is."""
    history: jax.Array
    """i32[HISTORY, F]: see :mod:`~oxidize_jax.scheduler.stats`."""


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def run(
    config: EngineConfig, model: Model, params: Params, state: EngineState, limit: jax.Array
) -> EngineState:
    """:func:`~oxidize_jax.engine.step.run_steps`"""
    return run_steps(config, model, params, state, limit)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def submit(
    config: EngineConfig, state: SchedulerState, slot: jax.Array, new: submission.NewRequest
) -> SchedulerState:
    """:func:`~oxidize_jax.scheduler.submit.submit`"""
    return submission.submit(config, state, slot, new)


@partial(jax.jit, donate_argnums=0)
def abort(state: SchedulerState, slot: jax.Array) -> SchedulerState:
    """:func:`~oxidize_jax.scheduler.submit.abort`"""
    return submission.abort(state, slot)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def fork(
    config: EngineConfig, state: SchedulerState, new: forks.Fork
) -> tuple[SchedulerState, jax.Array]:
    """:func:`~oxidize_jax.scheduler.fork.fork`"""
    return forks.fork(config, state, new)


@partial(jax.jit, donate_argnums=0)
def reset_prefix_cache(state: SchedulerState) -> SchedulerState:
    """:func:`~oxidize_jax.scheduler.reset.reset_prefix_cache`"""
    return reset.reset_prefix_cache(state)


@partial(jax.jit, static_argnums=(0, 3))
def drain(config: EngineConfig, state: SchedulerState, cursor: jax.Array, width: int) -> Drained:
    """Read ``width`` tokens of every request from ``cursor i32[R]`` on, and where it stands."""
    requests = state.requests
    lane = jnp.arange(config.max_num_requests, dtype=jnp.int32)[:, None]
    place = cursor[:, None] + jnp.arange(width, dtype=jnp.int32)

    def window(values: jax.Array) -> jax.Array:
        return values.at[lane, place].get(mode="fill", fill_value=0)

    return Drained(
        status=requests.status,
        finish_reason=requests.finish_reason,
        row=requests.row,
        num_tokens=requests.num_tokens,
        num_cached=requests.num_cached,
        num_preemptions=requests.num_preemptions,
        tokens=window(requests.tokens),
        logprobs=window(requests.logprobs),
        top_ids=window(requests.top_ids),
        top_logprobs=window(requests.top_logprobs),
        steps=state.totals.steps,
        history=state.history,
    )


def with_scheduler(state: EngineState, scheduler: SchedulerState) -> EngineState:
    """``state`` with another scheduler state, the cache untouched."""
    return replace(state, scheduler=scheduler)
