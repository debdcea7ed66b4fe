"""Grow: give running rows the blocks for their next tokens, preempting where they lack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import apply_if, at_index, prefix_sum, segments
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import Grants, grant_running
from oxidize_jax.scheduler.rows import free_rows, order_rows
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.types import BlockId, replace, state


@state
class _Room:
    """Carry of the search for room."""

    scheduler: SchedulerState
    grants: Grants
    lacks: jax.Array
    """bool[]: the granted tokens did not fit; true before the first try too."""
    victim: jax.Array
    """i32[]: the row to preempt for them, S for none."""
    preempted: jax.Array
    """bool[]"""


def make_room(
    config: EngineConfig, state: SchedulerState
) -> tuple[SchedulerState, Grants, jax.Array]:
    """Retire, grant tokens to running rows, and preempt until what they need fits into the pool.

    The victim is the last in order (vLLM ``v1/core/sched/scheduler.py``): never one that
    came before a row in need. A request that does not fit with the pool to itself is
    finished. Returns ``(state, grants, preempted bool[])``.
    """

    def evaluate(carry: _Room) -> _Room:
        state = order_rows(free_rows(carry.scheduler, carry.victim))
        grants = grant_running(config, state, state.plan.order)
        lacks = blocks_needed(config, state, grants) > block_pool.available(state.pool)
        return _Room(
            scheduler=state,
            grants=grants,
            lacks=lacks,
            victim=jnp.where(lacks, _last_row(state), config.max_num_seqs),
            preempted=carry.preempted | lacks,
        )

    none = jnp.zeros((config.max_num_seqs,), jnp.int32)
    no = jnp.zeros((), jnp.bool_)
    start = _Room(
        scheduler=state,
        grants=Grants(decode=none, prefill=none, due=none > 0, decodes_first=no),
        lacks=jnp.ones((), jnp.bool_),
        victim=jnp.full((), config.max_num_seqs, jnp.int32),
        preempted=no,
    )
    end = lax.while_loop(lambda carry: carry.lacks, evaluate, start)
    return end.scheduler, end.grants, end.preempted


def grow(config: EngineConfig, state: SchedulerState, grants: Grants) -> SchedulerState:
    """Copy what is shared and will be written, and allocate for the granted tokens.

    :func:`make_room` has seen to it that the pool can.
    """
    target = _write_block(config, state, grants.tokens)
    copies = _writers_that_copy(state.pool, target)
    growth = _growth(config, state, grants.tokens)
    no_copy = jnp.full((config.max_num_seqs,), config.num_blocks, jnp.int32)
    plan = replace(
        state.plan, copy_src=no_copy, copy_dst=no_copy, num_copies=jnp.zeros((), jnp.int32)
    )

    def take(state: SchedulerState) -> SchedulerState:
        return _take_blocks(config, state, jnp.where(copies, target, config.num_blocks), growth)

    return apply_if(jnp.any(copies | (growth > 0)), take, replace(state, plan=plan))


def blocks_needed(config: EngineConfig, state: SchedulerState, grants: Grants) -> jax.Array:
    """i32[]: blocks that the granted tokens of all rows would take, copies included."""
    copies = _writers_that_copy(state.pool, _write_block(config, state, grants.tokens))
    growth = _growth(config, state, grants.tokens)
    return jnp.sum(growth + copies.astype(jnp.int32), dtype=jnp.int32)


def fits_in_place(config: EngineConfig, state: SchedulerState, tokens: jax.Array) -> jax.Array:
    """bool[S]: rows whose next ``tokens i32[S]`` need no block, neither new nor copied."""
    held = at_index(state.pool.ref_count, _write_block(config, state, tokens), 0)
    return (_growth(config, state, tokens) == 0) & (held <= 1)


def _last_row(state: SchedulerState) -> jax.Array:
    """i32[]: the running row that is last in order."""
    running = state.rows.request < state.requests.status.shape[0]
    return state.plan.order[jnp.sum(running, dtype=jnp.int32) - 1]


def _writers_that_copy(pool: block_pool.BlockPool, target: BlockId) -> jax.Array:
    """bool[S]: rows that need a block of their own in place of ``target i32[S]``."""
    shared = jnp.any(at_index(pool.ref_count, target, 0) > 1)

    def compare(_: jax.Array) -> jax.Array:
        return block_pool.writers_that_copy(pool, target)

    return apply_if(shared, compare, jnp.zeros(target.shape, jnp.bool_))


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


def _take_blocks(
    config: EngineConfig, state: SchedulerState, shared: BlockId, growth: jax.Array
) -> SchedulerState:
    """Copy the blocks ``shared i32[S]`` (padding B) and append ``growth i32[S]`` to each row.

    Blocks for both come of one allocation, those for the copies first.
    """
    rows, no_block = state.rows, config.num_blocks
    budget_blocks = -(-config.token_budget // config.block_size)
    size = min(2 * config.max_num_seqs + budget_blocks, no_block)
    num_copies = jnp.sum(shared < no_block, dtype=jnp.int32)
    ends = num_copies + prefix_sum(growth)
    pool, fresh, ok = block_pool.allocate(state.pool, ends[-1], size)
    pool, copied = block_pool.replace_shared(pool, jnp.where(ok, shared, no_block), fresh)
    seat = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    column = jnp.where(copied < no_block, rows.kv_len // config.block_size, config.blocks_per_seq)
    table = rows.block_table.at[seat, column].set(copied, mode="drop")
    lane = jnp.arange(size, dtype=jnp.int32)
    row = segments(ends, size)
    nth = lane - at_index(ends - growth, row, 0)
    row = jnp.where((lane >= num_copies) & (lane < ends[-1]), row, config.max_num_seqs)
    table = table.at[row, at_index(rows.num_blocks, row, 0) + nth].set(fresh, mode="drop")
    rows = replace(rows, block_table=table, num_blocks=rows.num_blocks + jnp.where(ok, growth, 0))
    return _record_copies(replace(state, pool=pool, rows=rows), shared, copied)


def _record_copies(state: SchedulerState, src: BlockId, dst: BlockId) -> SchedulerState:
    """Pack the copies to the front of the plan's list."""
    no_block, size = state.pool.num_blocks, src.shape[0]
    used = dst < no_block
    place = jnp.where(used, prefix_sum(used) - 1, size)
    pairs = jnp.full((2, size), no_block, jnp.int32)
    pairs = pairs.at[:, place].set(jnp.stack([src, dst]), mode="drop")
    count = jnp.sum(used, dtype=jnp.int32)
    plan = replace(state.plan, copy_src=pairs[0], copy_dst=pairs[1], num_copies=count)
    totals = replace(state.totals, copies=state.totals.copies + count)
    return replace(state, plan=plan, totals=totals)
