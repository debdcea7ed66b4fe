"""Who gets how many tokens of a step, by policy. Pure arithmetic over rows in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from oxidize_jax.arrays import at_index, prefix_sum
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.types import state


@state
class Grants:
    """Tokens granted to running rows, before admissions; i32[S] each, by row."""

    decode: jax.Array
    """Rows that lack their newest token only, and have computed their prompt."""
    prefill: jax.Array
    """The others: prompts to their last token, and recomputation after a preemption."""
    due: jax.Array
    """bool[S]: rows that wait for a decode."""
    decodes_first: jax.Array
    """bool[]: decodes take the budget before prompts in this step."""

    @property
    def tokens(self) -> jax.Array:
        """i32[S]: of either kind; a row has one."""
        return self.decode + self.prefill


def tiles_for(tokens: jax.Array, tile: int) -> jax.Array:
    """i32[...]: prefill tiles of a chunk; one token runs as a decode and needs none."""
    return jnp.where(tokens > 1, -(-tokens // tile), 0)


def grant_running(config: EngineConfig, state: SchedulerState, order: jax.Array) -> Grants:
    """Share the budget among running rows, first come first served within each kind."""
    left = remaining_tokens(state)
    left = jnp.where(at_index(is_paused(state), state.rows.request, False), 0, left)
    # The last token of a prompt is prompt work: it must not wait for those that came later.
    decodes = (left == 1) & _has_computed_prompt(state)
    due = jnp.where(decodes, 1, 0)
    left = jnp.where(decodes, 0, left)
    budget = jnp.full((), config.token_budget, jnp.int32)
    first = decodes_first(config, state)
    decode = take(due, order, jnp.where(first, budget, 0))
    budget = budget - jnp.sum(decode, dtype=jnp.int32)
    prefill = take_chunks(config, left, order, budget)
    if config.policy == "prefill_first":
        budget = budget - jnp.sum(prefill, dtype=jnp.int32)
        decode = decode + take(due - decode, order, budget)
    return Grants(decode=decode, prefill=prefill, due=decodes, decodes_first=first)


def decodes_first(config: EngineConfig, state: SchedulerState) -> jax.Array:
    """bool[]: by policy, or since prompts left nothing for a decode in the step before.

    So under ``prefill_first`` too the oldest decode waits one step at most, however many
    prompts come.
    """
    if config.policy == "decode_first":
        return jnp.ones((), jnp.bool_)
    return state.plan.decode_turn


def left_for_admission(config: EngineConfig, grants: Grants) -> tuple[jax.Array, jax.Array]:
    """``(tokens i32[], tiles i32[])`` that new rows may take."""
    decode = jnp.sum(grants.decode, dtype=jnp.int32)
    used = jnp.sum(grants.prefill, dtype=jnp.int32) + jnp.where(grants.decodes_first, decode, 0)
    tiles = jnp.sum(tiles_for(grants.prefill, config.prefill_tile), dtype=jnp.int32)
    return config.token_budget - used, config.max_prefill_tiles - tiles


def is_paused(state: SchedulerState) -> jax.Array:
    """bool[R]: has the tokens that the host has given a mask for."""
    return state.requests.num_tokens >= state.requests.pause_at


def remaining_tokens(state: SchedulerState) -> jax.Array:
    """i32[S]: tokens of each row that are not computed yet; 0 for an idle row."""
    requests, request = state.requests, state.rows.request
    left = requests.num_tokens - requests.num_computed
    return left.at[request].get(mode="fill", fill_value=0)


def _has_computed_prompt(state: SchedulerState) -> jax.Array:
    """bool[S]: whether the row's prompt is computed; true for an idle row."""
    requests, request = state.requests, state.rows.request
    done = requests.num_computed >= requests.prompt_len
    return done.at[request].get(mode="fill", fill_value=True)


def take(want: jax.Array, order: jax.Array, budget: jax.Array) -> jax.Array:
    """i32[S]: what each row gets of ``budget i32[]``, rows served in ``order``."""
    wanted = want[order]
    before = prefix_sum(wanted) - wanted
    granted = jnp.clip(budget - before, 0, wanted)
    return jnp.zeros_like(want).at[order].set(granted)


def take_chunks(
    config: EngineConfig, want: jax.Array, order: jax.Array, budget: jax.Array
) -> jax.Array:
    """Like :func:`take`, bounded by the prefill tiles of the largest bucket too."""
    wanted = want[order]
    tiles = tiles_for(wanted, config.prefill_tile)
    tiles_before = prefix_sum(tiles) - tiles
    room = (config.max_prefill_tiles - tiles_before) * config.prefill_tile
    before = prefix_sum(wanted) - wanted
    granted = jnp.clip(jnp.minimum(budget - before, room), 0, wanted)
    return jnp.zeros_like(want).at[order].set(granted)
