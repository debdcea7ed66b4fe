"""Rows: their order, and the transitions that take one away: retire and preempt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import apply_if
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

    def is_finished(state: SchedulerState) -> jax.Array:
        return _of_rows(state, state.requests.status) == FINISHED

    def retire_one(state: SchedulerState) -> SchedulerState:
        return free_row(state, jnp.argmax(is_finished(state)).astype(jnp.int32))

    return lax.while_loop(lambda s: jnp.any(is_finished(s)), retire_one, state)


def preempt(state: SchedulerState, row: jax.Array, alone: jax.Array) -> SchedulerState:
    """Take ``row i32[]`` from a request so that others, or it later, can go on.

    Preemption is by recomputation: the request keeps its tokens and its status RUNNING,
    and loses row and blocks. Blocks that were registered stay in the prefix cache while
    nobody needs them, so that a soon resumption recomputes little. If it had the pool
    ``alone bool[]`` and still needs more, it is finished with what it has.
    """
    request = state.rows.request[row]
    none = state.requests.status.shape[0]
    state = finish(state, jnp.where(alone, request, none), POOL_EXHAUSTED)
    counts = state.requests.num_preemptions
    counts = counts.at[jnp.where(alone, none, request)].add(1, mode="drop")
    preemptions = state.totals.preemptions + (~alone).astype(jnp.int32)
    state = replace(
        state,
        requests=replace(state.requests, num_preemptions=counts),
        totals=replace(state.totals, preemptions=preemptions),
    )
    return free_row(state, row)


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
