"""The sampler: from logits to tokens, one row per sequence, pure and jittable.

A row's token depends on its own logits, parameters and key alone. The order of filters is
vLLM's: temperature, then top_k, then top_p over what top_k left.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oxidize_jax.types import state

GREEDY_BELOW = 1e-5
"""Temperatures below this take the likeliest token, as vLLM does: dividing by less overflows."""

_CHILD_BASE = 2**31
"""Children are folded in above every token index, so no draw shares a child's key."""


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
    """f32[C, P]; 0 where not wanted"""


def sample(logits: jax.Array, arrays: SamplingArrays, num_top_logprobs: int) -> SampleOutput:
    """Draw a token for every row of ``logits f32[C, V]``.

    ``num_top_logprobs`` is P, fixed at trace time and cut to V. What no row asks for is
    skipped when the program runs: noise, each filter, suppression, alternatives.
    """
    allowed = _suppress(logits, arrays.suppress_ids)
    greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    hot = arrays.temperature >= GREEDY_BELOW
    tokens = lax.cond(
        jnp.any(hot),
        lambda: jnp.where(hot, _draw(allowed, arrays, hot), greedy),
        lambda: greedy,
    )
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    top_ids, top_logprobs = _alternatives(
        logits, normalizer, arrays.want_logprobs, num_top_logprobs
    )
    return SampleOutput(tokens, chosen - normalizer, top_ids, top_logprobs)


def key_data_from_seed(seed: int) -> np.ndarray:
    """Threefry key data ``u32[2]`` of a seed in ``[0, 2**64)``: its two words, none lost."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def child_key(seed: int, child: int) -> np.ndarray:
    """Key data ``u32[2]`` of completion ``child`` of a request with n > 1.

    Child 0 draws what the request alone would with the same seed.
    """
    parent = key_data_from_seed(seed)
    if child == 0:
        return parent
    key = jax.random.wrap_key_data(jnp.asarray(parent), impl="threefry2x32")
    return np.asarray(jax.random.key_data(jax.random.fold_in(key, _CHILD_BASE + child)))


def _suppress(logits: jax.Array, ids: jax.Array) -> jax.Array:
    vocab = logits.shape[1]
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return lax.cond(
        jnp.any(ids < vocab),
        lambda: logits.at[row, ids].set(-jnp.inf, mode="drop"),
        lambda: logits,
    )


def _draw(logits: jax.Array, arrays: SamplingArrays, hot: jax.Array) -> jax.Array:
    """Gumbel-max over the kept tokens: ``i32[C]``."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    best = jnp.where(jnp.isfinite(best), best, 0)
    # The best token becomes 0 before the division, so no temperature can overflow it.
    scaled = (logits - best) / jnp.where(hot, arrays.temperature, 1)[:, None]
    scaled = _keep_top_k(scaled, jnp.where(hot, arrays.top_k, 0))
    scaled = _keep_top_p(scaled, jnp.where(hot, arrays.top_p, 1))
    noise = _gumbel(arrays.key, arrays.token_index, logits.shape[1])
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _gumbel(key_data: jax.Array, token_index: jax.Array, vocab: int) -> jax.Array:
    """f32[C, V]: one key per row and token, so that neither row nor batch size matters."""

    def row(data: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), (vocab,), jnp.float32)

    return jax.vmap(row)(key_data, token_index)


def _keep_top_k(scaled: jax.Array, top_k: jax.Array) -> jax.Array:
    """-inf below the k-th largest of ``scaled f32[C, V] <= 0``; all that tie with it stay."""
    active = (top_k > 0) & (top_k < scaled.shape[1])

    def apply() -> jax.Array:
        distance = -scaled

        def too_many(limit: jax.Array) -> tuple[jax.Array, jax.Array]:
            count = jnp.sum(distance < limit[:, None], axis=-1, dtype=jnp.int32)
            return count >= top_k, count

        limit = _smallest_limit(too_many, active)
        return jnp.where(distance < limit[:, None], scaled, -jnp.inf)

    return lax.cond(jnp.any(active), apply, lambda: scaled)


def _keep_top_p(scaled: jax.Array, top_p: jax.Array) -> jax.Array:
    """-inf but for the fewest likeliest tokens whose probability reaches ``top_p``.

    Tokens as likely as the last of them stay too.
    """
    active = top_p < 1

    def apply() -> jax.Array:
        mass = jnp.exp(scaled)
        wanted = jnp.maximum(top_p * jnp.sum(mass, axis=-1), jnp.finfo(jnp.float32).tiny)

        def enough(limit: jax.Array) -> tuple[jax.Array, jax.Array]:
            inside = -scaled < limit[:, None]
            total = jnp.sum(jnp.where(inside, mass, 0), axis=-1)
            return total >= wanted, jnp.sum(inside, axis=-1, dtype=jnp.int32)

        limit = _smallest_limit(enough, active)
        return jnp.where(-scaled < limit[:, None], scaled, -jnp.inf)

    return lax.cond(jnp.any(active), apply, lambda: scaled)


_INF_BITS = 0x7F800000


def _smallest_limit(
    test: Callable[[jax.Array], tuple[jax.Array, jax.Array]], active: jax.Array
) -> jax.Array:
    """The smallest ``limit f32[C]`` for which ``test(limit)`` is true of ``x < limit``.

    ``test`` gives ``(true bool[C], how many x < limit i32[C])`` and is monotone. Bisection over
    the bit patterns of non-negative floats, whose order is that of the floats: exact after 31
    passes over the vocabulary, and over as soon as one value is left between the bounds; a
    sort of 49,152 values costs more. Inactive rows get infinity, which keeps all but -inf.
    """
    low = jnp.where(active, 0, _INF_BITS - 1)
    high = jnp.full_like(low, _INF_BITS)
    first = jnp.zeros_like(low)
    last = jnp.full_like(low, jnp.iinfo(jnp.int32).max)

    def unsettled(carry: tuple[jax.Array, ...]) -> jax.Array:
        low, high, below_low, below_high = carry
        return jnp.any((high - low > 1) & (below_high - below_low > 1))

    def halve(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, below_low, below_high = carry
        middle = low + (high - low) // 2
        true, count = test(lax.bitcast_convert_type(middle, jnp.float32))
        true = true & active
        move_low = ~true & active
        return (
            jnp.where(move_low, middle, low),
            jnp.where(true, middle, high),
            jnp.where(move_low, count, below_low),
            jnp.where(true, count, below_high),
        )

    _, high, _, _ = lax.while_loop(unsettled, halve, (low, high, first, last))
    return lax.bitcast_convert_type(high, jnp.float32)


def _alternatives(
    logits: jax.Array, normalizer: jax.Array, wanted: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """``(i32[C, P], f32[C, P])``, zeros where not ``wanted bool[C]``."""
    size = min(size, logits.shape[1])
    shape = (logits.shape[0], size)

    def find() -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logits, size)
        rows = wanted[:, None]
        return jnp.where(rows, ids, 0), jnp.where(rows, values - normalizer[:, None], 0)

    def skip() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return lax.cond(jnp.any(wanted), find, skip) if size else skip()
