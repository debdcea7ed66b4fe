"""One step of the engine as a pure function, and the loop over steps of one shape.

``batch <- plan -> forward -> sample -> commit -> schedule`` : a step ends by planning the
next one, so a loop can look at the plan and decide, on the device, whether the next step
still has its shape.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.batch.buckets import Bucket, buckets, select_bucket
from oxidize_jax.batch.build import build_batch
from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.sampler import SamplingArrays, sample
from oxidize_jax.scheduler.commit import commit
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import NO_TOKEN, SchedulerState, init_scheduler
from oxidize_jax.types import state

Params = Any
"""Pytree of arrays that the model reads."""


class Model(Protocol):
    """What the step asks of a model. Hashable: it is a static argument."""

    @property
    def vocab_size(self) -> int:
        """V"""
        ...

    def init_kv(self, num_blocks: int, block_size: int) -> Any:
        """The paged cache for all layers, a pytree of arrays."""
        ...

    def forward(self, params: Params, kv: Any, batch: BatchDescriptor) -> tuple[jax.Array, Any]:
        """``(logits f32[C, V], kv)``: copy blocks, write the batch's KV, attend, head."""
        ...


@state
class EngineState:
    """Everything that changes from step to step; donated to each run."""

    scheduler: SchedulerState
    kv: Any


def init_state(config: EngineConfig, model: Model) -> EngineState:
    """An idle engine."""
    return EngineState(
        scheduler=init_scheduler(config),
        kv=model.init_kv(config.num_blocks, config.block_size),
    )


def engine_step(
    config: EngineConfig, model: Model, bucket: Bucket, params: Params, state: EngineState
) -> EngineState:
    """Execute the plan, whose tokens must fit ``bucket``, and plan the next step."""
    batch = build_batch(config, bucket, state.scheduler)
    logits, kv = model.forward(params, state.kv, batch)
    arrays = sampling_arrays(state.scheduler, batch.sample_rows)
    sampled = sample(logits, arrays, config.max_logprobs)
    scheduler = commit(config, state.scheduler, batch.sample_rows, sampled)
    return EngineState(scheduler=schedule(config, scheduler), kv=kv)


def run_bucket(
    config: EngineConfig,
    model: Model,
    index: int,
    params: Params,
    state: EngineState,
    limit: jax.Array,
) -> tuple[EngineState, jax.Array]:
    """Step while the plan has the shape of bucket ``index``, at most ``limit i32[]`` times.

    Returns ``(state, steps i32[])``, the number of steps made. A loop per shape, rather
    than a switch over shapes within one loop, is what keeps XLA from copying the cache.
    """
    bucket = buckets(config)[index]

    def same_shape(carry: tuple[EngineState, jax.Array]) -> jax.Array:
        state, steps = carry
        chosen = select_bucket(config, state.scheduler.plan.num_scheduled)
        return (chosen == index) & (steps < limit)

    def body(carry: tuple[EngineState, jax.Array]) -> tuple[EngineState, jax.Array]:
        state, steps = carry
        return engine_step(config, model, bucket, params, state), steps + 1

    return lax.while_loop(same_shape, body, (state, jnp.zeros((), jnp.int32)))


def sampling_arrays(state: SchedulerState, sample_rows: jax.Array) -> SamplingArrays:
    """Sampling parameters of the rows ``i32[C]`` (padding S: greedy, nothing wanted)."""
    requests = state.requests
    none = requests.status.shape[0]
    request = state.rows.request.at[sample_rows].get(mode="fill", fill_value=none)

    def of(values: jax.Array, fill: Any = 0) -> jax.Array:
        return values.at[request].get(mode="fill", fill_value=fill)

    too_short = of(requests.num_tokens) < of(requests.min_tokens)
    stop_ids = of(requests.stop_ids, NO_TOKEN)
    return SamplingArrays(
        temperature=of(requests.temperature),
        top_k=of(requests.top_k),
        top_p=of(requests.top_p, 1.0),
        key=of(requests.key),
        token_index=of(requests.num_tokens) - of(requests.prompt_len),
        suppress_ids=jnp.where(too_short[:, None], stop_ids, NO_TOKEN),
        want_logprobs=of(requests.want_logprobs, False),
    )
