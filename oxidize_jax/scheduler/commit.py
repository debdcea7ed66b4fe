"""Commit: what a step computed becomes part of the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.blocks import hashing, prefix
from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.sampler import SampleOutput
from oxidize_jax.scheduler.state import (
    FINISHED,
    LENGTH,
    NOT_FINISHED,
    RUNNING,
    STOPPED,
    SchedulerState,
)
from oxidize_jax.types import replace


def commit(
    config: EngineConfig,
    state: SchedulerState,
    sample_rows: jax.Array,
    sampled: SampleOutput,
) -> SchedulerState:
    """Count the computed tokens, register the blocks that became full, append the samples.

    Args:
      sample_rows: i32[C], padding S: the row of each lane of ``sampled``.
    """
    state = _advance(config, state)
    return _append(state, sample_rows, sampled)


def _advance(config: EngineConfig, state: SchedulerState) -> SchedulerState:
    requests, scheduled = state.requests, state.plan.num_scheduled
    before = requests.num_computed.at[state.rows.request].get(mode="fill", fill_value=0)
    computed = requests.num_computed.at[state.rows.request].add(scheduled, mode="drop")
    state = replace(
        state,
        requests=replace(requests, num_computed=computed),
        totals=replace(
            state.totals,
            steps=state.totals.steps + jnp.any(scheduled > 0).astype(jnp.int32),
            scheduled_tokens=state.totals.scheduled_tokens + jnp.sum(scheduled, dtype=jnp.int32),
        ),
        plan=replace(
            state.plan,
            num_scheduled=jnp.zeros_like(scheduled),
            num_copies=jnp.zeros((), jnp.int32),
        ),
    )
    if not config.enable_prefix_caching:
        return state
    return _register_full_blocks(config, state, before, before + scheduled)


def _register_full_blocks(
    config: EngineConfig, state: SchedulerState, before: jax.Array, after: jax.Array
) -> SchedulerState:
    """Register the blocks that ``before -> after i32[S]`` computed tokens filled.

    Each turn takes the next full block of every row, since a block needs its parent's
    hash; there are as many turns as the longest chunk filled blocks, most often none.
    """
    k = config.block_size
    first, end = before // k, after // k

    def register_next(turn: jax.Array, state: SchedulerState) -> SchedulerState:
        rows = state.rows
        column = first + turn
        live = column < end
        lane = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
        block = rows.block_table.at[lane, column].get(mode="fill", fill_value=config.num_blocks)
        offsets = column[:, None] * k + jnp.arange(k, dtype=jnp.int32)
        tokens = state.requests.tokens.at[rows.request[:, None], offsets].get(
            mode="fill", fill_value=0
        )
        block_hash = hashing.chain_hash(rows.chain_hash, tokens)
        pool, serial = prefix.register(
            state.pool,
            jnp.where(live, block, config.num_blocks),
            block_hash,
            tokens,
            rows.chain_parent,
        )
        rows = replace(
            rows,
            chain_hash=jnp.where(live[:, None], block_hash, rows.chain_hash),
            chain_parent=jnp.where(live, serial, rows.chain_parent),
        )
        return replace(state, pool=pool, rows=rows)

    turns = jnp.max(end - first)
    return lax.fori_loop(jnp.zeros((), jnp.int32), turns, register_next, state)


def _append(state: SchedulerState, sample_rows: jax.Array, sampled: SampleOutput) -> SchedulerState:
    """Append each sampled token to its request, and finish those that are complete."""
    requests = state.requests
    none = requests.status.shape[0]
    request = state.rows.request.at[sample_rows].get(mode="fill", fill_value=none)
    # A request aborted since the plan was made takes no more tokens.
    running = requests.status.at[request].get(mode="fill", fill_value=FINISHED) == RUNNING
    request = jnp.where(running, request, none)

    def of(values: jax.Array) -> jax.Array:
        return values.at[request].get(mode="fill", fill_value=0)

    place, tokens = of(requests.num_tokens), sampled.tokens
    stops = requests.stop_ids.at[request].get(mode="fill", fill_value=0)
    count = place + 1
    stopped = jnp.any(stops == tokens[:, None], axis=1) & (place >= of(requests.min_tokens))
    reason = jnp.where(
        stopped, STOPPED, jnp.where(count >= of(requests.max_tokens), LENGTH, NOT_FINISHED)
    )
    done = jnp.where(reason != NOT_FINISHED, request, none)
    wants = jnp.where(
        requests.want_logprobs.at[request].get(mode="fill", fill_value=False), request, none
    )
    return replace(
        state,
        requests=replace(
            requests,
            tokens=requests.tokens.at[request, place].set(tokens, mode="drop"),
            logprobs=requests.logprobs.at[request, place].set(sampled.logprobs, mode="drop"),
            top_ids=requests.top_ids.at[wants, place].set(sampled.top_ids, mode="drop"),
            top_logprobs=requests.top_logprobs.at[wants, place].set(
                sampled.top_logprobs, mode="drop"
            ),
            num_tokens=requests.num_tokens.at[request].add(1, mode="drop"),
            status=requests.status.at[done].set(FINISHED, mode="drop"),
            finish_reason=requests.finish_reason.at[request].set(reason, mode="drop"),
        ),
        totals=replace(
            state.totals,
            generated_tokens=state.totals.generated_tokens + jnp.sum(running, dtype=jnp.int32),
        ),
    )
