"""Commit: what a step computed becomes part of the state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import at_index, prefix_sum, segments
from oxidize_jax.blocks import hashing, prefix
from oxidize_jax.blocks.pool import BlockPool
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
from oxidize_jax.types import replace, state

_LANES = 32
"""Blocks that are registered together."""


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
    state = advance(config, state)
    return _append(state, sample_rows, sampled)


def advance(config: EngineConfig, state: SchedulerState) -> SchedulerState:
    """Count the computed tokens, and register the blocks that became full."""
    requests, rows, scheduled = state.requests, state.rows, state.plan.num_scheduled
    computed = requests.num_computed.at[rows.request].add(scheduled, mode="drop")
    kv_len = jnp.maximum(rows.kv_len, at_index(computed, rows.request, 0))
    before = rows.kv_len
    state = replace(
        state,
        requests=replace(requests, num_computed=computed),
        rows=replace(rows, kv_len=kv_len),
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
    return _register_full_blocks(config, state, before)


@state
class _Chains:
    """Carry of registration."""

    pool: BlockPool
    chain_hash: jax.Array
    """u32[S, 2]"""
    chain_parent: jax.Array
    """i32[S]"""
    first: jax.Array
    """i32[S]: column of each row's next block to register."""
    tokens: jax.Array
    """i32[R, N], unchanged. A large array that a loop only reads is carried, and used from
    the loop's result on: XLA copies one that is closed over and changed afterwards."""


def _register_full_blocks(
    config: EngineConfig, state: SchedulerState, before: jax.Array
) -> SchedulerState:
    """Register the blocks that the tokens from ``before i32[S]`` on have filled.

    Each turn takes a few of them, row after row and each row's in sequence. Of many
    decoding rows one in K fills a block in a step; most often one turn does.
    """
    k, s = config.block_size, config.max_num_seqs
    rows, requests = state.rows, state.requests
    end = jnp.where(at_index(requests.use_cache, rows.request, False), rows.kv_len // k, 0)
    lane = jnp.arange(_LANES, dtype=jnp.int32)

    def register_next(carry: _Chains) -> _Chains:
        due = jnp.maximum(end - carry.first, 0)
        ends = prefix_sum(due)
        row = segments(ends, _LANES)
        head = at_index(ends - due, row, 0)
        place = lane - head
        column = at_index(carry.first, row, 0) + place
        block = rows.block_table.at[row, column].get(mode="fill", fill_value=config.num_blocks)
        offsets = column[:, None] * k + jnp.arange(k, dtype=jnp.int32)
        request = at_index(rows.request, row, config.max_num_requests)
        tokens = carry.tokens.at[request[:, None], offsets].get(mode="fill", fill_value=0)
        parents = at_index(carry.chain_hash, row, 0)
        block_hash = hashing.run_hashes(parents, tokens, head, place)
        pool, serial, done = prefix.register(
            carry.pool, block, block_hash, tokens, at_index(carry.chain_parent, row, 0), head
        )
        count = jnp.zeros((s,), jnp.int32).at[row].add(done.astype(jnp.int32), mode="drop")
        # The chain of a row goes on behind its last block that is done.
        last = jnp.where(done & (place == at_index(count, row, 0) - 1), row, s)
        return _Chains(
            pool=pool,
            chain_hash=carry.chain_hash.at[last].set(block_hash, mode="drop"),
            chain_parent=carry.chain_parent.at[last].set(serial, mode="drop"),
            first=carry.first + count,
            tokens=lax.optimization_barrier(carry.tokens),
        )

    start = _Chains(
        pool=state.pool,
        chain_hash=rows.chain_hash,
        chain_parent=rows.chain_parent,
        first=before // k,
        tokens=requests.tokens,
    )
    done = lax.while_loop(lambda carry: jnp.any(carry.first < end), register_next, start)
    rows = replace(rows, chain_hash=done.chain_hash, chain_parent=done.chain_parent)
    requests = replace(requests, tokens=done.tokens)
    return replace(state, pool=done.pool, rows=rows, requests=requests)


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
    num_logprobs = requests.num_logprobs.at[request].get(mode="fill", fill_value=-1)
    ranked = jnp.where(num_logprobs >= 0, request, none)
    wants = jnp.where(num_logprobs > 0, request, none)
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
            ranks=requests.ranks.at[ranked, place].set(sampled.ranks, mode="drop"),
            num_tokens=requests.num_tokens.at[request].add(1, mode="drop"),
            status=requests.status.at[done].set(FINISHED, mode="drop"),
            finish_reason=requests.finish_reason.at[request].set(reason, mode="drop"),
        ),
        totals=replace(
            state.totals,
            generated_tokens=state.totals.generated_tokens + jnp.sum(running, dtype=jnp.int32),
        ),
    )
