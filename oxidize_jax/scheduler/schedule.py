"""Schedule: ``retire -> grow -> preempt -> admit -> plan``, one pure transition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.admit import admit
from oxidize_jax.scheduler.budget import Grants, left_for_admission, take
from oxidize_jax.scheduler.grow import grow, make_room, row_order
from oxidize_jax.scheduler.rows import retire
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.types import replace


def schedule(config: EngineConfig, state: SchedulerState) -> SchedulerState:
    """Plan the next step.

    A plan that schedules nothing means that nothing is left to do: every request that
    was submitted has finished.
    """
    state = retire(state)
    state, preempted = make_room(config, state)
    state, grants = grow(config, state)
    tokens, tiles = left_for_admission(config, grants)
    # No admission in a step that preempted, unless that left nobody: then the engine
    # would stand still with requests waiting.
    idle = jnp.all(state.rows.request >= config.max_num_requests)
    state, admitted = admit(config, state, tokens, tiles, ~preempted | idle)
    return plan(config, state, grants, admitted)


def plan(
    config: EngineConfig, state: SchedulerState, grants: Grants, admitted: jax.Array
) -> SchedulerState:
    """Fix the tokens of each row, ``admitted i32[S]`` being those of the new rows.

    Under ``prefill_first`` decodes get what the prompts left of the budget; a decode
    that gets nothing keeps its block for the next step.
    """
    prefill = grants.prefill + admitted
    decode = grants.decode
    if config.policy == "prefill_first":
        left = config.max_num_batched_tokens - jnp.sum(prefill, dtype=jnp.int32)
        decode = take(decode, state.plan.order, left)
    new_plan = replace(state.plan, num_scheduled=prefill + decode, order=row_order(state))
    return replace(state, plan=new_plan)
