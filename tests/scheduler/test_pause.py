"""Paused requests: who is planned nothing, and who joins the plan that stands."""

import numpy as np
import pytest

from oxidize_jax.scheduler.pause import MaskUpdate

NEVER = 2**31 - 1


def update(slot, pause_at, words=0):
    masks = np.full((1, words), 2**32 - 1, np.uint32)
    return MaskUpdate(np.array([slot], np.int32), masks, np.array([pause_at], np.int32))


def paused_beside_a_prompt(hand, length):
    """Row 0 has its mask's last token; a prompt of ``length`` tokens is planned in row 1."""
    hand.seat(([1, 2, 3], 2, 1))
    hand("set_masks", update(0, 3))
    hand.submit([4] * length)
    hand("schedule")
    assert hand.scheduled[0] == 0


@pytest.mark.parametrize(("length", "joins"), [(7, 1), (8, 0), (9, 0)])
def test_a_resumed_row_joins_the_plan_where_the_budget_has_a_token_left(hand, length, joins):
    paused_beside_a_prompt(hand, length)
    hand("set_masks", update(0, NEVER))
    assert hand.scheduled[:2] == [joins, min(length, 8)]
    hand.commit({row: 9 for row in (0, 1) if (joins, length < 9)[row]})
    hand("schedule")
    assert hand.scheduled[0] == 1


@pytest.mark.parametrize(("length", "joins"), [(31, 1), (32, 0), (40, 0)])
def test_a_resumed_row_does_not_overfill_the_one_shape_of_a_deterministic_step(
    make_hand, length, joins
):
    hand = make_hand(deterministic=True, max_num_batched_tokens=64, max_model_len=48, num_blocks=24)
    assert hand.config.step_tokens == 32
    paused_beside_a_prompt(hand, length)
    hand("set_masks", update(0, NEVER))
    assert hand.scheduled[:2] == [joins, min(length, 32)]


def test_a_resumed_row_that_needs_a_block_waits_for_the_next_plan(hand):
    hand.seat(([1, 2, 3, 4, 5], 4, 1))
    hand("set_masks", update(0, 5))
    hand.submit([4, 5])
    hand("schedule")
    hand("set_masks", update(0, NEVER))
    assert hand.scheduled[:2] == [0, 2]
    hand.step()
    assert hand.scheduled[:2] == [1, 1]
