"""Idioms of the transitions, written so that they compile to few kernels.

Every engine program holds the scheduler, and on a CPU the time to compile it goes with the
number of kernels. A running sum over a few hundred lanes is one kernel as a masked sum and
a dozen as XLA's logarithmic scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

_T = TypeVar("_T")

_DENSE_LANES = 32
"""Longest axis that is summed by comparing all pairs of lanes."""
_GROUP = 16
"""Lanes that are summed together on a longer axis, before the sums of the groups are."""


def prefix_sum(values: jax.Array) -> jax.Array:
    """i32[..., n]: inclusive running sum of ``i32[..., n]`` or ``bool[..., n]``.

    Several sums at once, along a leading axis, take no more kernels than one.
    """
    *lead, n = values.shape
    values = values.astype(jnp.int32)
    if n <= _DENSE_LANES:
        return _sum_pairs(values)
    groups = -(-n // _GROUP)
    whole = jnp.pad(values, [(0, 0)] * len(lead) + [(0, groups * _GROUP - n)])
    inside = _sum_pairs(whole.reshape(*lead, groups, _GROUP))
    totals = inside[..., -1]
    sums = inside + (prefix_sum(totals) - totals)[..., None]
    return sums.reshape(*lead, groups * _GROUP)[..., :n]


def _sum_pairs(values: jax.Array) -> jax.Array:
    """i32[..., n]: running sums along the short last axis, by a mask over pairs of lanes."""
    lane = jnp.arange(values.shape[-1], dtype=jnp.int32)
    upto = lane[None, :] <= lane[:, None]
    return jnp.sum(jnp.where(upto, values[..., None, :], 0), axis=-1, dtype=jnp.int32)


def segments(ends: jax.Array, size: int) -> jax.Array:
    """i32[size]: the segment each place falls into; ``ends i32[n]`` are exclusive, ascending.

    Empty segments are passed over; a place at or behind the last end gives n.
    """
    # Every end adds one to the number of all places from there on.
    marks = jnp.zeros((size,), jnp.int32).at[ends].add(1, mode="drop")
    return prefix_sum(marks)


def at_index(values: jax.Array, index: jax.Array, fill: int | float | bool) -> jax.Array:
    """``values[index]`` along the first axis; ``fill`` for an index past the end.

    ``index`` is never negative: JAX's wrap-around is left out.
    """
    return values.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)


def apply_if(condition: jax.Array, transition: Callable[[_T], _T], values: _T) -> _T:
    """``transition(values)`` where ``condition bool[]``, else ``values``.

    A loop that runs once or not at all: unlike ``lax.cond`` it copies no buffer, so rare
    work costs one test in the steps that do not need it.
    """

    def once(carry: tuple[jax.Array, _T]) -> tuple[jax.Array, _T]:
        return jnp.zeros((), jnp.bool_), transition(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (condition, values))[1]
