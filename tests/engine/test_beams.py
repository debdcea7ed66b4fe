"""Beam search on the device: the sequences of the reference, blocks shared, every state checked."""

import random
import re
from functools import partial

import beam_driver
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beam_driver import ENDS, spread_logits
from fake_model import VOCAB, Driver, quick_jit, small_config, solo
from reference_beams import beam_search
from write_checkpoints import TINY_LLAMA as MODEL
from write_checkpoints import random_params

from oxidize_jax.engine.beams import NewSearch, search_config, search_steps, start_search
from oxidize_jax.engine.step import init_state
from oxidize_jax.model.functional import build
from oxidize_jax.sampling.beam_params import BeamSearchParams
from oxidize_jax.sampling.beams import make_rules
from oxidize_jax.scheduler.beams import preempt_all
from oxidize_jax.scheduler.state import RUNNING

ROOMY = small_config(max_num_seqs=8, max_num_requests=16)
"""4 beams: two groups of four at a time."""
CHUNKED = small_config(
    max_num_seqs=5, max_num_requests=8, num_blocks=9, max_num_batched_tokens=3, block_size=3
)
"""2 beams: prompts in pieces, decodes that wait for a turn, a pool for some four beams."""
TIGHT = small_config(max_num_seqs=8, max_num_requests=16, num_blocks=6)
"""4 beams: a pool for one beam of 24 tokens."""
EIGHT = small_config(
    max_num_seqs=9, max_num_requests=16, num_blocks=30, enable_prefix_caching=False
)
"""8 beams: one group at a time, nothing to be found in the cache."""

KINDS = [
    (1.0, False),
    (0.0, "never"),
    (2.0, "never"),
    (-1.0, True),
    (-1.0, False),
    (0.6, True),
]


def prompts_of(seed, lengths):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def check(config, width, prompts, limits, stop_ids, penalty=1.0, early=False, **options):
    """Run it, and compare with the reference, which must tell all apart clearly."""
    params = BeamSearchParams(
        beam_width=width, max_tokens=max(limits), length_penalty=penalty, early_stopping=early
    )
    seen = beam_driver.run(config, prompts, params, stop_ids=stop_ids, max_tokens=limits, **options)
    for group, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        found, margin = beam_search(
            spread_logits,
            prompt,
            width,
            limit,
            stop_ids=stop_ids,
            length_penalty=penalty,
            early_stopping=early,
        )
        assert margin > 1e-5, "choose another prompt"
        assert seen.sequences[group] == [f.tokens for f in found]
        np.testing.assert_allclose(seen.scores[group], [f.score for f in found], rtol=1e-5)
        np.testing.assert_allclose(seen.logprobs[group], [f.logprob for f in found], rtol=1e-5)
    return seen


@pytest.mark.parametrize(("penalty", "early"), KINDS)
def test_four_beams_of_three_prompts(penalty, early):
    prompts, limits = prompts_of(1, [5, 9, 3]), [10, 14, 1]
    check(ROOMY, 4, prompts, limits, ENDS[:1], penalty, early)


def test_without_ends_every_sequence_has_its_full_length():
    seen = check(ROOMY, 4, prompts_of(2, [4]), [9], ())
    assert [len(s) for s in seen.sequences[0]] == [9] * 4


def test_some_sequences_end_early_and_some_searches_too():
    """What the other tests rest on: both ends, in one search and over several."""
    prompts, limits = prompts_of(1, [5, 9, 3]), [30, 30, 30]
    lengths = {}
    for early in (False, True, "never"):
        seen = check(ROOMY, 4, prompts, limits, ENDS[:1], early=early)
        lengths[early] = [sorted(len(s) for s in group) for group in seen.sequences]
        assert any(len(set(group)) > 1 for group in lengths[early])
    assert all(group[-1] < 30 for group in lengths[True])
    assert lengths[True] != lengths["never"]


def test_two_beams_in_small_steps_with_two_ids_that_end():
    prompts, limits = prompts_of(2, [8, 1, 11, 6]), [9, 12, 8, 5]
    preemptions = 0
    for penalty, early in KINDS:
        seen = check(CHUNKED, 2, prompts, limits, ENDS, penalty, early)
        preemptions += int(seen.totals.preemptions)
    assert preemptions > 0


def test_eight_beams_without_a_prefix_cache():
    seen = check(EIGHT, 8, prompts_of(5, [6, 13]), [11, 9], ENDS)
    assert seen.totals.cached_tokens == 0


def test_a_pool_for_a_single_beam_takes_longer_and_changes_nothing():
    prompts, limits = prompts_of(6, [9, 12, 5]), [12, 10, 14]
    tight = check(TIGHT, 4, prompts, limits, ENDS[:1])
    roomy = check(ROOMY, 4, prompts, limits, ENDS[:1])
    assert tight.totals.preemptions > 0
    assert roomy.totals.preemptions == 0
    assert tight.steps > roomy.steps


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_full_blocks_are_held_once_and_each_beam_has_one_of_its_own(length):
    """The bound is met in every step; and it is far below what separate beams would hold."""
    k, held = ROOMY.block_size, []

    def watch(host, _):
        used = int((host.pool.ref_count > 0).sum())
        full, rows = set(), np.flatnonzero(host.rows.request < 16)
        for row in rows:
            tokens = host.requests.tokens[host.rows.request[row]]
            planned = int(host.plan.num_scheduled[row])  # a prompt's blocks are there before
            written = int(host.rows.kv_len[row]) + (planned if planned > 1 else 0)
            for end in range(k, written + 1, k):
                full.add(tuple(tokens[:end]))
        assert used <= len(full) + len(rows)
        held.append((used, int(host.rows.num_blocks.sum())))

    seen = check(ROOMY, 4, prompts_of(length, [length]), [20], (), watch=watch)
    assert max(used for used, _ in held) == seen.most_used
    assert seen.totals.copies > 0
    assert any(used < separate for used, separate in held)


def test_a_group_takes_the_rows_of_one_that_is_done():
    """Four groups, two at a time: the third begins in the middle of the second."""
    opened, rows = [], []

    def watch(host, search):
        opened.append((int(search.opened), search.beams.length.tolist()))
        rows.append(int((host.rows.request < 16).sum()))

    check(ROOMY, 4, prompts_of(8, [5, 5, 6, 7]), [3, 12, 4, 5], (), watch=watch)
    third = next(lengths for count, lengths in opened if count == 3)
    assert third[0] == 3
    assert 0 < third[1] < 12
    assert max(rows) == 8


def test_equal_prompts_share_their_blocks_too():
    prompt = prompts_of(9, [12])[0]
    seen = check(ROOMY, 4, [prompt, prompt], [4, 4], ())
    assert seen.sequences[0] == seen.sequences[1]
    assert seen.totals.cached_tokens > 0


def test_preempt_all_takes_every_row_and_all_go_on():
    config = small_config()
    prompts = prompts_of(10, [5, 9, 6])
    driver = Driver(config, seed=3)
    slots = [driver.submit(prompt, 12) for prompt in prompts]
    slots.append(driver.submit(prompts[1], 12, fork_of=slots[1]))
    for _ in range(4):
        driver.step()
    lent = quick_jit(preempt_all)(driver.state.scheduler)
    driver._set_scheduler(lent)
    assert not driver.host.pool.ref_count.any()
    assert not driver.host.plan.num_scheduled.any()
    assert driver.host.plan.num_copies == 0
    assert [driver.status(slot) for slot in slots] == [RUNNING] * 4
    driver.step()  # only plans
    driver.run()
    for slot, prompt in zip(slots, [*prompts, prompts[1]], strict=True):
        assert driver.tokens(slot) == solo(prompt, 12)


def test_the_program_does_not_copy_the_cache():
    model, params = build(MODEL, jax.tree.map(jnp.asarray, random_params(MODEL)))
    sizes = {"max_num_batched_tokens": 8, "block_size": 4, "prefill_tile": 4}
    config = search_config(small_config(num_blocks=16384, **sizes), 2, 2, 64)
    params_of = BeamSearchParams(beam_width=2, max_tokens=5)
    state = jax.eval_shape(lambda: init_state(config, model))
    i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    new = NewSearch(i32((2, 64)), i32((2,)), i32((2,)), i32((2,)))
    _, search = jax.eval_shape(partial(start_search, config, 2, 1), new)
    program = jax.jit(partial(search_steps, config, model), donate_argnums=(1, 3))
    rules = make_rules(params_of, (2,), 64)
    compiled = program.lower(params, state, rules, search, jnp.int32(1)).compile()
    shape = ",".join(str(n) for n in state.kv.shape)
    text = compiled.as_text()
    assert re.search(rf"f32\[{shape}\]", text), "the cache is not in the program"
    assert not re.findall(rf"f32\[{shape}\]\S* (?:copy|convert)\(", text)
    kv_bytes = state.kv.size * state.kv.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < kv_bytes / 10
