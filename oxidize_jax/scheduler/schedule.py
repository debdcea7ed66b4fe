"""Schedule: ``fork -> retire -> preempt -> grow -> admit -> plan``, one pure transition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.admit import admit
from oxidize_jax.scheduler.budget import Grants, left_for_admission, take
from oxidize_jax.scheduler.fork import place_forks
from oxidize_jax.scheduler.grow import grow, make_room
from oxidize_jax.scheduler.reset import renew_serials
from oxidize_jax.scheduler.rows import order_rows
from oxidize_jax.scheduler.state import SchedulerState, with_sequences, without_sequences
from oxidize_jax.scheduler.stats import record
from oxidize_jax.types import replace


def schedule(config: EngineConfig, state: SchedulerState) -> SchedulerState:
    """Plan the next step; the one planned before must have been committed.

    A plan's copies are part of the tables already, so a plan that is dropped loses them.

    A plan that schedules nothing means that nothing is left to do: every request that
    was submitted has finished, or is paused.
    """
    whole, state = state, without_sequences(state)
    state = renew_serials(state)
    # Forks come first: what has just finished its last token still has blocks to share.
    state = place_forks(config, state)
    state, grants, preempted = make_room(config, state)
    state = grow(config, state, grants)
    tokens, tiles = left_for_admission(config, grants)
    # No admission in a step that preempted, unless that left nobody: then the engine
    # would stand still with requests waiting.
    idle = jnp.all(state.rows.request >= config.max_num_requests)
    allowed = ~preempted | idle
    state, sequences, admitted = admit(
        config, state, whole.requests.tokens, tokens, tiles, allowed, grants.tokens
    )
    state = plan(config, order_rows(state), grants, admitted)
    state = with_sequences(record(config, state, whole.totals), whole)
    return replace(state, requests=replace(state.requests, tokens=sequences))


def plan(
    config: EngineConfig, state: SchedulerState, grants: Grants, admitted: jax.Array
) -> SchedulerState:
    """Fix the tokens of each row, ``admitted i32[S]`` being those of the new rows.

    Under ``prefill_first`` decodes get what the prompts left of the budget; a decode
    that gets nothing keeps its block for the next step, in which decodes go first.
    """
    prefill = grants.prefill + admitted
    left = config.token_budget - jnp.sum(prefill, dtype=jnp.int32)
    decode = take(grants.decode, state.plan.order, left)
    skipped = jnp.any(grants.due & (decode == 0)) & ~grants.decodes_first
    new_plan = replace(state.plan, num_scheduled=prefill + decode, decode_turn=skipped)
    return replace(state, plan=new_plan)
