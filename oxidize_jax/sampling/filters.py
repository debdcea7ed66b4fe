"""min_p, top_k, top_p and typical_p as thresholds: no filter sorts the vocabulary.

They work on ``distance f32[C, V] >= 0``, how far a token's logit is below the row's best after
the temperature. The first three keep the tokens nearer to the best than one number per row,
typical_p those within a band. A token that ties with the last one kept is kept too, so the
result does not depend on the order of a sort (as in vLLM and Hugging Face for top_k).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oxidize_jax.types import state

NEAREST = 128
"""Tokens to sort. Filters that end within them, as nearly all do, need no more than that."""

_TINY = np.float32(2.0**-126)
_TINY_BITS, _INF_BITS = 0x00800000, 0x7F800000


_Bracket = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Bounds of a threshold, ``i32[C]``, and how many values lie above each."""


@state
class Kept:
    """The tokens that are kept: those with ``distance < limit`` and
    ``|distance - center| < width``."""

    limit: jax.Array
    """f32[C]; infinity keeps all"""
    center: jax.Array
    """f32[C]"""
    width: jax.Array
    """f32[C]; infinity keeps all"""

    def of(self, distance: jax.Array) -> jax.Array:
        """``bool[C, V]``: which tokens are kept."""
        in_band = jnp.abs(distance - self.center[:, None]) < self.width[:, None]
        return (distance < self.limit[:, None]) & in_band


def kept_tokens(
    distance: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    typical_p: jax.Array,
) -> Kept:
    """What the filters keep, each of what those before it left: vLLM's order, typical_p last.

    ``min_p f32[C]`` of 0 and less filters nothing, nor does ``top_k i32[C]`` below 1, or V and
    more, nor ``top_p`` and ``typical_p f32[C]`` of 1 and more.
    """
    limit = _min_p_limit(min_p)
    sorts = (top_k > 0) & (top_k < distance.shape[1]) | (top_p < 1)

    def find() -> jax.Array:
        nearest = -lax.top_k(-distance, min(NEAREST, distance.shape[1]))[0]
        inside = jnp.minimum(limit, _top_k_limit(distance, nearest, top_k))
        return _top_p_limit(distance, nearest, top_p, inside)

    limit = lax.cond(jnp.any(sorts), find, lambda: limit)
    wide = (jnp.zeros_like(limit), jnp.full_like(limit, jnp.inf))
    center, width = lax.cond(
        jnp.any(typical_p < 1), lambda: _typical_band(distance, limit, typical_p), lambda: wide
    )
    return Kept(limit, center, width)


def _min_p_limit(min_p: jax.Array) -> jax.Array:
    """Just above the distance of a token ``min_p`` times as likely as the best."""
    furthest = -jnp.log(jnp.clip(min_p, _TINY, 1))
    return jnp.where(min_p > 0, _just_above(furthest), jnp.inf)


def _top_k_limit(distance: jax.Array, nearest: jax.Array, top_k: jax.Array) -> jax.Array:
    """Just above the k-th smallest distance; ``nearest f32[C, n]`` are the n smallest, sorted."""
    active = (top_k > 0) & (top_k < distance.shape[1])
    size = nearest.shape[1]
    limit = jnp.where(active, _just_above(_at(nearest, jnp.minimum(top_k, size) - 1)), jnp.inf)
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
    nucleus = _just_above(_at(nearest, jnp.argmax(reached, axis=-1)))
    active = top_p < 1
    beyond = active & ~reached[:, -1]

    def enough(bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        bound = jnp.minimum(bound, limit)
        count = jnp.sum(distance < bound[:, None], axis=-1, dtype=jnp.int32)
        return _mass(distance, bound) >= wanted, count

    nucleus = _where_beyond(beyond, enough, nucleus)
    return jnp.where(active, jnp.minimum(limit, nucleus), limit)


def _typical_band(
    distance: jax.Array, limit: jax.Array, typical_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(center, width)`` of the tokens within ``limit`` whose surprise is nearest to the mean.

    The surprise of a token is its distance and a constant, the entropy therefore the mean
    distance and that constant: the difference needs no normaliser.
    """
    inside = distance < limit[:, None]
    weight = jnp.where(inside, jnp.exp(-distance), 0)
    total = jnp.sum(weight, axis=-1)
    surprise = jnp.sum(weight * jnp.where(inside, distance, 0), axis=-1)
    center = surprise / jnp.maximum(total, _TINY)
    deviation = jnp.where(inside, jnp.abs(distance - center[:, None]), jnp.inf)
    wanted = jnp.maximum(typical_p * total, _TINY)
    nearest, place = lax.top_k(-deviation, min(NEAREST, distance.shape[1]))
    nearest = -nearest
    reached = jnp.cumsum(jnp.take_along_axis(weight, place, axis=1), axis=-1) >= wanted[:, None]
    width = _just_above(_at(nearest, jnp.argmax(reached, axis=-1)))
    active = typical_p < 1

    def enough(bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        within = deviation < bound[:, None]
        mass = jnp.sum(jnp.where(within, weight, 0), axis=-1)
        return mass >= wanted, jnp.sum(within, axis=-1, dtype=jnp.int32)

    width = _where_beyond(active & ~reached[:, -1], enough, width)
    return center, jnp.where(active, width, jnp.inf)


def _mass(distance: jax.Array, limit: jax.Array) -> jax.Array:
    inside = distance < limit[:, None]
    return jnp.sum(jnp.where(inside, jnp.exp(-distance), 0), axis=-1)


def _at(values: jax.Array, place: jax.Array) -> jax.Array:
    """``values[c, place[c]]`` of ``f32[C, n]``."""
    return jnp.take_along_axis(values, place.astype(jnp.int32)[:, None], axis=1)[:, 0]


def _just_above(value: jax.Array) -> jax.Array:
    """The next float after ``value f32[C] >= 0``, at most infinity.

    It is never a denormal, which CPUs may take for zero: the best token is at distance 0.
    """
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
