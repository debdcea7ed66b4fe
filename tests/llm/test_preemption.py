"""Preemption as a caller sees it: not at all."""

import dataclasses

import jax
import numpy as np
import pytest

from oxidize_jax import SamplingParams
from oxidize_jax.scheduler.rows import preempt
from oxidize_jax.scheduler.schedule import schedule

PARAMS = SamplingParams(
    temperature=1,
    seed=5,
    presence_penalty=1,
    repetition_penalty=1.3,
    min_tokens=3,
    max_tokens=6,
    ignore_eos=True,
    logprobs=2,
)


def preempt_all(llm):
    """Take the rows of all that runs, and plan again."""
    engine = llm.engine
    scheduler = engine.state.scheduler
    assert int(scheduler.plan.num_copies) == 0
    rows = np.flatnonzero(np.asarray(scheduler.rows.request) < llm.config.max_num_requests)
    for row in rows.tolist():
        scheduler = jax.jit(preempt)(scheduler, np.int32(row), np.bool_(False))
    scheduler = jax.jit(schedule, static_argnums=0)(llm.config, scheduler)
    engine.state = dataclasses.replace(engine.state, scheduler=scheduler)
    return len(rows)


def test_sc03_a_pool_for_one_and_a_half_gives_what_a_large_one_gives(llm, make_llm):
    prompts = ["abcdefgh", "klmnopqr"]
    expected = llm.generate(prompts, PARAMS)
    # Each needs 4 blocks of 4 tokens at its end.
    tight = make_llm(num_blocks=6, max_model_len=24, check_invariants=True)
    outputs = tight.generate(prompts, PARAMS)
    assert int(tight.engine.state.scheduler.totals.preemptions) > 0
    for output, other in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        assert output.outputs[0].text == other.outputs[0].text
        assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs) == 6
        assert output.usage.prompt_tokens == other.usage.prompt_tokens
        assert output.usage.completion_tokens == 6
        for entry, same in zip(output.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert entry.keys() == same.keys()
            for token in entry:
                assert entry[token].logprob == pytest.approx(same[token].logprob, abs=1e-4)


@pytest.mark.parametrize("cached", [True, False])
def test_sc04_a_stream_that_is_preempted_twice_sends_nothing_twice(llm, cached):
    params = dataclasses.replace(PARAMS, max_tokens=8)
    (expected,) = llm.generate("abcdefghij", params)
    llm.reset_prefix_cache()
    ids, text, preempted = [], "", 0
    for delta in llm.stream("abcdefghij", params):
        before = len(ids)
        ids += delta.token_ids
        text += delta.text
        for at in (3, 5):
            if before < at <= len(ids) < 8:
                preempted += preempt_all(llm)
                if not cached:
                    llm.reset_prefix_cache()
    assert preempted == 2
    assert tuple(ids) == expected.outputs[0].token_ids
    assert text == expected.outputs[0].text
    assert len(ids) == 8
