"""Prefix cache: finding and registering full blocks by their chained hash.

The hash index is a table of block ids in which a key may stand at any of ``PROBES``
places from its hash on, so that lookups and insertions are a fixed number of gathers
for all lanes together. At a quarter full it practically never lacks a place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import at_index, prefix_sum
from oxidize_jax.blocks import hashing
from oxidize_jax.blocks.pool import NO_SERIAL, BlockPool, root_parent
from oxidize_jax.types import BlockId, replace, state

PROBES = 8
"""Places in the index that a key may occupy, beginning at its hash."""
_NOBODY = -(2**31)
"""Parent of no block: root parents are above it."""


@state
class Prefix:
    """The longest registered prefix of a sequence, and where its chain goes on."""

    blocks: jax.Array
    """i32[M]: the matching blocks, B behind them."""
    num_blocks: jax.Array
    """i32[]"""
    chain_hash: jax.Array
    """u32[2]: hash of the last matching block; the root's if there is none."""
    chain_parent: jax.Array
    """i32[]: serial of the last matching block; the root's mark if there is none."""


def lookup_prefix(pool: BlockPool, tokens: jax.Array, limit: jax.Array, salt: jax.Array) -> Prefix:
    """Longest chain of registered blocks that begins a sequence.

    Args:
      tokens: i32[M, K], the sequence cut into blocks.
      limit: i32[], most blocks that may match; a caller who needs logits leaves at least
        the last token out.
      salt: i32[] >= 0; sequences share only with those of the same salt.
    """
    root = hashing.root_hash(salt, pool.secret)
    hashes = hashing.prefix_hashes(root, tokens)
    near = candidates(pool, hashes, tokens)
    parents = at_index(pool.parent, near.blocks, 0)

    def more(carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        _, count, _, matched = carry
        return matched & (count < limit)

    def match_next(
        carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        blocks, count, parent, _ = carry
        match = near.matches[count] & (parents[count] == parent)
        matched = jnp.any(match)
        block = near.blocks[count, jnp.argmax(match)]
        blocks = blocks.at[count].set(jnp.where(matched, block, pool.num_blocks))
        parent = jnp.where(matched, at_index(pool.serial, block, NO_SERIAL), parent)
        return blocks, count + matched.astype(jnp.int32), parent, matched

    start = _first_guess(pool, near, parents, root_parent(salt), limit)
    blocks, count, parent, _ = lax.while_loop(more, match_next, start)
    last = hashes[jnp.maximum(count - 1, 0)]
    return Prefix(
        blocks=blocks,
        num_blocks=count,
        chain_hash=jnp.where(count > 0, last, root),
        chain_parent=parent,
    )


def _first_guess(
    pool: BlockPool, near: Candidates, parents: jax.Array, root: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Where the search for a prefix goes on: behind the blocks that chain up at first sight.

    Blocks whose hash and tokens are equal are nearly always the only ones; then all are
    matched at once. Where hashes collide the search goes on one by one from there.
    """
    column = jnp.arange(parents.shape[0], dtype=jnp.int32)
    first = jnp.argmax(near.matches, axis=1)
    block = jnp.take_along_axis(near.blocks, first[:, None], axis=1)[:, 0]
    before = jnp.concatenate([root[None], at_index(pool.serial, block, NO_SERIAL)[:-1]])
    chained = jnp.take_along_axis(parents, first[:, None], axis=1)[:, 0] == before
    good = jnp.any(near.matches, axis=1) & chained & (column < limit)
    count = jnp.argmin(jnp.append(good, False)).astype(jnp.int32)
    blocks = jnp.where(column < count, block, pool.num_blocks)
    parent = jnp.where(count > 0, at_index(pool.serial, block[count - 1], NO_SERIAL), root)
    return blocks, count, parent, jnp.ones((), jnp.bool_)


def find(pool: BlockPool, block_hash: jax.Array, tokens: jax.Array, parent: jax.Array) -> BlockId:
    """i32[n]: registered block with these tokens after this parent, B where there is none.

    ``block_hash u32[n, 2]``, ``tokens i32[n, K]``, ``parent i32[n]``. The hash leads to
    candidates; tokens and parent decide.
    """
    near = candidates(pool, block_hash, tokens)
    match = near.matches & (at_index(pool.parent, near.blocks, 0) == parent[:, None])
    first = jnp.argmax(match, axis=1)
    block = jnp.take_along_axis(near.blocks, first[:, None], axis=1)[:, 0]
    return jnp.where(jnp.any(match, axis=1), block, pool.num_blocks)


@state
class Candidates:
    """What the index holds near a hash."""

    blocks: jax.Array
    """i32[n, PROBES]"""
    matches: jax.Array
    """bool[n, PROBES]: hash and tokens are equal; the parent is not yet compared."""


def candidates(pool: BlockPool, block_hash: jax.Array, tokens: jax.Array) -> Candidates:
    """Candidates for ``block_hash u32[n, 2]`` and ``tokens i32[n, K]``."""
    blocks = pool.index[_probe_slots(pool, block_hash)]
    same_hash = jnp.all(
        pool.block_hash.at[blocks].get(mode="fill", fill_value=0) == block_hash[:, None], axis=-1
    )
    same_tokens = jnp.all(
        pool.block_tokens.at[blocks].get(mode="fill", fill_value=0) == tokens[:, None], axis=-1
    )
    return Candidates(blocks=blocks, matches=(blocks < pool.num_blocks) & same_hash & same_tokens)


def register(
    pool: BlockPool,
    blocks: BlockId,
    block_hash: jax.Array,
    tokens: jax.Array,
    parent: jax.Array,
    head: jax.Array | None = None,
) -> tuple[BlockPool, jax.Array, jax.Array]:
    """Make full, written blocks findable.

    Args:
      blocks: i32[n], padding B; distinct, live, not registered.
      block_hash, tokens, parent: u32[n, 2], i32[n, K], i32[n].
      head: i32[n], lane at which a run of blocks begins, each the parent of the next (by
        default every lane is one). ``parent`` counts at the heads only.

    Returns:
      ``(pool, serial i32[n], done bool[n])``: the serial that the *next* block of each
      sequence names as its parent. It is that of an equal block if one is registered
      already, or stands before it in the list (then this one stays unregistered, and is
      freed first), else that of this block. Where a head was such a twin, the rest of its
      run is not ``done``: it needs the twin's serial. A block for which the index has no
      room within ``PROBES`` is not registered; it only costs hits.
    """
    lane = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    head = lane if head is None else head
    leads, wanted = head == lane, blocks < pool.num_blocks
    # Behind a new block there can be no registered one, and no twin.
    parent = jnp.where(leads, parent, _NOBODY)
    twin = find(pool, block_hash, tokens, parent)
    first = _first_equal(wanted & leads, block_hash, tokens, parent)
    first = jnp.where(leads, first, lane)
    fresh = wanted & (twin >= pool.num_blocks) & (first == lane)
    done = wanted & (leads | fresh[head])
    fresh = fresh & done
    nth = prefix_sum(fresh)
    serial = pool.next_serial + nth - 1
    parent = jnp.where(leads, parent, serial - 1)
    index, slot = _insert(pool, jnp.where(fresh, blocks, pool.num_blocks), block_hash)
    placed = jnp.where(slot < index.shape[0], blocks, pool.num_blocks)
    known = jnp.where(twin < pool.num_blocks, at_index(pool.serial, twin, 0), serial[first])
    pool = replace(
        pool,
        hashed=pool.hashed.at[placed].set(True, mode="drop"),
        block_hash=pool.block_hash.at[placed].set(block_hash, mode="drop"),
        block_tokens=pool.block_tokens.at[placed].set(tokens, mode="drop"),
        serial=pool.serial.at[placed].set(serial, mode="drop"),
        parent=pool.parent.at[placed].set(parent, mode="drop"),
        index=index,
        index_slot=pool.index_slot.at[placed].set(slot, mode="drop"),
        next_serial=pool.next_serial + nth[-1],
    )
    return pool, known, done


def _first_equal(
    wanted: jax.Array, block_hash: jax.Array, tokens: jax.Array, parent: jax.Array
) -> jax.Array:
    """i32[n]: the first wanted lane that is equal to each lane, most often itself.

    Sequences with one prompt that are prefilled together fill equal blocks in one step.
    Of the lanes with one hash and parent only the first is compared by its tokens.
    """
    lane = jnp.arange(wanted.shape[0], dtype=jnp.int32)
    same_hash = jnp.all(block_hash[:, None] == block_hash[None, :], axis=-1)
    near = wanted & same_hash & (parent[:, None] == parent[None, :])
    first = jnp.argmax(near, axis=1).astype(jnp.int32)
    return jnp.where(jnp.all(tokens[first] == tokens, axis=-1), first, lane)


def _insert(pool: BlockPool, blocks: BlockId, block_hash: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index with ``blocks i32[n]`` put in, and the slot each got (I where it got none).

    All lanes try their next slot at once; of those that meet, the one that the scatter
    left there has it, and the others go on.
    """
    none = pool.index.shape[0]

    def pending(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        _, slot, probe = carry
        return (probe < PROBES) & jnp.any((slot == none) & (blocks < pool.num_blocks))

    def try_next(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        index, slot, probe = carry
        place = jnp.take(slots, probe, axis=1)
        free = (slot == none) & (blocks < pool.num_blocks) & (index[place] == pool.num_blocks)
        index = index.at[jnp.where(free, place, none)].set(blocks, mode="drop")
        won = free & (index[place] == blocks)
        return index, jnp.where(won, place, slot), probe + 1

    slots = _probe_slots(pool, block_hash)
    start = jnp.full(blocks.shape, none, jnp.int32)
    index, slot, _ = lax.while_loop(
        pending, try_next, (pool.index, start, jnp.zeros((), jnp.int32))
    )
    return index, slot


def _probe_slots(pool: BlockPool, block_hash: jax.Array) -> jax.Array:
    """i32[n, PROBES]: places in the index for ``block_hash u32[n, 2]``."""
    base = block_hash[:, :1] + jnp.arange(PROBES, dtype=jnp.uint32)
    return (base & jnp.uint32(pool.index.shape[0] - 1)).astype(jnp.int32)
