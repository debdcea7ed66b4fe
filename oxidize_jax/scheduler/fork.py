"""Fork: several continuations of one sequence, its blocks shared until one of them writes.

A fork waits until its parent has computed the tokens they have in common, then takes a row
with the parent's blocks, full or not (vLLM v0 ``core/block_manager.py``). Sharing takes no
block and cannot fail half way. The last common token is run again for its logits, reading
its own KV and writing none; the first *write* into a shared block copies it (``grow``).
A fork whose parent has gone goes on as a request of its own, through the prefix cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import at_index
from oxidize_jax.blocks import hashing
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import is_paused
from oxidize_jax.scheduler.queue import (
    first_in_line,
    is_preempted,
    uncommitted,
)
from oxidize_jax.scheduler.state import (
    FINISHED,
    NO_TOKEN,
    RUNNING,
    UNUSED,
    WAITING,
    SchedulerState,
)
from oxidize_jax.scheduler.submit import disown
from oxidize_jax.types import replace, state


@state
class Fork:
    """C children of one request, as it stands: prompt and what it has generated."""

    parent: jax.Array
    """i32[]: its slot."""
    children: jax.Array
    """i32[C]: slots for the children, distinct, padding R."""
    keys: jax.Array
    """u32[C, 2]: their threefry key data."""
    arrivals: jax.Array
    """i32[C]"""
    last_tokens: jax.Array
    """i32[C]: put in place of the last generated token, as a beam does; ``NO_TOKEN`` keeps it."""
    last_logprobs: jax.Array
    """f32[C]: logprob of a replaced token."""


def fork(
    config: EngineConfig, state: SchedulerState, new: Fork
) -> tuple[SchedulerState, jax.Array]:
    """Put copies of a request into free slots, to share its blocks: all of them or none.

    Returns:
      ``(state, ok bool[])``. ``ok`` is false, and the state unchanged, where the parent is
      not alive, a child's slot is in use, or a last token is to be replaced that belongs
      to the prompt.
    """
    requests, none = state.requests, config.max_num_requests
    status = requests.status[new.parent]
    total = requests.num_tokens[new.parent]
    replaces = (new.last_tokens != NO_TOKEN) & (new.children < none)
    in_use = at_index(requests.status, new.children, UNUSED)
    rowless = at_index(requests.row, new.children, config.max_num_seqs) >= config.max_num_seqs
    free = (in_use == UNUSED) | ((in_use == FINISHED) & rowless)
    ok = (
        ((status == WAITING) | (status == RUNNING))
        & jnp.all(free)
        & ((total > requests.prompt_len[new.parent]) | ~jnp.any(replaces))
    )
    children = jnp.where(ok, new.children, none)
    values = {
        "status": jnp.full_like(children, WAITING),
        "row": jnp.full_like(children, config.max_num_seqs),
        "num_computed": jnp.zeros_like(children),
        "num_cached": jnp.zeros_like(children),
        "num_preemptions": jnp.zeros_like(children),
        "arrival": new.arrivals,
        "key": new.keys,
        "fork_of": jnp.full_like(children, new.parent),
        "fork_len": total - replaces.astype(jnp.int32),
    }
    fields = [field.name for field in dataclasses.fields(requests)]
    old = {name: getattr(requests, name) for name in fields}
    copied = {
        name: old[name].at[children].set(values.get(name, old[name][new.parent]), mode="drop")
        for name in fields
    }
    writer = jnp.where(replaces, children, none)
    copied["tokens"] = copied["tokens"].at[writer, total - 1].set(new.last_tokens, mode="drop")
    copied["logprobs"] = (
        copied["logprobs"].at[writer, total - 1].set(new.last_logprobs, mode="drop")
    )
    copied["ranks"] = copied["ranks"].at[writer, total - 1].set(0, mode="drop")
    state = disown(state, jnp.where(children == new.parent, none, children))
    kept = state.requests.fork_of
    copied["fork_of"] = kept.at[children].set(values["fork_of"], mode="drop")
    return replace(state, requests=replace(requests, **copied)), ok


def place_forks(config: EngineConfig, state: SchedulerState) -> SchedulerState:
    """Give rows to forks whose common tokens their parent has computed, first come first.

    None is placed before a preempted request has its row again, nor where the rows would
    not find their next blocks any more.
    """

    def place_next(carry: tuple[jax.Array, SchedulerState]) -> tuple[jax.Array, SchedulerState]:
        _, state = carry
        ready = _is_ready(state)
        full = jnp.all(state.rows.request < config.max_num_requests)
        can = (
            jnp.any(ready)
            & ~full
            & ~jnp.any(is_preempted(state) & ~is_paused(state))
            & (uncommitted(config, state) > 0)
        )
        child = jnp.where(can, first_in_line(state, ready), config.max_num_requests)
        return can, _place(config, state, child)

    requests = state.requests
    some = jnp.any((requests.status == WAITING) & (requests.fork_of < config.max_num_requests))
    return lax.while_loop(lambda carry: carry[0], place_next, (some, state))[1]


def _is_ready(state: SchedulerState) -> jax.Array:
    """bool[R]: forks whose parent holds the KV of all tokens they have in common."""
    requests, rows = state.requests, state.rows
    parent = requests.fork_of
    no_row = rows.request.shape[0]
    row = at_index(requests.row, parent, no_row)
    written = at_index(rows.kv_len, row, 0)
    return (requests.status == WAITING) & (row < no_row) & (written >= requests.fork_len)


def _place(config: EngineConfig, state: SchedulerState, child: jax.Array) -> SchedulerState:
    """Give ``child i32[]`` (``R``: nobody) the first free row, with its parent's blocks."""
    rows, requests, k = state.rows, state.requests, config.block_size
    none = config.max_num_requests
    parent = at_index(requests.fork_of, child, none)
    source = at_index(requests.row, parent, config.max_num_seqs)
    shared, salt = at_index(requests.fork_len, child, 0), at_index(requests.salt, child, 0)
    shared, chain_hash, chain_parent = _common(config, state, source, shared, salt)
    column = jnp.arange(config.blocks_per_seq, dtype=jnp.int32)
    held = -(-shared // k)
    table = at_index(rows.block_table, source, config.num_blocks)
    table = jnp.where(column < held, table, config.num_blocks)
    computed = jnp.minimum(shared, at_index(requests.num_tokens, child, 0) - 1)
    row = jnp.argmax(rows.request >= none).astype(jnp.int32)
    row = jnp.where(child < none, row, config.max_num_seqs)
    totals = state.totals

    def set_row(values: jax.Array, value: jax.Array) -> jax.Array:
        return values.at[row].set(value, mode="drop")

    def set_child(values: jax.Array, value: jax.Array | int) -> jax.Array:
        return values.at[child].set(value, mode="drop")

    return replace(
        state,
        pool=block_pool.share(state.pool, table),
        rows=replace(
            rows,
            request=set_row(rows.request, child),
            block_table=set_row(rows.block_table, table),
            num_blocks=set_row(rows.num_blocks, held),
            kv_len=set_row(rows.kv_len, shared),
            chain_hash=set_row(rows.chain_hash, chain_hash),
            chain_parent=set_row(rows.chain_parent, chain_parent),
        ),
        requests=replace(
            requests,
            status=set_child(requests.status, RUNNING),
            row=set_child(requests.row, row),
            num_computed=set_child(requests.num_computed, computed),
            fork_of=set_child(requests.fork_of, none),
        ),
        totals=replace(totals, forked_tokens=totals.forked_tokens + jnp.maximum(computed, 0)),
    )


def _common(
    config: EngineConfig,
    state: SchedulerState,
    source: jax.Array,
    shared: jax.Array,
    salt: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(shared, chain_hash, chain_parent)`` for a fork of ``shared i32[]`` tokens.

    A parent that has gone on since may have filled the last common block with tokens of
    its own, and registered it. Such a block belongs to the prefix cache, which nobody may
    write into: then only the blocks before it are shared.
    """
    rows, pool, k = state.rows, state.pool, config.block_size
    blocks = shared // k
    table = at_index(rows.block_table, source, config.num_blocks)
    partial = at_index(table, jnp.where(shared % k > 0, blocks, table.size), config.num_blocks)
    shared = jnp.where(at_index(pool.hashed, partial, False), blocks * k, shared)
    last = at_index(table, jnp.where(blocks > 0, blocks - 1, table.size), config.num_blocks)
    level = at_index(rows.kv_len, source, 0) // k == blocks
    known = at_index(pool.hashed, last, False)
    begins = shared == 0
    # Where neither the parent's chain nor a registered block says where the child's chain
    # stands, what it computes is not found by others.
    chain_parent = jnp.select(
        [begins, level, known],
        [
            block_pool.root_parent(salt),
            at_index(rows.chain_parent, source, 0),
            at_index(pool.serial, last, 0),
        ],
        block_pool.DETACHED,
    )
    chain_hash = jnp.select(
        [begins, level],
        [hashing.root_hash(salt, pool.secret), at_index(rows.chain_hash, source, 0)],
        at_index(pool.block_hash, last, 0),
    )
    return shared, chain_hash, chain_parent
