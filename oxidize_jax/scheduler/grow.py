"""Grow: give running rows the blocks for their next tokens, preempting where they lack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import prefix_sum, segment_of
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import Grants, grant_running
from oxidize_jax.scheduler.rows import preempt
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.types import BlockId, replace


def make_room(config: EngineConfig, state: SchedulerState) -> tuple[SchedulerState, jax.Array]:
    """Preempt until the granted tokens of the rows that are left fit into the pool.

    The victim is the last in order (vLLM ``v1/core/sched/scheduler.py``): never one that
    came before a row in need. A request that does not fit with the pool to itself is
    finished. Returns ``(state, preempted bool[])``.
    """

    def lacks_room(carry: tuple[SchedulerState, jax.Array]) -> jax.Array:
        state, _ = carry
        return blocks_needed(config, state) > block_pool.available(state.pool)

    def take_one(carry: tuple[SchedulerState, jax.Array]) -> tuple[SchedulerState, jax.Array]:
        state, _ = carry
        running = state.rows.request < state.requests.status.shape[0]
        count = jnp.sum(running, dtype=jnp.int32)
        victim = row_order(state)[count - 1]
        return preempt(state, victim, alone=count == 1), jnp.ones((), jnp.bool_)

    return lax.while_loop(lacks_room, take_one, (state, jnp.zeros((), jnp.bool_)))


def grow(config: EngineConfig, state: SchedulerState) -> tuple[SchedulerState, Grants]:
    """Allocate for the granted tokens and record the copies. :func:`make_room` ran before."""
    order = row_order(state)
    grants = grant_running(config, state, order)
    tokens = grants.decode + grants.prefill
    target = _write_block(config, state, tokens)
    pool, written, src, dst, _ = block_pool.copy_on_write(state.pool, target)
    column = computed_of_rows(state) // config.block_size
    row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    column = jnp.where(target < config.num_blocks, column, config.blocks_per_seq)
    table = state.rows.block_table.at[row, column].set(written, mode="drop")
    state = replace(state, pool=pool, rows=replace(state.rows, block_table=table))
    state = _append_blocks(config, state, _growth(config, state, tokens))
    return _record_copies(replace(state, plan=replace(state.plan, order=order)), src, dst), grants


def blocks_needed(config: EngineConfig, state: SchedulerState) -> jax.Array:
    """i32[]: blocks that the granted tokens of all rows would take, copies included."""
    grants = grant_running(config, state, row_order(state))
    tokens = grants.decode + grants.prefill
    copies = block_pool.writers_that_copy(state.pool, _write_block(config, state, tokens))
    growth = _growth(config, state, tokens)
    return jnp.sum(growth, dtype=jnp.int32) + jnp.sum(copies, dtype=jnp.int32)


def row_order(state: SchedulerState) -> jax.Array:
    """i32[S]: rows by priority, then arrival; idle rows last."""
    requests, request = state.requests, state.rows.request
    idle = request >= requests.status.shape[0]
    priority = requests.priority.at[request].get(mode="fill", fill_value=0)
    arrival = requests.arrival.at[request].get(mode="fill", fill_value=0)
    return jnp.lexsort((arrival, priority, idle)).astype(jnp.int32)


def computed_of_rows(state: SchedulerState) -> jax.Array:
    """i32[S]: ``num_computed`` of each row's request, 0 for an idle row."""
    return state.requests.num_computed.at[state.rows.request].get(mode="fill", fill_value=0)


def _write_block(config: EngineConfig, state: SchedulerState, tokens: jax.Array) -> BlockId:
    """i32[S]: the block that the row's first new token goes into, if it has one already."""
    computed = computed_of_rows(state)
    row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    block = state.rows.block_table.at[row, computed // config.block_size].get(
        mode="fill", fill_value=config.num_blocks
    )
    return jnp.where(tokens > 0, block, config.num_blocks)


def _growth(config: EngineConfig, state: SchedulerState, tokens: jax.Array) -> jax.Array:
    """i32[S]: blocks that each row lacks for ``tokens i32[S]`` more."""
    needed = -(-(computed_of_rows(state) + tokens) // config.block_size)
    return jnp.where(tokens > 0, jnp.maximum(needed - state.rows.num_blocks, 0), 0)


def _append_blocks(
    config: EngineConfig, state: SchedulerState, growth: jax.Array
) -> SchedulerState:
    """Allocate ``growth i32[S]`` blocks and enter them at the end of each row's table."""
    budget_blocks = -(-config.max_num_batched_tokens // config.block_size)
    size = min(config.max_num_seqs + budget_blocks, config.num_blocks)
    ends = prefix_sum(growth)
    pool, fresh, ok = block_pool.allocate(state.pool, ends[-1], size)
    lane = jnp.arange(size, dtype=jnp.int32)
    row = segment_of(ends, lane)
    first = (ends - growth).at[row].get(mode="fill", fill_value=0)
    held = state.rows.num_blocks.at[row].get(mode="fill", fill_value=0)
    row = jnp.where(lane < ends[-1], row, config.max_num_seqs)
    table = state.rows.block_table.at[row, held + lane - first].set(fresh, mode="drop")
    rows = replace(
        state.rows,
        block_table=table,
        num_blocks=state.rows.num_blocks + jnp.where(ok, growth, 0),
    )
    return replace(state, pool=pool, rows=rows)


def _record_copies(state: SchedulerState, src: BlockId, dst: BlockId) -> SchedulerState:
    """Pack the copies to the front of the plan's list."""
    no_block, size = state.pool.num_blocks, src.shape[0]
    used = src < no_block
    place = jnp.where(used, prefix_sum(used) - 1, size)
    empty = jnp.full((size,), no_block, jnp.int32)
    count = jnp.sum(used, dtype=jnp.int32)
    plan = replace(
        state.plan,
        copy_src=empty.at[place].set(src, mode="drop"),
        copy_dst=empty.at[place].set(dst, mode="drop"),
        num_copies=count,
    )
    totals = replace(state.totals, copies=state.totals.copies + count)
    return replace(state, plan=plan, totals=totals)
