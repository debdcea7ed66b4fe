"""The prefix cache: what is registered is found, and nothing else is."""

import numpy as np
import pytest
from fake_model import make_hashes_constant

from oxidize_jax.blocks import hashing
from oxidize_jax.blocks.pool import root_parent
from oxidize_jax.blocks.prefix import PROBES

A, B, C, D = ([w] * 4 for w in (1, 2, 3, 4))
"""Contents of blocks."""


def test_lookup_finds_the_longest_registered_prefix(make_pool):
    pool = make_pool(6)
    pool.allocate(3)
    pool.register_sequence([2, 0, 1], [A, B, C])
    assert pool.lookup([A, B, C, D]) == [2, 0, 1]
    assert pool.lookup([A, B, D, C]) == [2, 0]
    assert pool.lookup([A, C]) == [2]
    assert pool.lookup([B, C]) == []
    assert pool.lookup([]) == []


def test_lookup_stops_at_the_limit(make_pool):
    pool = make_pool(6)
    pool.allocate(3)
    end = pool.register_sequence([0, 1, 2], [A, B, C])
    assert pool.lookup([A, B, C], limit=2) == [0, 1]
    assert pool.lookup([A, B, C], limit=0) == []
    assert pool.find([A, B, C]) == ([0, 1, 2], end)
    assert pool.find([A, B, C], limit=0) == ([], pool.root())


def test_what_a_lookup_gives_lets_the_chain_go_on(make_pool):
    pool = make_pool(6)
    pool.allocate(3)
    pool.register_sequence([0, 1], [A, B])
    blocks, chain = pool.find([A, B, C])
    pool.register((2, C, chain))
    assert (blocks, pool.lookup([A, B, C])) == ([0, 1], [0, 1, 2])


def test_an_equal_block_under_another_parent_is_another_block(make_pool):
    pool = make_pool(6)
    pool.allocate(4)
    pool.register_sequence([0, 1], [A, C])
    pool.register_sequence([2, 3], [B, C])
    assert pool.lookup([A, C]) == [0, 1]
    assert pool.lookup([B, C]) == [2, 3]
    assert pool.lookup([C]) == []


def test_salts_do_not_share(make_pool):
    pool = make_pool(6)
    pool.allocate(2)
    pool.register_sequence([0], [A], salt=7)
    assert pool.lookup([A], salt=7) == [0]
    assert pool.lookup([A], salt=0) == []
    pool.register_sequence([1], [A], salt=0)
    assert (pool.lookup([A], salt=7), pool.lookup([A], salt=0)) == ([0], [1])


def test_a_block_equal_to_a_registered_one_goes_on_under_its_serial(make_pool):
    pool = make_pool(6)
    pool.allocate(4)
    first = pool.register_sequence([0, 1], [A, B])
    second = pool.register_sequence([2, 3], [A, B])
    assert second == first
    assert pool.state.hashed.tolist() == [True, True, False, False, False, False]
    pool.release(3, 2)  # never registered: free, not cached
    assert (pool.free, pool.cached) == ([2, 3, 4, 5], [])
    pool.release(1, 0)
    assert pool.lookup([A, B]) == [0, 1]


def test_kv06_equal_blocks_registered_together_are_registered_once(make_pool):
    pool = make_pool(6)
    pool.allocate(6)
    root, salted = pool.root(), pool.root(1)
    chains = pool.register((4, A, root), (3, B, root), (2, A, root), (1, A, salted), (0, A, root))
    assert pool.state.hashed.tolist() == [False, True, False, True, True, False]
    assert chains[0] == chains[2] == chains[4]
    assert len({chain.parent for chain in chains}) == 3
    # The chains go on alike, and a duplicate takes nothing along when it is dropped.
    pool.register((5, C, chains[4]))
    pool.release(0)
    pool.release(2)
    assert pool.lookup([A, C]) == [4, 5]
    assert pool.cached == []


def test_the_survivor_of_two_equal_chains_is_found_after_the_other_was_evicted(make_pool):
    pool = make_pool(3)
    pool.allocate(2)
    pool.register_sequence([0], [A])
    pool.register_sequence([1], [A])
    pool.release(0)
    assert pool.allocate(2) == [2, 0]  # the registered one is evicted
    assert pool.lookup([A]) == []
    pool.register_sequence([1], [A])
    assert pool.lookup([A]) == [1]


def test_evicting_a_middle_block_cuts_the_match(make_pool):
    pool = make_pool(6)
    pool.allocate(6)
    pool.register_sequence([0, 1, 2], [A, B, C])
    pool.release(1, 2, 0)
    assert pool.allocate(1) == [1]
    assert pool.lookup([A, B, C]) == [0]
    # The middle comes back under a new serial: what named the old one is not behind it.
    pool.share(0)
    pool.register_sequence([0, 1], [A, B])
    assert pool.lookup([A, B, C]) == [0, 1]
    assert pool.cached == [2]


def test_a_full_index_costs_hits_and_nothing_else(make_fresh_pool, monkeypatch):
    make_hashes_constant(monkeypatch)
    lanes = PROBES + 2
    pool = make_fresh_pool(num_blocks=lanes, lanes=lanes)
    pool.allocate(lanes)
    root = pool.root()
    pool.register(*[(b, [b] * 4, root) for b in range(lanes)])
    found = [b for b in range(lanes) if pool.lookup([[b] * 4]) == [b]]
    assert len(found) == PROBES
    pool.release(*range(lanes))
    assert sorted(pool.cached) == found
    lost = [b for b in range(lanes) if b not in found]
    assert sorted(pool.free) == lost
    # Evicting one makes room for one.
    taken = pool.allocate(len(lost) + 1)
    assert taken == [*lost[::-1], found[0]]
    pool.register((taken[0], [50] * 4, root), (taken[1], [51] * 4, root))
    hits = [pool.lookup([[50] * 4]), pool.lookup([[51] * 4])]
    assert sorted(hits) == [[], [taken[0]]] or sorted(hits) == [[], [taken[1]]]


def test_kv11_a_constant_hash_never_serves_another_prompts_blocks(make_fresh_pool, monkeypatch):
    make_hashes_constant(monkeypatch)
    pool = make_fresh_pool(num_blocks=6, lanes=6)
    pool.allocate(6)
    pool.register_sequence([0, 1], [A, C])
    pool.register_sequence([2, 3], [B, C])
    pool.register_sequence([4], [A], salt=1)
    assert set(np.asarray(pool.state.block_hash[:5]).ravel().tolist()) == {5}
    assert pool.lookup([A, C, A]) == [0, 1]
    assert pool.lookup([B, C, A]) == [2, 3]
    assert pool.lookup([A, C], salt=1) == [4]
    assert pool.lookup([C]) == []
    assert pool.lookup([D]) == []
    # Nor does it where equal blocks under different parents are registered together.
    pool.release(5)
    pool.release(3, 2)
    assert pool.allocate(2) == [5, 3]
    pool.register((5, D, pool.root(2)), (3, D, pool.root(3)))
    assert (pool.lookup([D], salt=2), pool.lookup([D], salt=3)) == ([5], [3])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([10, 20, 1, 2], [41, 19, 1, 2]),
        ([1, 2, 3, 4], [2, 1, 3, 4]),
        ([0, 0, 0, 0], [0, 0, 0, 1]),
        ([5, 5, 6, 6], [6, 6, 5, 5]),
    ],
)
def test_kv11_near_blocks_have_different_hashes(one, other):
    root = hashing.root_hash(np.zeros((), np.int32))
    hashes = hashing.chain_hash(root, np.array([one, other], np.int32))
    assert (np.asarray(hashes[0]) != np.asarray(hashes[1])).all()


def test_hashes_depend_on_salt_parent_and_order_and_do_not_collide_in_10000():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (5000, 4)).astype(np.int32)
    tokens = np.unique(tokens, axis=0)
    words = set()
    for salt in (0, 1):
        root = hashing.root_hash(np.full((), salt, np.int32))
        first = np.asarray(hashing.chain_hash(root, tokens))
        words |= {tuple(w) for w in first.tolist()}
    assert len(words) == 2 * len(tokens)


def test_prefix_hashes_are_the_chain_of_single_hashes():
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4)
    chain = hashing.root_hash(np.full((), 3, np.int32))
    hashes = hashing.prefix_hashes(chain, tokens)
    for block, expected in zip(tokens, np.asarray(hashes), strict=True):
        chain = hashing.chain_hash(chain, block)
        np.testing.assert_array_equal(chain, expected)


def test_root_parents_are_no_serials_and_one_per_salt():
    salts = np.array([0, 1, 2, 2**31 - 1], np.int32)
    assert root_parent(salts).tolist() == [-1, -2, -3, -(2**31)]
