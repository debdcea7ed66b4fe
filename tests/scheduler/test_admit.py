"""Admission: who gets a row, with which blocks and how many tokens."""

import chex
import numpy as np
import pytest

from oxidize_jax.scheduler.state import FINISHED, POOL_EXHAUSTED, RUNNING, WAITING


def test_first_come_first_served_whatever_the_slot(hand):
    for slot, arrival in ((0, 7), (3, 5), (5, 6)):
        hand.submit([slot + 1] * 2, slot=slot, arrival=arrival)
    assert hand.admit(8) == [2, 2, 2]
    assert hand.in_rows == [3, 5, 0]
    assert hand.tables == [[0], [1], [2]]
    assert hand.of("status") == [RUNNING, 0, 0, RUNNING, 0, RUNNING]
    assert hand.of("row") == [2, 3, 3, 0, 3, 1]


def test_priority_goes_before_arrival(hand):
    for slot, priority in enumerate((0, -2, 5, -2)):
        hand.submit([1], slot=slot, priority=priority)
    assert hand.admit(8) == [1, 1, 1]
    assert hand.in_rows == [1, 3, 0]


def test_preempted_requests_go_before_waiting_ones(hand):
    hand.seat(([1] * 3, 2, 1), ([2] * 3, 2, 1))
    hand.submit([3], arrival=0, priority=-9)
    hand.edit(requests={"arrival": np.array([4, 3, 0, 0, 0, 0], np.int32)})
    for row in (0, 1):
        hand("preempt", np.int32(row), np.bool_(False))
    assert hand.admit(8) == [3, 3, 1]
    assert hand.in_rows == [1, 0, 2]


def test_the_head_of_the_line_holds_up_those_behind_it(hand):
    hand.seat(([1] * 20, 19, 5))
    hand.submit([2] * 9)  # 3 blocks; 3 are there, one is kept for what runs
    hand.submit([3])
    before = hand.state
    assert hand.admit(8) == [0, 0, 0]
    chex.assert_trees_all_equal(hand.state, before)


def test_a_prompt_that_is_being_prefilled_keeps_its_claim(hand):
    hand.seat(([1] * 20, 8, 2))  # 6 blocks are there, 3 of them promised, one kept
    hand.submit([2] * 9)
    assert hand.admit(8) == [0, 0, 0]
    assert hand.of("status")[1] == WAITING
    hand.edit(requests={"num_tokens": np.array([20, 8, 0, 0, 0, 0], np.int32)})
    assert hand.admit(8) == [0, 8, 0]
    assert hand.tables == [[0, 1], [2, 3], []]


def test_the_budget_cuts_the_last_prompt_and_stops(hand):
    for _ in range(3):
        hand.submit([1] * 3)
    assert hand.admit(5) == [3, 2, 0]
    assert hand.in_rows == [0, 1, None]
    assert hand.of("num_computed")[:2] == [0, 0]  # counted when the step is made


@pytest.mark.parametrize(
    ("tokens", "tiles", "granted"),
    [
        (8, 2, [6, 0, 0]),  # two tiles for 6 tokens, none left
        (8, 1, [4, 0, 0]),
        (8, 0, [0, 0, 0]),
        (1, 0, [1, 0, 0]),  # one token runs as a decode and needs no tile
        (7, 2, [6, 1, 0]),
        (0, 2, [0, 0, 0]),
    ],
)
def test_tiles_bound_the_chunks(hand, tokens, tiles, granted):
    hand.submit([1] * 6)
    hand.submit([2] * 6)
    assert hand.admit(tokens, tiles) == granted


def test_nothing_is_admitted_where_it_is_not_allowed(hand):
    hand.submit([1])
    before = hand.state
    assert hand.admit(8, allowed=False) == [0, 0, 0]
    chex.assert_trees_all_equal(hand.state, before)


def test_there_are_no_more_rows_than_max_num_seqs(hand):
    for _ in range(5):
        hand.submit([1])
    assert hand.admit(8) == [1, 1, 1]
    assert hand.of("status")[:5] == [RUNNING] * 3 + [WAITING] * 2


def run_once(hand, prompt):
    """Let a request with this prompt run and finish, so that the cache knows it."""
    slot = hand.submit(prompt, max_tokens=1)
    while hand.of("status")[slot] != FINISHED:
        hand.step()
    return slot


def test_a_hit_leaves_at_least_one_token_to_compute(hand):
    run_once(hand, [1, 2, 3, 4, 5, 6, 7, 8])
    hand.submit([1, 2, 3, 4, 5, 6, 7, 8])
    hand.submit([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert hand.admit(8) == [1, 1, 0]
    # The first shares all its KV, and runs its last token again for the logits only.
    assert hand.tables == [[0, 1], [0, 1, 2], []]
    assert hand.of("num_cached")[1:3] == [7, 8]
    assert hand.of("num_computed")[1:3] == [7, 8]
    assert hand.state.rows.kv_len[:2].tolist() == [8, 8]
    assert hand.state.totals.cached_tokens == 15
    assert hand.state.pool.ref_count[:4].tolist() == [2, 2, 1, 0]


def test_what_stands_behind_the_tokens_in_the_buffer_never_matches(hand):
    # The buffer holds 88 behind every prompt.
    run_once(hand, [1, 88, 88, 88, 88, 88, 88, 88])
    hand.submit([1, 88])
    hand.submit([1, 88, 88, 88])
    hand.submit([1, 88, 88, 88, 88])
    assert hand.admit(8) == [2, 1, 1]
    assert hand.of("num_cached")[1:4] == [0, 3, 4]


def test_cached_blocks_that_are_hit_are_not_counted_as_room(hand):
    run_once(hand, [1, 2, 3, 4, 5, 6, 7, 8])
    hand.submit([9] * 20)
    for _ in range(3):
        hand.step()
    assert len(hand.tables[0]) == 5
    # 1 free and 2 cached; the hit needs the 2 cached and 1 more, and 1 is kept.
    hand.submit([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    before = hand.state
    assert hand.admit(8) == [0, 0, 0]
    chex.assert_trees_all_equal(hand.state, before)


def test_without_prefix_caching_nothing_is_shared(hand, make_hand):
    run_once(hand, [1, 2, 3, 4, 5])
    hand.submit([1, 2, 3, 4, 5])
    off = make_hand(enable_prefix_caching=False)
    off.set(hand.state)
    for scheduler, cached in ((hand, 4), (off, 0)):
        assert scheduler.admit(8) == [5 - cached, 0, 0]
        assert scheduler.of("num_cached")[1] == cached


def test_num_cached_is_that_of_the_first_admission(hand):
    hand.submit([1, 2, 3, 4, 5, 6])
    hand("schedule")
    hand.step(50)
    hand("preempt", np.int32(0), np.bool_(False))
    assert hand.admit(8) == [3, 0, 0]
    assert (hand.of("num_computed")[0], hand.of("num_cached")[0]) == (4, 0)
    assert hand.state.totals.cached_tokens == 4


def test_a_preempted_request_that_outgrew_the_pool_is_finished_and_the_next_goes_on(make_hand):
    hand = make_hand(num_blocks=4)
    hand.seat(([1] * 16, 8, 2), ([2], 0, 1))
    hand("preempt", np.int32(0), np.bool_(False))
    hand("preempt", np.int32(1), np.bool_(False))
    assert hand.admit(1) == [1, 0, 0]  # 16 tokens fit
    hand = make_hand(num_blocks=4)
    hand.seat(([1] * 17, 8, 2), ([2], 0, 1))
    hand("preempt", np.int32(0), np.bool_(False))
    hand("preempt", np.int32(1), np.bool_(False))
    assert hand.admit(8) == [1, 0, 0]
    assert hand.in_rows == [1, None, None]
    assert (hand.of("status")[0], hand.of("finish_reason")[0]) == (FINISHED, POOL_EXHAUSTED)
    assert hand.tokens(0) == [1] * 17
