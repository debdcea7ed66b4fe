"""The pool's transitions on tiny pools, with the exact blocks written out."""

import jax
import numpy as np
import pytest

from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.scheduler.invariants import InvariantError, check_pool
from oxidize_jax.types import replace

A, B, C, D = ([w] * 4 for w in (1, 2, 3, 4))
"""Contents of blocks."""


def test_a_new_pool_gives_the_lowest_ids_first(make_pool):
    pool = make_pool(6)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.ref_counts == [1, 1, 1, 1, 1, 0]
    assert pool.free == [5]


def test_create_has_a_buffer_of_its_own_for_every_leaf():
    leaves = jax.tree.leaves(block_pool.create(4, 2))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize(("num_blocks", "size"), [(1, 4), (2, 8), (3, 16), (4, 16), (5, 32)])
def test_index_is_a_power_of_two_and_at_most_a_quarter_full(num_blocks, size):
    assert block_pool.create(num_blocks, 2).index.shape == (size,)


def test_exhaustion_is_a_value_and_changes_nothing(make_pool):
    pool = make_pool(6)
    pool.allocate(4)
    assert pool.allocate(3) is None  # compares every leaf of the pool
    assert pool.allocate(2) == [4, 5]
    assert pool.allocate(1) is None


def test_exhaustion_evicts_nothing(make_pool):
    pool = make_pool(6)
    pool.allocate(3)
    pool.register_sequence([0, 1], [A, B])
    pool.release(1, 0)
    assert pool.allocate(6) is None
    assert pool.lookup([A, B]) == [0, 1]
    assert pool.allocate(5) == [3, 4, 5, 1, 0]


def test_released_blocks_are_taken_again_last_released_first(make_pool):
    pool = make_pool(6)
    pool.allocate(4)
    pool.release(3, 1)
    assert pool.free == [1, 3, 4, 5]
    assert pool.allocate(3) == [1, 3, 4]


def test_never_hashed_blocks_go_before_cached_ones_and_the_tail_before_the_head(make_pool):
    pool = make_pool(6)
    pool.allocate(4)
    pool.register_sequence([0, 1, 2], [A, B, C])
    pool.release(3, 2, 1, 0)
    assert (pool.free, pool.cached) == ([3, 4, 5], [2, 1, 0])
    assert pool.allocate(5) == [3, 4, 5, 2, 1]
    assert pool.lookup([A, B, C]) == [0]


def test_cached_blocks_go_least_recently_used_first_and_a_hit_refreshes(make_pool):
    pool = make_pool(6)
    pool.allocate(6)
    for block, words in enumerate((A, B, C, D)):
        pool.register_sequence([block], [words])
    pool.release(2, 0, 3, 1)
    assert pool.cached == [2, 0, 3, 1]
    pool.share(*pool.lookup([A]))
    pool.release(0)
    assert pool.cached == [2, 3, 1, 0]
    pool.share(2, 1)
    assert pool.cached == [3, 0]
    assert pool.allocate(2) == [3, 0]  # stale entries of 2, 0 and 1 are skipped
    pool.release(1, 2)
    assert pool.cached == [1, 2]


def test_a_free_pool_serves_from_both_places_in_one_call(make_pool):
    pool = make_pool(3)
    pool.allocate(3)
    pool.register_sequence([1], [A])
    pool.release(1, 0)
    assert pool.allocate(2) == [0, 1]
    assert pool.lookup([A]) == []


@pytest.mark.parametrize("num_blocks", [3, 6])
def test_many_hits_fill_the_ring_with_stale_entries_and_it_is_compacted(make_pool, num_blocks):
    pool = make_pool(num_blocks)
    pool.allocate(num_blocks)
    words = [[w] * 4 for w in range(num_blocks)]
    for block in range(num_blocks):
        pool.register_sequence([block], [words[block]])
    pool.release(*range(num_blocks))
    tails = []
    for turn in range(5 * num_blocks):
        hit = turn % (num_blocks - 1)
        pool.share(hit)
        pool.release(hit)
        tails.append(int(pool.state.ring_tail))
        assert pool.cached[-1] == hit
    assert min(np.diff(tails)) < 0, "never compacted"
    assert pool.cached[0] == num_blocks - 1  # never hit: still the oldest
    order = pool.cached
    assert pool.allocate(num_blocks) == order


def test_ring_positions_are_renumbered_long_before_32_bits_end(make_pool):
    pool = make_pool(6)
    pool.allocate(4)
    for block, words in enumerate((A, B, C)):
        pool.register_sequence([block], [words])
    pool.release(1, 0)
    state, late = pool.state, np.int32(block_pool._RENUMBER - 5)
    pool.state = replace(
        state,
        ring=np.roll(state.ring, late % 12),
        ring_head=state.ring_head + late,
        ring_tail=state.ring_tail + late,
        lru_pos=np.where(state.lru_pos >= 0, state.lru_pos + late, state.lru_pos),
    )
    check_pool(pool.state)
    for _ in range(6):
        pool.release(2)
        assert pool.cached == [1, 0, 2]
        pool.share(2)
        assert pool.state.ring_tail <= block_pool._RENUMBER
    assert pool.state.ring_tail == 5
    assert pool.allocate(4) == [4, 5, 1, 0]


def test_share_adds_holders_and_only_the_last_release_frees(make_pool):
    pool = make_pool(6)
    pool.allocate(2)
    pool.share(0, 1, 0)
    assert pool.ref_counts[:2] == [3, 2]
    pool.release(0, 1)
    pool.release(0, 1)
    assert (pool.ref_counts[:2], pool.free) == ([1, 0], [1, 2, 3, 4, 5])


def test_one_release_may_name_a_block_twice(make_pool):
    pool = make_pool(6)
    pool.allocate(2)
    pool.share(0)
    pool.release(0, 1, 0)
    # Block 0 is dropped at its last mention, behind block 1.
    assert pool.free == [0, 1, 2, 3, 4, 5]
    assert pool.ref_counts == [0] * 6


def test_sharing_a_cached_block_takes_it_out_of_reach_of_allocation(make_pool):
    pool = make_pool(3)
    pool.allocate(1)
    pool.register_sequence([0], [A])
    pool.release(0)
    pool.share(0)
    assert pool.allocate(3) is None
    assert pool.allocate(2) == [1, 2]
    assert pool.ref_counts == [1, 1, 1]


@pytest.mark.parametrize(("length", "last"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 1), (8, 4)])
def test_kv03_block_edges(make_pool, length, last):
    pool = make_pool(6)
    blocks = pool.allocate(-(-length // 4))
    assert length - 4 * max(len(blocks) - 1, 0) == last
    assert [pool.ref_counts[b] for b in blocks] == [1] * len(blocks)
    pool.release(*blocks)
    assert pool.ref_counts == [0] * 6
    for block in blocks[:1]:
        with pytest.raises(InvariantError, match="below 0"):
            pool.release(block)


def test_kv02_a_recycled_block_forgets_what_it_held(make_pool):
    pool = make_pool(3)
    pool.allocate(3)
    pool.register_sequence([2], [A])
    pool.release(2)
    assert pool.lookup([A]) == [2]
    assert pool.allocate(1) == [2]
    assert pool.lookup([A]) == []
    pool.register_sequence([2], [B])
    assert (pool.lookup([A]), pool.lookup([B])) == ([], [2])
    pool.release(2)
    assert (pool.lookup([A]), pool.lookup([B])) == ([], [2])


def test_physical_block_shows_what_the_pool_knows(make_pool):
    pool = make_pool(3)
    pool.allocate(2)
    chain = pool.register_sequence([1], [A])
    assert block_pool.physical_block(pool.state, 0) == block_pool.PhysicalTokenBlock(
        block_id=0, ref_count=1, block_hash=None, token_ids=None
    )
    assert block_pool.physical_block(pool.state, 1) == block_pool.PhysicalTokenBlock(
        block_id=1, ref_count=1, block_hash=chain.hash, token_ids=tuple(A)
    )
    for block in (-1, 3):
        with pytest.raises(ValueError, match=f"block_id={block}: the pool has blocks 0 to 2"):
            block_pool.physical_block(pool.state, block)


def test_copy_on_write_leaves_a_block_with_one_holder_in_place(make_pool):
    pool = make_pool(6)
    pool.allocate(2)
    assert pool.copy_on_write(1, 0, 6) == ([1, 0, 6], [6, 6, 6], [6, 6, 6])
    assert pool.ref_counts == [1, 1, 0, 0, 0, 0]


def test_copy_on_write_gives_one_of_two_holders_a_copy(make_pool):
    pool = make_pool(6)
    pool.allocate(2)
    pool.share(1)
    assert pool.copy_on_write(0, 1) == ([0, 2], [6, 1], [6, 2])
    assert pool.ref_counts == [1, 1, 1, 0, 0, 0]
    assert pool.copy_on_write(0, 1) == ([0, 1], [6, 6], [6, 6])


def test_copy_on_write_where_every_holder_writes_leaves_it_to_the_last(make_pool):
    pool = make_pool(6)
    pool.allocate(1)
    pool.share(0, 0)
    assert pool.copy_on_write(0, 0, 0) == ([1, 2, 0], [0, 0, 6], [1, 2, 6])
    assert pool.ref_counts == [1, 1, 1, 0, 0, 0]


def test_copy_on_write_of_two_of_three_holders_copies_both(make_pool):
    pool = make_pool(6)
    pool.allocate(2)
    pool.share(0, 0, 1)
    assert pool.copy_on_write(0, 1, 0) == ([2, 3, 4], [0, 1, 0], [2, 3, 4])
    assert pool.ref_counts == [1, 1, 1, 1, 1, 0]


def test_copy_on_write_is_all_or_nothing(make_pool):
    pool = make_pool(3)
    pool.allocate(2)
    pool.share(0, 0, 1)
    assert pool.copy_on_write(0, 1, 0) is None  # three copies, one block
    assert pool.copy_on_write(1) == ([2], [1], [2])
    assert pool.copy_on_write(0) is None


def test_copy_on_write_may_evict_and_never_copies_onto_a_source(make_pool):
    pool = make_pool(3)
    pool.allocate(3)
    pool.register_sequence([2], [A])
    pool.release(2)
    pool.share(0)
    assert pool.copy_on_write(0) == ([2], [0], [2])
    assert pool.lookup([A]) == []


def test_available_counts_free_and_cached(make_pool):
    pool = make_pool(6)
    pool.allocate(4)
    pool.register_sequence([0], [A])
    pool.release(0)
    assert int(block_pool.available(pool.state)) == 3
