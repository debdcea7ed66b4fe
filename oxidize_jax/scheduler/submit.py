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
from oxidize_jax.scheduler.rows import finish
from oxidize_jax.scheduler.state import (
    ABORTED,
    NO_TOKEN,
    NOT_FINISHED,
    UNUSED,
    WAITING,
    SchedulerState,
)
from oxidize_jax.types import replace, state


@state
class NewRequest:
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
    temperature: jax.Array
    """f32[]"""
    top_k: jax.Array
    """i32[]"""
    top_p: jax.Array
    """f32[]"""
    min_p: jax.Array
    """f32[]"""
    typical_p: jax.Array
    """f32[]"""
    repetition_penalty: jax.Array
    """f32[] > 0"""
    presence_penalty: jax.Array
    """f32[]"""
    frequency_penalty: jax.Array
    """f32[]"""
    bias_ids: jax.Array
    """i32[E], distinct, those used first; padded with ``NO_TOKEN``"""
    bias_values: jax.Array
    """f32[E]"""
    bad_words: jax.Array
    """i32[W, L], each backwards, those used first; padded with ``NO_TOKEN``"""
    token_mask: jax.Array
    """u32[ceil(token_mask_size / 32)]"""
    has_mask: jax.Array
    """bool[]"""
    key: jax.Array
    """u32[2]"""
    salt: jax.Array
    """i32[] >= 0"""
    use_cache: jax.Array
    """bool[]"""
    fork_of: jax.Array
    """i32[]: slot of a request with the same prompt, whose blocks to share; ``R`` for none."""
    want_logprobs: jax.Array
    """bool[]"""


def plain_sampling(config: EngineConfig) -> dict[str, Any]:
    """Values, on the host, of the fields of a greedy :class:`NewRequest` without any wish."""
    return {
        "temperature": np.zeros((), np.float32),
        "top_k": np.zeros((), np.int32),
        "top_p": np.ones((), np.float32),
        "min_p": np.zeros((), np.float32),
        "typical_p": np.ones((), np.float32),
        "repetition_penalty": np.ones((), np.float32),
        "presence_penalty": np.zeros((), np.float32),
        "frequency_penalty": np.zeros((), np.float32),
        "bias_ids": np.full((config.max_logit_bias,), NO_TOKEN, np.int32),
        "bias_values": np.zeros((config.max_logit_bias,), np.float32),
        "bad_words": np.full(
            (config.max_bad_words, config.max_bad_word_tokens), NO_TOKEN, np.int32
        ),
        "token_mask": np.zeros((config.token_mask_words,), np.uint32),
        "has_mask": np.zeros((), np.bool_),
        "key": np.zeros((2,), np.uint32),
        "want_logprobs": np.zeros((), np.bool_),
    }


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
            raise ValueError(f"{name}[{i}]={token!r}: token ids must be whole numbers.")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name}[{i}]={token}: token ids must be in 0 to {vocab_size - 1}, "
                f"the model's vocabulary."
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
        "tokens": new.tokens,
        "logprobs": jnp.zeros((*shape, config.max_model_len), jnp.float32),
        "want_logprobs": new.want_logprobs,
        "stop_ids": new.stop_ids,
        "temperature": new.temperature,
        "top_k": new.top_k,
        "top_p": new.top_p,
        "min_p": new.min_p,
        "typical_p": new.typical_p,
        "repetition_penalty": new.repetition_penalty,
        "presence_penalty": new.presence_penalty,
        "frequency_penalty": new.frequency_penalty,
        "bias_ids": new.bias_ids,
        "bias_values": new.bias_values,
        "bad_words": new.bad_words,
        "token_mask": new.token_mask,
        "has_mask": new.has_mask,
        "key": new.key,
        "salt": new.salt,
        "use_cache": new.use_cache,
        "fork_of": new.fork_of,
        "fork_len": new.prompt_len,
        "num_cached": jnp.zeros(shape, jnp.int32),
        "num_preemptions": jnp.zeros(shape, jnp.int32),
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
