"""The whole transition: who is in the next step, by policy, and what never happens."""

import numpy as np
import pytest

from oxidize_jax.scheduler.state import FINISHED, RUNNING, WAITING


def test_a_new_request_joins_a_running_one_in_one_mixed_step(hand):
    hand.submit([1, 2, 3])
    hand("schedule")
    hand.submit([4, 5, 6, 7, 8])
    hand.step()
    assert hand.scheduled == [1, 5, 0]
    assert hand.state.plan.order.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("prefill_first", [[3, 5, 0], [0, 8, 0], [1, 3, 0], [1, 1, 0]]),
        ("decode_first", [[3, 5, 0], [1, 7, 0], [1, 4, 0], [1, 1, 0]]),
    ],
)
def test_policies_share_a_long_prompt_and_a_decode(make_hand, policy, steps):
    hand = make_hand(policy=policy)
    hand.submit([1] * 3, max_tokens=9)
    hand.submit([2] * 16)
    hand("schedule")
    seen = [hand.scheduled]
    for _ in steps[1:]:
        hand.step()
        seen.append(hand.scheduled)
    assert seen == steps


def test_the_last_token_of_a_prompt_does_not_wait_for_a_later_prompt(hand):
    hand.submit([1] * 9)
    hand.submit([2] * 9)
    hand("schedule")
    assert hand.scheduled == [8, 0, 0]
    hand.step()
    assert hand.scheduled == [1, 7, 0]
    hand.step()
    assert hand.scheduled == [1, 2, 0]


def test_a_decode_that_waits_for_prompts_keeps_its_new_block(hand):
    hand.submit([1] * 4)
    hand("schedule")
    hand.submit([2] * 16)
    hand.step()
    assert hand.scheduled == [0, 8, 0]
    assert hand.tables == [[0, 1], [2, 3], []]
    hand.step()
    assert hand.scheduled == [1, 7, 0]  # it goes first after a step without it
    assert hand.tables[0] == [0, 1]
    hand.step()
    assert hand.scheduled == [1, 1, 0]


def test_a_decode_never_waits_twice_for_prompts_that_keep_coming(hand):
    hand.submit([1] * 4, max_tokens=9)
    hand("schedule")
    seen = []
    for slot in range(1, 6):
        hand.submit([slot + 1] * 8, max_tokens=1)
        hand.step()
        seen.append(hand.scheduled[0])
    assert seen == [0, 1, 0, 1, 0]


def test_nothing_is_admitted_in_a_step_that_preempted(make_hand):
    hand = make_hand(num_blocks=4)
    hand.seat(([1] * 5, 4, 1), ([2] * 10, 9, 3), ([3], 0, 0))
    hand("preempt", np.int32(2), np.bool_(False))
    hand.edit(requests={"arrival": np.array([1, 2, 0, 0, 0, 0], np.int32)})
    hand("schedule")
    # Request 1 gave 3 blocks, request 0 took one, and request 2 needs one only.
    assert hand.in_rows == [0, None, None]
    assert hand.scheduled == [1, 0, 0]
    hand.step()
    assert hand.in_rows == [0, 2, None]
    assert hand.scheduled == [1, 1, 0]


def test_a_preempted_request_comes_back_before_one_that_never_ran(make_hand):
    hand = make_hand(num_blocks=4)
    hand.seat(([1] * 5, 4, 1), ([2] * 10, 9, 3))
    hand.submit([3], priority=-5)
    hand("schedule")
    hand.step()
    # Two blocks are free: too few for the preempted one, which holds up the other.
    assert hand.in_rows == [0, None, None]
    assert hand.of("status")[:3] == [RUNNING, RUNNING, WAITING]
    hand("abort", np.int32(0))
    hand.step()
    assert hand.in_rows == [1, None, None]
    assert hand.scheduled == [8, 0, 0]  # it begins anew


def test_a_step_that_preempted_everybody_admits(make_hand):
    hand = make_hand(num_blocks=4)
    hand.seat(([1] * 17, 16, 4))
    hand.submit([3] * 2)
    hand("schedule")
    assert hand.of("status")[:2] == [FINISHED, RUNNING]
    assert hand.in_rows == [1, None, None]
    assert hand.scheduled == [2, 0, 0]


def test_finished_rows_are_free_for_the_next_in_line_in_the_same_step(hand):
    for i in range(4):
        hand.submit([i], max_tokens=1 if i == 1 else 3)
    hand("schedule")
    assert hand.in_rows == [0, 1, 2]
    hand.step()
    assert hand.in_rows == [0, 3, 2]
    assert hand.state.plan.order.tolist() == [0, 2, 1]


def test_an_idle_engine_plans_nothing(hand):
    hand("schedule")
    assert hand.scheduled == [0, 0, 0]
    hand.submit([1, 2], max_tokens=1)
    hand("schedule")
    hand.step()
    assert hand.scheduled == [0, 0, 0]
    assert hand.of("status")[0] == FINISHED
    assert hand.in_rows == [None] * 3


def test_planning_again_before_the_step_changes_no_tables(hand):
    hand.submit([1] * 3)
    hand.submit([2] * 10)
    hand("schedule")
    tables, scheduled = hand.tables, hand.scheduled
    hand("schedule")
    assert (hand.tables, hand.scheduled) == (tables, scheduled)
