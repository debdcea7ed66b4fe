"""Beams as rows: a step of a beam search only re-points block tables.

A group is k requests side by side, slots ``g * k`` to ``g * k + k - 1``, that run like any other:
they are admitted, share prefixes, are preempted and computed again. But for two things: no token
is drawn for them, and a beam that has computed its last token waits until all of its group have.
It is *ready* then, and what it knows of its continuations is kept apart, so that it loses nothing
with its row. A ready beam without a row is *parked*, its status UNUSED, and waits for nothing.

When all of a group are ready each beam becomes a copy of one of them with a token more: it takes
its tokens and shares its blocks, the last one too until one of them writes (``grow`` copies it).
Reference counts go up for beams taken twice and down for those dropped; no KV moves.

Sizes: G groups of k beams, R = G * k.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import at_index, prefix_sum
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.queue import uncommitted
from oxidize_jax.scheduler.rows import free_row, preempt, retire
from oxidize_jax.scheduler.state import (
    FINISHED,
    NOT_FINISHED,
    RUNNING,
    STOPPED,
    UNUSED,
    WAITING,
    SchedulerState,
)
from oxidize_jax.types import replace


def open_groups(
    config: EngineConfig, width: int, state: SchedulerState, opened: jax.Array, done: jax.Array
) -> tuple[SchedulerState, jax.Array]:
    """Let the first beams of the next groups wait for admission, as far as there is room.

    A group is opened where rows are left for all its beams, and blocks for its prompt and a
    block for each beam; or where no other is under way.

    Args:
      opened: i32[]: groups opened so far, in order.
      done: bool[G]

    Returns:
      ``(state, opened)``
    """
    requests, groups = state.requests, done.shape[0]
    lead = jnp.arange(groups, dtype=jnp.int32) * width
    blocks = -(-requests.prompt_len[lead] // config.block_size) + width
    room = uncommitted(config, state)

    def fits(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        status, opened = carry
        under_way = jnp.sum((lead < opened * width) & ~done, dtype=jnp.int32)
        promised = jnp.sum(jnp.where(status[lead] == WAITING, blocks, 0), dtype=jnp.int32)
        enough = at_index(blocks, opened, 0) + promised <= room
        rows = (under_way + 1) * width <= config.max_num_seqs
        return (opened < groups) & rows & (enough | (under_way == 0))

    def open_next(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        status, opened = carry
        # What is done before it begins only fills up the number of groups.
        slot = jnp.where(done[opened], status.shape[0], opened * width)
        return status.at[slot].set(WAITING, mode="drop"), opened + 1

    status, opened = lax.while_loop(fits, open_next, (requests.status, opened))
    return replace(state, requests=replace(requests, status=status)), opened


def reorder(
    config: EngineConfig,
    state: SchedulerState,
    parents: jax.Array,
    tokens: jax.Array,
    moves: jax.Array,
) -> SchedulerState:
    """Make each beam that moves a copy of ``parents``, as all stand now, with a token more.

    Args:
      parents: i32[R]: slot of the beam it continues, itself possibly.
      tokens: i32[R]: the token it adds.
      moves: bool[R]: whole groups; others stay as they are. No plan may be open.

    A beam whose parent has no row loses its own, and is computed again. One that has none takes
    an idle row; ``open_groups`` has seen to it that there is one.
    """
    requests, no_row = state.requests, config.max_num_seqs
    slot = jnp.arange(parents.shape[0], dtype=jnp.int32)
    parents = jnp.where(moves, parents, slot)
    source = requests.row[parents]
    has = source < no_row
    needs = moves & has & (requests.row >= no_row)
    idle = state.rows.request >= config.max_num_requests
    seat = jnp.arange(no_row, dtype=jnp.int32)
    free = jnp.where(idle, prefix_sum(idle) - 1, no_row)
    free = jnp.full((no_row,), no_row, jnp.int32).at[free].set(seat, mode="drop")
    nth = jnp.where(needs, prefix_sum(needs) - 1, no_row)
    row = jnp.where(needs, at_index(free, nth, no_row), requests.row)
    row = jnp.where(has, row, no_row)
    total = requests.num_tokens[parents]
    place = jnp.where(moves, total, config.max_model_len)
    state = _point_rows(config, state, jnp.where(moves, row, no_row), source, moves)
    return replace(
        state,
        requests=replace(
            requests,
            status=jnp.where(moves, RUNNING, requests.status),
            row=row,
            num_tokens=total + moves.astype(jnp.int32),
            num_computed=jnp.where(row < no_row, requests.num_computed[parents], 0),
            tokens=requests.tokens[parents].at[slot, place].set(tokens, mode="drop"),
        ),
        totals=replace(
            state.totals,
            generated_tokens=state.totals.generated_tokens + jnp.sum(moves, dtype=jnp.int32),
        ),
    )


def _point_rows(
    config: EngineConfig,
    state: SchedulerState,
    row: jax.Array,
    source: jax.Array,
    moves: jax.Array,
) -> SchedulerState:
    """Let ``row i32[R]`` (S: none) of each beam hold what the row ``source i32[R]`` holds now."""
    rows, pool, no_row = state.rows, state.pool, config.max_num_seqs
    slot = jnp.arange(row.shape[0], dtype=jnp.int32)
    seat = jnp.arange(no_row, dtype=jnp.int32)
    # Of the rows of beams that move, those that nobody takes become idle.
    held = at_index(moves, rows.request, False)
    request = jnp.where(held, config.max_num_requests, rows.request)
    request = request.at[row].set(slot, mode="drop")
    origin = jnp.where(held, no_row, seat).at[row].set(source, mode="drop")

    def from_origin(values: jax.Array, fill: int) -> jax.Array:
        return at_index(values, origin, fill)

    table = from_origin(rows.block_table, config.num_blocks)
    changed = table != rows.block_table
    gained = jnp.where(changed, table, config.num_blocks)
    lost = jnp.where(changed, rows.block_table, config.num_blocks)
    # Sharing comes first, so that a block that only changes hands is never free. Then the
    # tails go before the heads: a prefix is of use only while all blocks before it are there.
    pool = block_pool.share(pool, gained.reshape(-1))
    pool = block_pool.release(pool, lost[:, ::-1].T.reshape(-1))
    return replace(
        state,
        pool=pool,
        rows=replace(
            rows,
            request=request,
            block_table=table,
            num_blocks=from_origin(rows.num_blocks, 0),
            kv_len=from_origin(rows.kv_len, 0),
            chain_hash=from_origin(rows.chain_hash, 0),
            chain_parent=from_origin(rows.chain_parent, 0),
        ),
    )


def finish_beams(state: SchedulerState, ends: jax.Array) -> SchedulerState:
    """Finish the requests of groups that are done, ``ends bool[R]``; schedule takes their rows."""
    requests = state.requests
    ends = ends & (requests.finish_reason == NOT_FINISHED)
    return replace(
        state,
        requests=replace(
            requests,
            status=jnp.where(ends, FINISHED, requests.status),
            finish_reason=jnp.where(ends, STOPPED, requests.finish_reason),
        ),
    )


def park(state: SchedulerState, ready: jax.Array) -> SchedulerState:
    """Let ``ready bool[R]`` beams that have lost their rows wait for nothing."""
    requests = state.requests
    rowless = requests.row >= state.rows.request.shape[0]
    parked = ready & rowless & (requests.status == RUNNING)
    status = jnp.where(parked, UNUSED, requests.status)
    return replace(state, requests=replace(requests, status=status))


def free_ready(state: SchedulerState, ready: jax.Array) -> SchedulerState:
    """Take the rows and blocks of all ``ready bool[R]`` beams, and park them.

    For where nothing can be planned: all rows are of beams that wait for others, and these for
    blocks. What was computed for the ready ones is kept, so each time one more becomes ready.
    """

    def holds(state: SchedulerState) -> jax.Array:
        return at_index(ready, state.rows.request, False)

    def free_next(state: SchedulerState) -> SchedulerState:
        return free_row(state, jnp.argmax(holds(state)).astype(jnp.int32))

    return park(lax.while_loop(lambda state: jnp.any(holds(state)), free_next, state), ready)


def preempt_all(state: SchedulerState) -> SchedulerState:
    """Preempt whoever runs, and drop the plan, so that others can have rows and blocks.

    All go on, as after any preemption, once the next step is scheduled.
    """

    def runs(state: SchedulerState) -> jax.Array:
        return state.rows.request < state.requests.status.shape[0]

    def preempt_next(state: SchedulerState) -> SchedulerState:
        row = jnp.argmax(runs(state)).astype(jnp.int32)
        return preempt(state, row, jnp.zeros((), jnp.bool_))

    state = lax.while_loop(lambda state: jnp.any(runs(state)), preempt_next, retire(state))
    none = jnp.zeros_like(state.plan.num_scheduled)
    plan = replace(state.plan, num_scheduled=none, num_copies=jnp.zeros((), jnp.int32))
    return replace(state, plan=plan)
