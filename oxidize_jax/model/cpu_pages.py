"""Pages of the KV cache as a CPU likes them: one row of a matrix is one block of one layer.

``kv`` is ``[L * B, 2 * G * N * K]``. The row of a block holds its keys as ``[G, N, K]``, slots
next to each other, then its values as ``[G, K, N]``. A decode then reads one contiguous run,
and both of its products are sums of whole vectors: over slots for the scores, over numbers of
a head for the output (see :mod:`~oxidize_jax.model.attention_cpu`).

A float32 cache has N = D numbers. A bfloat16 cache has N = D / 2 words of 32 bits: word ``i``
holds number ``i`` in its low and number ``i + D / 2`` in its high half, so that either becomes a
float32 by one shift or one mask. XLA:CPU would convert a whole array of bfloat16 to float32
before it gathers from it or scatters into it.

A block whose first slot is written is new to its sequence: the rest of it is zeroed then. So
all that attention reads is finite, whatever the pool held before, and what a query does not
see needs a weight of zero and nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import prefix_sum
from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.types import state

_HIGH = 0xFFFF0000
_PAGES = 32
"""Pages that a step with prompts writes at a time."""


@state
class SlotPlan:
    """Where a step of decodes writes: each of T tokens into a slot of its own."""

    blocks: jax.Array
    """i32[T]: ``B`` or more at padding"""
    slots: jax.Array
    """i32[T]: slot of the block"""
    fresh: jax.Array
    """i32[T]: blocks whose first slot is written, packed to the front. What else they hold is
    old."""
    num_fresh: jax.Array
    """i32[]: how many of them there are"""


@state
class PagePlan:
    """Which blocks a step with prompts writes, U at most, and what goes into each."""

    blocks: jax.Array
    """i32[U]: blocks, each once; ``B`` or more at padding"""
    tokens: jax.Array
    """i32[U, K]: token that goes into each slot, ``T`` where the slot stays as it is"""
    written: jax.Array
    """bool[U, K]: slots that a token goes into"""
    fresh: jax.Array
    """bool[U]: blocks whose first slot is written: what else they hold is old."""


def plan_writes(batch: BatchDescriptor, num_blocks: int, block_size: int) -> SlotPlan | PagePlan:
    """Where the step's tokens go; worked out once and used in every layer.

    In a step with tiles the tokens of one block must be next to each other, as a row's are.
    """
    block, slot = batch.slot_mapping // block_size, batch.slot_mapping % block_size
    if batch.tile_rows.size:
        return _plan_pages(batch, block, slot, num_blocks, block_size)
    fresh = (slot == 0) & (block < num_blocks)
    nth = prefix_sum(fresh) - 1
    place = jnp.where(fresh, nth, block.size)
    packed = jnp.zeros_like(block).at[place].set(block, mode="drop")
    return SlotPlan(block, slot, packed, nth[-1] + 1)


def _plan_pages(
    batch: BatchDescriptor, block: jax.Array, slot: jax.Array, num_blocks: int, block_size: int
) -> PagePlan:
    """Turn ``slot_mapping`` round: from a slot for each token to a token for each slot."""
    (t,) = block.shape
    token = jnp.arange(t, dtype=jnp.int32)
    # A row's tokens begin and end within a block: two more than they would fill.
    size = min(t, t // block_size + 2 * min(batch.block_tables.shape[0], t))
    live = block < num_blocks
    before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), block[:-1]])
    nth = prefix_sum(live & (block != before)) - 1
    place = jnp.where(live, nth, size)
    tokens = jnp.full((size, block_size), t, jnp.int32).at[place, slot].set(token, mode="drop")
    blocks = jnp.full((size,), num_blocks, jnp.int32).at[place].set(block, mode="drop")
    return PagePlan(blocks, tokens, written=tokens < t, fresh=tokens[:, 0] < t)


def write(
    kv: jax.Array,
    layer: jax.Array,
    plan: SlotPlan | PagePlan,
    k: jax.Array,
    v: jax.Array,
    num_blocks: int,
) -> jax.Array:
    """``kv`` with ``k``, ``v`` ``f32[T, G, D]`` in their slots of ``layer i32[]``, in place."""
    first = layer * num_blocks
    words = (to_words(k, kv.dtype), to_words(v, kv.dtype))
    if isinstance(plan, SlotPlan):
        page = jnp.where(plan.blocks < num_blocks, plan.blocks + first, kv.shape[0])
        return _write_slots(_clean(kv, first, plan), page, plan.slots, words)
    # Most steps write far fewer blocks than they might.
    live = jnp.sum(plan.blocks < num_blocks, dtype=jnp.int32)
    size = min(_PAGES, plan.blocks.shape[0])

    def some(i: jax.Array, kv: jax.Array) -> jax.Array:
        # The last ones begin early enough to be as many; to write a page again is no harm.
        start = jnp.minimum(i * size, plan.blocks.shape[0] - size)
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), plan)
        page = jnp.where(part.blocks < num_blocks, part.blocks + first, kv.shape[0])
        return _write_pages(kv, page, part, words)

    return lax.fori_loop(0, (live + size - 1) // size, some, kv)


def _clean(kv: jax.Array, first: jax.Array, plan: SlotPlan) -> jax.Array:
    zeros = jnp.zeros((1, kv.shape[1]), kv.dtype)

    def one(i: jax.Array, kv: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(kv, zeros, plan.fresh[i] + first, axis=0)

    return lax.fori_loop(0, plan.num_fresh, one, kv)


def _write_slots(
    kv: jax.Array, page: jax.Array, slot: jax.Array, words: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Scatter ``words [T, G, N]`` into ``slot i32[T]`` of ``page i32[T]``.

    A key is a column of its page, a value a row of each head, so they are scattered into two
    views of the same memory. XLA:CPU takes them one number at a time, which is still less
    than the whole pages (64 tokens of SmolLM2: 3.7 ms for 30 layers against 9.5).
    """
    (t, heads, n), (pages, width) = words[0].shape, kv.shape
    slots = width // (2 * heads * n)
    keys = words[0].reshape(t, heads * n)
    kv = _scatter(kv.reshape(pages, 2 * heads * n, slots), page, 0, slot, keys)
    kv = _scatter(kv.reshape(pages, 2 * heads, slots, n), page, heads, slot, words[1])
    return kv.reshape(pages, width)


def _scatter(
    x: jax.Array, page: jax.Array, start: int, slot: jax.Array, updates: jax.Array
) -> jax.Array:
    """``x[page[i], start:, slot[i]] = updates[i]``, as far as that goes."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, updates.ndim)),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 1, 2),
    )
    where = jnp.stack([page, jnp.full_like(page, start), slot], axis=1)
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, where, updates, numbers, unique_indices=True, mode=drop)


def _write_pages(
    kv: jax.Array, page: jax.Array, plan: PagePlan, words: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Whole pages are read, changed and written: quicker than one index at a time where
    most of a page is new."""
    (u, slots), heads = plan.written.shape, words[0].shape[1]
    old = gather_rows(kv, jnp.minimum(page, kv.shape[0] - 1))
    old = old.reshape(u, 2, heads, -1)
    new_k = _of_slots(words[0], plan).transpose(0, 2, 3, 1)
    new_v = _of_slots(words[1], plan).transpose(0, 2, 1, 3)
    stays = jnp.where(plan.fresh[:, None, None, None], jnp.zeros((), kv.dtype), old)
    old_k = stays[:, 0].reshape(u, heads, -1, slots)
    old_v = stays[:, 1].reshape(u, heads, slots, -1)
    new_k = jnp.where(plan.written[:, None, None, :], new_k, old_k).reshape(u, -1)
    new_v = jnp.where(plan.written[:, None, :, None], new_v, old_v).reshape(u, -1)
    pages = jnp.concatenate([new_k, new_v], axis=1)
    return kv.at[page].set(pages, mode="drop", unique_indices=True)


def _of_slots(words: jax.Array, plan: PagePlan) -> jax.Array:
    """``[U, K, G, N]``: the words of the token of each slot, any words where none goes."""
    (t, *heads), flat = words.shape, words.reshape(words.shape[0], -1)
    return gather_rows(flat, jnp.minimum(plan.tokens, t - 1)).reshape(*plan.tokens.shape, *heads)


def halves(pages: jax.Array, heads: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Keys ``[..., G, N, K]`` and values ``[..., G, K, N]`` of ``pages [..., 2 * G * N * K]``."""
    keys, values = views(pages, heads, block_size)
    return keys[..., 0, :, :, :], values[..., 1, :, :, :]


def views(pages: jax.Array, heads: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """``pages`` seen as ``[..., 2, G, N, K]`` and as ``[..., 2, G, K, N]``: no work at all.

    Keys are half 0 of the first, values half 1 of the second. Whoever takes many small pieces
    cuts them from these: from :func:`halves` XLA:CPU would first make a copy.
    """
    *lead, width = pages.shape
    n = width // (2 * heads * block_size)
    shape = (*lead, 2, heads)
    return pages.reshape(*shape, n, block_size), pages.reshape(*shape, block_size, n)


def gather_rows(matrix: jax.Array, index: jax.Array) -> jax.Array:
    """Rows ``[..., W]`` of ``matrix [P, W]``; ``index i32[...]`` must be within bounds.

    The result is kept apart from what reads it: fused, the copy would go slot by slot.
    """
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(index.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    rows = lax.gather(
        matrix,
        index[..., None],
        dimensions,
        (1, matrix.shape[1]),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return lax.optimization_barrier(rows)


def to_words(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``f32[..., D]`` as it is stored, ``[..., N]``."""
    if dtype != jnp.uint32:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    low, high = jnp.split(bits, 2, axis=-1)
    return low | (high << 16)


def parts(words: jax.Array) -> tuple[jax.Array, ...]:
    """What is stored as float32: the array itself, or its low and its high halves."""
    if words.dtype != jnp.uint32:
        return (words,)
    low, high = words << 16, words & jnp.uint32(_HIGH)
    return tuple(lax.bitcast_convert_type(half, jnp.float32) for half in (low, high))
