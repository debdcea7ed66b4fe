"""Losing a row: retire and preempt."""

import chex
import numpy as np

from oxidize_jax.scheduler.state import FINISHED, LENGTH, NOT_FINISHED, POOL_EXHAUSTED, RUNNING


def test_retire_takes_rows_and_blocks_of_the_finished_and_of_nobody_else(hand):
    for prompt in ([1, 2, 3], [4, 5], [6, 7]):
        hand.submit(prompt, max_tokens=2 if prompt[0] == 4 else 1)
    hand("schedule")
    assert hand.tables == [[0], [1], [2]]
    hand.commit({0: 50, 1: 50, 2: 50})
    assert hand.of("status")[:3] == [FINISHED, RUNNING, FINISHED]
    assert hand.in_rows == [0, 1, 2]  # until the next schedule
    hand("retire")
    assert hand.in_rows == [None, 1, None]
    assert hand.tables == [[], [1], []]
    assert hand.of("row")[:3] == [3, 1, 3]
    assert hand.of("num_computed")[:3] == [0, 2, 0]
    assert hand.of("num_tokens")[:3] == [4, 3, 3]
    assert hand.state.pool.ref_count.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_retire_releases_the_tail_first(hand):
    hand.submit([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=2)
    hand("schedule")
    hand.step()
    assert hand.tables[0] == [0, 1, 2]
    hand.commit({0: 51})
    hand("retire")
    pool = hand.state.pool
    assert np.argsort(np.where(pool.lru_pos < 0, 99, pool.lru_pos))[:2].tolist() == [1, 0]
    assert pool.num_cached == 2
    assert pool.free_stack[pool.num_free - 1] == 2  # the block that was not full


def test_retire_without_a_finished_request_changes_nothing(hand):
    hand.submit([1, 2, 3])
    hand("schedule")
    before = hand.state
    hand("retire")
    chex.assert_trees_all_equal(hand.state, before)


def test_preempt_keeps_tokens_and_status_and_takes_the_rest(hand):
    hand.submit([1, 2, 3, 4, 5])
    hand.submit([6, 7])
    hand("schedule")
    hand.step(50)
    hand("preempt", np.int32(0), np.bool_(False))
    assert (hand.of("status")[0], hand.of("finish_reason")[0]) == (RUNNING, NOT_FINISHED)
    assert (hand.of("row")[0], hand.of("num_computed")[0]) == (3, 0)
    assert hand.tokens(0) == [1, 2, 3, 4, 5, 50]
    assert hand.in_rows == [None, 1, None]
    assert hand.of("num_preemptions")[:2] == [1, 0]
    assert hand.state.totals.preemptions == 1
    # The full block stays findable until somebody needs it.
    assert hand.state.pool.num_cached == 1


def test_preempt_of_one_that_had_the_pool_alone_finishes_it_with_its_tokens(hand):
    hand.submit([1, 2, 3])
    hand("schedule")
    hand.step(50)
    hand("preempt", np.int32(0), np.bool_(True))
    assert (hand.of("status")[0], hand.of("finish_reason")[0]) == (FINISHED, POOL_EXHAUSTED)
    assert hand.tokens(0) == [1, 2, 3, 50]
    assert (hand.of("num_preemptions")[0], hand.state.totals.preemptions) == (0, 0)
    assert not hand.state.pool.ref_count.any()


def test_preempt_of_one_that_has_finished_keeps_its_reason(hand):
    hand.submit([1, 2, 3], max_tokens=1)
    hand("schedule")
    hand.commit({0: 50})
    hand("preempt", np.int32(0), np.bool_(True))
    assert (hand.of("status")[0], hand.of("finish_reason")[0]) == (FINISHED, LENGTH)
