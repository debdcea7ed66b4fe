"""Admit: give rows to preempted requests first, then to waiting ones, first come first served."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import at_index
from oxidize_jax.blocks import hashing, prefix
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import tiles_for
from oxidize_jax.scheduler.queue import (
    first_in_line,
    is_candidate,
    is_preempted,
    is_waiting_fork,
    uncommitted,
)
from oxidize_jax.scheduler.rows import finish
from oxidize_jax.scheduler.state import POOL_EXHAUSTED, RUNNING, SchedulerState
from oxidize_jax.types import replace, state


@state
class Admission:
    """Carry of the admission loop."""

    scheduler: SchedulerState
    sequences: jax.Array
    """i32[R, N], unchanged; carried so that XLA does not copy it."""
    running: jax.Array
    """i32[S]: tokens of the rows that ran before."""
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
    sequences: jax.Array,
    tokens: jax.Array,
    tiles: jax.Array,
    allowed: jax.Array,
    running: jax.Array,
) -> tuple[SchedulerState, jax.Array, jax.Array]:
    """Admit while there is a row, budget and room in the pool.

    Args:
      sequences: i32[R, N], the tokens of the requests, which ``state`` need not hold.
      tokens, tiles: i32[], what the step has left for new rows.
      allowed: bool[], false in a step that preempted.
      running: i32[S], tokens granted to the rows that run already.

    Returns:
      ``(state, sequences, granted i32[S])``: the tokens of each new row in this step, and
      ``sequences`` as they were.
    """

    def can_admit(carry: Admission) -> jax.Array:
        full = jnp.all(carry.scheduler.rows.request < config.max_num_requests)
        return (
            carry.open
            & ~full
            & (carry.tokens > 0)
            & ((carry.tiles > 0) | (carry.tokens == 1))
            & jnp.any(is_candidate(carry.scheduler))
        )

    start = Admission(
        scheduler=state,
        sequences=sequences,
        running=running,
        granted=jnp.zeros((config.max_num_seqs,), jnp.int32),
        tokens=tokens,
        tiles=tiles,
        open=allowed,
    )
    end = lax.while_loop(can_admit, lambda carry: _admit_one(config, carry), start)
    return end.scheduler, end.sequences, end.granted


def _admit_one(config: EngineConfig, carry: Admission) -> Admission:
    """Try the first candidate: look its prefix up, check the pool, take row and blocks."""
    state = carry.scheduler
    request = first_in_line(state, is_candidate(state))
    total = state.requests.num_tokens[request]
    found = _lookup(config, state, request, carry.sequences[request])
    needed = -(-total // config.block_size)
    lacking = needed - found.num_blocks
    # Preempted while it grew past the whole pool: it could wait for ever.
    hopeless = needed > config.num_blocks
    state = finish(state, jnp.where(hopeless, request, config.max_num_requests), POOL_EXHAUSTED)
    fits = ~hopeless & _has_room(config, state, request, lacking, found.blocks)
    if config.enable_prefix_caching:
        fits = fits & ~_is_under_way(config, carry, request, found)
    # One token at least is computed, for its logits, even where the KV of all is there.
    cached = jnp.minimum(found.num_blocks * config.block_size, total - 1)
    chunk = jnp.minimum(total - cached, carry.tokens)
    chunk = jnp.minimum(chunk, jnp.maximum(carry.tiles * config.prefill_tile, 1))
    # The head of the queue that does not fit must change nothing: every write is masked.
    request = jnp.where(fits, request, config.max_num_requests)
    row = jnp.argmax(state.rows.request >= config.max_num_requests).astype(jnp.int32)
    row = jnp.where(fits, row, config.max_num_seqs)
    chunk = jnp.where(fits, chunk, 0)
    return Admission(
        scheduler=_enter(config, state, request, row, found, cached, chunk),
        sequences=lax.optimization_barrier(carry.sequences),
        running=carry.running,
        granted=carry.granted.at[row].set(chunk, mode="drop"),
        tokens=carry.tokens - chunk,
        tiles=carry.tiles - tiles_for(chunk, config.prefill_tile),
        open=fits | hopeless,
    )


def _is_under_way(
    config: EngineConfig, carry: Admission, request: jax.Array, found: prefix.Prefix
) -> jax.Array:
    """bool[]: in this very step a row computes the block that ``request`` would begin with.

    Waiting one step for it is cheaper than computing and holding it twice. The wait ends
    with the step: then the block is known, or it never will be.
    """
    rows, requests, k = carry.scheduler.rows, carry.scheduler.requests, config.block_size
    column = found.num_blocks
    end = (column + 1) * k
    planned = at_index(requests.num_computed, rows.request, 0) + carry.running + carry.granted
    computes = (rows.kv_len < end) & (planned >= end)
    row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
    before = jnp.where(column > 0, column - 1, config.blocks_per_seq)
    hit = at_index(found.blocks, before, config.num_blocks)
    same_prefix = rows.block_table.at[row, before].get(mode="fill", fill_value=-1) == hit
    same_salt = at_index(requests.salt, rows.request, -1) == requests.salt[request]
    place = column * k + jnp.arange(k, dtype=jnp.int32)
    mine = carry.sequences.at[request, place].get(mode="fill", fill_value=-1)
    theirs = carry.sequences.at[rows.request[:, None], place].get(mode="fill", fill_value=-2)
    caches = at_index(requests.use_cache, rows.request, False) & requests.use_cache[request]
    return (requests.num_tokens[request] >= end) & jnp.any(
        computes
        & caches
        & jnp.where(column > 0, same_prefix, same_salt)
        & jnp.all(theirs == mine, axis=1)
    )


def _lookup(
    config: EngineConfig, state: SchedulerState, request: jax.Array, tokens: jax.Array
) -> prefix.Prefix:
    """Prefix of the request's ``tokens i32[N]`` that the pool knows."""
    requests, k = state.requests, config.block_size
    salt = requests.salt[request]
    if not config.enable_prefix_caching:
        return prefix.Prefix(
            blocks=jnp.full((config.blocks_per_seq,), config.num_blocks, jnp.int32),
            num_blocks=jnp.zeros((), jnp.int32),
            chain_hash=hashing.root_hash(salt),
            chain_parent=block_pool.root_parent(salt),
        )
    tokens = jnp.pad(tokens, (0, config.blocks_per_seq * k - config.max_model_len))
    limit = jnp.where(requests.use_cache[request], requests.num_tokens[request] // k, 0)
    return prefix.lookup_prefix(state.pool, tokens.reshape(-1, k), limit, salt)


def _has_room(
    config: EngineConfig,
    state: SchedulerState,
    request: jax.Array,
    lacking: jax.Array,
    hits: jax.Array,
) -> jax.Array:
    """bool[]: ``lacking i32[]`` blocks are there, and rows and blocks for forks to come.

    ``hits i32[M]`` are the request's blocks in the cache; those that nobody holds stop
    being available when they are shared.
    """
    revived = at_index(state.pool.ref_count, hits, 1) == 0
    idle = state.rows.request >= config.max_num_requests
    # One block for the next tokens of what runs, so that the next step need not undo this.
    spare = ~jnp.all(idle)
    parent_row = at_index(state.requests.row, state.requests.fork_of, config.max_num_seqs)
    forks = is_waiting_fork(state) & (parent_row < config.max_num_seqs)
    num_forks = jnp.where(is_preempted(state)[request], 0, jnp.sum(forks, dtype=jnp.int32))
    taken = jnp.sum(revived, dtype=jnp.int32) + spare.astype(jnp.int32) + num_forks
    room = uncommitted(config, state) - taken
    return (lacking <= room) & (jnp.sum(idle, dtype=jnp.int32) > num_forks)


def _enter(
    config: EngineConfig,
    state: SchedulerState,
    request: jax.Array,
    row: jax.Array,
    found: prefix.Prefix,
    cached: jax.Array,
    chunk: jax.Array,
) -> SchedulerState:
    """Share the hits, allocate for the first chunk, and fill the row."""
    rows, requests, totals, k = state.rows, state.requests, state.totals, config.block_size
    admitted = row < config.max_num_seqs
    hits = jnp.where(admitted, found.blocks, config.num_blocks)
    cached = jnp.where(admitted, cached, 0)
    held = -(-(cached + chunk) // k)
    growth = jnp.where(admitted, held - found.num_blocks, 0)
    size = min(-(-config.token_budget // k) + 1, config.num_blocks)
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
            kv_len=rows.kv_len.at[row].set(found.num_blocks * k, mode="drop"),
            chain_hash=rows.chain_hash.at[row].set(found.chain_hash, mode="drop"),
            chain_parent=rows.chain_parent.at[row].set(found.chain_parent, mode="drop"),
        ),
        requests=replace(
            requests,
            status=requests.status.at[request].set(RUNNING, mode="drop"),
            row=requests.row.at[request].set(row, mode="drop"),
            num_computed=requests.num_computed.at[request].set(cached, mode="drop"),
            num_cached=requests.num_cached.at[first].set(cached, mode="drop"),
            fork_of=requests.fork_of.at[request].set(config.max_num_requests, mode="drop"),
        ),
        totals=replace(totals, cached_tokens=totals.cached_tokens + cached),
    )
