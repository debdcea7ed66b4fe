"""One step of the engine as a pure function, and the loop over steps.

``plan -> batch -> forward -> sample -> commit -> schedule``: a step ends by planning the
next one. The whole loop is one program: no step needs the host.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import apply_if
from oxidize_jax.batch.buckets import Bucket, buckets, select_bucket
from oxidize_jax.batch.build import build_batch, sampling_rows
from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.edits import Edits, Sequences
from oxidize_jax.sampling.sampler import SampleOutput, SamplingArrays, sample
from oxidize_jax.scheduler.commit import commit
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import NO_TOKEN, Requests, SchedulerState, init_scheduler
from oxidize_jax.types import replace, state

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


def init_state(config: EngineConfig, model: Model, secret: int = 0) -> EngineState:
    """An idle engine. ``secret``: the pool's, see :func:`~oxidize_jax.blocks.pool.create`.

    Raises ValueError for token masks that do not cover the vocabulary.
    """
    if 0 < config.token_mask_size < model.vocab_size:
        raise ValueError(
            f"token_mask_size={config.token_mask_size} does not cover the model's vocabulary of "
            f"{model.vocab_size}: raise it to that, or use 0 for no masks."
        )
    return EngineState(
        scheduler=init_scheduler(config, secret),
        kv=model.init_kv(config.num_blocks, config.block_size),
    )


def run_steps(
    config: EngineConfig, model: Model, params: Params, state: EngineState, limit: jax.Array
) -> EngineState:
    """Up to ``limit i32[]`` steps, fewer if everything finishes; plans first where nothing is.

    A state in which nothing is planned afterwards is idle: all its requests have finished, or
    are paused.
    """
    shapes = buckets(config)

    def goes_on(carry: tuple[EngineState, Room, jax.Array, jax.Array]) -> jax.Array:
        state, _, turn, steps = carry
        return ((turn == 0) | has_plan(state)) & (steps < limit)

    def body(
        carry: tuple[EngineState, Room, jax.Array, jax.Array],
    ) -> tuple[EngineState, Room, jax.Array, jax.Array]:
        state, room, turn, steps = carry
        steps = steps + has_plan(state).astype(jnp.int32)
        state, room = _step(config, model, shapes, params, state, room)
        return state, room, turn + 1, steps

    zero = jnp.zeros((), jnp.int32)
    return lax.while_loop(goes_on, body, (state, empty_room(model, shapes), zero, zero))[0]


def engine_step(
    config: EngineConfig,
    model: Model,
    params: Params,
    state: EngineState,
    shapes: tuple[Bucket, ...] | None = None,
) -> EngineState:
    """Execute the plan, if there is one, commit it, and plan the next step.

    ``shapes`` are the buckets to choose from, by default all of the configuration; the last
    must hold every plan.
    """
    shapes = shapes or buckets(config)
    return _step(config, model, shapes, params, state, empty_room(model, shapes))[0]


Room = dict[int, tuple[jax.Array, jax.Array]]
"""``{C: (logits f32[C, V], sample_rows i32[C])}`` for each C that shapes have: those that sample
alike share one sampler. Kept from step to step, so that nothing is cleared."""


def empty_room(model: Model, shapes: tuple[Bucket, ...]) -> Room:
    """Room for the logits of ``shapes``."""
    return {
        n: (jnp.zeros((n, model.vocab_size), jnp.float32), jnp.zeros((n,), jnp.int32))
        for n in sorted({shape.samples for shape in shapes})
    }


def _step(
    config: EngineConfig,
    model: Model,
    shapes: tuple[Bucket, ...],
    params: Params,
    state: EngineState,
    room: Room,
) -> tuple[EngineState, Room]:
    """:func:`engine_step`, with room for logits that is used again."""
    kv, room, samples, tokens = _execute(config, model, shapes, params, state, room)
    scheduler = state.scheduler
    scheduler = replace(scheduler, requests=replace(scheduler.requests, tokens=tokens))
    row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    sample_rows = jnp.where(sampling_rows(scheduler), row, config.max_num_seqs)
    scheduler = commit(config, scheduler, sample_rows, samples)
    return EngineState(scheduler=schedule(config, scheduler), kv=kv), room


def _execute(
    config: EngineConfig,
    model: Model,
    shapes: tuple[Bucket, ...],
    params: Params,
    state: EngineState,
    room: Room,
) -> tuple[Any, Room, SampleOutput, jax.Array]:
    """Run the plan, and sample.

    Returns ``(kv, room, samples by row, tokens of the requests, unchanged)``.
    """
    scheduler = state.scheduler
    kv, room, taken = execute_plan(config, model, shapes, params, state, room)
    # The tokens go through the loops: XLA copies a large array that one closes over and that
    # is changed afterwards.
    drawn = (_no_samples(config), scheduler.requests.tokens)
    for size, (logits, rows) in room.items():
        sampler = partial(_sampled, config, scheduler, logits, rows)
        drawn = apply_if(taken == size, sampler, drawn)
    return kv, room, *drawn


def execute_plan(
    config: EngineConfig,
    model: Model,
    shapes: tuple[Bucket, ...],
    params: Params,
    state: EngineState,
    room: Room,
) -> tuple[Any, Room, jax.Array]:
    """Run the model in the smallest shape that holds the plan.

    Returns ``(kv, room, taken i32[])``: the logits are those of ``room[taken]``; where nothing
    is planned ``taken`` is 0.

    Each shape is a loop that runs once or not at all. A conditional would do, but XLA copies
    the whole cache to get it into and out of a conditional, and loops work in place.
    """
    scheduler = state.scheduler
    chosen = select_bucket(config, shapes, scheduler.plan.num_scheduled)
    carry = (state.kv, room, jnp.zeros((), jnp.bool_))
    for index, shape in enumerate(shapes):

        def is_due(carry: tuple[Any, Room, jax.Array], index: int = index) -> jax.Array:
            return (chosen == index) & ~carry[2]

        def run(
            carry: tuple[Any, Room, jax.Array], shape: Bucket = shape
        ) -> tuple[Any, Room, jax.Array]:
            kv, room, ran = carry
            # Tied to what the loop changes, or XLA takes the work on the descriptors of all
            # shapes out of the loops, and does it in every step.
            scheduled = jnp.where(ran, 0, scheduler.plan.num_scheduled)
            plan = replace(scheduler.plan, num_scheduled=scheduled)
            batch = build_batch(config, shape, replace(scheduler, plan=plan))
            logits, kv = model.forward(params, kv, batch)
            return kv, {**room, shape.samples: (logits, batch.sample_rows)}, jnp.ones((), jnp.bool_)

        carry = lax.while_loop(is_due, run, carry)
    kv, room, _ = carry
    return kv, room, jnp.array([shape.samples for shape in shapes] + [0], jnp.int32)[chosen]


def _sampled(
    config: EngineConfig,
    scheduler: SchedulerState,
    logits: jax.Array,
    rows: jax.Array,
    carry: tuple[SampleOutput, jax.Array],
) -> tuple[SampleOutput, jax.Array]:
    """``(samples, tokens)`` with the samples that ``logits f32[C, V]`` give to ``rows i32[C]``."""
    samples, tokens = carry
    requests = scheduler.requests
    sequences = Sequences(
        tokens=tokens,
        bias_ids=requests.bias_ids,
        bias_values=requests.bias_values,
        bad_words=requests.bad_words,
        token_mask=requests.token_mask,
    )
    drawn = sample(logits, sampling_arrays(scheduler, rows), sequences, config.max_logprobs)
    samples = jax.tree.map(lambda all_, new: all_.at[rows].set(new, mode="drop"), samples, drawn)
    return samples, lax.optimization_barrier(tokens)


def _no_samples(config: EngineConfig) -> SampleOutput:
    """Room for one sample of each row."""
    s, a = config.max_num_seqs, config.max_logprobs
    return SampleOutput(
        tokens=jnp.zeros((s,), jnp.int32),
        logprobs=jnp.zeros((s,), jnp.float32),
        top_ids=jnp.zeros((s, a), jnp.int32),
        top_logprobs=jnp.zeros((s, a), jnp.float32),
        ranks=jnp.zeros((s,), jnp.int32),
    )


def has_plan(state: EngineState) -> jax.Array:
    """bool[]: something is planned."""
    return jnp.any(state.scheduler.plan.num_scheduled > 0)


def sampling_arrays(state: SchedulerState, sample_rows: jax.Array) -> SamplingArrays:
    """Sampling parameters of the rows ``i32[C]`` (padding S: greedy, nothing wanted)."""
    requests = state.requests
    none = requests.status.shape[0]
    request = state.rows.request.at[sample_rows].get(mode="fill", fill_value=none)

    def of(values: jax.Array, fill: Any = 0) -> jax.Array:
        return values.at[request].get(mode="fill", fill_value=fill)

    num_tokens, prompt_len = of(requests.num_tokens), of(requests.prompt_len)
    too_short = num_tokens < of(requests.min_tokens)
    stop_ids = of(requests.stop_ids, NO_TOKEN)
    return SamplingArrays(
        temperature=of(requests.temperature),
        top_k=of(requests.top_k),
        top_p=of(requests.top_p, 1.0),
        min_p=of(requests.min_p),
        typical_p=of(requests.typical_p, 1.0),
        key=of(requests.key),
        token_index=num_tokens - prompt_len,
        edits=Edits(
            sequence=request,
            prompt_len=prompt_len,
            num_tokens=num_tokens,
            # ~id is of one that is held back but ends nothing.
            suppress_ids=jnp.where(too_short[:, None], jnp.maximum(stop_ids, ~stop_ids), NO_TOKEN),
            masked=of(requests.has_mask, False),
            listed=of(_has_list(requests), False),
            repetition_penalty=of(requests.repetition_penalty, 1.0),
            presence_penalty=of(requests.presence_penalty),
            frequency_penalty=of(requests.frequency_penalty),
        ),
        num_logprobs=of(requests.num_logprobs, -1),
    )


def _has_list(requests: Requests) -> jax.Array:
    """bool[R]: has a bias, or bad words. Those used stand first."""
    firsts = (requests.bias_ids[:, :1], requests.bad_words[:, :1, 0])
    return jnp.any(jnp.concatenate(firsts, axis=1) != NO_TOKEN, axis=1)
