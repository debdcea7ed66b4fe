"""Room for running rows: grow, make_room, copies."""

import chex
import numpy as np
import pytest
from fake_model import quick_jit

from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.scheduler.state import FINISHED, POOL_EXHAUSTED, RUNNING
from oxidize_jax.types import replace

NONE = 8
"""No block, in a pool of 8."""


def decodes(hand, *computed, **options):
    """Rows that have one token left, with their blocks just full enough."""
    hand.seat(*[([i + 1] * (n + 1), n, -(-n // 4)) for i, n in enumerate(computed)], **options)


def test_a_block_is_taken_only_where_the_next_token_begins_one(hand):
    decodes(hand, 4, 6, 7)
    assert hand.tables == [[0], [1, 2], [3, 4]]
    grants = hand("grow")
    assert grants.decode.tolist() == [1, 1, 1]
    assert grants.prefill.tolist() == [0, 0, 0]
    assert hand.tables == [[0, 5], [1, 2], [3, 4]]
    assert hand.state.plan.num_copies == 0
    before = hand.state
    hand("grow")
    chex.assert_trees_all_equal(hand.state, before)  # it has what it needs


def test_a_chunk_takes_the_blocks_of_its_tokens(hand):
    hand.seat(([1] * 21, 6, 2), ([2] * 5, 4, 1))
    grants = hand("grow")
    # The prompt takes the whole budget of 8; the decode waits and takes no block.
    assert (grants.prefill.tolist(), grants.decode.tolist()) == ([8, 0, 0], [0, 0, 0])
    assert hand.tables == [[0, 1, 3, 4], [2], []]


def test_new_blocks_go_to_the_rows_in_order_of_rows(hand):
    decodes(hand, 4, 8, 4)
    hand("grow")
    assert hand.tables == [[0, 4], [1, 2, 5], [3, 6]]


def test_order_is_by_priority_then_arrival_and_idle_rows_last(hand):
    def order(state):
        hand("order_rows")
        return hand.state.plan.order

    decodes(hand, 1, 1)
    assert order(hand.state).tolist() == [0, 1, 2]
    hand.edit(requests={"arrival": np.array([9, 3, 0, 0, 0, 0], np.int32)})
    assert order(hand.state).tolist() == [1, 0, 2]
    hand.edit(requests={"priority": np.array([-1, 0, 0, 0, 0, 0], np.int32)})
    assert order(hand.state).tolist() == [0, 1, 2]


def test_make_room_leaves_alone_what_fits(hand):
    decodes(hand, 4, 8, 7)
    hand("order_rows")
    before = hand.state
    assert not hand("make_room")
    chex.assert_trees_all_equal(hand.state, before)


@pytest.mark.parametrize(
    ("num_blocks", "left"), [(3, [0, None, None]), (4, [0, 1, None]), (6, [0, 1, 2])]
)
def test_sc07_need_is_counted_in_blocks_and_just_enough_are_preempted(make_hand, num_blocks, left):
    hand = make_hand(num_blocks=num_blocks)
    decodes(hand, 4, 4, 4)  # three tokens fit into one block by number, but need three
    assert bool(hand("make_room")) == (None in left)
    assert hand.in_rows == left
    running = len(left) - left.count(None)
    assert int(block_pool.available(hand.state.pool)) == num_blocks - running >= running
    assert hand.of("status")[:3] == [RUNNING] * 3


def test_the_victim_is_the_newest_though_an_older_one_is_in_need(make_hand):
    hand = make_hand(num_blocks=4)
    decodes(hand, 4, 7, 1)
    assert hand.tables == [[0], [1, 2], [3]]
    assert hand("make_room")
    assert hand.in_rows == [0, 1, None]


def test_the_newest_in_need_yields_itself_and_not_an_older_one(make_hand):
    hand = make_hand(num_blocks=4)
    decodes(hand, 3, 7, 4)
    assert hand("make_room")
    assert hand.in_rows == [0, 1, None]


def test_the_victim_is_the_least_urgent_by_priority(make_hand):
    hand = make_hand(num_blocks=4)
    decodes(hand, 4, 7, 1)
    hand.edit(requests={"priority": np.array([5, 5, 1, 0, 0, 0], np.int32)})
    assert hand("make_room")
    assert hand.in_rows == [0, None, 2]


def test_one_that_outgrew_the_pool_alone_is_finished_with_its_tokens(make_hand):
    hand = make_hand(num_blocks=4)
    decodes(hand, 16)
    assert hand("make_room")
    assert hand.in_rows == [None] * 3
    assert (hand.of("status")[0], hand.of("finish_reason")[0]) == (FINISHED, POOL_EXHAUSTED)
    assert hand.tokens(0) == [1] * 17


@quick_jit
def swap_holder(pool, gained, lost):
    return block_pool.release(block_pool.share(pool, gained), lost)


def fork(hand, parent, child):
    """Let row ``child`` hold the blocks of row ``parent`` in place of its own."""
    rows, pool = hand.state.rows, hand.state.pool
    before = rows.block_table
    pool = swap_holder(pool, before[parent], before[child])
    # A new array: the transition runs on, and may read its arguments where they are.
    table = before.copy()
    table[child] = before[parent]
    hand.set(replace(hand.state, pool=pool, rows=replace(rows, block_table=table)))


def test_a_writer_into_a_shared_block_gets_a_copy(hand):
    decodes(hand, 6, 6, 2)
    fork(hand, 0, 1)
    assert hand.tables == [[0, 1], [0, 1], [4]]
    hand("grow")
    # Both write: the first gets a copy, the last keeps the block.
    plan = hand.state.plan
    assert hand.tables == [[0, 3], [0, 1], [4]]
    assert plan.copy_src.tolist() == [1, NONE, NONE]
    assert plan.copy_dst.tolist() == [3, NONE, NONE]
    assert (plan.num_copies, hand.state.totals.copies) == (1, 1)
    assert hand.state.pool.ref_count.tolist() == [2, 1, 0, 1, 1, 0, 0, 0]


def test_a_full_shared_block_is_not_copied(hand):
    decodes(hand, 4, 4)
    fork(hand, 0, 1)
    hand("grow")
    assert hand.tables[0][0] == hand.tables[1][0] == 0
    assert hand.state.plan.num_copies == 0


def test_copies_are_packed_at_the_front_and_forgotten_with_the_step(hand):
    decodes(hand, 4, 6, 6)
    fork(hand, 1, 2)
    hand("grow")
    plan = hand.state.plan
    assert (plan.copy_src.tolist(), plan.copy_dst.tolist()) == ([2, NONE, NONE], [4, NONE, NONE])
    hand.commit()
    assert hand.state.plan.num_copies == 0


def test_make_room_counts_copies(make_hand):
    hand = make_hand(num_blocks=4)
    decodes(hand, 2, 2, 6)
    fork(hand, 0, 1)
    assert int(hand.state.pool.num_free) == 1
    assert not hand("make_room")
    hand = make_hand(num_blocks=4)
    decodes(hand, 2, 2, 8)
    fork(hand, 0, 1)
    assert hand("make_room")  # a copy and a new block, with one block free
    assert hand.in_rows == [0, 1, None]
