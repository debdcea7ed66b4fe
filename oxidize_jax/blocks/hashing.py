"""Chained block hashes (vLLM ``v1/core/kv_cache_utils.py``: parent hash + tokens + salt).

A hash only *finds* a candidate. Whether a candidate is the block is decided by its
tokens and by its parent's serial number (see ``pool.find``), so a collision, even a
forged one, can cost a miss but never serve another prompt's KV.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_WORDS = (0x9E3779B9, 0x85EBCA6B)
_FIRST = (0x243F6A88, 0xB7E15162)


def root_hash(salt: jax.Array, secret: jax.Array | int = 0) -> jax.Array:
    """u32[..., 2]: parent hash of a sequence's first block.

    ``salt i32[...]`` is the request's, ``secret u32[]`` the pool's: who does not know it
    cannot make prompts whose blocks crowd one place of the index.
    """
    salt = salt.astype(jnp.uint32) ^ _mix(jnp.asarray(secret, jnp.uint32))
    return jnp.stack([_mix(salt ^ jnp.uint32(word)) for word in _FIRST], axis=-1)


def chain_hash(parent: jax.Array, tokens: jax.Array) -> jax.Array:
    """u32[..., 2]: hash of a block with ``tokens i32[..., K]`` after ``parent u32[..., 2]``."""
    return link(parent, digest(tokens))


def prefix_hashes(root: jax.Array, tokens: jax.Array) -> jax.Array:
    """u32[M, 2]: hash of each block of one sequence, ``tokens i32[M, K]``."""

    def step(parent: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        child = link(parent, block)
        return child, child

    return lax.scan(step, root, digest(tokens))[1]


def digest(tokens: jax.Array) -> jax.Array:
    """u32[..., 2]: order-dependent digest of the tokens of one block, ``i32[..., K]``."""
    place = jnp.arange(1, tokens.shape[-1] + 1, dtype=jnp.uint32)
    words = []
    for word in _WORDS:
        keyed = _mix(tokens.astype(jnp.uint32) + place * jnp.uint32(word))
        words.append(_mix(jnp.sum(keyed, axis=-1, dtype=jnp.uint32) ^ jnp.uint32(word)))
    return jnp.stack(words, axis=-1)


def link(parent: jax.Array, block: jax.Array) -> jax.Array:
    """u32[..., 2]: hash of a block from its parent's hash and its own digest."""
    left, right = parent[..., 0], parent[..., 1]
    return jnp.stack(
        [
            _mix(left * jnp.uint32(_WORDS[0]) + (block[..., 0] ^ right)),
            _mix(right * jnp.uint32(_WORDS[1]) + (block[..., 1] ^ left)),
        ],
        axis=-1,
    )


def _mix(x: jax.Array) -> jax.Array:
    """Finaliser of MurmurHash3 (public domain): a bijection of u32 that spreads every bit."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
