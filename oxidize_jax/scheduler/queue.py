"""Who is next in line, and what the pool has left for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import at_index
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import is_paused, remaining_tokens
from oxidize_jax.scheduler.state import RUNNING, WAITING, SchedulerState

_INT32_MAX = 2**31 - 1


def is_candidate(state: SchedulerState) -> jax.Array:
    """bool[R]: preempted, or waiting for nothing but room."""
    waiting = (state.requests.status == WAITING) & ~is_waiting_fork(state)
    return (waiting | is_preempted(state)) & ~is_paused(state)


def is_preempted(state: SchedulerState) -> jax.Array:
    """bool[R]: has run, and holds no row."""
    requests = state.requests
    return (requests.status == RUNNING) & (requests.row >= state.rows.request.shape[0])


def is_waiting_fork(state: SchedulerState) -> jax.Array:
    """bool[R]: waits for a parent that is alive. Without one it is a request like any other."""
    requests = state.requests
    parent = at_index(requests.status, requests.fork_of, -1)
    return (requests.status == WAITING) & ((parent == WAITING) | (parent == RUNNING))


def first_in_line(state: SchedulerState, among: jax.Array) -> jax.Array:
    """i32[]: of ``among bool[R]``, preempted before waiting, by priority, then by arrival."""
    requests = state.requests
    fresh = (~is_preempted(state)).astype(jnp.int32)
    slot = jnp.arange(among.size, dtype=jnp.int32)
    ranks = (fresh, requests.priority, requests.arrival)
    keys = (*(jnp.where(among, rank, _INT32_MAX) for rank in ranks), slot)

    def earlier(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        less = jnp.zeros_like(a[0], jnp.bool_)
        for x, y in reversed(list(zip(a, b, strict=True))):
            less = (x < y) | ((x == y) & less)
        return tuple(jnp.where(less, x, y) for x, y in zip(a, b, strict=True))

    last = (jnp.full((), _INT32_MAX, jnp.int32),) * len(keys)
    *_, first = lax.reduce(keys, last, earlier, (0,))
    return first


def uncommitted(config: EngineConfig, state: SchedulerState) -> jax.Array:
    """i32[]: blocks the pool can give, less what the rows will take in any case.

    That is the rest of their prompts, the block of a decode's next token, and a copy for
    each row that will write into a block it shares (one of the sharers needs none).
    """
    rows, k = state.rows, config.block_size
    computed = at_index(state.requests.num_computed, rows.request, 0)
    total = computed + remaining_tokens(state)
    growth = jnp.maximum(-(-total // k) - rows.num_blocks, 0)
    row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    block = rows.block_table.at[row, rows.kv_len // k].get(
        mode="fill", fill_value=config.num_blocks
    )
    copies = at_index(state.pool.ref_count, block, 0) > 1
    # Shared to the end of its last block: it writes its next token into a new one.
    opens = (rows.kv_len > computed) & (rows.kv_len == rows.num_blocks * k)
    promised = growth + copies.astype(jnp.int32) + opens.astype(jnp.int32)
    return block_pool.available(state.pool) - jnp.sum(promised, dtype=jnp.int32)
