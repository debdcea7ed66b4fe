"""Pause: a request whose next token nobody may choose yet, since its mask is not known.

The host sets a mask for so many tokens; behind them the request is *paused*. It keeps row
and blocks, and is planned no token, so that it takes neither budget nor blocks from others.
Without a row (it waits, or was preempted) it is passed over until it is resumed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from oxidize_jax.arrays import at_index
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler import stats
from oxidize_jax.scheduler.budget import remaining_tokens, take
from oxidize_jax.scheduler.grow import fits_in_place
from oxidize_jax.scheduler.state import HISTORY, RUNNING, UNUSED, SchedulerState
from oxidize_jax.types import replace, state


@state
class MaskUpdate:
    """New masks for C requests."""

    slots: jax.Array
    """i32[C]: distinct, padding R."""
    masks: jax.Array
    """u32[C, ceil(token_mask_size / 32)]: ids that may be sampled from now on."""
    pause_at: jax.Array
    """i32[C]: tokens, prompt included, at which the request is paused."""


def set_masks(config: EngineConfig, state: SchedulerState, new: MaskUpdate) -> SchedulerState:
    """Replace the masks of requests, and resume those that may have more tokens now.

    A row that is resumed joins the step that is planned already where that needs no block and
    there is budget left; else it waits for the plan after it. A token that is planned is
    sampled, whatever ``pause_at`` says.
    """
    requests = state.requests
    was_paused = at_index(requests.num_tokens >= requests.pause_at, new.slots, False)
    requests = replace(
        requests,
        token_mask=requests.token_mask.at[new.slots].set(new.masks, mode="drop"),
        has_mask=requests.has_mask.at[new.slots].set(True, mode="drop"),
        pause_at=requests.pause_at.at[new.slots].set(new.pause_at, mode="drop"),
    )
    state = replace(state, requests=requests)
    goes_on = was_paused & at_index(requests.num_tokens < requests.pause_at, new.slots, False)
    row = jnp.where(
        goes_on, at_index(requests.row, new.slots, config.max_num_seqs), config.max_num_seqs
    )
    none = jnp.zeros((config.max_num_seqs,), jnp.bool_)
    return _join_plan(config, state, none.at[row].set(True, mode="drop"))


def _join_plan(config: EngineConfig, state: SchedulerState, resumed: jax.Array) -> SchedulerState:
    """Let ``resumed bool[S]`` decode in the planned step, as far as its budget goes."""
    plan, rows = state.plan, state.rows
    running = at_index(state.requests.status, rows.request, UNUSED) == RUNNING
    one = jnp.ones_like(plan.num_scheduled)
    joins = (
        resumed
        & running
        & (plan.num_scheduled == 0)
        & (remaining_tokens(state) == 1)
        & fits_in_place(config, state, one)
        # Where nothing is planned the next run plans first, for all that is resumed.
        & jnp.any(plan.num_scheduled > 0)
    )
    left = config.token_budget - jnp.sum(plan.num_scheduled, dtype=jnp.int32)
    granted = take(joins.astype(jnp.int32), plan.order, left)
    computed = at_index(state.requests.num_computed, rows.request, 0)
    written = jnp.where(computed + granted > rows.kv_len, granted, 0)
    count, slots = jnp.sum(granted, dtype=jnp.int32), jnp.sum(written, dtype=jnp.int32)
    changes = {"scheduled_tokens": count, "decode_rows": count, "wasted_slots": -slots}
    zero = jnp.zeros((), jnp.int32)
    line = jnp.stack([changes.get(name, zero) for name in stats.FIELDS])
    return replace(
        state,
        plan=replace(plan, num_scheduled=plan.num_scheduled + granted),
        history=state.history.at[state.totals.steps % HISTORY].add(line),
    )
