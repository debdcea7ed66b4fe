"""vLLM's prefix-caching tests, told as tests of this scheduler and its pool.

Read for behaviour in ``neuralmagic/vllm`` at 017e9f4 (``tests/v1/core``) and, for the
first scheduler, in ``opendatahub-io/vllm`` at 7f15f78 (``tests/core``). Each line is a vLLM
test (``*`` a family) and the test here, or where its behaviour is tested, or why it is not.
``pool`` and ``prefix`` stand for ``test_pool.py`` and ``test_prefix.py`` in ``tests/blocks``,
``cases``, ``admit`` and so on for ``test_cases.py``, ``test_admit.py`` beside this file.

v1/core/test_prefix_caching.py
  prefill -> prefill_shares_full_blocks_and_they_are_reused_in_order
  decode -> decodes_fill_the_last_block_then_take_a_new_one; differs by design: a block is
    registered when its KV is written, not when its tokens are scheduled
  evict -> blocks_that_were_not_full_go_first_then_by_age, tails_before_heads
  hash_block_correct_reuse -> pool: kv02_a_recycled_block_forgets_what_it_held
  computed_blocks_not_evicted -> a_hit_is_not_evicted_for_the_blocks_behind_it
  basic_prefix_caching_disabled, prefix_cache_stats_not_recorded_when_caching_disabled (of
    test_scheduler.py) -> without_prefix_caching_nothing_is_known_or_counted
  cache_blocks -> commit: a_chunk_registers_all_the_blocks_it_filled, prefix:
    what_a_lookup_gives_lets_the_chain_go_on
  cache_key_salting -> what_decodes_filled_is_shared_within_a_salt
  prefill_not_enough_free_blocks_with_computed_blocks -> a_hit_that_does_not_fit_touches_nothing
  reset_prefix_cache, scheduler_reset_prefix_cache (of test_scheduler.py)
    -> a_reset_forgets_what_was_known_and_stops_nobody; differs by design: it is never refused,
    and who runs keeps row and blocks
  maybe_evict_cached_block, block_lookup_cache_* -> differs by design: of equal blocks one is
    registered (prefix: the_survivor_of_two_equal_chains, kv06_equal_blocks)
  can_fit_full_sequence_full_attention_still_gates_oversized -> submit:
    check_prompt_refuses_with_the_numbers, admit: the_head_of_the_line_holds_up_those_behind
  prefix_cache_stats_counted_once_* (of test_scheduler.py) -> a_hit_that_waits_is_counted_once
  prefix_cache_stats_disabled -> not ours: the counters are always kept
  prefill_plp -> a_request_without_the_cache_neither_hits_nor_leaves_anything; differs: that is
    asked for by use_cache, and what such a request computes is not registered
  (a prompt known to its last block) -> what_is_cached_is_whole_blocks_and_never_the_last_token,
    a_prompt_known_in_full_takes_no_block_for_it; differs by design: one token is run again and
    not written, where vLLM computes the whole last block anew
  mm_prefix_caching -> not ours: multimodal
  kv_cache_events*, null_parent_block_hash, block_stored_event_*, block_removed_event_*,
    emit_cached_block_events* -> not ours: events of the cache
  prefill_hybrid_*, hybrid_*, cache_blocks_multi_group, different_block_size, *swa*, *mamba*,
    *retention*, can_fit_full_sequence_swa_* -> not ours: groups of layers with other caches
  eagle_* -> not ours: drafts; cache_hit_local_and_external* -> not ours: connectors

v1/core/test_kv_cache_utils.py
  kv_cache_block -> pool: physical_block_shows_what_the_pool_knows
  free_kv_cache_block_queue_* -> pool: a_new_pool_gives_the_lowest_ids_first,
    released_blocks_are_taken_again, cached_blocks_go_least_recently_used_first,
    exhaustion_is_a_value; differs: a stack and a ring with stale entries, no linked list
  generate_block_hash_extra_keys_cache_salt -> prefix: salts_do_not_share,
    hashes_depend_on_salt_parent_and_order
  hash_block_tokens, request_block_hasher, hash_request_tokens_no_mm_inputs -> prefix:
    prefix_hashes_are_the_chain_of_single_hashes
  none_hash -> differs by design: the root hash is a constant of the salt; a hit is decided by
    the tokens (prefix: kv11_*), so it need not be secret
  metrics* -> differs: totals.cached_tokens (a_hit_that_waits_is_counted_once)
  allocate_with_lookahead -> not ours: drafts
  kv_cache_block_uses_slots -> not ours: Python objects
  *extra_keys*, *mm*, *prompt_embeds*, *lora* -> not ours: multimodal, embeddings, LoRA
  *kv_cache_config*, *kv_cache_spec*, *mla*, *page_size*, *concurrency*, *max_model_len*,
    *num_gpu_blocks*, *groups*, *uniform_type_spec*, resolve_block_hashes_*,
    hidden_state_group_*, hma_*, check_enough_* -> not ours: layers of unlike sizes

core/test_scheduler.py, core/test_chunked_prefill_scheduler.py (v0)
  prefix_caching_aware_prefills -> prompts_that_fit_thanks_to_their_hits_run_together
  no_multiple_partial_prefills_* -> a_prompt_hits_what_another_has_computed_so_far; differs by
    design: it joins with what the budget has left
"""

import random

import numpy as np
import pytest
from fake_model import VOCAB, Driver, quick_jit, small_config, solo

from oxidize_jax.blocks.pool import NOT_IN_RING, physical_block
from oxidize_jax.scheduler.reset import reset_prefix_cache
from oxidize_jax.scheduler.state import FINISHED, RUNNING, WAITING

WIDE = small_config(max_num_batched_tokens=64)
UNCACHED = small_config(max_num_batched_tokens=3, num_blocks=6, enable_prefix_caching=False)

COMMON = [0] * 4 + [1] * 4 + [2] * 4
"""Three full blocks."""


def prefill(hand, prompt, **options):
    """Submit and step until the prompt is computed and its first token sampled."""
    slot = hand.submit(prompt, **options)
    hand("schedule")
    while hand.of("num_tokens")[slot] == len(prompt):
        hand.step()
    return slot


def drop(hand, *slots):
    for slot in slots:
        hand("abort", np.int32(slot))
    hand("schedule")


def free(hand):
    """Free blocks, the next to be taken first."""
    pool = hand.state.pool
    return pool.free_stack[: pool.num_free].tolist()[::-1]


def cached(hand):
    """Cached blocks, the next to be taken first."""
    position = hand.state.pool.lru_pos
    return sorted(np.flatnonzero(position != NOT_IN_RING).tolist(), key=position.__getitem__)


def test_prefill_shares_full_blocks_and_they_are_reused_in_order(hand):
    first = prefill(hand, [*COMMON, 3, 3])
    assert hand.tables[0] == [0, 1, 2, 3]
    pool = hand.state.pool
    known = [physical_block(pool, block) for block in range(4)]
    assert [block.token_ids for block in known] == [(0,) * 4, (1,) * 4, (2,) * 4, None]
    assert [block.ref_count for block in known] == [1] * 4
    assert len({block.block_hash for block in known[:3]}) == 3
    assert pool.parent[[1, 2]].tolist() == pool.serial[[0, 1]].tolist()
    # A hit while the blocks are in use.
    second = hand.submit([*COMMON, 9])
    hand("schedule")
    assert hand.tables[1] == [0, 1, 2, 4]
    assert (hand.of("num_cached")[second], hand.of("num_computed")[second]) == (12, 12)
    assert hand.state.pool.ref_count.tolist() == [2, 2, 2, 1, 1, 0, 0, 0]
    # Never full ones first, the last freed in front; then known ones, tail before head.
    drop(hand, first, second)
    assert (free(hand), cached(hand)) == ([4, 3, 5, 6, 7], [2, 1, 0])
    # A hit when nobody holds them.
    third = hand.submit([*COMMON, 5, 5])
    hand("schedule")
    assert hand.tables[0] == [0, 1, 2, 4]
    assert hand.of("num_cached")[third] == 12
    assert (free(hand), cached(hand)) == ([3, 5, 6, 7], [])
    drop(hand, third)
    # A miss takes them in that order.
    fourth = prefill(hand, [9] * 22)
    assert hand.of("num_cached")[fourth] == 0
    assert hand.tables[0] == [4, 3, 5, 6, 7, 2]
    drop(hand, fourth)
    hand.submit([*COMMON, 5])
    hand("schedule")
    assert hand.tables[0][:2] == [0, 1]
    assert hand.of("num_cached")[4] == 8


def test_decodes_fill_the_last_block_then_take_a_new_one(hand):
    prefill(hand, [*COMMON, 3, 3], max_tokens=9)

    def now():
        return len(hand.tables[0]), int(hand.state.pool.hashed.sum())

    seen = [now()]
    for _ in range(7):
        hand.step()
        seen.append(now())
    # 14 tokens are computed at first, and the block of the next one is there.
    assert seen == [(4, 3), (4, 3), (5, 4), (5, 4), (5, 4), (5, 4), (6, 5), (6, 5)]
    assert hand.tables[0] == [0, 1, 2, 3, 4, 5]
    assert physical_block(hand.state.pool, 3).token_ids == (3, 3, 50, 50)


def test_blocks_that_were_not_full_go_first_then_by_age_tails_before_heads(hand):
    hand.submit([*COMMON, 3, 3], max_tokens=2)
    hand.submit([6] * 4 + [7] * 4, max_tokens=1)
    hand("schedule")
    for chunks in ([8, 0, 0], [6, 2, 0], [1, 6, 0]):
        assert hand.scheduled == chunks
        tables = hand.tables
        hand.step()
    assert tables == [[0, 1, 2, 3], [4, 5], []]
    assert hand.of("status")[:2] == [FINISHED] * 2
    assert (free(hand), cached(hand)) == ([3, 6, 7], [2, 1, 0, 5, 4])
    # A hit takes its blocks out of the line.
    hand.submit([*COMMON[:8], 8, 8, 8])
    hand("schedule")
    assert hand.tables[0] == [0, 1, 3]
    assert (free(hand), cached(hand)) == ([6, 7], [2, 5, 4])


def test_a_hit_is_not_evicted_for_the_blocks_behind_it(hand):
    for word in (1, 2):
        prefill(hand, [word] * 16, max_tokens=1)
    assert (free(hand), cached(hand)) == ([], [3, 2, 1, 0, 7, 6, 5, 4])
    hand.submit([1] * 16 + [3] * 7)
    hand("schedule")
    assert hand.tables[0] == [0, 1, 2, 3, 7, 6]
    assert hand.of("num_cached")[2] == 16


def test_without_prefix_caching_nothing_is_known_or_counted():
    driver = Driver(UNCACHED, seed=1)
    first = driver.submit(list(range(10)), 2)
    driver.run()
    second = driver.submit(list(range(16)), 2)
    third = driver.submit(list(range(8)), 2)
    driver.step()
    # The same words take blocks of their own, so there is no room for the third.
    while driver.status(second) != FINISHED:
        assert driver.host.rows.request[0] == second
        assert driver.status(third) == WAITING
        assert driver.host.pool.ref_count.sum() == driver.host.rows.num_blocks[0]
        driver.step()
    assert driver.status(third) == RUNNING
    driver.run()
    for slot, (length, count) in {first: (10, 2), second: (16, 2), third: (8, 2)}.items():
        assert driver.num_cached(slot) == 0
        assert driver.tokens(slot) == solo(list(range(length)), count)
    assert not driver.host.pool.hashed.any()
    assert driver.host.pool.num_cached == driver.host.totals.cached_tokens == 0
    driver.assert_clean()


def test_what_decodes_filled_is_shared_within_a_salt():
    rng = random.Random(2)
    prompt, more = ([rng.randrange(VOCAB) for _ in range(n)] for n in (10, 3))
    driver = Driver(WIDE, seed=2)
    first = driver.submit(prompt, 7, salt=1)
    driver.run()
    talk = driver.tokens(first) + more
    hits = []
    for salt in (1, 2, 1):
        slot = driver.submit(talk, 4, salt=salt)
        driver.run()
        assert driver.tokens(slot) == solo(talk, 4)
        hits.append(driver.num_cached(slot))
    # 17 tokens, of which the last was never computed; then 23 of 24 were.
    assert hits[:2] == [16, 0]
    driver.assert_clean()


def test_a_hit_that_does_not_fit_touches_nothing(hand):
    first = prefill(hand, COMMON[:8], max_tokens=12)
    prefill(hand, COMMON[:8] + [3] * 8, max_tokens=1)
    third = prefill(hand, [7] * 3, max_tokens=12)
    assert hand.tables == [[0, 1, 2], [5], []]
    assert (free(hand), cached(hand)) == ([6, 7], [4, 3])
    # Six blocks: two in use, two cached, two new; and one is kept for what runs.
    late = hand.submit(COMMON[:8] + [3] * 8 + [4] * 7)
    before = hand.state.pool
    hand("schedule")
    assert hand.of("status")[late] == WAITING
    after = hand.state.pool
    assert after.ref_count.tolist() == before.ref_count.tolist() == [1, 1, 1, 0, 0, 1, 0, 0]
    assert (free(hand), cached(hand)) == ([6, 7], [4, 3])
    drop(hand, first, third)
    assert hand.of("status")[late] == RUNNING
    assert hand.tables[0][:4] == [0, 1, 3, 4]
    assert hand.of("num_cached")[late] == 16


def test_a_hit_that_waits_is_counted_once(hand):
    prefill(hand, COMMON[:8], max_tokens=1)
    big = prefill(hand, [9] * 20, max_tokens=3)
    late = hand.submit([*COMMON[:8], 5, 5, 5, 5])
    for _ in range(2):
        hand("schedule")
        assert hand.of("status")[late] == WAITING
        assert (hand.of("num_cached")[late], hand.state.totals.cached_tokens) == (0, 0)
    drop(hand, big)
    assert hand.of("status")[late] == RUNNING
    assert (hand.of("num_cached")[late], hand.state.totals.cached_tokens) == (8, 8)
    hand.step()
    assert (hand.of("num_cached")[late], hand.state.totals.cached_tokens) == (8, 8)


def test_prompts_that_fit_thanks_to_their_hits_run_together(hand):
    first = prefill(hand, [*range(8)], max_tokens=9)
    others = [hand.submit([0, 1, 2, 3, word, word, word, word]) for word in (12, 16)]
    hand.step()
    # 16 tokens of prompts in a budget of 8; the decode waits for them.
    assert hand.in_rows == [first, *others]
    assert hand.scheduled == [0, 4, 4]
    assert [table[0] for table in hand.tables] == [0, 0, 0]
    assert [hand.of("num_cached")[slot] for slot in others] == [4, 4]


def test_a_prompt_hits_what_another_has_computed_so_far(hand):
    first = hand.submit(COMMON, max_tokens=9)
    hand("schedule")
    second = hand.submit([*COMMON, 5])
    assert hand.scheduled == [8, 0, 0]
    hand("schedule")
    assert hand.of("status")[second] == WAITING  # the budget is spent
    hand.step()
    # Two blocks of the other are written, the third is being computed: it waits for that.
    assert hand.scheduled == [4, 0, 0]
    hand.step()
    assert hand.scheduled == [1, 1, 0]
    assert [table[:3] for table in hand.tables] == [[0, 1, 2], [0, 1, 2], []]
    assert hand.of("num_cached")[second] == 12
    hand.step()
    third = hand.submit([*COMMON, 6])
    hand("schedule")
    assert hand.in_rows == [first, second, third]
    assert hand.tables[2][:3] == [0, 1, 2]
    assert hand.of("num_cached")[third] == 12
    assert hand.state.pool.hashed.tolist() == [True] * 3 + [False] * 5


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11, 12, 13])
def test_what_is_cached_is_whole_blocks_and_never_the_last_token(length):
    driver = Driver(WIDE, seed=length)
    driver.submit([*COMMON, 3], 2)
    driver.run()
    prompt = [*COMMON, 3][:length]
    slot = driver.submit(prompt, 3)
    driver.run()
    assert driver.tokens(slot) == solo(prompt, 3)
    assert driver.num_cached(slot) == min(length - length % 4, length - 1)


def test_a_prompt_known_in_full_takes_no_block_for_it_while_another_holds_it(hand):
    prefill(hand, COMMON, max_tokens=9)
    hand.submit(COMMON, max_tokens=9)
    hand("schedule")
    # The last token is run for its logits; its KV is there, and shared.
    assert hand.tables[:2] == [[0, 1, 2, 3], [0, 1, 2]]
    assert (hand.of("num_cached")[1], hand.of("num_computed")[1]) == (11, 11)
    assert hand.scheduled == [1, 1, 0]
    hand.step()
    assert hand.tables[:2] == [[0, 1, 2, 3], [0, 1, 2, 4]]
    assert (hand.of("num_computed")[1], hand.tokens(1)) == (12, [*COMMON, 50])
    assert hand.state.totals.copies == 0
    assert hand.state.pool.ref_count.tolist() == [2, 2, 2, 1, 1, 0, 0, 0]


def test_a_request_without_the_cache_neither_hits_nor_leaves_anything():
    rng = random.Random(5)
    prompt = [rng.randrange(VOCAB) for _ in range(13)]
    driver = Driver(WIDE, seed=5)
    hits = []
    for use_cache in (False, True, False, True):
        slot = driver.submit(prompt, 4, use_cache=use_cache)
        driver.run()
        assert driver.tokens(slot) == solo(prompt, 4)
        hits.append(driver.num_cached(slot))
    assert hits == [0, 0, 0, 12]
    assert driver.host.totals.cached_tokens == 12
    driver.assert_clean()


def test_a_reset_forgets_what_was_known_and_stops_nobody():
    rng = random.Random(6)
    done, running = ([rng.randrange(VOCAB) for _ in range(n)] for n in (9, 13))
    driver = Driver(WIDE, seed=6)
    driver.submit(done, 1)
    driver.run()
    slot = driver.submit(running, 12)
    for _ in range(2):
        driver.step()
    before = driver.host
    assert (before.pool.num_cached, before.pool.hashed.sum()) == (2, 5)
    driver._set_scheduler(quick_jit(reset_prefix_cache)(driver.state.scheduler))
    pool, rows = driver.host.pool, driver.host.rows
    assert (pool.num_cached, pool.hashed.sum()) == (0, 0)
    assert pool.ref_count.tolist() == before.pool.ref_count.tolist()
    assert rows.block_table.tolist() == before.rows.block_table.tolist()
    assert driver.host.plan.num_scheduled.tolist() == [1, 0, 0, 0]
    # The same words are computed anew, and get the serials that they had before.
    fresh = [driver.submit(prompt, 1) for prompt in (done, running)]
    driver.run()
    assert [driver.num_cached(again) for again in fresh] == [0, 0]
    assert driver.tokens(slot) == solo(running, 12)
    # What the first filled after the reset, behind blocks of before, is not found.
    hits = []
    for prompt in (done, driver.tokens(slot)) * 2:
        later = driver.submit(prompt, 2)
        driver.run()
        assert driver.tokens(later) == solo(prompt, 2)
        hits.append(driver.num_cached(later))
    assert hits == [8, 12, 8, 24]
    driver.assert_clean()
