"""Rows: their order, and the transitions that take one away: retire and preempt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import apply_if, at_index
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.scheduler.state import (
    FINISHED,
    NOT_FINISHED,
    POOL_EXHAUSTED,
    SchedulerState,
)
from oxidize_jax.types import replace


def order_rows(state: SchedulerState) -> SchedulerState:
    """Put the rows in order by priority, then arrival; sorts only where rows have changed."""

    def sort(state: SchedulerState) -> SchedulerState:
        request = state.rows.request
        idle = request >= state.requests.status.shape[0]
        keys = (_of_rows(state, state.requests.arrival), _of_rows(state, state.requests.priority))
        order = jnp.lexsort((*keys, idle)).astype(jnp.int32)
        return replace(state, plan=replace(state.plan, order=order, ordered=request))

    changed = jnp.any(state.rows.request != state.plan.ordered)
    return apply_if(changed, sort, state)


def retire(state: SchedulerState) -> SchedulerState:
    """Take the rows and blocks of finished requests, one after the other."""
    return free_rows(state, jnp.full((), state.rows.request.shape[0], jnp.int32))


def preempt(state: SchedulerState, row: jax.Array, alone: jax.Array) -> SchedulerState:
    """Take ``row i32[]`` from a request so that others, or it later, can go on.

    Preemption is by recomputation: the request keeps its tokens and its status RUNNING,
    and loses row and blocks. Blocks that were registered stay in the prefix cache while
    nobody needs them, so that a soon resumption recomputes little. If it had the pool
    ``alone bool[]`` and still needs more, it is finished with what it has.
    """
    return free_row(_note_preemption(state, state.rows.request[row], alone), row)


def free_rows(state: SchedulerState, victim: jax.Array) -> SchedulerState:
    """:func:`preempt` the row ``victim i32[]`` (S: none) and :func:`retire` the finished ones.

    One loop for both, since to free a row takes more kernels than all else in it.
    """
    no_row, no_request = state.rows.request.shape[0], state.requests.status.shape[0]

    def is_finished(state: SchedulerState) -> jax.Array:
        return _of_rows(state, state.requests.status) == FINISHED

    def some(carry: tuple[jax.Array, SchedulerState]) -> jax.Array:
        victim, state = carry
        return (victim < no_row) | jnp.any(is_finished(state))

    def free_next(carry: tuple[jax.Array, SchedulerState]) -> tuple[jax.Array, SchedulerState]:
        victim, state = carry
        finished = jnp.argmax(is_finished(state)).astype(jnp.int32)
        alone = jnp.sum(state.rows.request < no_request, dtype=jnp.int32) == 1
        preempted = at_index(state.rows.request, victim, no_request)
        state = _note_preemption(state, preempted, alone)
        state = free_row(state, jnp.where(victim < no_row, victim, finished))
        return jnp.full((), no_row, jnp.int32), state

    return lax.while_loop(some, free_next, (victim, state))[1]


def _note_preemption(state: SchedulerState, request: jax.Array, alone: jax.Array) -> SchedulerState:
    """Count that ``request i32[]`` (``R``: nobody) is preempted, or finish it if ``alone``."""
    requests, none = state.requests, state.requests.status.shape[0]
    resumes = jnp.where(alone, none, request)
    counts = requests.num_preemptions.at[resumes].add(1, mode="drop")
    preemptions = state.totals.preemptions + (resumes < none).astype(jnp.int32)
    state = replace(
        state,
        requests=replace(requests, num_preemptions=counts),
        totals=replace(state.totals, preemptions=preemptions),
    )
    return finish(state, jnp.where(alone, request, none), POOL_EXHAUSTED)


def finish(state: SchedulerState, request: jax.Array, reason: int) -> SchedulerState:
    """Set ``request i32[]`` to FINISHED with ``reason``, unless it is already."""
    requests = state.requests
    reasons = requests.finish_reason.at[request].get(mode="fill", fill_value=reason)
    target = jnp.where(reasons == NOT_FINISHED, request, requests.status.shape[0])
    return replace(
        state,
        requests=replace(
            requests,
            status=requests.status.at[target].set(FINISHED, mode="drop"),
            finish_reason=requests.finish_reason.at[target].set(reason, mode="drop"),
        ),
    )


def free_row(state: SchedulerState, row: jax.Array) -> SchedulerState:
    """Release the blocks of ``row i32[]``, last block first, and leave the row idle."""
    rows, requests, pool = state.rows, state.requests, state.pool
    request = rows.request[row]
    no_row, no_request = rows.request.shape[0], requests.status.shape[0]
    # The tail goes first: a prefix is of use only while all blocks before it are there.
    pool = block_pool.release(pool, rows.block_table[row][::-1], distinct=True)
    return replace(
        state,
        pool=pool,
        rows=replace(
            rows,
            request=rows.request.at[row].set(no_request),
            block_table=rows.block_table.at[row].set(pool.num_blocks),
            num_blocks=rows.num_blocks.at[row].set(0),
            kv_len=rows.kv_len.at[row].set(0),
        ),
        requests=replace(
            requests,
            row=requests.row.at[request].set(no_row, mode="drop"),
            num_computed=requests.num_computed.at[request].set(0, mode="drop"),
        ),
    )


def _of_rows(state: SchedulerState, values: jax.Array) -> jax.Array:
    return values.at[state.rows.request].get(mode="fill", fill_value=0)
