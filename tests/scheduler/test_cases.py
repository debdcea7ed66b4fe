"""Faults that engines of this kind have had, replayed with the scripted model."""

import dataclasses
import functools
import random

import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import (
    VOCAB,
    Driver,
    FakeModel,
    make_hashes_constant,
    quick_jit,
    small_config,
    solo,
)

from oxidize_jax.batch.buckets import buckets
from oxidize_jax.engine.step import engine_step
from oxidize_jax.scheduler.state import ABORTED, FINISHED, LENGTH, POOL_EXHAUSTED, RUNNING
from oxidize_jax.scheduler.submit import check_prompt

WIDE = small_config(max_num_batched_tokens=64)
CHUNK = small_config(max_num_batched_tokens=4, num_blocks=10)
POOL_8 = small_config(max_num_batched_tokens=5, num_blocks=8)
POOL_4 = small_config(max_num_batched_tokens=8, num_blocks=4, max_model_len=64)


def prompts(seed, *lengths):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def run_alone(driver, prompt, max_tokens, **options):
    """Run one request to the end; its tokens are those of the oracle."""
    slot = driver.submit(prompt, max_tokens, **options)
    driver.run()
    assert driver.tokens(slot) == solo(prompt, max_tokens)
    driver.assert_clean()
    return slot


def test_kv01_a_prefix_that_was_churned_out_is_a_miss():
    one, other = prompts(1, 16, 28)
    driver = Driver(POOL_8, seed=1)
    hits = []
    for _ in range(3):
        hits += [driver.num_cached(run_alone(driver, p, 3)) for p in (one, other)]
    # The longer one needs all 8 blocks. The shorter needs 5, and takes the free one and the
    # tail of the longer, whose first 3 blocks stay.
    assert hits == [0, 0, 0, 12, 0, 12]


@pytest.mark.parametrize(
    ("length", "blocks", "last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4)]
)
def test_kv03_blocks_of_a_prompt_and_tokens_in_the_last(length, blocks, last):
    driver = Driver(WIDE, seed=length)
    driver.submit([7] * length, max_tokens=2)
    driver.step()
    table = driver.host.rows.block_table[0]
    assert driver.host.rows.num_blocks[0] == blocks
    assert driver.host.plan.num_scheduled[0] - 4 * (blocks - 1) == last
    assert driver.host.pool.ref_count[table[:blocks]].tolist() == [1] * blocks
    driver.run()
    driver.assert_clean()


def test_kv03_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="0 tokens"):
        check_prompt(WIDE, 0)


def test_kv04_a_prompt_that_is_cached_in_full_recomputes_its_last_token():
    (prompt,) = prompts(4, 8)
    driver = Driver(WIDE, seed=4)
    assert driver.num_cached(run_alone(driver, prompt, 3)) == 0
    assert driver.num_cached(run_alone(driver, prompt, 3)) == 7
    assert driver.num_cached(run_alone(driver, [*prompt, 5], 3)) == 8
    assert driver.num_cached(run_alone(driver, prompt, 3)) == 7
    assert driver.host.totals.copies == 0  # the last block was shared, read, and not written


def test_kv06_equal_prompts_in_one_step_are_computed_once():
    (prompt,) = prompts(6, 8)
    driver = Driver(WIDE, seed=6)
    first, second = driver.submit(prompt, 2), driver.submit(prompt, 7)
    driver.step()
    assert driver.host.plan.num_scheduled.tolist() == [8, 0, 0, 0]
    driver.step()
    assert driver.host.plan.num_scheduled.tolist() == [1, 1, 0, 0]
    assert driver.num_cached(second) == 7
    driver.run()
    assert driver.tokens(first) == solo(prompt, 2)
    assert driver.tokens(second) == solo(prompt, 7)
    driver.assert_clean()


def test_kv06_equal_blocks_that_are_filled_in_one_step():
    (prompt,) = prompts(6, 3)
    driver = Driver(WIDE, seed=6)
    first, second = driver.submit(prompt, 3), driver.submit(prompt, 12)
    for _ in range(4):
        driver.step()
    # Each has filled a block of its own with the same tokens, and one is registered.
    assert (driver.status(first), driver.status(second)) == (FINISHED, RUNNING)
    assert driver.host.pool.hashed.sum() == 1
    assert driver.tokens(first) == solo(prompt, 3)
    for other in prompts(7, 35, 35, 35, 35):
        driver.submit(other, 1)  # takes all other blocks
    driver.run()
    assert driver.tokens(second) == solo(prompt, 12)
    driver.assert_clean()
    again = solo(prompt, 12)[:8]
    run_alone(driver, again, 5)
    assert driver.num_cached(run_alone(driver, again, 5)) == 7


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_kv08_a_prompt_that_is_stopped_half_way_poisons_nothing(how, chunks):
    prompt, other = prompts(8, 12, 12)
    driver = Driver(CHUNK, seed=chunks)
    slot = driver.submit(prompt, 4)
    for _ in range(1 + chunks):  # the first only plans
        driver.step()
    assert driver.host.requests.num_computed[slot] == 4 * chunks
    assert driver.host.pool.hashed.sum() == chunks  # and not the block that is planned
    if how == "abort":
        driver.abort(slot)
    else:
        driver.preempt(0)
    later = driver.submit(other, 4)
    again = driver.submit(prompt, 4)
    driver.run()
    assert driver.tokens(later) == solo(other, 4)
    assert driver.tokens(again) == solo(prompt, 4)
    if how == "abort":
        assert (driver.reason(slot), driver.tokens(slot)) == (ABORTED, prompt)
    else:
        assert driver.tokens(slot) == solo(prompt, 4)
    run_alone(driver, prompt, 6)


@pytest.mark.parametrize("seed", [0, 1])
def test_kv09_hits_and_a_miss_in_one_batch_with_shuffled_blocks(seed):
    prefix, one, other, miss = prompts(9, 8, 5, 5, 13)
    driver = Driver(WIDE, seed=seed)
    run_alone(driver, prefix, 2)
    slots = {driver.submit(p, 6): p for p in (prefix + one, miss, prefix + other)}
    driver.step()
    assert driver.host.plan.num_scheduled.tolist() == [5, 13, 5, 0]
    assert [driver.num_cached(slot) for slot in slots] == [8, 0, 8]
    driver.run()
    for slot, prompt in slots.items():
        assert driver.tokens(slot) == solo(prompt, 6)


def test_kv11_with_a_constant_hash_the_tokens_are_those_of_the_oracle(monkeypatch):
    make_hashes_constant(monkeypatch)
    largest = buckets(CHUNK)[-1:]
    # A function of its own is traced anew, with the changed hash.
    step = quick_jit(lambda state: engine_step(CHUNK, FakeModel(), None, state, shapes=largest))
    driver = Driver(CHUNK, seed=11, step=step)
    same = [9, 9, 9, 9]
    a, b = [10, 20, 1, 2], [41, 19, 1, 2]
    hits = []
    for first in (a, b, same, b, a):
        hits.append(driver.num_cached(run_alone(driver, [*first, *same, 3], 4)))
    assert hits == [0, 0, 0, 8, 8]
    assert set(driver.host.pool.block_hash[driver.host.pool.hashed].ravel().tolist()) == {5}


def test_salts_share_no_blocks():
    (prompt,) = prompts(12, 9)
    driver = Driver(WIDE)
    hits = [driver.num_cached(run_alone(driver, prompt, 2, salt=salt)) for salt in (0, 1, 0, 1)]
    assert hits == [0, 0, 8, 8]


def test_sc01_a_prompt_larger_than_the_pool_is_refused_and_the_next_completes():
    with pytest.raises(ValueError, match=r"20 tokens and needs 5 blocks of 4.*num_blocks=4"):
        check_prompt(POOL_4, 20)
    check_prompt(POOL_4, 3)
    run_alone(Driver(POOL_4), [1, 2, 3], 5)


def test_sc02_one_that_outgrows_the_pool_ends_with_its_tokens_and_the_engine_goes_on():
    prompt, other = prompts(2, 10, 5)
    driver = Driver(POOL_4, seed=2)
    slot = driver.submit(prompt, 30)
    driver.run()
    # 16 tokens have their KV in the pool; the last one needs none.
    assert driver.reason(slot) == POOL_EXHAUSTED
    assert driver.tokens(slot) == solo(prompt, 7)
    driver.assert_clean()
    run_alone(driver, other, 5)


def test_sc02_a_full_pool_is_enough_for_what_just_fits():
    (prompt,) = prompts(3, 16)
    driver = Driver(POOL_4, seed=3)
    assert driver.reason(run_alone(driver, prompt, 1)) == LENGTH


def test_sc02_with_others_waiting_each_gets_its_turn():
    first, second, third = prompts(5, 10, 9, 16)
    driver = Driver(POOL_4, seed=5)
    slots = [driver.submit(first, 30), driver.submit(second, 30), driver.submit(third, 3)]
    driver.run()
    assert [driver.reason(slot) for slot in slots] == [POOL_EXHAUSTED] * 3
    for slot, prompt in zip(slots, (first, second, third), strict=True):
        assert driver.tokens(slot) == solo(prompt, 17 - len(prompt))
    driver.assert_clean()


@functools.cache
def stop_case():
    """A prompt whose fourth new token did not come before, and its five new tokens."""
    for seed in range(100):
        (prompt,) = prompts(seed, 6)
        new = solo(prompt, 5)[6:]
        if new[3] not in new[:3]:
            return prompt, new
    raise AssertionError("no such prompt")


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 4), (3, 4), (4, None)])
def test_a_stop_id_ends_a_request_unless_min_tokens_forbids(min_tokens, count):
    prompt, new = stop_case()
    driver = Driver(WIDE)
    options = {"stop_ids": [new[3]], "min_tokens": min_tokens}
    slot = driver.submit(prompt, 5, **options)
    driver.run()
    assert driver.tokens(slot) == solo(prompt, 5, **options)
    if count:
        assert driver.tokens(slot) == prompt + new[:count]
    else:
        assert driver.tokens(slot)[9] != new[3]


def test_a_request_ends_at_max_model_len():
    (prompt,) = prompts(13, 35)
    driver = Driver(WIDE)
    slot = driver.submit(prompt, 30)
    driver.run()
    assert driver.tokens(slot) == solo(prompt, 5)
    assert driver.reason(slot) == LENGTH


def test_the_driver_sees_a_block_table_that_is_wrong():
    """The scripted model is worth something only if a paging fault changes its tokens."""
    prompt = prompts(14, 9)[0]
    driver = Driver(WIDE)
    slot = driver.submit(prompt, 3)
    driver.step()
    driver.step()
    kv = np.array(driver.state.kv)
    kv[driver.host.rows.block_table[0, 0], 2] ^= 1
    driver.state = type(driver.state)(scheduler=driver.state.scheduler, kv=jnp.asarray(kv))
    driver.run()
    assert driver.tokens(slot) != solo(prompt, 3)


@pytest.mark.parametrize("how", ["no cache", "a request that does not use it"])
def test_sc10_chunks_without_the_cache_go_on_where_they_were(how):
    config = dataclasses.replace(CHUNK, enable_prefix_caching=how != "no cache")
    options = {} if how == "no cache" else {"use_cache": False}
    (prompt,) = prompts(10, 14)
    driver = Driver(config, seed=10)
    for _ in range(2):
        slot = driver.submit(prompt, 5, **options)
        held = []
        while not held or driver.busy():
            driver.step()
            held.append(int((driver.host.pool.ref_count > 0).sum()))
        assert driver.tokens(slot) == solo(prompt, 5)
        assert driver.num_cached(slot) == 0
        # A block for each 4 tokens so far, and none beside; the last token needs no KV.
        assert held == [1, 2, 3, 4, 4, 4, 5, 5, 0]
    assert not driver.host.pool.hashed.any()
    driver.assert_clean()
