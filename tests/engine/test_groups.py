"""Groups and forks through the host engine: ids, updates, aborts, statistics."""

import dataclasses

import jax
import pytest
from fake_model import FakeModel, solo
from host_engine import CONFIG, assert_clean, request, run, tokens

from oxidize_jax.engine.engine import Engine

KEYS = [(0, 1), (0, 2), (0, 3), (0, 4)]
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def engine():
    return Engine(CONFIG, FakeModel(), None, check_invariants=True)


def totals(engine):
    return jax.device_get(engine.state.scheduler.totals)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_kv13_every_sequence_of_a_group_is_the_same_as_alone(engine, n):
    ids = engine.add_group(request(PROMPT, 4), KEYS[:n])
    updates = run(engine)
    assert sorted(updates) == ids
    for request_id in ids:
        assert tokens(updates[request_id]) == solo(PROMPT, 4)[6:]
        assert updates[request_id][-1].finish_reason == "length"
    if n < 4:  # of four, the last two wait for a slot until the parent has gone
        assert totals(engine).forked_tokens == 5 * (n - 1)
    assert_clean(engine)


def test_kv16_aborting_a_group_leaves_nothing(engine):
    for _ in range(100):
        ids = engine.add_group(request(PROMPT, 20), KEYS[:2])
        engine.step(2)
        for request_id in ids:
            assert engine.abort(request_id)
        engine.step(1)
        rows = jax.device_get(engine.state.scheduler.rows.request)
        assert (rows == CONFIG.max_num_requests).all()
        assert engine.num_unfinished == 0
        assert not engine._slots.running
        assert engine._queue.is_empty
    assert_clean(engine)


def test_a_fork_goes_on_from_where_its_parent_stands(engine):
    parent = engine.add(request(PROMPT, 9))
    made = tokens(engine.step(4))
    assert made
    (child,) = engine.fork(parent, KEYS[:1])
    updates = run(engine)
    rest = solo(PROMPT, 9)[6 + len(made) :]
    assert tokens(updates[parent]) == tokens(updates[child]) == rest
    assert_clean(engine)


def test_a_fork_that_cannot_be_is_a_value_and_changes_nothing(engine):
    parent = engine.add(request(PROMPT, 9))
    assert engine.fork(parent, KEYS[:1]) is None  # still queued
    engine.step(2)
    before = jax.device_get(engine.state.scheduler.requests)
    assert engine.fork(parent, KEYS[:3]) is None  # two slots are free
    assert engine.fork(77, KEYS[:1]) is None
    after = jax.device_get(engine.state.scheduler.requests)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, after))
    assert len(engine.fork(parent, KEYS[:2])) == 2
    updates = run(engine)
    assert len(updates) == 3
    assert engine.fork(parent, KEYS[:1]) is None  # it has finished
    assert_clean(engine)


@pytest.mark.parametrize("keys", [[], [(1,)], [(0, -1)], ["ab"]])
def test_keys_that_are_none_are_refused(engine, keys):
    parent = engine.add(request(PROMPT, 9))
    engine.step(1)
    with pytest.raises(ValueError, match="key"):
        engine.fork(parent, keys)
    with pytest.raises(ValueError, match="key"):
        engine.add_group(request(PROMPT), keys)
    assert list(run(engine)) == [parent]
    assert_clean(engine)


def test_after_a_reset_of_the_cache_nothing_from_before_is_hit(engine):
    def cached(prompt):
        (updates,) = run_one(prompt)
        return updates[-1].num_cached_tokens

    def run_one(prompt):
        engine.add(request(prompt, 3))
        return run(engine).values()

    assert [cached(PROMPT), cached(PROMPT)] == [0, 4]
    running = engine.add(request([*PROMPT, 1], 9))
    begun = tokens(engine.step(2))
    engine.reset_prefix_cache()
    other = engine.add(request([*PROMPT, 1, 2], 3))
    updates = run(engine)
    assert begun + tokens(updates[running]) == solo([*PROMPT, 1], 9)[7:]
    assert updates[other][-1].num_cached_tokens == 0
    assert tokens(updates[other]) == solo([*PROMPT, 1, 2], 3)[8:]
    # What ran on over the reset is not found either, what began after it is.
    assert cached([*solo([*PROMPT, 1], 9)[:12], 3]) == 4
    assert_clean(engine)


def test_statistics_of_each_step(engine):
    engine.add_group(request(PROMPT, 4), KEYS[:2])
    engine.step(16)
    stats = engine.step_stats
    assert [s.step for s in stats] == list(range(len(stats)))
    assert [s.num_running for s in stats[:3]] == [1, 2, 2]
    assert [s.num_waiting for s in stats[:3]] == [1, 0, 0]
    assert [s.scheduled_tokens for s in stats[:3]] == [6, 2, 2]
    assert [s.decode_rows for s in stats[:3]] == [0, 2, 2]
    assert [s.forked_tokens for s in stats[:3]] == [0, 5, 0]
    # The parent copies the last block of the prompt when it writes behind it.
    assert [s.copies for s in stats[:3]] == [0, 1, 0]
    assert [s.blocks_used for s in stats[:3]] == [2, 3, 3]
    assert [s.wasted_slots for s in stats[:2]] == [2, 3]
    for s in stats:
        assert s.blocks_used + s.blocks_cached + s.blocks_free == CONFIG.num_blocks
    engine.add(request(PROMPT, 1))
    engine.step(16)
    assert engine.step_stats[0].step == len(stats)
    assert engine.step_stats[0].cached_tokens == 4


def test_the_secret_changes_hashes_and_no_token():
    hashes = []
    for secret in (1, 2):
        engine = Engine(CONFIG, FakeModel(), None, secret=secret)
        request_id = engine.add(request(PROMPT, 5))
        assert tokens(run(engine)[request_id]) == solo(PROMPT, 5)[6:]
        hashes.append(jax.device_get(engine.state.scheduler.pool.block_hash[:2]))
    assert (hashes[0] != hashes[1]).any()
    drawn = {Engine(CONFIG, FakeModel(), None)._device.secret for _ in range(3)}
    assert len(drawn) > 1


def test_a_request_that_does_not_use_the_cache_neither_reads_nor_fills_it(engine):
    first = engine.add(dataclasses.replace(request(PROMPT, 3), use_cache=False))
    run(engine)
    assert first == 0
    assert not jax.device_get(engine.state.scheduler.pool.hashed).any()
    for use, cached in ((True, 0), (False, 0), (True, 4)):
        request_id = engine.add(dataclasses.replace(request(PROMPT, 3), use_cache=use))
        updates = run(engine)[request_id]
        assert updates[-1].num_cached_tokens == cached
        assert tokens(updates) == solo(PROMPT, 3)[6:]
    assert_clean(engine)
