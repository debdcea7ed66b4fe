"""The sampler: from logits to tokens, one row per sequence, pure and jittable.

A row's token depends on its own logits, parameters and key alone. The order of filters is
vLLM's: temperature, then top_k, then top_p over what top_k left.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.sampling.filters import kept_limit
from oxidize_jax.sampling.keys import child_key, gumbel, key_data_from_seed
from oxidize_jax.types import state

__all__ = [
    "GREEDY_BELOW",
    "SampleOutput",
    "SamplingArrays",
    "child_key",
    "key_data_from_seed",
    "sample",
]

GREEDY_BELOW = 1e-5
"""Temperatures below this take the likeliest token, as vLLM does: dividing by less overflows."""


@state
class SamplingArrays:
    """Parameters of C rows. A padding row is greedy and wants nothing."""

    temperature: jax.Array
    """f32[C] >= 0"""
    top_k: jax.Array
    """i32[C]; below 1, or V and more: keep all"""
    top_p: jax.Array
    """f32[C]; 1 and more: keep all; 0 and less: the likeliest and its equals"""
    key: jax.Array
    """u32[C, 2]: threefry key data of the request"""
    token_index: jax.Array
    """i32[C]: how many tokens the request has drawn"""
    suppress_ids: jax.Array
    """i32[C, Z]: ids that must not be drawn; V or more at padding"""
    want_logprobs: jax.Array
    """bool[C]: fill ``top_ids`` and ``top_logprobs``"""


@state
class SampleOutput:
    """What was drawn. Log probabilities are those of the raw logits, before any filter."""

    tokens: jax.Array
    """i32[C]"""
    logprobs: jax.Array
    """f32[C]: of the drawn token"""
    top_ids: jax.Array
    """i32[C, P]: likeliest tokens, the smaller id first among equals; 0 where not wanted"""
    top_logprobs: jax.Array
    """f32[C, P]; 0 where not wanted, and -inf past the end of a vocabulary smaller than P"""


def sample(logits: jax.Array, arrays: SamplingArrays, num_top_logprobs: int) -> SampleOutput:
    """Draw a token for every row of ``logits f32[C, V]``.

    ``num_top_logprobs`` is P, fixed at trace time. What no row asks for is skipped when the
    program runs: noise, each filter, suppression, alternatives.
    """
    hot = arrays.temperature >= GREEDY_BELOW
    plain = ~jnp.any(hot) & jnp.all(arrays.suppress_ids >= logits.shape[1])
    tokens = lax.cond(plain, lambda: _argmax(logits), lambda: _drawn(logits, arrays, hot))
    normalizer = _logsumexp(logits)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    top_ids, top_logprobs = _alternatives(
        logits, normalizer, arrays.want_logprobs, num_top_logprobs
    )
    return SampleOutput(tokens, chosen - normalizer, top_ids, top_logprobs)


def _drawn(logits: jax.Array, arrays: SamplingArrays, hot: jax.Array) -> jax.Array:
    """``i32[C]``: a draw for the rows of ``hot bool[C]``, the likeliest allowed for others."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    allowed = logits.at[row, arrays.suppress_ids].set(-jnp.inf, mode="drop")
    scores = lax.cond(
        jnp.any(hot),
        lambda: jnp.where(hot[:, None], _perturbed(allowed, arrays, hot), allowed),
        lambda: allowed,
    )
    return _argmax(scores)


def _perturbed(logits: jax.Array, arrays: SamplingArrays, hot: jax.Array) -> jax.Array:
    """Scores ``f32[C, V]`` whose largest is a draw (Gumbel-max); -inf where filtered out.

    The best token is at distance 0 before the division, so no temperature can overflow it.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    best = jnp.where(jnp.isfinite(best), best, 0)
    distance = (best - logits) / jnp.where(hot, arrays.temperature, 1)[:, None]
    limit = kept_limit(distance, jnp.where(hot, arrays.top_k, 0), jnp.where(hot, arrays.top_p, 1))
    noise = gumbel(arrays.key, arrays.token_index, logits.shape[1])
    return jnp.where(distance < limit[:, None], noise - distance, -jnp.inf)


def _argmax(scores: jax.Array) -> jax.Array:
    """``i32[C]``: the first of the largest, 0 where all are -inf or NaN.

    Two passes of whole vectors: XLA:CPU runs argmax one number at a time (26 ms against 1 for
    64 rows of 49,152).
    """
    best = jnp.max(scores, axis=-1, keepdims=True)
    slices = _slices(scores)
    none = len(slices)
    nth = jnp.full(slices[0].shape, none, jnp.int32)
    for i, part in enumerate(slices):
        nth = jnp.minimum(nth, jnp.where(part == best, i, none))
    width = nth.shape[1]
    lane = jnp.arange(width, dtype=jnp.int32)
    first = jnp.min(jnp.where(nth < none, nth * width + lane, scores.shape[1]), axis=-1)
    return jnp.where(first < scores.shape[1], first, 0)


def _logsumexp(logits: jax.Array) -> jax.Array:
    """``f32[C]``, as jax.nn.logsumexp, in one pass of whole vectors behind the maximum."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    best = jnp.where(jnp.isfinite(best), best, 0)
    slices = _slices(logits)
    total = jnp.exp(slices[0] - best)
    for part in slices[1:]:
        total = total + jnp.exp(part - best)
    return jnp.log(jnp.sum(total, axis=-1)) + best[:, 0]


def _slices(x: jax.Array) -> list[jax.Array]:
    """``f32[C, V]`` side by side as at most 64 pieces of one width, padded with -inf."""
    width = max(64, -(-x.shape[1] // 64))
    slices = [x[:, start : start + width] for start in range(0, x.shape[1], width)]
    short = width - slices[-1].shape[1]
    slices[-1] = jnp.pad(slices[-1], ((0, 0), (0, short)), constant_values=-jnp.inf)
    return slices


def _alternatives(
    logits: jax.Array, normalizer: jax.Array, wanted: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """``(i32[C, P], f32[C, P])``, zeros where not ``wanted bool[C]``."""
    rows = wanted[:, None]
    present = min(size, logits.shape[1])
    padding = ((0, 0), (0, size - present))

    def find() -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logits, present)
        values = jnp.pad(values, padding, constant_values=-jnp.inf)
        logprobs = jnp.where(rows, values - normalizer[:, None], 0)
        return jnp.where(rows, jnp.pad(ids, padding), 0), logprobs

    def skip() -> tuple[jax.Array, jax.Array]:
        shape = (logits.shape[0], size)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return lax.cond(jnp.any(wanted), find, skip) if size else skip()
