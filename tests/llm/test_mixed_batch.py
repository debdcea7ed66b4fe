"""64 requests with unlike options in one batch: each gives, to the bit, what it gives alone."""

import dataclasses

import pytest
from mixed_batch import mixed_params, options_used, solo, together

from oxidize_jax import SamplingParams

LETTERS = tuple(range(64, 90))  # of the tiny tokenizer: a to z
PARAMS = mixed_params(LETTERS, 64)
PROMPTS = [("The sea", "Hello there", "abcabcabc", "x", "The sea is")[i % 5] for i in range(64)]


@pytest.fixture(scope="module")
def exact(make_llm):
    return make_llm(deterministic=True, max_num_seqs=8, num_blocks=16, check_invariants=True)


def test_sv09_64_requests_with_every_option_are_each_as_alone(exact):
    missing = {f.name for f in dataclasses.fields(SamplingParams)} - options_used(PARAMS)
    assert not missing, f"{missing}: put it into mixed_batch"
    expected = solo(exact, PROMPTS, PARAMS)
    assert together(exact, PROMPTS, PARAMS) == expected
    assert together(exact, PROMPTS[::-1], PARAMS[::-1])[::-1] == expected
    assert int(exact.engine.state.scheduler.totals.preemptions) > 0
    # The batch is worth something: all ways to end, and options that matter.
    ends = {(c.finish_reason, type(c.stop_reason)) for outputs in expected for c in outputs}
    assert {("stop", str), ("stop", int), ("length", type(None))} <= ends
    assert len({c.token_ids for outputs in expected for c in outputs}) > 64
