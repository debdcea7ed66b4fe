"""Who gets how many tokens: plain loops agree with the vectorised arithmetic."""

import functools

import numpy as np
import pytest
from fake_model import quick_jit

from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import grant_running, take, take_chunks, tiles_for

CONFIG = EngineConfig(max_num_seqs=5, max_num_batched_tokens=16, prefill_tile=8, max_num_requests=5)
"""At most 4 tiles of 8 tokens."""


@pytest.mark.parametrize(("tokens", "tiles"), [(0, 0), (1, 0), (2, 1), (8, 1), (9, 2), (16, 2)])
def test_one_token_needs_no_tile(tokens, tiles):
    assert tiles_for(np.array([tokens], np.int32), 8).tolist() == [tiles]


def test_take_serves_rows_in_order_until_the_budget_is_spent():
    jitted = quick_jit(take)
    rng = np.random.default_rng(0)
    for _ in range(50):
        want = rng.integers(0, 6, 5).astype(np.int32)
        order = rng.permutation(5).astype(np.int32)
        left = budget = int(rng.integers(-2, 16))
        expected = [0] * 5
        for row in order:
            expected[row] = max(min(want[row], left), 0)
            left -= expected[row]
        assert jitted(want, order, np.int32(budget)).tolist() == expected


def test_take_chunks_keeps_budget_and_tiles():
    jitted = quick_jit(functools.partial(take_chunks, CONFIG))
    rng = np.random.default_rng(1)
    bound = 0
    for _ in range(100):
        want = rng.choice([0, 2, 3, 9, 20], 5).astype(np.int32)
        order = rng.permutation(5).astype(np.int32)
        left, tiles = int(rng.integers(0, 17)), CONFIG.max_prefill_tiles
        granted = jitted(want, order, np.int32(left)).tolist()
        for row in order:
            expected = max(min(want[row], left, tiles * 8), 0)
            bound += tiles == 0 < min(want[row], left)
            assert granted[row] == expected
            left -= expected
            tiles -= -(-expected // 8) if want[row] > 1 else 0
    assert bound, "the tile limit was never met"


@pytest.mark.parametrize(
    ("policy", "left", "decode", "prefill"),
    [
        ("prefill_first", (1, 6, 1), [1, 0, 1], [0, 6, 0]),
        ("prefill_first", (1, 7, 1), [1, 0, 0], [0, 7, 0]),
        ("prefill_first", (1, 20, 1), [0, 0, 0], [0, 8, 0]),
        ("prefill_first", (20, 20, 1), [0, 0, 0], [8, 0, 0]),
        ("prefill_first", (3, 20, 1), [0, 0, 0], [3, 5, 0]),
        ("decode_first", (1, 20, 1), [1, 0, 1], [0, 6, 0]),
        ("decode_first", (20, 20, 1), [0, 0, 1], [7, 0, 0]),
        ("decode_first", (3, 20, 1), [0, 0, 1], [3, 4, 0]),
        ("decode_first", (1, 1, 1), [1, 1, 1], [0, 0, 0]),
    ],
)
def test_policies(make_hand, policy, left, decode, prefill):
    hand = make_hand(policy=policy)
    hand.seat(*[([1] * (n + 1), 1, 1) for n in left])
    grants = _granting(hand.config)(hand.state, np.arange(3, dtype=np.int32))
    assert grants.decode.tolist() == decode
    assert grants.prefill.tolist() == prefill


@functools.cache
def _granting(config):
    return quick_jit(functools.partial(grant_running, config))
