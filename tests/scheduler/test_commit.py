"""Commit: what a step computed becomes part of the state."""

import numpy as np
import pytest

from oxidize_jax.sampling.sampler import SampleOutput
from oxidize_jax.scheduler.state import FINISHED, LENGTH, NOT_FINISHED, RUNNING, STOPPED


def test_a_step_is_counted_and_the_plan_forgotten(hand):
    hand.submit([1] * 10)
    hand.submit([2] * 2)
    hand("schedule")
    assert hand.scheduled == [8, 0, 0]
    hand.commit()
    assert hand.of("num_computed")[:2] == [8, 0]
    assert hand.of("num_tokens")[:2] == [10, 2]  # nothing was sampled
    assert hand.scheduled == [0, 0, 0]
    totals = hand.state.totals
    assert (totals.steps, totals.scheduled_tokens, totals.generated_tokens) == (1, 8, 0)
    hand("schedule")
    assert hand.scheduled == [2, 2, 0]
    hand.commit({0: 50, 1: 60})
    assert (hand.tokens(0)[10:], hand.tokens(1)[2:]) == ([50], [60])
    totals = hand.state.totals
    assert (totals.steps, totals.scheduled_tokens, totals.generated_tokens) == (2, 12, 2)


def test_only_full_blocks_are_registered_with_their_tokens(hand):
    hand.submit([1, 2, 3, 4, 5, 6])
    hand("schedule")
    assert not hand.state.pool.hashed.any()  # nothing is written before the step
    hand.commit({0: 50})
    pool = hand.state.pool
    assert hand.tables[0] == [0, 1]
    assert pool.hashed.tolist() == [True] + [False] * 7
    assert pool.block_tokens[0].tolist() == [1, 2, 3, 4]
    assert hand.state.rows.chain_parent[0] == pool.serial[0]
    for token in (51, 52):
        hand("schedule")
        hand.commit({0: token})
    pool = hand.state.pool
    assert pool.hashed[:2].tolist() == [True, True]
    assert pool.block_tokens[1].tolist() == [5, 6, 50, 51]  # 52 is not computed yet
    assert pool.parent[1] == pool.serial[0]


def test_a_chunk_registers_all_the_blocks_it_filled_of_every_row(hand):
    hand.seat(([1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 3), ([4] * 3, 0, 1), ([1, 2, 3, 4, 9], 0, 2))
    hand.edit(plan={"num_scheduled": np.array([9, 3, 5], np.int32)})
    hand.commit({0: 50, 1: 50, 2: 50})
    pool = hand.state.pool
    # Row 2 filled a block equal to the first of row 0: its own stays unregistered.
    assert pool.hashed.tolist() == [True, True, False, False, False, False, False, False]
    assert pool.parent[:2].tolist() == [-1, pool.serial[0]]
    assert hand.state.rows.chain_parent.tolist() == [pool.serial[1], -1, pool.serial[0]]
    assert hand.state.rows.chain_hash[2].tolist() == pool.block_hash[0].tolist()


def test_without_prefix_caching_nothing_is_registered(make_hand):
    hand = make_hand(enable_prefix_caching=False)
    hand.seat(([1] * 9, 0, 3))
    hand.edit(plan={"num_scheduled": np.array([9, 0, 0], np.int32)})
    hand.commit({0: 50})
    assert hand.of("num_computed")[0] == 9
    assert not hand.state.pool.hashed.any()


def one_step_from(hand, *, tokens=3, token=50, **fields):
    """A request with ``tokens`` tokens of which it computes the last, and ``token`` comes."""
    hand.seat(([7] * tokens, tokens - 1, -(-tokens // 4)))
    requests = {"prompt_len": 2, "max_tokens": 9, "min_tokens": 0} | fields
    of_slot = {}
    for name, value in requests.items():
        of_slot[name] = getattr(hand.state.requests, name).copy()
        of_slot[name][0] = value
    hand.edit(requests=of_slot, plan={"num_scheduled": np.array([1, 0, 0], np.int32)})
    hand.commit({0: token})
    assert hand.tokens(0) == [7] * tokens + [token]
    return hand.of("status")[0], hand.of("finish_reason")[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (RUNNING, NOT_FINISHED)),
        ({"stop_ids": [50, 4]}, (FINISHED, STOPPED)),
        ({"stop_ids": [4, 50]}, (FINISHED, STOPPED)),
        ({"stop_ids": [4, 7]}, (RUNNING, NOT_FINISHED)),
        ({"max_tokens": 5}, (RUNNING, NOT_FINISHED)),
        ({"max_tokens": 4}, (FINISHED, LENGTH)),
        # On the last token allowed a stop id is still a stop.
        ({"max_tokens": 4, "stop_ids": [50, 4]}, (FINISHED, STOPPED)),
        # The fourth token is the second new one.
        ({"min_tokens": 3, "stop_ids": [50, 4]}, (FINISHED, STOPPED)),
        ({"min_tokens": 4, "stop_ids": [50, 4]}, (RUNNING, NOT_FINISHED)),
        ({"min_tokens": 9, "max_tokens": 4}, (FINISHED, LENGTH)),
    ],
)
def test_finish_reasons(hand, fields, expected):
    assert one_step_from(hand, **fields) == expected


def test_the_buffer_ends_at_max_model_len(hand):
    assert one_step_from(hand, tokens=23, max_tokens=24) == (FINISHED, LENGTH)
    assert hand.of("num_tokens")[0] == 24


@pytest.mark.parametrize(("wanted", "rank"), [(-1, 0), (0, 7)])
def test_logprobs_are_kept_and_ranks_and_alternatives_only_where_wanted(make_hand, wanted, rank):
    hand = make_hand(max_logprobs=2)
    hand.seat(([1] * 3, 2, 1), ([2] * 2, 1, 1))
    hand.edit(
        requests={"num_logprobs": np.array([wanted, 2] + [-1] * 4, np.int32)},
        plan={"num_scheduled": np.array([1, 1, 0], np.int32)},
    )
    sampled = SampleOutput(
        tokens=np.array([50, 60, 70], np.int32),
        logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
        top_ids=np.array([[50, 51], [60, 61], [70, 71]], np.int32),
        top_logprobs=np.array([[-1.0, -1.5], [-2.0, -2.5], [-3.0, -3.5]], np.float32),
        ranks=np.array([1, 7, 9], np.int32),
    )
    hand("commit", np.array([1, 0, 3], np.int32), sampled)  # lane 2 is padding
    requests = hand.state.requests
    assert (hand.tokens(0), hand.tokens(1)) == ([1, 1, 1, 60], [2, 2, 50])
    assert (requests.logprobs[0, 3], requests.logprobs[1, 2]) == (-2.0, -1.0)
    assert requests.top_ids[1, 2].tolist() == [50, 51]
    assert requests.top_logprobs[1, 2].tolist() == [-1.0, -1.5]
    assert requests.ranks[1].tolist() == [0, 0, 1] + [0] * (requests.ranks.shape[1] - 3)
    assert not requests.top_ids[0].any()
    assert requests.ranks[0].tolist() == [0, 0, 0, rank] + [0] * (requests.ranks.shape[1] - 4)
    assert np.count_nonzero(requests.logprobs) == 2
