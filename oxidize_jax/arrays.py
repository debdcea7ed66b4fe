"""Idioms of the transitions, written so that they compile to few kernels.

Every engine program holds the scheduler, and on a CPU the time to compile it goes with the
number of kernels. A running sum over a few hundred lanes is one kernel as a masked sum and
a dozen as XLA's logarithmic scan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_DENSE_LANES = 256
"""Longest axis that is summed by comparing all pairs of lanes."""
_DENSE_PAIRS = 2**16


def prefix_sum(values: jax.Array) -> jax.Array:
    """i32[n]: inclusive running sum of ``i32[n]`` or ``bool[n]``."""
    (n,) = values.shape
    if n > _DENSE_LANES:
        return jnp.cumsum(values, dtype=jnp.int32)
    lane = jnp.arange(n, dtype=jnp.int32)
    upto = lane[None, :] <= lane[:, None]
    return jnp.sum(jnp.where(upto, values.astype(jnp.int32)[None, :], 0), axis=1, dtype=jnp.int32)


def segment_of(ends: jax.Array, index: jax.Array) -> jax.Array:
    """i32[m]: the segment each ``index i32[m]`` falls into; ``ends i32[n]`` are exclusive.

    Empty segments are passed over; an index at or behind the last end gives n.
    """
    if ends.shape[0] * index.shape[0] > _DENSE_PAIRS:
        return jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    return jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)


def at_index(values: jax.Array, index: jax.Array, fill: int | float | bool) -> jax.Array:
    """``values[index]`` along the first axis; ``fill`` for an index past the end.

    ``index`` is never negative: JAX's wrap-around is left out.
    """
    return values.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)
