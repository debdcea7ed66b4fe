"""The checks themselves: each sees the damage it is there for."""

import jax
import numpy as np
import pytest

from oxidize_jax.scheduler import invariants
from oxidize_jax.scheduler.invariants import InvariantError
from oxidize_jax.types import replace


@pytest.fixture
def busy(hand):
    """Blocks 0 and 1 cached, 2 and 3 in row 0, 4 in row 1; request 3 waits."""
    hand.submit([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    hand("schedule")
    hand.submit([2, 2, 2, 2, 2])
    hand.submit([3, 3])
    hand.step()
    hand.submit([4])
    hand.commit({0: 50, 1: 60})
    assert hand.tables == [[2, 3], [4], []]
    assert np.flatnonzero(hand.state.pool.lru_pos >= 0).tolist() == [0, 1]
    return jax.tree.map(np.array, hand.state)


def test_a_good_state_passes(busy):
    invariants.check(busy)


DAMAGES = [
    ("below 0", lambda pool: pool.ref_count.__setitem__(7, -1)),
    ("every block once", lambda pool: pool.ref_count.__setitem__(7, 1)),
    ("every block once", lambda pool: pool.free_stack.__setitem__(0, 6)),
    ("every block once", lambda pool: pool.free_stack.__setitem__(0, 99)),
    ("every block once", lambda pool: pool.lru_pos.__setitem__(0, -1)),
    ("num_cached", lambda pool: pool.num_cached.__setitem__((), 1)),
    ("free block is still hashed", lambda pool: pool.hashed.__setitem__(7, True)),
    ("cached block is not hashed", lambda pool: pool.hashed.__setitem__(1, False)),
    ("ring head and tail", lambda pool: pool.ring_head.__setitem__((), 3)),
    ("outside the ring", lambda pool: pool.ring_head.__setitem__((), 1)),
    ("entry of another block", lambda pool: pool.ring.__setitem__(0, 5)),
    ("does not lead to a block", lambda pool: pool.index_slot.__setitem__(2, 0)),
    ("does not lead to a block", lambda pool: pool.index.__setitem__(pool.index_slot[0], 8)),
    ("that is not hashed", lambda pool: pool.index.__setitem__(empty_place(pool), 7)),
    ("has no serial", lambda pool: pool.serial.__setitem__(0, 0)),
    ("have one serial", lambda pool: pool.serial.__setitem__(0, pool.serial[1])),
    ("not given out yet", lambda pool: pool.next_serial.__setitem__((), 2)),
    ("hash does not lead", lambda pool: pool.block_hash.__setitem__((0, 0), far_hash(pool))),
    ("serial of no registration", lambda pool: pool.serial.__setitem__(7, 9)),
    ("place of no entry", lambda pool: pool.index_slot.__setitem__(7, 0)),
]


def empty_place(pool):
    return np.flatnonzero(pool.index == 8)[0]


def far_hash(pool):
    return (int(pool.index_slot[0]) + 16) % 32


@pytest.mark.parametrize(("message", "damage"), DAMAGES)
def test_damage_to_the_pool_is_seen(busy, message, damage):
    damage(busy.pool)
    with pytest.raises(InvariantError, match=message):
        invariants.check_pool(busy.pool)


@pytest.mark.parametrize(
    ("message", "part", "field", "place", "value"),
    [
        ("empty table entry", "rows", "num_blocks", 0, 3),
        ("behind the table", "rows", "num_blocks", 0, 1),
        ("idle row holds", "rows", "request", 1, 6),
        ("row and request disagree", "requests", "row", 1, 2),
        ("names another's row", "requests", "row", 3, 1),
        ("computed too much", "requests", "num_computed", 2, 9),
        ("KV without blocks", "rows", "block_table", 0, None),
        ("waiting one", "requests", "status", 2, 1),
        ("number of table entries", "rows", "block_table", (1, 0), 3),
        ("KV without a row", "requests", "num_computed", 3, 1),
        ("does not hold its tokens", "requests", "tokens", (1, 2), 9),
        ("computed tokens without KV", "rows", "kv_len", 0, 3),
        ("KV of tokens that are not computed", "requests", "num_computed", 1, 2),
        ("an idle row has KV", "rows", "kv_len", 2, 1),
        ("a fork of itself", "requests", "fork_of", 2, 2),
    ],
)
def test_damage_to_rows_and_requests_is_seen(busy, message, part, field, place, value):
    if value is None:  # the row gives a block back that its tokens stand in
        busy.rows.block_table[0, 1], busy.rows.num_blocks[0] = 8, 1
        busy.pool.ref_count[3] = 0
        busy.pool.free_stack[int(busy.pool.num_free)] = 3
        pool = replace(busy.pool, num_free=busy.pool.num_free + np.int32(1))
        busy = replace(busy, pool=pool)
    else:
        getattr(getattr(busy, part), field)[place] = value
    with pytest.raises(InvariantError, match=message):
        invariants.check(busy)
