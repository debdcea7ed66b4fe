"""vLLM's scheduler tests, told as tests of this scheduler.

Read for behaviour in ``neuralmagic/vllm`` at 017e9f4 (``tests/v1/core``) and, for the
first scheduler, in ``opendatahub-io/vllm`` at 7f15f78 (``tests/core``). Each line is a vLLM
test (``*`` a family) and the test here, or where its behaviour is tested, or why it is not.
``cases``, ``admit`` and so on stand for ``test_cases.py``, ``test_admit.py`` beside this file.

v1/core/test_scheduler.py
  add_requests, finish_request, get_num_unfinished_requests -> requests_wait_and_are_aborted
  schedule, schedule_skip_tokenizer_init -> prompts_that_fit_are_scheduled_whole
  schedule_concurrent_partial_requests -> long_prompts_run_in_chunks_side_by_side; differs by
    design: no long_prefill_token_threshold, chunks are cut by the budget, first come first
  stop_via_update_from_output -> requests_stop_on_their_ids_or_at_their_limit; differs: one
    token a step, so nothing is cut off behind a stop
  check_stop_min_tokens -> a_stop_id_counts_after_min_tokens; differs: a stop id may be the
    token after min_tokens, as vLLM's sampler has it
  schedule_concurrent_batches -> schedule: a_new_request_joins_a_running_one; differs: one step
    is in flight, and the state after it is the next plan
  schedule_order -> short_prompts_do_not_overtake_long_ones; differs: prompts are always chunked
  preempt_during_execution -> the_newer_is_preempted_and_both_end_right; differs: a plan is made
    after the commit, so no output comes for a row that was taken away
  prefix_cache_stats_* -> test_vllm_prefix_caching.py
  preemption_re_records_prefix_cache_query -> admit: num_cached_is_that_of_the_first_admission
  scheduler_stats_waiting_queues -> what_the_budget_leaves_waits
  memory_leak -> nothing_is_left_of_requests_that_came_one_by_one
  priority_scheduling_basic_ordering, _arrival_time_tiebreaker, _mixed_priority_and_arrival,
    _fcfs_fallback -> rows_are_given_by_priority_then_arrival
  priority_scheduling_preemption, _preemption_and_resumption_when_out_of_kv
    -> the_less_urgent_is_preempted_and_resumes_with_its_tokens
  priority_scheduling_no_preemption_when_space_available -> urgent_ones_preempt_nobody
  priority_scheduling_with_limited_slots -> the_most_urgent_take_the_rows
  priority_scheduling_preemption_victim_selection, _equal_priority_preemption,
    _waiting_queue_order, _heap_property -> one_at_a_time_they_go_by_priority_then_arrival
  scheduler_reset_prefix_cache -> test_vllm_prefix_caching.py
  schedule_prefills_gating, throttle_* -> not ours: balances prefills over data-parallel ranks
  scheduler_stats_route_to_existing_output_client, cached_request_data_resumed_* -> not ours:
    messages between vLLM's processes
  async_scheduling_pp_* -> not ours: pipeline stages
  schedule_multimodal_requests, schedule_partial_requests, no_mm_input_chunking,
    *encoder_input*, *encoder_cache*, free_encoder_inputs_*, encoder_instance_*, eagle3_mm_*
    -> not ours: multimodal
  chunked_prefill_disabled_for_encoder_decoder, *cross_attn* -> not ours: encoder-decoder
  *spec_decod*, draft_slots_*, no_spec_tokens_*, spec_decode_padding_* -> not ours: drafts
  kv_connector_*, *ec_connector*, external_prefix_cache_metrics, *remote_kv*,
    reset_connector_cache_*, delayed_kv_connector_free_*, abort_request_finished_recving,
    prefix_cache_query_not_inflated_by_connector_defer, prepend_skipped_requests_order,
    fcfs_mixed_skipped_*, async_load_reservation_*, hybrid_*, scheduler_kv_connector_stats
    -> not ours: connectors
  mamba_align_* -> not ours: state-space layers
  *structured_output*, grammar_compile_error_* -> not ours here: structured output

v1/core/test_priority_preemption_bug.py
  priority_scheduler_preempt_skipped_request -> taking_the_first_row_skips_no_other
v1/core/test_priority_scheduler_random.py
  priority_scheduling_blast -> loads: random_loads_end_with_the_tokens_of_the_oracle

core/test_scheduler.py (v0)
  scheduler_add_seq_group, scheduler_abort_seq_group -> requests_wait_and_are_aborted
  scheduler_schedule_simple -> prompts_that_fit_are_scheduled_whole
  scheduler_prefill_prioritized -> schedule: a_decode_that_waits_for_prompts_keeps_its_new_block
  scheduler_schedule_preempt_abort -> the_preempted_one_resumes_when_the_older_is_aborted
  scheduler_max_seqs, prefill_schedule_max_seqs -> the_most_urgent_take_the_rows
  scheduler_delay_factor -> not ours: holding prompts back by the clock
  prefill_schedule_max_prompt_len -> submit: check_prompt_refuses_with_the_numbers
  prefill_schedule_token_budget, scheduling_budget -> admit: tiles_bound_the_chunks, budget:
    take_serves_rows_in_order; differs: a prompt that does not fit is cut, not held back
  prefill_schedule_no_block_manager_capacity -> admit: the_head_of_the_line_holds_up_those_behind
    (later) and submit: check_prompt_refuses_with_the_numbers (never)
  decode_schedule_preempted -> grow: the_newest_in_need_yields_itself, sc07_need_is_counted
  schedule_decode_blocks_to_copy_update -> grow: a_writer_into_a_shared_block_gets_a_copy
  prefix_caching_aware_prefills, no_multiple_partial_prefills_* -> test_vllm_prefix_caching.py
  *swap* -> not ours: preemption recomputes; *lora* -> not ours

core/test_chunked_prefill_scheduler.py (v0)
  simple -> prompts_that_fit_are_scheduled_whole
  chunk, complex -> the_rest_of_the_budget_goes_to_the_next_prompt; differs: by default the
    decodes get what prompts leave (as in vLLM: policy decode_first, tested in schedule)
  maximal_decoding -> schedule: policies_share_a_long_prompt_and_a_decode[decode_first]
  prompt_limit -> loads: sc09_a_prompt_in_chunks_of_any_size
  prompt_limit_exceed -> submit: check_prompt_refuses_with_the_numbers
  chunked_prefill_preempt -> cases: kv08_a_prompt_that_is_stopped_half_way[preempt]
  chunked_prefill_max_seqs -> the_most_urgent_take_the_rows
  prefix_caching, prefix_caching_with_concurrent_partial_prefills -> differs by design: a chunk
    may end inside a block, which is registered when a later chunk fills it (loads: sc09)
  concurrent_chunking*, short_prompts_jump_* -> differs by design: no max_num_partial_prefills,
    prompts are served first come first served (short_prompts_do_not_overtake_long_ones)
  chunked_prefill_spec_prefill -> not ours: drafts; *_with_actual_engine -> not ours: real model
core/test_num_computed_tokens_update.py (v0)
  num_computed_tokens_update -> commit: a_step_is_counted_and_the_plan_forgotten
"""

import random

import numpy as np
import pytest
from fake_model import VOCAB, Driver, small_config, solo

from oxidize_jax.scheduler.state import (
    ABORTED,
    FINISHED,
    LENGTH,
    RUNNING,
    STOPPED,
    UNUSED,
    WAITING,
)

WIDE = small_config(max_num_batched_tokens=64)
POOL_8 = small_config(max_num_batched_tokens=5, num_blocks=8)
UNCACHED = small_config(max_num_batched_tokens=3, num_blocks=6, enable_prefix_caching=False)

EOS, STOP = 40, 42


def prompts(seed, *lengths):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def unfinished(hand):
    return sum(status in (WAITING, RUNNING) for status in hand.of("status"))


def test_requests_wait_and_are_aborted_one_by_one(hand):
    for i in range(6):
        hand.submit([i] * 3)
        assert hand.of("status") == [WAITING] * (i + 1) + [UNUSED] * (5 - i)
    for i in range(6):
        hand("abort", np.int32(i))
        assert hand.of("finish_reason")[i] == ABORTED
        assert unfinished(hand) == 5 - i
    hand("schedule")
    assert hand.scheduled == [0, 0, 0]
    assert not hand.state.pool.ref_count.any()


def test_prompts_that_fit_are_scheduled_whole_and_then_decode_together():
    driver = Driver(WIDE, seed=1)
    words = prompts(1, 4, 10, 1, 7)
    slots = [driver.submit(prompt, 3) for prompt in words]
    driver.step()
    assert driver.host.plan.num_scheduled.tolist() == [4, 10, 1, 7]
    assert driver.host.rows.request.tolist() == slots
    assert [driver.status(slot) for slot in slots] == [RUNNING] * 4
    for _ in range(2):
        driver.step()
        assert driver.host.plan.num_scheduled.tolist() == [1, 1, 1, 1]
        assert driver.host.plan.num_copies == 0
    driver.run()
    assert [driver.tokens(slot) for slot in slots] == [solo(prompt, 3) for prompt in words]
    driver.assert_clean()


def test_what_the_budget_leaves_waits(hand):
    for i in range(5):
        hand.submit([i] * 4)
    hand("schedule")
    assert hand.scheduled == [4, 4, 0]
    assert hand.of("status")[:5] == [RUNNING] * 2 + [WAITING] * 3
    assert hand.tables == [[0], [1], []]
    hand.step()
    # The fifth lacks a row, whatever the budget.
    assert hand.scheduled == [1, 1, 4]
    assert hand.of("status")[:5] == [RUNNING] * 3 + [WAITING] * 2


@pytest.mark.parametrize(
    ("config", "length", "chunks"),
    [
        # A decode that got nothing goes first in the step after.
        (POOL_8, 7, [[5, 0, 0], [2, 3, 0], [0, 4, 1], [1, 1, 3], [1, 1, 3]]),
        (UNCACHED, 4, [[3, 0, 0], [1, 2, 0], [0, 2, 1], [1, 1, 1], [1, 0, 2]]),
    ],
    ids=["cached", "uncached"],
)
def test_long_prompts_run_in_chunks_side_by_side(config, length, chunks):
    driver = Driver(config, seed=2)
    words = prompts(2, length, length, length)
    slots = [driver.submit(prompt, 3) for prompt in words]
    for chunk in chunks:
        driver.step()
        assert driver.host.plan.num_scheduled.tolist() == [*chunk, 0]
    driver.run()
    assert [driver.tokens(slot) for slot in slots] == [solo(prompt, 3) for prompt in words]


def test_the_rest_of_the_budget_goes_to_the_next_prompt(hand):
    hand.submit([1] * 7)
    hand.submit([2] * 7)
    hand("schedule")
    seen = [hand.scheduled]
    hand.submit([3] * 7)
    for _ in range(3):
        hand.step()
        seen.append(hand.scheduled)
    assert seen == [[7, 1, 0], [0, 6, 2], [1, 1, 5], [1, 1, 1]]


def test_short_prompts_do_not_overtake_long_ones(hand):
    for word, length in enumerate((6, 6, 1, 1)):
        hand.submit([word] * length)
    hand("schedule")
    assert (hand.in_rows, hand.scheduled) == ([0, 1, None], [6, 2, 0])
    hand.step()
    assert (hand.in_rows, hand.scheduled) == ([0, 1, 2], [1, 4, 1])
    assert hand.of("status")[3] == WAITING


def test_requests_stop_on_their_ids_or_at_their_limit_and_give_up_the_row(hand):
    hand.submit([1, 1], max_tokens=10, stop_ids=[EOS])
    hand.submit([2, 2], max_tokens=10, stop_ids=[EOS, STOP])
    hand.submit([3, 3], max_tokens=3)  # end-of-sequence is an id like any other here
    hand("schedule")
    hand.commit({0: EOS, 1: 10, 2: EOS})
    hand("schedule")
    assert hand.in_rows == [None, 1, 2]
    hand.commit({1: STOP, 2: 10})
    hand("schedule")
    assert hand.in_rows == [None, None, 2]
    hand.commit({2: STOP})
    hand("schedule")
    assert hand.in_rows == [None, None, None]
    assert hand.of("finish_reason")[:3] == [STOPPED, STOPPED, LENGTH]
    assert [hand.tokens(i)[2:] for i in range(3)] == [[EOS], [10, STOP], [EOS, 10, STOP]]


@pytest.mark.parametrize(
    ("min_tokens", "new", "finished"),
    [
        (5, [10, 11, EOS], False),
        (5, [10, 11, STOP], False),
        (5, [10, 11, EOS, STOP, 12, EOS], True),
        (5, [10, 11, EOS, STOP, 12, STOP], True),
        (0, [10, EOS], True),
        (0, [STOP], True),
    ],
)
def test_a_stop_id_counts_after_min_tokens_only(hand, min_tokens, new, finished):
    hand.submit([0, 1, 2], max_tokens=20, min_tokens=min_tokens, stop_ids=[EOS, STOP])
    hand("schedule")
    for token in new:
        assert hand.of("status")[0] == RUNNING
        hand.step(token)
    assert hand.of("status")[0] == (FINISHED if finished else RUNNING)
    assert hand.tokens(0) == [0, 1, 2, *new]


def test_the_newer_is_preempted_and_both_end_right():
    driver = Driver(POOL_8, seed=3)
    words = prompts(3, 15, 12)
    older, newer = (driver.submit(prompt, 6) for prompt in words)
    driver.step()
    while not driver.host.totals.preemptions:
        assert driver.busy()
        driver.step()
    assert driver.host.plan.num_scheduled.tolist() == [1, 0, 0, 0]
    assert driver.host.rows.request[:2].tolist() == [older, POOL_8.max_num_requests]
    assert driver.status(newer) == RUNNING
    sampled = len(driver.tokens(newer)) - 12
    assert sampled > 0
    assert driver.tokens(newer) == solo(words[1], sampled)  # what it has sampled stays
    driver.run()
    for slot, prompt in zip((older, newer), words, strict=True):
        assert driver.tokens(slot) == solo(prompt, 6)
    assert driver.host.requests.num_preemptions[[older, newer]].tolist() == [0, 1]
    driver.assert_clean()


def test_the_preempted_one_resumes_when_the_older_is_aborted(hand):
    hand.submit([1] * 15)
    hand.submit([2] * 12)
    hand("schedule")
    for chunks in ([8, 0, 0], [7, 1, 0], [0, 8, 0], [1, 3, 0]):
        assert hand.scheduled == chunks
        hand.step()
    # Each needs a block for its next token, and one is left.
    assert (hand.in_rows, hand.scheduled) == ([0, None, None], [1, 0, 0])
    assert unfinished(hand) == 2
    assert hand.state.totals.preemptions == 1
    hand("abort", np.int32(0))
    hand("schedule")
    assert hand.in_rows == [1, None, None]
    assert hand.tokens(1) == [2] * 12 + [50]
    # Its prompt filled three blocks that are still known, so one token of 13 is computed.
    assert (hand.of("num_computed")[1], hand.scheduled) == (12, [1, 0, 0])
    assert hand.state.plan.num_copies == 0


def test_nothing_is_left_of_requests_that_came_one_by_one():
    driver = Driver(WIDE, seed=4)
    words = prompts(4, 10, 10, 10, 10, 10)
    slots = []
    for prompt in words:
        slots.append(driver.submit(prompt, 10))
        driver.step()
    driver.run()
    assert [driver.tokens(slot) for slot in slots] == [solo(prompt, 10) for prompt in words]
    assert set(driver.host.requests.status[slots].tolist()) == {FINISHED}
    driver.assert_clean()


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ([2, 0, 1], [1, 2, 3], [1, 2, 0]),
        ([1, 1, 1], [3, 1, 2], [1, 2, 0]),
        ([2, 1, 1, 0], [1, 3, 2, 4], [3, 2, 1, 0]),
        ([1, 1, 1, 1], [4, 1, 3, 2], [1, 3, 2, 0]),
    ],
    ids=["priority", "arrival", "both", "first-come"],
)
def test_rows_are_given_by_priority_then_arrival(priorities, arrivals, order):
    driver = Driver(WIDE)
    for i, (priority, arrival) in enumerate(zip(priorities, arrivals, strict=True)):
        driver.submit([i] * 10, priority=priority, arrival=arrival)
    driver.step()
    count = len(order)
    assert driver.host.rows.request[:count].tolist() == order
    assert driver.host.plan.order[:count].tolist() == list(range(count))
    assert driver.host.plan.num_scheduled[:count].tolist() == [10] * count


def test_the_most_urgent_take_the_rows_and_the_others_follow_as_rows_are_free(hand):
    for priority in (3, 1, 2, 0, 4):
        hand.submit([priority], max_tokens=1 if priority == 1 else 9, priority=priority)
    hand("schedule")
    assert hand.in_rows == [3, 1, 2]
    hand.step()
    assert hand.in_rows == [3, 0, 2]
    assert hand.of("status")[4] == WAITING
    hand("abort", np.int32(2))
    hand.step()
    assert hand.in_rows == [3, 0, 4]


@pytest.mark.parametrize(
    ("priorities", "arrivals"),
    [
        ([5, 1, 6, 3, 2, 4], [0, 1, 2, 3, 4, 5]),
        ([2, 2, 2, 2, 2, 2], [3, 1, 2, 6, 5, 4]),
        ([3, 1, 3, 1, 0, 1], [1, 9, 0, 2, 3, 4]),
    ],
)
def test_one_at_a_time_they_go_by_priority_then_arrival(hand, priorities, arrivals):
    for slot, keys in enumerate(zip(priorities, arrivals, strict=True)):
        priority, arrival = keys
        # A prompt that takes the whole budget is alone in its step.
        hand.submit([slot] * 8, max_tokens=1, priority=priority, arrival=arrival)
    hand("schedule")
    seen = []
    while unfinished(hand):
        assert sorted(hand.scheduled) == [0, 0, 8]
        seen.append(hand.in_rows[hand.scheduled.index(8)])
        hand.step()
    assert seen == sorted(range(6), key=lambda slot: (priorities[slot], arrivals[slot]))


def test_urgent_ones_preempt_nobody_where_there_is_room():
    driver = Driver(WIDE, seed=5)
    words = prompts(5, 20, 20, 20)
    slots = [driver.submit(prompt, 6, priority=5) for prompt in words[:2]]
    for _ in range(2):
        driver.step()
    slots.append(driver.submit(words[2], 6, priority=0))
    driver.step()
    assert driver.host.rows.request[:3].tolist() == slots
    assert driver.host.plan.num_scheduled[:3].tolist() == [1, 1, 20]
    driver.run()
    assert driver.host.totals.preemptions == 0
    assert [driver.tokens(slot) for slot in slots] == [solo(prompt, 6) for prompt in words]


def test_the_less_urgent_is_preempted_and_resumes_with_its_tokens():
    driver = Driver(POOL_8, seed=6)
    low_prompt, high_prompt = prompts(6, 9, 12)
    low = driver.submit(low_prompt, 10, priority=5)
    for _ in range(3):
        driver.step()
    high = driver.submit(high_prompt, 7, priority=0)
    while not driver.host.totals.preemptions:
        assert driver.busy()
        driver.step()
    # The urgent one came later, needs a fifth block, and keeps its row.
    requests = driver.host.requests
    assert requests.num_tokens[high] == 17
    assert (driver.status(low), driver.status(high)) == (RUNNING, RUNNING)
    assert requests.row[[low, high]].tolist() == [POOL_8.max_num_seqs, 1]
    assert driver.host.plan.num_scheduled.tolist() == [0, 1, 0, 0]
    kept = driver.tokens(low)
    assert len(kept) > len(low_prompt)
    while driver.status(high) != FINISHED:
        assert driver.host.requests.row[low] == POOL_8.max_num_seqs
        driver.step()
    # It resumes in the step that gave the row of the finished one back.
    assert driver.host.requests.row[low] < POOL_8.max_num_seqs
    assert driver.tokens(low) == kept
    driver.run()
    assert driver.tokens(low) == solo(low_prompt, 10)
    assert driver.tokens(high) == solo(high_prompt, 7)
    assert driver.host.requests.num_preemptions[[low, high]].tolist() == [1, 0]
    driver.assert_clean()


def test_taking_the_first_row_skips_no_other(hand):
    hand.seat(([1] * 17, 16, 4), ([2] * 13, 12, 3), ([3] * 2, 1, 1))
    hand.edit(requests={"priority": np.array([9, 0, 1, 0, 0, 0], np.int32)})
    hand("schedule")
    assert hand.in_rows == [None, 1, 2]
    assert hand.scheduled == [0, 1, 1]
