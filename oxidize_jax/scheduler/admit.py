"""Admit: give rows to preempted requests first, then to waiting ones, first come first served."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.blocks import hashing, prefix
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import remaining_tokens, tiles_for
from oxidize_jax.scheduler.rows import finish
from oxidize_jax.scheduler.state import POOL_EXHAUSTED, RUNNING, WAITING, SchedulerState
from oxidize_jax.types import replace, state

_INT32_MAX = 2**31 - 1


@state
class Admission:
    """Carry of the admission loop."""

    scheduler: SchedulerState
    granted: jax.Array
    """i32[S]: first chunk of each row admitted in this step."""
    tokens: jax.Array
    """i32[]: budget left."""
    tiles: jax.Array
    """i32[]: prefill tiles left."""
    open: jax.Array
    """bool[]: the last candidate fitted; one that does not holds up those behind it."""


def admit(
    config: EngineConfig,
    state: SchedulerState,
    tokens: jax.Array,
    tiles: jax.Array,
    allowed: jax.Array,
) -> tuple[SchedulerState, jax.Array]:
    """Admit while there is a row, budget and room in the pool.

    Args:
      tokens, tiles: i32[], what the step has left for new rows.
      allowed: bool[], false in a step that preempted.

    Returns:
      ``(state, granted i32[S])``: the tokens of each new row in this step.
    """

    def can_admit(carry: Admission) -> jax.Array:
        full = jnp.all(carry.scheduler.rows.request < config.max_num_requests)
        return (
            carry.open
            & ~full
            & (carry.tokens > 0)
            & ((carry.tiles > 0) | (carry.tokens == 1))
            & jnp.any(_is_candidate(carry.scheduler))
        )

    start = Admission(
        scheduler=state,
        granted=jnp.zeros((config.max_num_seqs,), jnp.int32),
        tokens=tokens,
        tiles=tiles,
        open=allowed,
    )
    end = lax.while_loop(can_admit, lambda carry: _admit_one(config, carry), start)
    return end.scheduler, end.granted


def _admit_one(config: EngineConfig, carry: Admission) -> Admission:
    """Try the first candidate: look its prefix up, check the pool, take row and blocks."""
    state = carry.scheduler
    request = _first_candidate(state)
    found = _lookup(config, state, request)
    total = state.requests.num_tokens[request]
    needed = -(-total // config.block_size)
    lacking = needed - found.num_blocks
    # Preempted while it grew past the whole pool: it could wait for ever.
    hopeless = needed > config.num_blocks
    state = finish(state, jnp.where(hopeless, request, config.max_num_requests), POOL_EXHAUSTED)
    fits = ~hopeless & (lacking <= _uncommitted(config, state, found.blocks))
    cached = found.num_blocks * config.block_size
    chunk = jnp.minimum(total - cached, carry.tokens)
    chunk = jnp.minimum(chunk, jnp.maximum(carry.tiles * config.prefill_tile, 1))
    # The head of the queue that does not fit must change nothing: every write is masked.
    request = jnp.where(fits, request, config.max_num_requests)
    row = jnp.argmax(state.rows.request >= config.max_num_requests).astype(jnp.int32)
    row = jnp.where(fits, row, config.max_num_seqs)
    chunk = jnp.where(fits, chunk, 0)
    return Admission(
        scheduler=_enter(config, state, request, row, found, chunk),
        granted=carry.granted.at[row].set(chunk, mode="drop"),
        tokens=carry.tokens - chunk,
        tiles=carry.tiles - tiles_for(chunk, config.prefill_tile),
        open=fits | hopeless,
    )


def _is_candidate(state: SchedulerState) -> jax.Array:
    """bool[R]: waiting, or preempted."""
    return (state.requests.status == WAITING) | _is_preempted(state)


def _is_preempted(state: SchedulerState) -> jax.Array:
    requests = state.requests
    return (requests.status == RUNNING) & (requests.row >= state.rows.request.shape[0])


def _first_candidate(state: SchedulerState) -> jax.Array:
    """i32[]: preempted before waiting, then by priority, then by arrival."""
    requests = state.requests
    left = _is_candidate(state)
    for key in (~_is_preempted(state), requests.priority, requests.arrival):
        least = jnp.min(jnp.where(left, key.astype(jnp.int32), _INT32_MAX))
        left = left & (key.astype(jnp.int32) == least)
    return jnp.argmax(left).astype(jnp.int32)


def _lookup(config: EngineConfig, state: SchedulerState, request: jax.Array) -> prefix.Prefix:
    """Prefix of the request's tokens that the pool knows; never the last token."""
    requests, k = state.requests, config.block_size
    salt = requests.salt[request]
    if not config.enable_prefix_caching:
        return prefix.Prefix(
            blocks=jnp.full((config.blocks_per_seq,), config.num_blocks, jnp.int32),
            num_blocks=jnp.zeros((), jnp.int32),
            chain_hash=hashing.root_hash(salt),
            chain_parent=block_pool.root_parent(salt),
        )
    tokens = jnp.pad(
        requests.tokens[request], (0, config.blocks_per_seq * k - config.max_model_len)
    )
    limit = (requests.num_tokens[request] - 1) // k
    return prefix.lookup_prefix(state.pool, tokens.reshape(-1, k), limit, salt)


def _uncommitted(config: EngineConfig, state: SchedulerState, hits: jax.Array) -> jax.Array:
    """i32[]: blocks the pool can give, less what is promised to others.

    Promised are the rest of the prompts that are being prefilled, one block for the next
    tokens of what runs (so that an admission is not undone in the next step), and the
    cached blocks among ``hits i32[M]``, which stop being available when they are shared.
    """
    rows = state.rows
    left = remaining_tokens(state)
    computed = state.requests.num_computed.at[rows.request].get(mode="fill", fill_value=0)
    promised = jnp.maximum(-(-(computed + left) // config.block_size) - rows.num_blocks, 0)
    running = jnp.any(rows.request < config.max_num_requests)
    revived = state.pool.ref_count.at[hits].get(mode="fill", fill_value=1) == 0
    return (
        block_pool.available(state.pool)
        - jnp.sum(promised, dtype=jnp.int32)
        - jnp.sum(revived, dtype=jnp.int32)
        - running.astype(jnp.int32)
    )


def _enter(
    config: EngineConfig,
    state: SchedulerState,
    request: jax.Array,
    row: jax.Array,
    found: prefix.Prefix,
    chunk: jax.Array,
) -> SchedulerState:
    """Share the hits, allocate for the first chunk, and fill the row."""
    rows, requests, totals, k = state.rows, state.requests, state.totals, config.block_size
    admitted = row < config.max_num_seqs
    hits = jnp.where(admitted, found.blocks, config.num_blocks)
    cached = jnp.where(admitted, found.num_blocks * k, 0)
    held = -(-(cached + chunk) // k)
    growth = jnp.where(admitted, held - found.num_blocks, 0)
    size = min(-(-config.max_num_batched_tokens // k) + 1, config.num_blocks)
    pool, fresh, _ = block_pool.allocate(block_pool.share(state.pool, hits), growth, size)
    column = jnp.arange(size, dtype=jnp.int32)
    place = jnp.where(column < growth, found.num_blocks + column, config.blocks_per_seq)
    table = hits.at[place].set(fresh, mode="drop")
    first_time = requests.num_preemptions.at[request].get(mode="fill", fill_value=1) == 0
    first = jnp.where(first_time, request, config.max_num_requests)
    return replace(
        state,
        pool=pool,
        rows=replace(
            rows,
            request=rows.request.at[row].set(request, mode="drop"),
            block_table=rows.block_table.at[row].set(table, mode="drop"),
            num_blocks=rows.num_blocks.at[row].set(held, mode="drop"),
            chain_hash=rows.chain_hash.at[row].set(found.chain_hash, mode="drop"),
            chain_parent=rows.chain_parent.at[row].set(found.chain_parent, mode="drop"),
        ),
        requests=replace(
            requests,
            status=requests.status.at[request].set(RUNNING, mode="drop"),
            row=requests.row.at[request].set(row, mode="drop"),
            num_computed=requests.num_computed.at[request].set(cached, mode="drop"),
            num_cached=requests.num_cached.at[first].set(cached, mode="drop"),
        ),
        totals=replace(totals, cached_tokens=totals.cached_tokens + cached),
    )
