"""Grow: give running rows the blocks for their next tokens, preempting where they lack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import apply_if, at_index, prefix_sum, segments
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import Grants, grant_running
from oxidize_jax.scheduler.rows import order_rows, preempt
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.types import BlockId, replace, state


@state
class _Room:
    """Carry of the search for room."""

    scheduler: SchedulerState
    grants: Grants
    lacks: jax.Array
    """bool[]: the granted tokens did not fit, and the last row was preempted."""
    preempted: jax.Array
    """bool[]"""


def make_room(
    config: EngineConfig, state: SchedulerState
) -> tuple[SchedulerState, Grants, jax.Array]:
    """Grant tokens to the running rows, and preempt until what they need fits into the pool.

    The victim is the last in order (vLLM ``v1/core/sched/scheduler.py``): never one that
    came before a row in need. A request that does not fit with the pool to itself is
    finished. Returns ``(state, grants, preempted bool[])``.
    """

    def evaluate(carry: _Room) -> _Room:
        state = order_rows(carry.scheduler)
        grants = grant_running(config, state, state.plan.order)
        lacks = blocks_needed(config, state, grants) > block_pool.available(state.pool)
        return _Room(
            scheduler=apply_if(lacks, _preempt_last, state),
            grants=grants,
            lacks=lacks,
            preempted=carry.preempted | lacks,
        )

    none = jnp.zeros((config.max_num_seqs,), jnp.int32)
    no = jnp.zeros((), jnp.bool_)
    start = _Room(
        scheduler=state,
        grants=Grants(decode=none, prefill=none, due=none > 0, decodes_first=no),
        lacks=jnp.ones((), jnp.bool_),
        preempted=no,
    )
    end = lax.while_loop(lambda carry: carry.lacks, evaluate, start)
    return end.scheduler, end.grants, end.preempted


def grow(config: EngineConfig, state: SchedulerState, grants: Grants) -> SchedulerState:
    """Copy what is shared and will be written, and allocate for the granted tokens.

    :func:`make_room` has seen to it that the pool can.
    """
    state = _copy_shared(config, state, _write_block(config, state, grants.tokens))
    growth = _growth(config, state, grants.tokens)

    def append(state: SchedulerState) -> SchedulerState:
        return _append_blocks(config, state, growth)

    return apply_if(jnp.any(growth > 0), append, state)


def blocks_needed(config: EngineConfig, state: SchedulerState, grants: Grants) -> jax.Array:
    """i32[]: blocks that the granted tokens of all rows would take, copies included."""
    pool, target = state.pool, _write_block(config, state, grants.tokens)

    def count_copies(_: jax.Array) -> jax.Array:
        return jnp.sum(block_pool.writers_that_copy(pool, target), dtype=jnp.int32)

    copies = apply_if(_any_shared(pool, target), count_copies, jnp.zeros((), jnp.int32))
    return copies + jnp.sum(_growth(config, state, grants.tokens), dtype=jnp.int32)


def _preempt_last(state: SchedulerState) -> SchedulerState:
    running = state.rows.request < state.requests.status.shape[0]
    count = jnp.sum(running, dtype=jnp.int32)
    return preempt(state, state.plan.order[count - 1], alone=count == 1)


def _copy_shared(config: EngineConfig, state: SchedulerState, target: BlockId) -> SchedulerState:
    """Copy-on-write for the rows whose ``target i32[S]`` others hold too; record the copies."""
    no_copy = jnp.full((config.max_num_seqs,), config.num_blocks, jnp.int32)
    plan = replace(
        state.plan, copy_src=no_copy, copy_dst=no_copy, num_copies=jnp.zeros((), jnp.int32)
    )

    def copy(state: SchedulerState) -> SchedulerState:
        pool, written, src, dst, _ = block_pool.copy_on_write(state.pool, target)
        row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
        column = state.rows.kv_len // config.block_size
        column = jnp.where(target < config.num_blocks, column, config.blocks_per_seq)
        table = state.rows.block_table.at[row, column].set(written, mode="drop")
        state = replace(state, pool=pool, rows=replace(state.rows, block_table=table))
        return _record_copies(state, src, dst)

    return apply_if(_any_shared(state.pool, target), copy, replace(state, plan=plan))


def _any_shared(pool: block_pool.BlockPool, target: BlockId) -> jax.Array:
    return jnp.any(at_index(pool.ref_count, target, 0) > 1)


def computed_of_rows(state: SchedulerState) -> jax.Array:
    """i32[S]: ``num_computed`` of each row's request, 0 for an idle row."""
    return state.requests.num_computed.at[state.rows.request].get(mode="fill", fill_value=0)


def _write_block(config: EngineConfig, state: SchedulerState, tokens: jax.Array) -> BlockId:
    """i32[S]: the block that the row's first new KV goes into, if it has one already."""
    kv_len = state.rows.kv_len
    row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    block = state.rows.block_table.at[row, kv_len // config.block_size].get(
        mode="fill", fill_value=config.num_blocks
    )
    writes = computed_of_rows(state) + tokens > kv_len
    return jnp.where(writes, block, config.num_blocks)


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
    row = segments(ends, size)
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
