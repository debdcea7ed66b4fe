"""Events from outside: submit, abort, and the checks at the boundary."""

import functools

import chex
import jax
import numpy as np
import pytest
from fake_model import new_request, quick_jit

from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.state import (
    ABORTED,
    FINISHED,
    LENGTH,
    NO_TOKEN,
    NOT_FINISHED,
    RUNNING,
    UNUSED,
    WAITING,
)
from oxidize_jax.scheduler.submit import check_prompt, check_token_ids, submit_all


def test_submit_fills_a_slot_and_no_other(hand):
    before = hand.state
    hand.submit([7, 8, 9], slot=2, max_tokens=5, min_tokens=2, stop_ids=[4], priority=3, salt=6)
    requests = hand.state.requests
    expected = {
        "status": WAITING,
        "finish_reason": NOT_FINISHED,
        "arrival": 0,
        "priority": 3,
        "row": 3,
        "prompt_len": 3,
        "num_tokens": 3,
        "num_computed": 0,
        "max_tokens": 8,
        "min_tokens": 5,
        "salt": 6,
        "num_cached": 0,
        "num_preemptions": 0,
    }
    assert {name: int(getattr(requests, name)[2]) for name in expected} == expected
    assert hand.tokens(2) == [7, 8, 9]
    assert requests.stop_ids[2].tolist() == [4, NO_TOKEN]
    assert hand.of("status") == [UNUSED, UNUSED, WAITING, UNUSED, UNUSED, UNUSED]
    chex.assert_trees_all_equal(hand.state.pool, before.pool)
    chex.assert_trees_all_equal(hand.state.rows, before.rows)


@pytest.mark.parametrize(("new", "limit"), [(1, 21), (4, 24), (5, 24), (24, 24), (2**31 - 1, 24)])
def test_max_tokens_ends_at_max_model_len_and_never_wraps(hand, new, limit):
    hand.submit([1] * 20, max_tokens=new, min_tokens=new)
    assert hand.of("max_tokens")[0] == limit
    assert hand.of("min_tokens")[0] == 20 + min(new, 24)


def test_a_finished_slot_takes_a_new_request_without_a_trace_of_the_old(hand):
    hand.submit([1, 2, 3, 4, 5], max_tokens=1)
    hand("schedule")
    hand.step()
    assert (hand.of("status")[0], hand.of("finish_reason")[0]) == (FINISHED, LENGTH)
    assert hand.state.requests.logprobs[0, 5] == -0.5
    hand.submit([9, 9], slot=0)
    requests = hand.state.requests
    assert (hand.of("status")[0], hand.of("finish_reason")[0]) == (WAITING, NOT_FINISHED)
    assert hand.tokens(0) == [9, 9]
    assert not requests.logprobs[0].any()
    assert (hand.of("num_computed")[0], hand.of("num_cached")[0]) == (0, 0)


@functools.cache
def jitted_submit_all(config):
    return quick_jit(functools.partial(submit_all, config))


def requests_of_all_kinds(config, fork_of):
    """Four requests, each different from the others in every field."""
    stops = [[], [4], [5, 6], [7]]
    return [
        new_request(
            config,
            [10 * i + 1] * (i + 2),
            max_tokens=[1, 5, 24, 2**31 - 1][i],
            min_tokens=i,
            stop_ids=stops[i],
            arrival=20 - i,
            priority=i - 1,
            salt=i,
            use_cache=i % 2 == 0,
            fork_of=fork_of[i],
        )
        for i in range(4)
    ]


@pytest.mark.parametrize(
    ("lanes", "fork_of"),
    [
        ([None] * 4, [None] * 4),
        ([None, 0, 0, 1], [None] * 4),
        ([2, 3, None, 0], [None] * 4),
        ([None] * 4, [1, 3, None, 1]),
    ],
    ids=["none", "of an earlier lane", "of a later lane", "of older requests"],
)
@pytest.mark.parametrize("slots", [[2, 0, 4, 5], [5, 4, 2, 0]])
def test_all_at_once_is_one_by_one_state_for_state(hand, slots, lanes, fork_of):
    fork_of = [of if lane is None else slots[lane] for lane, of in zip(lanes, fork_of, strict=True)]
    # Slot 0 has finished, slot 1 runs and slot 3 waits for whoever is in slot 2.
    hand.submit([1, 2, 3], max_tokens=1)
    hand.submit([4, 5, 6, 7, 8])
    hand.submit([6, 7], max_tokens=1)
    hand.submit([6, 7], fork_of=2)
    hand("schedule")
    hand.step()
    hand("abort", np.int32(2))
    hand("schedule")
    assert hand.of("status")[:3] == [FINISHED, RUNNING, FINISHED]
    new = requests_of_all_kinds(hand.config, fork_of)
    bulk = jitted_submit_all(hand.config)(
        hand.state, np.array(slots, np.int32), jax.tree.map(lambda *x: np.stack(x), *new)
    )
    for slot, request in zip(slots, new, strict=True):
        hand("submit", np.int32(slot), request)
    chex.assert_trees_all_equal(jax.device_get(bulk), hand.state)


def test_a_lane_without_a_slot_is_left_out(hand):
    new = requests_of_all_kinds(hand.config, [None, None, 0, None])
    slots = np.array([6, 1, 2, 6], np.int32)
    bulk = jitted_submit_all(hand.config)(
        hand.state, slots, jax.tree.map(lambda *x: np.stack(x), *new)
    )
    hand("submit", np.int32(1), new[1])
    hand("submit", np.int32(2), new[2])
    chex.assert_trees_all_equal(jax.device_get(bulk), hand.state)


def test_abort_of_an_unused_slot_changes_nothing(hand):
    before = hand.state
    hand("abort", np.int32(1))
    chex.assert_trees_all_equal(hand.state, before)


def test_abort_while_waiting_means_never_running(hand):
    hand.submit([1, 2, 3])
    hand.submit([4, 5])
    hand("abort", np.int32(0))
    assert hand.of("status")[:2] == [FINISHED, WAITING]
    assert hand.of("finish_reason")[:2] == [ABORTED, NOT_FINISHED]
    hand("schedule")
    assert hand.in_rows == [1, None, None]


def test_abort_while_running_takes_no_more_tokens_and_gives_the_blocks_back(hand):
    hand.submit([1, 2, 3, 4, 5])
    hand.submit([6, 7])
    hand("schedule")
    assert hand.scheduled == [5, 2, 0]
    hand("abort", np.int32(0))
    hand.commit({0: 50, 1: 60})  # the step that was planned before
    assert hand.tokens(0) == [1, 2, 3, 4, 5]
    assert hand.tokens(1) == [6, 7, 60]
    assert hand.state.totals.generated_tokens == 1
    assert hand.of("num_computed")[0] == 5
    hand("schedule")
    assert hand.in_rows == [None, 1, None]
    assert hand.of("row")[0] == 3
    # The full block of the aborted prompt is written, so it may serve others.
    assert (int(hand.state.pool.num_cached), int(hand.state.pool.num_free)) == (1, 6)


def test_abort_while_preempted_means_never_running_again(hand):
    hand.submit([1, 2, 3])
    hand("schedule")
    hand("preempt", np.int32(0), np.bool_(False))
    assert hand.of("status")[0] == RUNNING
    hand("abort", np.int32(0))
    hand("schedule")
    assert hand.in_rows == [None, None, None]
    assert (hand.of("status")[0], hand.of("finish_reason")[0]) == (FINISHED, ABORTED)


def test_abort_of_a_finished_request_keeps_its_reason(hand):
    hand.submit([1], max_tokens=1)
    hand("schedule")
    hand.commit({0: 50})
    assert hand.of("finish_reason")[0] == LENGTH
    before = hand.state
    hand("abort", np.int32(0))
    chex.assert_trees_all_equal(hand.state, before)


CONFIG = EngineConfig(
    max_model_len=64, num_blocks=4, block_size=4, max_num_seqs=2, max_num_requests=2
)


@pytest.mark.parametrize("length", [1, 15, 16])
def test_check_prompt_accepts_what_fits(length):
    check_prompt(CONFIG, length)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "prompt has 0 tokens: give at least one"),
        (17, "prompt has 17 tokens and needs 5 blocks of 4, but the pool has num_blocks=4"),
        (64, "prompt has 64 tokens, but max_model_len=64"),
    ],
)
def test_check_prompt_refuses_with_the_numbers(length, message):
    with pytest.raises(ValueError, match=message):
        check_prompt(CONFIG, length)


def test_check_prompt_leaves_room_for_one_new_token():
    config = EngineConfig(max_model_len=8, max_num_seqs=2)
    check_prompt(config, 7)
    with pytest.raises(ValueError, match="shorten the prompt to 7 tokens or, if the model"):
        check_prompt(config, 8)


@pytest.mark.parametrize("bad", [-1, 97, 2**31 + 5, 2**32 + 7])
def test_sm16_ids_outside_the_vocabulary_are_named(bad):
    ids = np.array([96, 0, bad], np.int64)
    with pytest.raises(ValueError, match=rf"stop_token_ids\[2\]={bad}: .* 0 to 96"):
        check_token_ids("stop_token_ids", ids, 97)
    check_token_ids("stop_token_ids", ids[:2], 97)
