"""Statistics of each step, kept on the device for the last few steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.arrays import at_index
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.queue import is_preempted
from oxidize_jax.scheduler.state import HISTORY, NUM_STATS, WAITING, SchedulerState, Totals
from oxidize_jax.types import replace


@dataclasses.dataclass(frozen=True)
class StepStats:
    """One step as it was planned. Counts of blocks are those with which it runs."""

    step: int
    """Steps made before it."""
    num_running: int
    """Rows in use."""
    num_waiting: int
    """Requests in the queue, forks that wait for their parent included."""
    num_preempted: int
    """Requests that lost their row and wait for another."""
    scheduled_tokens: int
    decode_rows: int
    """Rows that run one token; the other tokens are prefill."""
    blocks_used: int
    blocks_cached: int
    """Blocks that nobody holds and the prefix cache knows."""
    blocks_free: int
    wasted_slots: int
    """Slots for a token in used blocks that will hold none after the step."""
    cached_tokens: int
    """Prompt tokens that admissions for this step found in the prefix cache."""
    forked_tokens: int
    """Tokens that forks placed for this step share with their parents."""
    preemptions: int
    copies: int
    """Blocks copied before the step writes: copy-on-write."""


FIELDS = tuple(field.name for field in dataclasses.fields(StepStats))
assert len(FIELDS) == NUM_STATS


def record(config: EngineConfig, state: SchedulerState, before: Totals) -> SchedulerState:
    """Note the step that has just been planned; ``before`` are the totals before planning."""
    rows, requests, pool, totals = state.rows, state.requests, state.pool, state.totals
    scheduled = state.plan.num_scheduled
    running = rows.request < config.max_num_requests

    def count(*masks: jax.Array) -> list[jax.Array]:
        return list(jnp.sum(jnp.stack([m.astype(jnp.int32) for m in masks]), 1, jnp.int32))

    written = jnp.maximum(rows.kv_len, at_index(requests.num_computed, rows.request, 0) + scheduled)
    # Slack is in a row's last block; one that is shared counts for each row that holds it.
    slack = jnp.where(running, rows.num_blocks * config.block_size - written, 0)
    num_running, num_scheduled, decode_rows, wasted = count(
        running, scheduled, scheduled == 1, slack
    )
    num_waiting, num_preempted = count(requests.status == WAITING, is_preempted(state))
    values = {
        "step": totals.steps,
        "num_running": num_running,
        "num_waiting": num_waiting,
        "num_preempted": num_preempted,
        "scheduled_tokens": num_scheduled,
        "decode_rows": decode_rows,
        "blocks_used": config.num_blocks - pool.num_free - pool.num_cached,
        "blocks_cached": pool.num_cached,
        "blocks_free": pool.num_free,
        "wasted_slots": wasted,
        "cached_tokens": totals.cached_tokens - before.cached_tokens,
        "forked_tokens": totals.forked_tokens - before.forked_tokens,
        "preemptions": totals.preemptions - before.preemptions,
        "copies": totals.copies - before.copies,
    }
    line = jnp.stack([values[name] for name in FIELDS])
    return replace(state, history=state.history.at[totals.steps % HISTORY].set(line))


def read(history: np.ndarray, first: int, end: int) -> tuple[StepStats, ...]:
    """The steps ``first`` to ``end - 1``, at most ``HISTORY - 1`` of them, on the host."""
    lines = [history[step % HISTORY].tolist() for step in range(first, end)]
    return tuple(StepStats(*line) for line in lines)
