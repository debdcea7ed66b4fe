"""Beam search as one program: selection, hypotheses and the forks of every step on the device.

``plan -> batch -> forward -> candidates -> select -> reorder -> schedule``: the engine's own step,
but for the sampler. In its place the best continuations of each beam are kept, and a group whose
beams all have theirs makes a step (:mod:`~oxidize_jax.sampling.beams`), which re-points its block
tables (:mod:`~oxidize_jax.scheduler.beams`). Groups are batched continuously: as one ends, the
next takes its rows, whatever lengths they have.

Sizes: G groups of k beams, R = G * k requests, C continuations of a beam.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import apply_if
from oxidize_jax.batch.buckets import Bucket, buckets
from oxidize_jax.blocks.pool import available
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.programs import COMPILER_OPTIONS
from oxidize_jax.engine.step import (
    EngineState,
    Model,
    Params,
    Room,
    empty_room,
    execute_plan,
    has_plan,
)
from oxidize_jax.sampling.beams import (
    BeamRules,
    Beams,
    advance,
    begin,
    continuations,
    num_candidates,
)
from oxidize_jax.scheduler import beams as rows_of_beams
from oxidize_jax.scheduler.commit import advance as advance_rows
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import SchedulerState, init_scheduler
from oxidize_jax.types import replace, state


@state
class NewSearch:
    """Prompts of G groups; a group that is only padding has ``max_tokens`` 0."""

    tokens: jax.Array
    """i32[G, N]: prompts, then anything."""
    prompt_len: jax.Array
    """i32[G]"""
    max_tokens: jax.Array
    """i32[G]"""
    salt: jax.Array
    """i32[G] >= 0"""


@state
class Search:
    """What a search knows beside the rows. Donated to each run."""

    beams: Beams
    opened: jax.Array
    """i32[]: groups that have been let in so far, in order."""
    ready: jax.Array
    """bool[R]: beams whose continuations are known."""
    tokens: jax.Array
    """i32[R, C]: the best continuations of each ready beam,"""
    sums: jax.Array
    """f32[R, C]: and their sums of logprobs, the beam's own included."""
    peak_blocks: jax.Array
    """i32[]: most blocks that were held in a step so far."""


def search_config(
    engine: EngineConfig, width: int, num_groups: int, max_model_len: int
) -> EngineConfig:
    """The configuration of a search of ``num_groups`` with the blocks of ``engine``."""
    slots = num_groups * width
    return dataclasses.replace(
        engine,
        max_num_seqs=min(engine.max_num_seqs, slots),
        max_model_len=max_model_len,
        max_num_requests=slots,
        max_logprobs=0,
        max_stop_token_ids=1,
        max_logit_bias=0,
        max_bad_words=0,
        token_mask_size=0,
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def start_search(
    config: EngineConfig, width: int, num_stop_ids: int, new: NewSearch
) -> tuple[SchedulerState, Search]:
    """Groups that wait, in a scheduler whose pool is yet to be replaced by the engine's.

    ``num_stop_ids`` is that of the rules, 1 where they have only padding.
    """
    groups = new.prompt_len.shape[0]
    slots, count = groups * width, num_candidates(width, num_stop_ids)
    scheduler = init_scheduler(config)
    lane = jnp.arange(slots, dtype=jnp.int32)
    lead = lane % width == 0

    def each(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, width, axis=0)

    requests = replace(
        scheduler.requests,
        tokens=each(new.tokens),
        prompt_len=each(new.prompt_len),
        num_tokens=each(new.prompt_len),
        salt=each(new.salt),
        arrival=lane,
        # A search has shapes of its own, and rounds as they do: what a deterministic engine finds
        # in its cache must not come from there.
        use_cache=jnp.full((slots,), not config.deterministic),
    )
    beams = begin(width, new.max_tokens, config.max_model_len)
    search = Search(
        beams=replace(beams, done=new.max_tokens < 1),
        opened=jnp.zeros((), jnp.int32),
        # There is one beam to begin with: the others have nothing to offer, and are ready.
        ready=~lead,
        tokens=jnp.zeros((slots, count), jnp.int32),
        sums=jnp.full((slots, count), -jnp.inf, jnp.float32),
        peak_blocks=jnp.zeros((), jnp.int32),
    )
    return replace(scheduler, requests=requests), search


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 5), compiler_options=COMPILER_OPTIONS)
def run_search(
    config: EngineConfig,
    model: Model,
    params: Params,
    state: EngineState,
    rules: BeamRules,
    search: Search,
    limit: jax.Array,
) -> tuple[EngineState, Search]:
    """:func:`search_steps`"""
    return search_steps(config, model, params, state, rules, search, limit)


def search_steps(
    config: EngineConfig,
    model: Model,
    params: Params,
    state: EngineState,
    rules: BeamRules,
    search: Search,
    limit: jax.Array,
    shapes: tuple[Bucket, ...] | None = None,
) -> tuple[EngineState, Search]:
    """Up to ``limit i32[]`` steps, fewer if every group is done; then no row and no block is held.

    It is for the caller to see that each group can run by itself: its prompt and ``max_tokens``
    within ``max_model_len`` and the pool.
    """
    shapes = shapes or buckets(config)

    def goes_on(carry: tuple[EngineState, Search, Room, jax.Array]) -> jax.Array:
        _, search, _, steps = carry
        return ~jnp.all(search.beams.done) & (steps < limit)

    def body(
        carry: tuple[EngineState, Search, Room, jax.Array],
    ) -> tuple[EngineState, Search, Room, jax.Array]:
        state, search, room, steps = carry
        stuck = ~has_plan(state)
        kv, room, taken = execute_plan(config, model, shapes, params, state, room)
        scheduler = state.scheduler
        for size, (logits, rows) in room.items():
            note = partial(_note_candidates, scheduler, logits, rows)
            search = apply_if(taken == size, note, search)
        scheduler = advance_rows(config, scheduler)
        scheduler, search = _move_groups(config, scheduler, rules, search)
        free = partial(rows_of_beams.free_ready, ready=search.ready)
        scheduler = apply_if(stuck, free, scheduler)
        width = search.beams.logprob.shape[1]
        scheduler, opened = rows_of_beams.open_groups(
            config, width, scheduler, search.opened, search.beams.done
        )
        scheduler = rows_of_beams.park(schedule(config, scheduler), search.ready)
        used = config.num_blocks - available(scheduler.pool)
        search = replace(search, opened=opened, peak_blocks=jnp.maximum(search.peak_blocks, used))
        return EngineState(scheduler=scheduler, kv=kv), search, room, steps + 1

    zero = jnp.zeros((), jnp.int32)
    end = lax.while_loop(goes_on, body, (state, search, empty_room(model, shapes), zero))
    return end[0], end[1]


def _note_candidates(
    scheduler: SchedulerState, logits: jax.Array, rows: jax.Array, search: Search
) -> Search:
    """Keep what ``logits f32[C, V]`` give for the beams in ``rows i32[C]``; they are ready."""
    slots = search.ready.shape[0]
    beam = scheduler.rows.request.at[rows].get(mode="fill", fill_value=slots)
    logprob = search.beams.logprob.reshape(-1).at[beam].get(mode="fill", fill_value=0)
    tokens, sums = continuations(logits, logprob, search.tokens.shape[1])
    return replace(
        search,
        ready=search.ready.at[beam].set(True, mode="drop"),
        tokens=search.tokens.at[beam].set(tokens, mode="drop"),
        sums=search.sums.at[beam].set(sums, mode="drop"),
    )


def _move_groups(
    config: EngineConfig, scheduler: SchedulerState, rules: BeamRules, search: Search
) -> tuple[SchedulerState, Search]:
    """A step for every group whose beams are all ready."""
    groups, width = search.beams.logprob.shape
    ready = jnp.all(search.ready.reshape(groups, width), axis=1)
    moves = ready & ~search.beams.done

    def each(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, width, axis=0)

    def move(carry: tuple[SchedulerState, Search]) -> tuple[SchedulerState, Search]:
        scheduler, search = carry
        shape = (groups, width, search.tokens.shape[1])
        beams, chosen = advance(
            rules, search.beams, search.tokens.reshape(shape), search.sums.reshape(shape), moves
        )
        first = jnp.arange(groups, dtype=jnp.int32) * width
        scheduler = rows_of_beams.reorder(
            config,
            scheduler,
            parents=(first[:, None] + chosen.parents).reshape(-1),
            tokens=chosen.tokens.reshape(-1),
            moves=each(moves & ~beams.done),
        )
        scheduler = rows_of_beams.finish_beams(scheduler, each(moves & beams.done))
        return scheduler, replace(search, beams=beams, ready=search.ready & ~each(moves))

    return apply_if(jnp.any(moves), move, (scheduler, search))
