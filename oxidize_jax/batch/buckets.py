"""Step shapes: one function gives them, for run time and for warm-up alike."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp

from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import tiles_for

_GROWTH = 4
"""Ratio of neighbouring buckets: few programs to compile, at most 4x padding."""
_MANY_ROWS = 64
"""Decode rows from which on half of them have a shape too."""
_SMALLEST = 2
"""One row is slow on XLA:CPU in bf16 and int8 (a matrix-vector product), two are not."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Static shape of one step."""

    tokens: int
    """T"""
    decode_rows: int
    """Dn: rows that run one token"""
    tiles: int
    """P: prefill tiles; 0 in a step in which every token is computed as a decode"""
    samples: int
    """C: sequences that can sample"""


@cache
def buckets(config: EngineConfig) -> tuple[Bucket, ...]:
    """Every shape a step can have: decode-only ones first, each kind smallest first.

    A deterministic engine has one, without tiles: every token is a decode row.
    """
    if config.deterministic:
        tokens, rows = config.step_tokens, max(_SMALLEST, config.max_num_seqs)
        return (Bucket(tokens, tokens, 0, rows),)
    seqs, budget, q = config.max_num_seqs, config.max_num_batched_tokens, config.prefill_tile
    decode = [Bucket(n, n, 0, n) for n in _decode_rows(min(seqs, budget))]
    if budget == 1:
        return tuple(decode)
    mixed = []
    for tokens in _ladder(min(4 * q, max(2 * q, budget)), budget):
        rows = max(_SMALLEST, min(seqs, tokens))
        mixed.append(Bucket(tokens, rows, 2 * -(-tokens // q), rows))
    return tuple(decode + mixed)


def select_bucket(
    config: EngineConfig, shapes: tuple[Bucket, ...], num_scheduled: jax.Array
) -> jax.Array:
    """i32[]: index of the first of ``shapes`` that holds ``num_scheduled i32[S]``.

    It is ``len(shapes)`` where nothing is scheduled. The last must hold every plan.
    """
    tokens = jnp.sum(num_scheduled, dtype=jnp.int32)
    if len(shapes) == 1:
        return (tokens == 0).astype(jnp.int32)
    tiles = jnp.sum(tiles_for(num_scheduled, config.prefill_tile), dtype=jnp.int32)
    room = jnp.array([b.tokens for b in shapes], jnp.int32)
    room_tiles = jnp.array([b.tiles for b in shapes], jnp.int32)
    fits = (tokens <= room) & (tiles <= room_tiles)
    return jnp.where(tokens > 0, jnp.argmax(fits).astype(jnp.int32), len(shapes))


def _decode_rows(top: int) -> list[int]:
    """As :func:`_ladder`, and half of many rows beside them: a batch job ends with fewer and
    fewer, and half the rows take two thirds of the time (SmolLM2 in bfloat16 on two cores)."""
    if top < _MANY_ROWS:
        return _ladder(_SMALLEST, top)
    return [*_ladder(_SMALLEST, top // 2), top]


def _ladder(least: int, top: int) -> list[int]:
    """From ``top`` down as long as there is ``least`` left: each shape is compiled."""
    sizes = [max(least, top)]
    while sizes[0] // _GROWTH >= least:
        sizes.insert(0, sizes[0] // _GROWTH)
    return sizes
