"""Random numbers of the sampler: one key per request and token, the same on every machine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CHILD_BASE = 2**31
"""Children are folded in above every token index, so no draw shares a child's key."""


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
    # On the host: a request must not wait for the device, nor for a compiler.
    words = _threefry(parent[None], np.zeros(1, np.uint32), np.array([CHILD_BASE + child], "u4"))
    return np.concatenate(words)


def gumbel(key_data: jax.Array, token_index: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise ``f32[C, V]``, finite, from keys ``u32[C, 2]`` and ``i32[C]``.

    Number v of a row comes from the row's key, its token index and v alone, so neither the
    row's place nor the size of the batch or of the vocabulary changes it.
    """
    bits = random_bits(fold_in(key_data, token_index.astype(jnp.uint32)), vocab)
    # A uniform number near 0 is finer than one near 1, and large noise needs the fine end.
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    exponential = -jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2**-24)))
    return -jnp.log(exponential)


def fold_in(key_data: jax.Array, data: jax.Array) -> jax.Array:
    """``jax.random.fold_in`` of every row: keys ``u32[C, 2]``, data ``u32[C]``."""
    return jnp.stack(_threefry(key_data, jnp.zeros_like(data), data), axis=1)


def random_bits(key_data: jax.Array, size: int) -> jax.Array:
    """``jax.random.bits`` of every key ``u32[C, 2]``: ``u32[C, size]``."""
    count = jnp.arange(size, dtype=jnp.uint32)[None, :]
    first, second = _threefry(key_data[:, None, :], jnp.zeros_like(count), count)
    return first ^ second


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(key_data: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011): two words from key and counter.

    Arrays of jax or of numpy; the result is of the same kind.

    ``jax.random`` has the same function, but on CPUs as a loop over whole arrays: 104 ms for
    64 rows of 49,152, where one expression that XLA fuses takes 4.
    """
    a, b = key_data[..., 0], key_data[..., 1]
    keys = (a, b, a ^ b ^ np.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for turn in range(5):
        for amount in _ROTATIONS[turn % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(amount)) | (y >> np.uint32(32 - amount)))
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y
