"""Attention of rows of tokens over chunks of their pages, with a running softmax."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.model import cpu_pages
from oxidize_jax.model.attention_cpu import softcapped
from oxidize_jax.types import state


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static sizes of one attention layer over pages. ``platform`` is where it runs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    platform: str
    scale: float
    """What scores are multiplied by."""
    softcap: float = 0.0
    """Bound of the scores, by tanh; 0: none."""
    windows: tuple[int, ...] = ()
    """How many keys a token sees in each layer; 0: all. Empty: all in every layer."""

    def window_at(self, layer: jax.Array) -> jax.Array | int | None:
        """Keys that a token sees in ``layer i32[]``; None where all see all."""
        if not any(self.windows):
            return None
        if len(set(self.windows)) == 1:
            return self.windows[0]
        return jnp.asarray([window or _ALL for window in self.windows], jnp.int32)[layer]


_ALL = 2**30
"""A window that nothing is outside of."""


@state
class Part:
    """Queries that read the cache the same way: ``n`` rows of ``A`` tokens each.

    The decode part has a row per token (A = 1), the prefill part a row per tile (A = Q).
    """

    tokens: jax.Array
    """i32[n, A]: index of each token in the step, ``T`` at padding."""
    positions: jax.Array
    """i32[n, A]: its position in its sequence, -1 at padding (it then sees no key)."""
    tables: jax.Array
    """i32[n, M]: block table of the sequence, ``B`` where there is no block."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a part is cut: ``rows`` of it at a time, ``chunk`` blocks of KV at a time."""

    rows: int
    chunk: int


def attend_rows(
    spec: AttentionSpec,
    plan: Plan,
    part: Part,
    q: jax.Array,
    kv: jax.Array,
    offset: jax.Array,
    window: jax.Array | int | None,
) -> jax.Array:
    """Online softmax over chunks of blocks (Milakov and Gimelshein, 2018).

    ``q`` is ``f32[n, A, H, D]``. The loop ends with the longest context of these rows, in a
    layer with a window counted from where each row's begins, so the cost follows what is seen
    and not the width of the tables. Query heads that share a kv head are one matrix against it,
    hence K and V are never repeated.
    """
    if window is not None:
        part = _from_window(spec, part, window)
    n, width = part.tokens.shape
    heads, group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    span = plan.chunk * spec.block_size
    on_cpu = spec.platform == "cpu"
    q = q.reshape(n, width, heads, group, spec.head_dim).transpose(0, 2, 1, 3, 4)
    dot_dtype = jnp.bfloat16 if kv.dtype == jnp.uint32 else kv.dtype
    q = q.reshape(n, heads, width * group, spec.head_dim).astype(dot_dtype)

    def chunk(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        blocks = lax.dynamic_slice_in_dim(part.tables, i * plan.chunk, plan.chunk, axis=1)
        seen = _seen(spec, part.positions, blocks, i * span, window)
        if on_cpu:
            # A sequence may hold blocks that nobody has written yet: read its first instead,
            # which like all that it has seen is finite.
            begin = i * span + jnp.arange(plan.chunk, dtype=jnp.int32) * spec.block_size
            written = begin <= part.positions.max(axis=1, keepdims=True)
            blocks = jnp.where(written, blocks, part.tables[:, :1])
            k, v = _read_rows(spec, kv, blocks, offset, dot_dtype)
        else:
            k, v = _read(spec, kv, blocks, offset, dot_dtype)
            # 0 * NaN is NaN: a weight of zero does not hide what an unused slot holds.
            v = jnp.where(seen.any(axis=1)[:, None, :, None], v, jnp.zeros((), v.dtype))
        scores = _dot(q, k, contract_rhs=2 if on_cpu else 3)
        scores = softcapped(scores.reshape(n, heads, width, group, span), spec.softcap)
        scores = jnp.where(seen[:, None, :, None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        flat = weights.reshape(n, heads, width * group, span).astype(dot_dtype)
        new_out = out * fade[..., None] + _dot(flat, v, contract_rhs=2).reshape(out.shape)
        return new_top, total * fade + weights.sum(axis=-1), new_out

    # Starting from a finite maximum, rows that see nothing keep weights of exp(-inf) = 0.
    top = jnp.full((n, heads, width, group), -1e30, jnp.float32)
    out = jnp.zeros((*top.shape, spec.head_dim), jnp.float32)
    trips = (part.positions.max() + span) // span
    _, total, out = lax.fori_loop(0, trips, chunk, (top, jnp.zeros_like(top), out))
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(n, width, spec.num_heads, spec.head_dim)


def _from_window(spec: AttentionSpec, part: Part, window: jax.Array | int) -> Part:
    """``part`` with tables that begin at the first block that any token of the row sees, and
    positions that count from there."""
    padding = part.positions < 0
    lowest = jnp.where(padding, _ALL, part.positions).min(axis=1, keepdims=True)
    first = jnp.maximum(lowest - window + 1, 0) // spec.block_size
    first = jnp.where(lowest < _ALL, first, 0)
    column = first + jnp.arange(part.tables.shape[1], dtype=jnp.int32)
    past_the_end = jnp.iinfo(jnp.int32).max
    return Part(
        tokens=part.tokens,
        positions=jnp.where(padding, -1, part.positions - first * spec.block_size),
        tables=jnp.take_along_axis(
            part.tables, column, axis=1, mode="fill", fill_value=past_the_end
        ),
    )


def _seen(
    spec: AttentionSpec,
    positions: jax.Array,
    blocks: jax.Array,
    first: jax.Array,
    window: jax.Array | int | None,
) -> jax.Array:
    """bool[n, A, span]: which keys of a chunk that starts at position ``first`` a query sees."""
    key = first + jnp.arange(blocks.shape[1] * spec.block_size, dtype=jnp.int32)
    exists = jnp.repeat(blocks < spec.num_blocks, spec.block_size, axis=1)
    seen = (key <= positions[:, :, None]) & exists[:, None, :]
    return seen if window is None else seen & (key > positions[:, :, None] - window)


def _read(
    spec: AttentionSpec, kv: jax.Array, blocks: jax.Array, offset: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """K and V of ``blocks i32[n, c]``, each ``[n, G, c * K, D]``.

    Where there is no block, the layer's first page is read (and masked by the caller);
    adding the offset to a padding id would name a page of the next layer.
    """
    n, count = blocks.shape
    page = jnp.where(blocks < spec.num_blocks, blocks, 0)[:, None, :] + offset
    head = jnp.arange(spec.num_kv_heads, dtype=jnp.int32)[None, :, None]
    shape = (n, spec.num_kv_heads, count * spec.block_size, spec.head_dim)

    def half(which: int) -> jax.Array:
        pages = kv.at[page, which, head].get(mode="promise_in_bounds")[..., : spec.head_dim]
        return pages.astype(dtype).reshape(shape)

    return half(0), half(1)


def _read_rows(
    spec: AttentionSpec,
    kv: jax.Array,
    blocks: jax.Array,
    offset: jax.Array,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """K ``[n, G, D, c * K]`` and V ``[n, G, c * K, D]`` of pages as CPUs have them
    (:mod:`.cpu_pages`)."""
    n, count = blocks.shape
    page = jnp.where(blocks < spec.num_blocks, blocks, 0) + offset
    pages = cpu_pages.gather_rows(kv, page)
    keys, values = cpu_pages.halves(pages, spec.num_kv_heads, spec.block_size)
    k = jnp.concatenate([part.astype(dtype) for part in cpu_pages.parts(keys)], axis=3)
    v = jnp.concatenate([part.astype(dtype) for part in cpu_pages.parts(values)], axis=4)
    span = (n, spec.num_kv_heads, count * spec.block_size)
    return (
        k.transpose(0, 2, 3, 1, 4).reshape(n, spec.num_kv_heads, spec.head_dim, -1),
        v.transpose(0, 2, 1, 3, 4).reshape(*span, spec.head_dim),
    )


def _dot(a: jax.Array, b: jax.Array, contract_rhs: int) -> jax.Array:
    """Batched over the first two axes, accumulated in float32."""
    dimensions = (((3,), (contract_rhs,)), ((0, 1), (0, 1)))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )
