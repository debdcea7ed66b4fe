"""BlockPool: physical KV blocks with reference counts, sharing and LRU reuse, as pure functions.

Every block is in exactly one of three places:

* *live*: ``ref_count > 0``, held by that many block-table entries;
* *free*: never hashed; on a stack, taken first;
* *cached*: nobody holds it, but its tokens are still known to the prefix cache; on a
  ring in the order of release, taken last and oldest first.

A cached block that is hit leaves the ring by having its ``lru_pos`` cleared: the ring
entry becomes stale and is skipped when it is met. So neither allocation nor a hit
sorts or scans the pool (vLLM ``v1/core/block_pool.py`` uses a linked list for this).

Exhaustion is a value: :func:`allocate` returns ``ok = False`` and the pool unchanged.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import at_index, prefix_sum
from oxidize_jax.types import BlockId, replace, state

NOT_IN_RING = -1
"""``lru_pos`` of a block that is not cached (a mark that is compared, never an index)."""
NO_SERIAL = 0
"""``serial`` of a block that is not registered."""
DETACHED = 1
"""``parent`` that no registered block has as its serial: what follows it is never hit."""
_RENUMBER = 2**30
"""Ring position from which the ring counts from 0 again: far inside 32 bits."""


@state
class BlockPool:
    """B blocks of K tokens. All counters are ``i32[]``."""

    ref_count: jax.Array
    """i32[B]: block-table entries that hold the block."""
    hashed: jax.Array
    """bool[B]: registered in the prefix cache: full, written and findable."""
    block_hash: jax.Array
    """u32[B, 2]: chained hash, valid where ``hashed``."""
    block_tokens: jax.Array
    """i32[B, K]: the tokens whose KV the block holds, valid where ``hashed``."""
    serial: jax.Array
    """i32[B]: unique number of the registration, ``NO_SERIAL`` where not hashed."""
    parent: jax.Array
    """i32[B]: serial of the block before it in the sequence, or :func:`root_parent`."""
    index: jax.Array
    """i32[I]: hash index, block ids; ``B`` where empty. I is a power of two >= 4 B."""
    index_slot: jax.Array
    """i32[B]: where the block stands in ``index``; ``I`` where not hashed."""
    free_stack: jax.Array
    """i32[B]: the first ``num_free`` entries are the free blocks, top last."""
    num_free: jax.Array
    ring: jax.Array
    """i32[2B]: cached blocks by time of release, at positions ``[ring_head, ring_tail)``
    modulo 2B; an entry counts only while ``lru_pos`` of its block is its position."""
    ring_head: jax.Array
    ring_tail: jax.Array
    lru_pos: jax.Array
    """i32[B]: the block's position in the ring, ``NOT_IN_RING`` where not cached."""
    num_cached: jax.Array
    next_serial: jax.Array
    secret: jax.Array
    """u32[]: enters every hash; see :func:`~oxidize_jax.blocks.hashing.root_hash`."""

    @property
    def num_blocks(self) -> int:
        """B."""
        return self.ref_count.shape[0]

    @property
    def block_size(self) -> int:
        """K."""
        return self.block_tokens.shape[1]


@dataclasses.dataclass(frozen=True)
class PhysicalTokenBlock:
    """One block, read to the host for people and tests."""

    block_id: int
    ref_count: int
    block_hash: tuple[int, int] | None
    token_ids: tuple[int, ...] | None
    """Tokens of a registered block; None where the pool does not know them."""


def create(num_blocks: int, block_size: int, secret: int = 0) -> BlockPool:
    """A pool of ``num_blocks`` free blocks; the lowest id is taken first.

    ``secret`` is any 32-bit word; engines draw one at random.
    """
    index_size = 1 << (4 * num_blocks - 1).bit_length()

    # Every field gets a buffer of its own: the state is donated, and no buffer may be twice.
    def full(shape: tuple[int, ...], value: int) -> jax.Array:
        return jnp.full(shape, value, jnp.int32)

    return BlockPool(
        ref_count=full((num_blocks,), 0),
        hashed=jnp.zeros((num_blocks,), jnp.bool_),
        block_hash=jnp.zeros((num_blocks, 2), jnp.uint32),
        block_tokens=full((num_blocks, block_size), 0),
        serial=full((num_blocks,), NO_SERIAL),
        parent=full((num_blocks,), 0),
        index=full((index_size,), num_blocks),
        index_slot=full((num_blocks,), index_size),
        free_stack=jnp.arange(num_blocks, dtype=jnp.int32)[::-1],
        num_free=full((), num_blocks),
        ring=full((2 * num_blocks,), num_blocks),
        ring_head=full((), 0),
        ring_tail=full((), 0),
        lru_pos=full((num_blocks,), NOT_IN_RING),
        num_cached=full((), 0),
        next_serial=full((), DETACHED + 1),
        secret=jnp.full((), secret, jnp.uint32),
    )


def available(pool: BlockPool) -> jax.Array:
    """i32[]: blocks that :func:`allocate` can give: free and cached."""
    return pool.num_free + pool.num_cached


def root_parent(salt: jax.Array) -> jax.Array:
    """i32[...]: ``parent`` of a first block; negative, so it is no serial. One per salt >= 0."""
    return -1 - salt


def physical_block(pool: BlockPool, block_id: int) -> PhysicalTokenBlock:
    """Read one block to the host. Raises ValueError for an id outside ``[0, B)``."""
    if not 0 <= block_id < pool.num_blocks:
        raise ValueError(f"block_id={block_id}: the pool has blocks 0 to {pool.num_blocks - 1}.")
    known = bool(pool.hashed[block_id])
    first, second = (int(word) for word in pool.block_hash[block_id])
    return PhysicalTokenBlock(
        block_id=block_id,
        ref_count=int(pool.ref_count[block_id]),
        block_hash=(first, second) if known else None,
        token_ids=tuple(int(t) for t in pool.block_tokens[block_id]) if known else None,
    )


def allocate(pool: BlockPool, count: jax.Array, size: int) -> tuple[BlockPool, BlockId, jax.Array]:
    """Take ``count`` blocks: free ones first, then the least recently used cached ones.

    Args:
      count: i32[], at most ``size``.
      size: static length of the returned list.

    Returns:
      ``(pool, blocks i32[size], ok bool[])``: the blocks with reference count 1, padded
      with B. Where the pool cannot give ``count``, ``ok`` is false, nothing is given and
      the pool is unchanged.
    """
    ok = count <= available(pool)
    count = jnp.where(ok, count, 0)
    from_stack = jnp.minimum(count, pool.num_free)
    lane = jnp.arange(size, dtype=jnp.int32)
    top = _take(pool.free_stack, pool.num_free - 1 - lane, lane < from_stack, pool.num_blocks)
    pool, evicted = _evict(pool, count - from_stack, size)
    oldest = _take(evicted, lane - from_stack, (lane >= from_stack) & (lane < count), 0)
    blocks = jnp.where(lane < from_stack, top, jnp.where(lane < count, oldest, pool.num_blocks))
    pool = replace(
        pool,
        ref_count=pool.ref_count.at[blocks].set(1, mode="drop"),
        num_free=pool.num_free - from_stack,
    )
    return pool, blocks, ok


def share(pool: BlockPool, blocks: BlockId) -> BlockPool:
    """Add a holder to each of ``blocks i32[n]`` (padding B), live or cached.

    A block that nobody held may be named once only; a live one as often as it gains
    holders (a fork).
    """
    revived = (blocks < pool.num_blocks) & (at_index(pool.ref_count, blocks, 1) == 0)
    gone = jnp.where(revived, blocks, pool.num_blocks)
    return replace(
        pool,
        ref_count=pool.ref_count.at[blocks].add(1, mode="drop"),
        lru_pos=pool.lru_pos.at[gone].set(NOT_IN_RING, mode="drop"),
        num_cached=pool.num_cached - jnp.sum(revived, dtype=jnp.int32),
    )


def release(pool: BlockPool, blocks: BlockId, *, distinct: bool = False) -> BlockPool:
    """Take one holder from each of ``blocks i32[n]`` (padding B; a block may stand twice).

    A block that loses its last holder becomes cached if it is registered, else free.
    The order of the list is the order in which cached blocks will be reused, so a
    sequence gives its tail first. ``distinct`` says that no block stands twice, as in the
    table of one sequence.
    """
    n = blocks.shape[0]
    ref_count = pool.ref_count.at[blocks].add(-1, mode="drop")
    dropped = at_index(ref_count, blocks, 1) == 0
    if not distinct:
        lane = jnp.arange(n, dtype=jnp.int32)
        last = jnp.full((pool.num_blocks,), -1, jnp.int32).at[blocks].max(lane, mode="drop")
        dropped = dropped & (at_index(last, blocks, -1) == lane)
    to_ring = dropped & at_index(pool.hashed, blocks, False)
    to_stack = dropped & ~to_ring
    nth_free, nth_cached = prefix_sum(jnp.stack([to_stack, to_ring]))
    pool = replace(pool, ref_count=ref_count)
    pool = _push_free(pool, blocks, to_stack, nth_free)
    return _push_cached(pool, blocks, to_ring, nth_cached)


def reset_prefix_cache(pool: BlockPool) -> BlockPool:
    """Forget every registration, so that nothing written so far can be hit again.

    For a change of weights. Cached blocks become free; live ones stay with their holders,
    whose next blocks must name ``DETACHED`` as their parent. Serials are counted anew.
    """
    cached = pool.lru_pos != NOT_IN_RING
    block = jnp.arange(pool.num_blocks, dtype=jnp.int32)
    pool = _push_free(pool, block, cached, prefix_sum(cached))

    def all_of(field: jax.Array, value: int | bool) -> jax.Array:
        return jnp.full_like(field, value)

    return replace(
        pool,
        hashed=all_of(pool.hashed, False),
        serial=all_of(pool.serial, NO_SERIAL),
        index=all_of(pool.index, pool.num_blocks),
        index_slot=all_of(pool.index_slot, pool.index.shape[0]),
        lru_pos=all_of(pool.lru_pos, NOT_IN_RING),
        ring_head=all_of(pool.ring_head, 0),
        ring_tail=all_of(pool.ring_tail, 0),
        num_cached=all_of(pool.num_cached, 0),
        next_serial=all_of(pool.next_serial, DETACHED + 1),
    )


def copy_on_write(
    pool: BlockPool, blocks: BlockId
) -> tuple[BlockPool, BlockId, BlockId, BlockId, jax.Array]:
    """Give each writer of a shared block a block of its own.

    Args:
      blocks: i32[n], the block that row i is about to write into (padding B). A block
        may stand several times; if every holder writes, the last one keeps it.

    Returns:
      ``(pool, written i32[n], src i32[n], dst i32[n], ok)``: the block to write, and the
      copies that the model step must make first, padded with B at the same lanes. No
      ``dst`` is a ``src``. Where the pool cannot give the copies, ``ok`` is false and the
      pool is unchanged.
    """
    n, none = blocks.shape[0], pool.num_blocks
    need = writers_that_copy(pool, blocks)
    pool, fresh, ok = allocate(pool, jnp.sum(need, dtype=jnp.int32), n)
    src = jnp.where(need & ok, blocks, none)
    pool, dst = replace_shared(pool, src, fresh)
    return pool, jnp.where(dst < none, dst, blocks), src, dst, ok


def replace_shared(pool: BlockPool, src: BlockId, fresh: BlockId) -> tuple[BlockPool, BlockId]:
    """Let the holders of ``src i32[n]`` (padding B) go over to the first blocks of ``fresh``.

    Returns ``(pool, dst i32[n])``: the new block of each lane, padded with B.
    """
    need = src < pool.num_blocks
    rank = jnp.where(need, prefix_sum(need) - 1, fresh.shape[0])
    # A source keeps a holder, whoever copies: nothing is released here.
    pool = replace(pool, ref_count=pool.ref_count.at[src].add(-1, mode="drop"))
    return pool, at_index(fresh, rank, pool.num_blocks)


def writers_that_copy(pool: BlockPool, blocks: BlockId) -> jax.Array:
    """bool[n]: the rows for which :func:`copy_on_write` needs a block."""
    n = blocks.shape[0]
    lane = jnp.arange(n, dtype=jnp.int32)
    # All pairs are compared: callers ask only where a block is shared at all.
    same = (blocks[:, None] == blocks[None, :]) & (lane[None, :] < lane[:, None])
    earlier = jnp.sum(same, axis=1, dtype=jnp.int32)
    return earlier < at_index(pool.ref_count, blocks, 0) - 1


def _evict(pool: BlockPool, count: jax.Array, size: int) -> tuple[BlockPool, BlockId]:
    """Take ``count`` cached blocks, oldest first, and forget what they held."""
    ring_size = pool.ring.shape[0]
    lane = jnp.arange(size, dtype=jnp.int32)

    def missing(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return carry[2] < count

    def take_window(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        taken, head, got = carry
        position = head + lane
        block = pool.ring[position % ring_size]
        current = (position < pool.ring_tail) & (at_index(pool.lru_pos, block, -2) == position)
        rank = got + prefix_sum(current) - 1
        use = current & (rank < count)
        taken = taken.at[jnp.where(use, rank, size)].set(block, mode="drop")
        # Stop behind the last block used: what follows it in the window may be current.
        skip = jnp.where(current & ~use, lane, size)
        head = jnp.minimum(head + jnp.min(skip), pool.ring_tail)
        return taken, head, got + jnp.sum(use, dtype=jnp.int32)

    start = (
        jnp.full((size,), pool.num_blocks, jnp.int32),
        pool.ring_head,
        jnp.zeros((), jnp.int32),
    )
    taken, head, _ = lax.while_loop(missing, take_window, start)
    slots = at_index(pool.index_slot, taken, pool.index.shape[0])
    pool = replace(
        pool,
        hashed=pool.hashed.at[taken].set(False, mode="drop"),
        serial=pool.serial.at[taken].set(NO_SERIAL, mode="drop"),
        index=pool.index.at[slots].set(pool.num_blocks, mode="drop"),
        index_slot=pool.index_slot.at[taken].set(pool.index.shape[0], mode="drop"),
        lru_pos=pool.lru_pos.at[taken].set(NOT_IN_RING, mode="drop"),
        ring_head=head,
        num_cached=pool.num_cached - count,
    )
    return pool, taken


def _push_free(pool: BlockPool, blocks: BlockId, push: jax.Array, nth: jax.Array) -> BlockPool:
    """Put the ``blocks i32[n]`` to ``push bool[n]`` on the stack; ``nth i32[n]`` counts them."""
    place = jnp.where(push, pool.num_free + nth - 1, pool.num_blocks)
    return replace(
        pool,
        free_stack=pool.free_stack.at[place].set(blocks, mode="drop"),
        num_free=pool.num_free + nth[-1],
    )


def _push_cached(pool: BlockPool, blocks: BlockId, push: jax.Array, nth: jax.Array) -> BlockPool:
    """Put them on the ring, like :func:`_push_free`."""
    count = nth[-1]
    ring_size = pool.ring.shape[0]
    full = pool.ring_tail - pool.ring_head + count > ring_size
    ring, head, tail, lru_pos = lax.cond(
        (count > 0) & (full | (pool.ring_tail >= _RENUMBER)),
        _compact_ring,
        lambda p: (p.ring, p.ring_head, p.ring_tail, p.lru_pos),
        pool,
    )
    position = tail + nth - 1
    target = jnp.where(push, blocks, pool.num_blocks)
    return replace(
        pool,
        ring=ring.at[jnp.where(push, position % ring_size, ring_size)].set(blocks, mode="drop"),
        ring_head=head,
        ring_tail=tail + count,
        lru_pos=lru_pos.at[target].set(position, mode="drop"),
        num_cached=pool.num_cached + count,
    )


def _compact_ring(pool: BlockPool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Drop the stale entries and count positions from 0 again.

    At most B entries are current and the ring has 2 B, so this runs at most once for B
    releases. While evictions keep the ring short it would never be full: then it runs
    when positions reach ``_RENUMBER``.
    """
    ring_size = pool.ring.shape[0]
    position = pool.ring_head + jnp.arange(ring_size, dtype=jnp.int32)
    block = pool.ring[position % ring_size]
    current = (position < pool.ring_tail) & (at_index(pool.lru_pos, block, -2) == position)
    # A sort is slow and one kernel: what runs so rarely should be quick to compile.
    place = jnp.arange(ring_size, dtype=jnp.int32)
    _, block = lax.sort((~current, block), num_keys=1, is_stable=True)
    count = jnp.sum(current, dtype=jnp.int32)
    ring = jnp.where(place < count, block, pool.num_blocks)
    return ring, jnp.zeros((), jnp.int32), count, pool.lru_pos.at[ring].set(place, mode="drop")


def _take(values: jax.Array, index: jax.Array, valid: jax.Array, fill: int) -> jax.Array:
    """``values[index]`` where ``valid``, else ``fill``."""
    return jnp.where(valid, values[jnp.where(valid, index, 0)], fill)
