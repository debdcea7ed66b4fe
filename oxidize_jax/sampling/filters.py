"""top_k and top_p as one number per row: tokens nearer to the best than that are kept.

Both work on ``distance f32[C, V] >= 0``, how far a token's logit is below the row's best
after the temperature. A token that ties with the last one kept is kept too, so the result
does not depend on the order of a sort (as in vLLM and Hugging Face for top_k).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NEAREST = 128
"""Tokens to sort. Filters that end within them, as nearly all do, need no more than that."""

_TINY = np.float32(2.0**-126)
_TINY_BITS, _INF_BITS = 0x00800000, 0x7F800000


_Bracket = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Bounds of a threshold, ``i32[C]``, and how many values lie above each."""


def kept_limit(distance: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """``limit f32[C]``: keep the tokens with ``distance < limit``; infinity keeps all.

    ``top_k i32[C]`` below 1, or V and more, and ``top_p f32[C]`` of 1 and more filter nothing.
    """
    filtered = (top_k > 0) & (top_k < distance.shape[1]) | (top_p < 1)
    size = min(NEAREST, distance.shape[1])

    def find() -> jax.Array:
        nearest = -lax.top_k(-distance, size)[0]
        limit = _top_k_limit(distance, nearest, top_k)
        return _top_p_limit(distance, nearest, top_p, limit)

    def all_kept() -> jax.Array:
        return jnp.full_like(top_p, jnp.inf)

    return lax.cond(jnp.any(filtered), find, all_kept)


def _top_k_limit(distance: jax.Array, nearest: jax.Array, top_k: jax.Array) -> jax.Array:
    """Just above the k-th smallest distance; ``nearest f32[C, n]`` are the n smallest, sorted."""
    active = (top_k > 0) & (top_k < distance.shape[1])
    size = nearest.shape[1]
    limit = jnp.where(active, _just_above(nearest, jnp.minimum(top_k, size) - 1), jnp.inf)
    beyond = active & (top_k > size)

    def enough(bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = jnp.sum(distance < bound[:, None], axis=-1, dtype=jnp.int32)
        return count >= top_k, count

    return _where_beyond(beyond, enough, limit)


def _top_p_limit(
    distance: jax.Array, nearest: jax.Array, top_p: jax.Array, limit: jax.Array
) -> jax.Array:
    """The smallest limit within which lies ``top_p`` of the probability within ``limit``."""
    total = _mass(distance, limit)
    wanted = jnp.maximum(top_p * total, _TINY)
    within = nearest < limit[:, None]
    reached = jnp.cumsum(jnp.where(within, jnp.exp(-nearest), 0), axis=-1) >= wanted[:, None]
    nucleus = _just_above(nearest, jnp.argmax(reached, axis=-1).astype(jnp.int32))
    active = top_p < 1
    beyond = active & ~reached[:, -1]

    def enough(bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        bound = jnp.minimum(bound, limit)
        count = jnp.sum(distance < bound[:, None], axis=-1, dtype=jnp.int32)
        return _mass(distance, bound) >= wanted, count

    nucleus = _where_beyond(beyond, enough, nucleus)
    return jnp.where(active, jnp.minimum(limit, nucleus), limit)


def _mass(distance: jax.Array, limit: jax.Array) -> jax.Array:
    inside = distance < limit[:, None]
    return jnp.sum(jnp.where(inside, jnp.exp(-distance), 0), axis=-1)


def _just_above(nearest: jax.Array, place: jax.Array) -> jax.Array:
    """The next float after ``nearest[c, place[c]]``, at most infinity.

    It is never a denormal, which CPUs may take for zero: the best token is at distance 0.
    """
    value = jnp.take_along_axis(nearest, place[:, None], axis=1)[:, 0]
    bits = lax.bitcast_convert_type(value, jnp.int32) + 1
    return lax.bitcast_convert_type(jnp.clip(bits, _TINY_BITS, _INF_BITS), jnp.float32)


def _where_beyond(
    beyond: jax.Array,
    enough: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    limit: jax.Array,
) -> jax.Array:
    """``limit``, but for rows whose answer is beyond the sorted tokens a search over all."""
    return lax.cond(
        jnp.any(beyond),
        lambda: jnp.where(beyond, _smallest_limit(enough, beyond), limit),
        lambda: limit,
    )


def _smallest_limit(
    enough: Callable[[jax.Array], tuple[jax.Array, jax.Array]], active: jax.Array
) -> jax.Array:
    """The smallest ``limit f32[C]`` that is enough, as a threshold on the distances.

    ``enough(limit)`` gives ``(is it bool[C], how many distances are below it i32[C])``.
    Bisection over the bit patterns of non-negative floats, whose order is that of the
    floats: exact after 31 passes over the vocabulary, and over as soon as one distance is
    left between the bounds. Inactive rows get infinity.
    """
    low = jnp.where(active, _TINY_BITS - 1, _INF_BITS - 1)
    high = jnp.full_like(low, _INF_BITS)
    none, many = jnp.zeros_like(low), jnp.full_like(low, jnp.iinfo(jnp.int32).max)

    def unsettled(carry: _Bracket) -> jax.Array:
        low, high, below_low, below_high = carry
        return jnp.any((high - low > 1) & (below_high - below_low > 1))

    def halve(carry: _Bracket) -> _Bracket:
        low, high, below_low, below_high = carry
        middle = low + (high - low) // 2
        is_enough, count = enough(lax.bitcast_convert_type(middle, jnp.float32))
        down, up = is_enough & active, ~is_enough & active
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, count, below_low),
            jnp.where(down, count, below_high),
        )

    _, high, _, _ = lax.while_loop(unsettled, halve, (low, high, none, many))
    return lax.bitcast_convert_type(high, jnp.float32)
