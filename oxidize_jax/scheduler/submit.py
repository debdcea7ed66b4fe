"""Events from outside: submit a request, abort one. The checks that need no device."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.arrays import at_index
from oxidize_jax.config import EngineConfig
from oxidize_jax.messages import short_repr
from oxidize_jax.sampling.fields import SAMPLING_FIELDS, SamplingFields
from oxidize_jax.scheduler.rows import finish
from oxidize_jax.scheduler.state import (
    ABORTED,
    NEVER,
    NOT_FINISHED,
    UNUSED,
    WAITING,
    SchedulerState,
)
from oxidize_jax.types import replace, state


@state
class NewRequest(SamplingFields):
    """One request, ready for a slot. Scalars are ``[]`` arrays, so values never recompile.

    :func:`submit_all` takes C at once: then every field has a leading axis C.
    """

    tokens: jax.Array
    """i32[N]: the prompt, then anything."""
    prompt_len: jax.Array
    """i32[], 1 .. N - 1"""
    max_new_tokens: jax.Array
    """i32[] >= 1"""
    min_new_tokens: jax.Array
    """i32[] >= 0"""
    arrival: jax.Array
    """i32[]"""
    priority: jax.Array
    """i32[]; the smaller goes first"""
    stop_ids: jax.Array
    """i32[Z], padded with ``NO_TOKEN``"""
    salt: jax.Array
    """i32[] >= 0"""
    use_cache: jax.Array
    """bool[]"""
    fork_of: jax.Array
    """i32[]: slot of a request with the same prompt, whose blocks to share; ``R`` for none."""
    pause_after: Any = np.int32(NEVER)
    """i32[] >= 0: new tokens after which it is paused."""


def check_prompt(config: EngineConfig, num_prompt_tokens: int) -> None:
    """Refuse what can never run. Raises ValueError with the numbers and the remedy."""
    if num_prompt_tokens < 1:
        raise ValueError("prompt has 0 tokens: give at least one token (text, or token ids).")
    if num_prompt_tokens >= config.max_model_len:
        raise ValueError(
            f"prompt has {num_prompt_tokens} tokens, but max_model_len={config.max_model_len} "
            f"must hold prompt and at least one new token: shorten the prompt to "
            f"{config.max_model_len - 1} tokens or, if the model was made for more, raise "
            f"max_model_len."
        )
    blocks = -(-num_prompt_tokens // config.block_size)
    if blocks > config.num_blocks:
        raise ValueError(
            f"prompt has {num_prompt_tokens} tokens and needs {blocks} blocks of "
            f"{config.block_size}, but the pool has num_blocks={config.num_blocks}: shorten "
            f"the prompt to {config.num_blocks * config.block_size} tokens or raise num_blocks."
        )


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, before 32-bit arithmetic could wrap them."""
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ValueError(f"{name}[{i}]={short_repr(token)}: token ids must be whole numbers.")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name}[{i}]={short_repr(int(token))}: token ids must be in 0 to "
                f"{vocab_size - 1}, the model's vocabulary."
            )


def submit(
    config: EngineConfig, state: SchedulerState, slot: jax.Array, new: NewRequest
) -> SchedulerState:
    """Put ``new`` into request ``slot i32[]``, which must be UNUSED or FINISHED and rowless."""
    return _write(config, disown(state, slot), slot, new)


def submit_all(
    config: EngineConfig, state: SchedulerState, slots: jax.Array, new: NewRequest
) -> SchedulerState:
    """:func:`submit` for C requests at once: the same state as one after the other.

    Args:
      slots: i32[C], distinct, each UNUSED or FINISHED and rowless; a lane of slot ``R`` is
        left out.
      new: every field with a leading axis C. ``fork_of`` may name the slot of an earlier lane.
    """
    none, count = config.max_num_requests, slots.shape[0]
    lane = jnp.arange(count, dtype=jnp.int32)
    lane_of = jnp.full((none,), -1, jnp.int32).at[slots].set(lane, mode="drop")
    # One by one, a lane that comes later takes its slot from those that wait for it.
    orphan = at_index(lane_of, new.fork_of, -1) > lane
    new = replace(new, fork_of=jnp.where(orphan, none, new.fork_of))
    return _write(config, disown(state, slots), slots, new)


def _write(
    config: EngineConfig, state: SchedulerState, slots: jax.Array, new: NewRequest
) -> SchedulerState:
    """Fill ``slots i32[...]`` with ``new``, whose fields have the same leading axes."""
    requests, shape = state.requests, jnp.shape(slots)
    limit = jnp.minimum(
        new.prompt_len + jnp.minimum(new.max_new_tokens, config.max_model_len),
        config.max_model_len,
    )
    values = {
        "status": jnp.full(shape, WAITING, jnp.int32),
        "finish_reason": jnp.full(shape, NOT_FINISHED, jnp.int32),
        "arrival": new.arrival,
        "priority": new.priority,
        "row": jnp.full(shape, config.max_num_seqs, jnp.int32),
        "prompt_len": new.prompt_len,
        "num_tokens": new.prompt_len,
        "num_computed": jnp.zeros(shape, jnp.int32),
        "max_tokens": limit,
        "min_tokens": new.prompt_len + jnp.minimum(new.min_new_tokens, config.max_model_len),
        "pause_at": new.prompt_len + jnp.minimum(new.pause_after, config.max_model_len),
        "tokens": new.tokens,
        "logprobs": jnp.zeros((*shape, config.max_model_len), jnp.float32),
        "stop_ids": new.stop_ids,
        "salt": new.salt,
        "use_cache": new.use_cache,
        "fork_of": new.fork_of,
        "fork_len": new.prompt_len,
        "num_cached": jnp.zeros(shape, jnp.int32),
        "num_preemptions": jnp.zeros(shape, jnp.int32),
        **{name: getattr(new, name) for name in SAMPLING_FIELDS},
    }
    changed = {
        name: getattr(requests, name).at[slots].set(v, mode="drop") for name, v in values.items()
    }
    return replace(state, requests=replace(requests, **changed))


def disown(state: SchedulerState, slots: jax.Array) -> SchedulerState:
    """Forks that still wait for the last request of ``slots i32[...]`` go on by themselves."""
    requests = state.requests
    gone = jnp.any(requests.fork_of[:, None] == jnp.reshape(slots, (1, -1)), axis=1)
    none = jnp.full((), requests.status.shape[0], jnp.int32)
    return replace(
        state, requests=replace(requests, fork_of=jnp.where(gone, none, requests.fork_of))
    )


def abort(state: SchedulerState, slot: jax.Array) -> SchedulerState:
    """Finish the request in ``slot i32[]`` now; its blocks go back in the next schedule.

    Nothing happens to a request that has finished, or to a slot without one.
    """
    used = state.requests.status[slot] != UNUSED
    return finish(state, jnp.where(used, slot, state.requests.status.shape[0]), ABORTED)
