"""Forks: blocks shared until one writes, every child the same as alone."""

import random

import jax
import numpy as np
import pytest
from fake_model import VOCAB, Driver, quick_jit, small_config, solo

from oxidize_jax.scheduler.fork import Fork, fork
from oxidize_jax.scheduler.state import (
    ABORTED,
    FINISHED,
    LENGTH,
    NO_TOKEN,
    RUNNING,
    STOPPED,
    WAITING,
)

WIDE = small_config(max_num_batched_tokens=64)
CHUNK = small_config(max_num_batched_tokens=4, num_blocks=10)
POOL_4 = small_config(max_num_batched_tokens=8, num_blocks=4, max_model_len=64)
NO_CACHE = small_config(max_num_batched_tokens=5, enable_prefix_caching=False)


def prompt_of(length, seed=1):
    rng = random.Random(seed * 100 + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def submit_group(driver, prompt, counts, **options):
    """A parent and its forks, with ``counts`` tokens each."""
    parent = driver.submit(prompt, counts[0], **options)
    return [parent, *(driver.submit(prompt, c, fork_of=parent, **options) for c in counts[1:])]


def tables(driver):
    rows = driver.host.rows
    return [t[:n].tolist() for t, n in zip(rows.block_table, rows.num_blocks, strict=True) if n]


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_forks_share_every_block_of_the_prompt_and_copy_the_last_when_they_write(length):
    prompt = prompt_of(length)
    driver = Driver(WIDE, seed=length)
    slots = submit_group(driver, prompt, [4, 4, 4])
    driver.step()  # plans the parent's prompt
    assert [driver.status(s) for s in slots] == [RUNNING, WAITING, WAITING]
    driver.step()  # computes it; its forks get rows
    blocks, full = -(-length // 4), length // 4
    assert [driver.status(s) for s in slots] == [RUNNING] * 3
    kept = [t[:blocks] for t in tables(driver)]
    assert kept[1] == kept[2]
    assert kept[0][:full] == kept[1][:full]
    used = WIDE.num_blocks - int(driver.host.pool.num_free) - int(driver.host.pool.num_cached)
    # The parent wrote a token of its own already: into a copy, or a new block.
    assert used == blocks + 1
    driver.step()  # the forks ran the last token of the prompt, and write next
    used = WIDE.num_blocks - int(driver.host.pool.num_free) - int(driver.host.pool.num_cached)
    own = [-(-(length + written) // 4) - full for written in (2, 1, 1)]
    assert used == full + sum(own)
    driver.run()
    for slot in slots:
        assert driver.tokens(slot) == solo(prompt, 4)
    driver.assert_clean()
    assert driver.host.totals.forked_tokens == 2 * (length - 1)
    assert driver.host.totals.copies == (0 if length % 4 == 0 else 2)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_kv13_forks_make_as_many_tokens_as_their_parent(length):
    driver = Driver(CHUNK, seed=2)
    slots = submit_group(driver, prompt_of(length), [4, 4])
    driver.run()
    for slot in slots:
        assert driver.tokens(slot) == solo(prompt_of(length), 4)
        assert driver.reason(slot) == LENGTH
    driver.assert_clean()


@pytest.mark.parametrize("config", [WIDE, POOL_4, NO_CACHE], ids=["wide", "tight", "no cache"])
def test_kv12_each_holder_of_a_shared_block_releases_it_once(config):
    prompt = prompt_of(5)
    driver = Driver(config, seed=3)
    slots = submit_group(driver, prompt, [1, 3, 6])
    driver.run()
    assert [driver.tokens(s) for s in slots] == [solo(prompt, n) for n in (1, 3, 6)]
    driver.assert_clean()


@pytest.mark.parametrize("n", [2, 4])
def test_kv15_a_pool_too_small_for_the_forks_delays_them_and_harms_nobody(n):
    config = small_config(max_num_batched_tokens=8, num_blocks=3, max_model_len=12)
    driver = Driver(config, seed=4)
    other = driver.submit(prompt_of(3, seed=9), 5)
    slots = submit_group(driver, prompt_of(5), [4] * n)
    driver.run()
    assert driver.tokens(other) == solo(prompt_of(3, seed=9), 5)
    for slot in slots:
        assert driver.tokens(slot) == solo(prompt_of(5), 4)
    driver.assert_clean()


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_a_fork_whose_parent_is_aborted_goes_on_alone(when):
    prompt = prompt_of(9)
    driver = Driver(CHUNK, seed=5)
    parent, child = submit_group(driver, prompt, [6, 6])
    for _ in range({"waiting": 0, "prefill": 2, "decode": 5}[when]):
        driver.step()
    driver.abort(parent)
    if when == "waiting":  # the slot goes to another before the scheduler has run
        other = driver.submit(prompt_of(6, seed=7), 3)
        assert other == parent
    driver.run()
    assert driver.tokens(child) == solo(prompt, 6)
    if when == "waiting":
        assert driver.tokens(other) == solo(prompt_of(6, seed=7), 3)
    driver.assert_clean()


@pytest.mark.parametrize("rows", [1, 2])
def test_more_forks_than_rows_take_turns(rows):
    config = small_config(max_num_batched_tokens=8, max_num_seqs=rows)
    driver = Driver(config, seed=6)
    slots = submit_group(driver, prompt_of(9), [3, 9, 5, 2])
    later = driver.submit(prompt_of(2, seed=8), 2)
    driver.run()
    for slot, count in zip(slots, [3, 9, 5, 2], strict=True):
        assert driver.tokens(slot) == solo(prompt_of(9), count)
    assert driver.tokens(later) == solo(prompt_of(2, seed=8), 2)
    driver.assert_clean()


def test_a_late_fork_does_not_write_into_what_the_parent_registered():
    config = small_config(max_num_batched_tokens=8, max_num_seqs=2)
    driver = Driver(config, seed=7)
    other = driver.submit(prompt_of(2, seed=3), 9)
    parent, child = submit_group(driver, prompt_of(6), [12, 7])
    while driver.status(child) == WAITING:
        driver.step()
    # By then the parent has filled the block in which the prompt ends.
    assert driver.status(other) == FINISHED
    assert driver.host.requests.num_tokens[parent] > 9
    driver.run()
    assert driver.tokens(parent) == solo(prompt_of(6), 12)
    assert driver.tokens(child) == solo(prompt_of(6), 7)
    driver.assert_clean()
    again = driver.submit(prompt_of(6) + solo(prompt_of(6), 12)[6:12], 3)
    driver.run()
    assert driver.num_cached(again) == 11
    assert driver.tokens(again) == solo(prompt_of(6) + solo(prompt_of(6), 12)[6:12], 3)


def test_a_preempted_fork_is_computed_again():
    driver = Driver(WIDE, seed=8)
    parent, child = submit_group(driver, prompt_of(7), [6, 8])
    for _ in range(4):
        driver.step()
    driver.preempt(int(driver.host.requests.row[child]))
    driver.run()
    assert driver.tokens(parent) == solo(prompt_of(7), 6)
    assert driver.tokens(child) == solo(prompt_of(7), 8)
    driver.assert_clean()


def test_rows_and_blocks_are_kept_for_forks_that_come_before_others():
    config = small_config(max_num_batched_tokens=4, max_num_seqs=2, num_blocks=40)
    driver = Driver(config, seed=9)
    parent, child = submit_group(driver, prompt_of(10), [5, 5])
    later = driver.submit([5], 5)
    for _ in range(3):
        driver.step()
    assert [driver.status(s) for s in (parent, child, later)] == [RUNNING, WAITING, WAITING]
    driver.step()
    assert [driver.status(s) for s in (parent, child, later)] == [RUNNING, RUNNING, WAITING]
    driver.run()
    assert driver.tokens(later) == solo([5], 5)


_fork = {c: quick_jit(lambda state, new, c=c: fork(c, state, new)) for c in (WIDE, CHUNK)}


def branch(driver, parent, children, last_tokens=None):
    """The event; whether it was done."""
    n, r = 3, driver.config.max_num_requests
    slots = np.full((n,), r, np.int32)
    slots[: len(children)] = children
    last = np.full((n,), NO_TOKEN, np.int32)
    last[: len(last_tokens or [])] = last_tokens or []
    new = Fork(
        parent=np.int32(parent),
        children=slots,
        keys=np.arange(2 * n, dtype=np.uint32).reshape(n, 2),
        arrivals=np.arange(100, 100 + n, dtype=np.int32),
        last_tokens=last,
        last_logprobs=np.full((n,), -0.5, np.float32),
    )
    scheduler, ok = _fork[driver.config](driver.state.scheduler, new)
    driver.host = jax.tree.map(np.array, driver.host)
    if bool(ok):
        # New requests in these slots: what was in them before is over.
        for slot in children:
            driver.host.requests.status[slot] = 0
    else:
        same = jax.tree.map(np.array_equal, jax.device_get(scheduler), driver.host)
        assert jax.tree.all(same)
    driver._set_scheduler(scheduler)
    return bool(ok)


def test_fork_event_copies_a_request_as_it_stands():
    driver = Driver(WIDE, seed=10)
    parent = driver.submit(prompt_of(5), 9)
    for _ in range(4):
        driver.step()
    tokens = driver.tokens(parent)
    assert len(tokens) == 8
    assert branch(driver, parent, [3, 5])
    assert driver.tokens(3) == driver.tokens(5) == tokens
    assert driver.host.requests.key[5].tolist() == [2, 3]
    driver.run()
    for slot in (parent, 3, 5):
        assert driver.tokens(slot) == solo(prompt_of(5), 9)
    assert driver.host.totals.forked_tokens == 2 * 7
    driver.assert_clean()


def test_fork_event_with_another_last_token_is_what_a_beam_does():
    driver = Driver(WIDE, seed=11)
    parent = driver.submit(prompt_of(6), 8)
    for _ in range(5):
        driver.step()
    tokens = driver.tokens(parent)
    assert branch(driver, parent, [1, 2], last_tokens=[11, 12])
    assert driver.tokens(1) == [*tokens[:-1], 11]
    assert driver.host.requests.logprobs[2, len(tokens) - 1] == np.float32(-0.5)
    kept = driver.host.requests.logprobs[[parent, 2], : len(tokens) - 1]
    assert (kept[0] == kept[1]).all()
    driver.run()
    assert driver.tokens(parent) == solo(prompt_of(6), 8)
    for slot, last in ((1, 11), (2, 12)):
        begin = [*tokens[:-1], last]
        assert driver.tokens(slot) == solo(begin, 8 - (len(tokens) - 6))
    driver.assert_clean()


def test_fork_event_is_all_or_nothing():
    driver = Driver(CHUNK, seed=12)
    parent = driver.submit(prompt_of(6), 8)
    other = driver.submit(prompt_of(2), 8)
    assert not branch(driver, parent, [3, other])  # a slot that is in use
    assert not branch(driver, 5, [3])  # no parent
    assert not branch(driver, parent, [3], last_tokens=[7])  # a token of the prompt
    assert branch(driver, parent, [2, 3])  # of one that waits
    driver.run()
    for slot in (parent, 2, 3):
        assert driver.tokens(slot) == solo(prompt_of(6), 8)
    assert not branch(driver, parent, [4])  # it has finished
    driver.assert_clean()


def test_random_groups_with_aborts_and_preemption_equal_their_solo_runs():
    rng = random.Random(5)
    for config in (CHUNK, POOL_4, NO_CACHE):
        driver = Driver(config, seed=13)
        longest = min(config.num_blocks * 4 - 4, 12)
        expected, aborted = {}, set()
        for turn in range(150):
            n = rng.randint(1, 4)
            free = [s for s in driver.free_slots() if s not in expected]
            if turn < 100 and len(free) >= n and rng.random() < 0.4:
                prompt = prompt_of(rng.randint(1, longest), seed=rng.randint(0, 1))
                counts = [rng.choice([1, 2, 4, 4, 7]) for _ in range(n)]
                stops = [prompt[0]] if rng.random() < 0.3 else []
                most = config.num_blocks * 4 + 1 - len(prompt)
                counts = [min(c, most) for c in counts]
                slots = submit_group(driver, prompt, counts, stop_ids=stops)
                for slot, count in zip(slots, counts, strict=True):
                    expected[slot] = solo(prompt, count, stop_ids=stops)
            if expected and rng.random() < 0.05:
                victim = rng.choice(list(expected))
                driver.abort(victim)
                aborted.add(victim)
            rows = np.flatnonzero(driver.host.rows.request < config.max_num_requests)
            rows = rows if driver.host.plan.num_copies == 0 else rows[:0]
            if rows.size and rng.random() < 0.05:
                driver.preempt(int(rng.choice(rows.tolist())))
            driver.step()
            free = set(driver.free_slots())
            for slot in [s for s in expected if s in free]:
                tokens = expected.pop(slot)
                if slot in aborted and driver.reason(slot) == ABORTED:
                    assert driver.tokens(slot) == tokens[: len(driver.tokens(slot))]
                else:
                    assert driver.tokens(slot) == tokens
                    assert driver.reason(slot) in (LENGTH, STOPPED)
                aborted.discard(slot)
        driver.run()
        for slot, tokens in expected.items():
            got = driver.tokens(slot)
            assert got == (tokens[: len(got)] if slot in aborted else tokens)
        driver.assert_clean()
        assert driver.host.totals.forked_tokens > 0
