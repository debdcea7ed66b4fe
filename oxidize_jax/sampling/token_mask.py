"""Token masks: one bit for each id of the vocabulary, set where it may be sampled.

Bit ``v % 32`` of word ``v // 32`` stands for id v, the layout that grammar engines fill
(llguidance, xgrammar). Bits behind the vocabulary are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def pack_token_mask(
    vocab_size: int, allowed: Sequence[int] | None, banned: Sequence[int] = ()
) -> np.ndarray:
    """``u32[ceil(V / 32)]``: ids that are allowed (None: all) and not banned, on the host."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    if allowed is None:
        bits[:vocab_size] = 1
    else:
        bits[np.asarray(allowed, np.int64)] = 1
    bits[np.asarray(banned, np.int64)] = 0
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def unpack_token_mask(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """``bool[V]`` of packed words, on the host."""
    data = np.ascontiguousarray(words.astype("<u4")).view(np.uint8)
    return np.unpackbits(data, bitorder="little")[:vocab_size].astype(bool)


def pack_bits(allowed: jax.Array) -> jax.Array:
    """``u32[..., ceil(V / 32)]`` of ``bool[..., V]``, on the device."""
    short = -allowed.shape[-1] % 32
    allowed = jnp.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, short)])
    bits = allowed.reshape(*allowed.shape[:-1], -1, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def unpack_bits(words: jax.Array, vocab_size: int) -> jax.Array:
    """``bool[..., V]`` of ``u32[..., ceil(V / 32)]``, on the device."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab_size] != 0
