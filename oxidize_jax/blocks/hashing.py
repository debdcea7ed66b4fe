"""Chained block hashes (vLLM ``v1/core/kv_cache_utils.py``: parent hash + tokens + salt).

A hash only *finds* a candidate. Whether a candidate is the block is decided by its
tokens and by its parent's serial number (see ``pool.find``), so a collision, even a
forged one, can cost a miss but never serve another prompt's KV.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oxidize_jax.arrays import prefix_sum

_WORDS = (0x9E3779B9, 0x85EBCA6B)
_BASE = (0x01000193, 0x9E3779B1)
"""P of each word: odd, so that it has an inverse modulo 2^32."""
_INVERSE = tuple(pow(base, -1, 2**32) for base in _BASE)
_FIRST = (0x243F6A88, 0xB7E15162)


def root_hash(salt: jax.Array, secret: jax.Array | int = 0) -> jax.Array:
    """u32[..., 2]: parent hash of a sequence's first block.

    ``salt i32[...]`` is the request's, ``secret u32[]`` the pool's: who does not know it
    cannot make prompts whose blocks crowd one place of the index.
    """
    salt = salt.astype(jnp.uint32) ^ _mix(jnp.asarray(secret, jnp.uint32))
    return jnp.stack([_mix(salt ^ jnp.uint32(word)) for word in _FIRST], axis=-1)


def chain_hash(parent: jax.Array, tokens: jax.Array) -> jax.Array:
    """u32[..., 2]: hash of a block with ``tokens i32[..., K]`` after ``parent u32[..., 2]``.

    ``parent * P + digest``, a polynomial in P: so the hashes of a run of blocks need no
    loop (:func:`run_hashes`).
    """
    return parent * jnp.array(_BASE, jnp.uint32) + digest(tokens)


def prefix_hashes(root: jax.Array, tokens: jax.Array) -> jax.Array:
    """u32[M, 2]: hash of each block of one sequence, ``tokens i32[M, K]``."""
    (m, _) = tokens.shape
    place = jnp.arange(m, dtype=jnp.int32)
    return run_hashes(root[None], tokens, jnp.zeros_like(place), place)


def run_hashes(
    parents: jax.Array, tokens: jax.Array, head: jax.Array, place: jax.Array
) -> jax.Array:
    """u32[n, 2]: hashes of n blocks that stand in runs, each block the parent of the next.

    Args:
      parents: u32[n, 2] or u32[1, 2], the hash before the *first* block of each lane's run.
      tokens: i32[n, K].
      head: i32[n], lane at which the run of each lane begins.
      place: i32[n], lanes since then.
    """
    (n, _) = tokens.shape
    # h[i] = P^(i+1) * (parent + sum of digest[j] * P^-(j+1)), modulo 2^32.
    up, down = _powers(_BASE, n)[place], _powers(_INVERSE, n)[place]
    terms = lax.bitcast_convert_type(digest(tokens) * down, jnp.int32)
    sums = prefix_sum(terms.T).T
    sums = sums - (sums - terms)[head]
    return (parents + lax.bitcast_convert_type(sums, jnp.uint32)) * up


def _powers(bases: tuple[int, ...], count: int) -> jax.Array:
    """u32[count, 2]: ``bases ** 1 ..``, modulo 2^32; a constant of the program."""
    powers = np.full((count, 2), bases, np.uint64)
    for i in range(1, count):
        powers[i] = powers[i - 1] * powers[0] % 2**32
    return jnp.asarray(powers.astype(np.uint32))


def digest(tokens: jax.Array) -> jax.Array:
    """u32[..., 2]: order-dependent digest of the tokens of one block, ``i32[..., K]``."""
    place = jnp.arange(1, tokens.shape[-1] + 1, dtype=jnp.uint32)
    words = jnp.array(_WORDS, jnp.uint32)
    keyed = _mix(tokens.astype(jnp.uint32)[..., None, :] + place * words[:, None])
    return _mix(jnp.sum(keyed, axis=-1, dtype=jnp.uint32) ^ words)


def _mix(x: jax.Array) -> jax.Array:
    """Finaliser of MurmurHash3 (public domain): a bijection of u32 that spreads every bit."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
