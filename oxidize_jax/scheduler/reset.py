"""Forget the prefix cache: after a change of weights, or before serials run out."""

from __future__ import annotations

import jax.numpy as jnp

from oxidize_jax.arrays import apply_if
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.types import replace

MAX_SERIAL = 2**30
"""Registrations before serials are counted anew: far inside 32 bits."""


def reset_prefix_cache(state: SchedulerState) -> SchedulerState:
    """Let nothing computed so far be hit again; what runs goes on with the KV it has.

    Unlike vLLM's it needs no idle engine. What running requests compute from now on,
    behind KV of before, is not found by others either.
    """
    rows = state.rows
    detached = jnp.where(rows.kv_len > 0, block_pool.DETACHED, rows.chain_parent)
    return replace(
        state,
        pool=block_pool.reset_prefix_cache(state.pool),
        rows=replace(rows, chain_parent=detached),
    )


def renew_serials(state: SchedulerState, limit: int = MAX_SERIAL) -> SchedulerState:
    """Reset the prefix cache once in ``limit`` registrations, so that no serial comes twice."""
    return apply_if(state.pool.next_serial >= limit, reset_prefix_cache, state)
