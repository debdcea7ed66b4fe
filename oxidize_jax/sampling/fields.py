"""SamplingFields: how the tokens of requests are chosen, as arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.edits import NO_TOKEN
from oxidize_jax.types import state


@state
class SamplingFields:
    """Fields of one request, or with leading axes of many; scalars are arrays too."""

    temperature: jax.Array
    """f32[...]; 0 is greedy"""
    top_k: jax.Array
    """i32[...]; 0 keeps all"""
    top_p: jax.Array
    """f32[...]"""
    min_p: jax.Array
    """f32[...]"""
    typical_p: jax.Array
    """f32[...]"""
    repetition_penalty: jax.Array
    """f32[...] > 0"""
    presence_penalty: jax.Array
    """f32[...]"""
    frequency_penalty: jax.Array
    """f32[...]"""
    bias_ids: jax.Array
    """i32[..., E], E = max_logit_bias: distinct, those used first; padded with ``NO_TOKEN``."""
    bias_values: jax.Array
    """f32[..., E]"""
    bad_words: jax.Array
    """i32[..., W, L]: the W = max_bad_words sequences that the output must not contain, of at
    most L = max_bad_word_tokens, backwards, those used first; padded with ``NO_TOKEN``."""
    token_mask: jax.Array
    """u32[..., ceil(token_mask_size / 32)]: ids that may be sampled, where ``has_mask``."""
    has_mask: jax.Array
    """bool[...]"""
    key: jax.Array
    """u32[..., 2]: threefry key data; folded with the index of each generated token."""
    num_logprobs: jax.Array
    """i32[...]: likeliest tokens to report; 0: the rank of the drawn token alone; -1: neither"""


SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingFields))
"""Names, in order."""


def plain_sampling(config: EngineConfig) -> dict[str, Any]:
    """Values, on the host, of the fields of one greedy request without any wish."""
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
        "num_logprobs": np.full((), -1, np.int32),
    }
