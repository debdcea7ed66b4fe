"""deterministic with a real model: the same bits in any company."""

import dataclasses
import random

import pytest
from bits import bits, preemptions
from mixed_batch import mixed_params, solo, together

from oxidize_jax import LLM
from oxidize_jax.engine.engine import EngineRequest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(smollm2_path):
    return LLM(
        smollm2_path,
        dtype="bfloat16",
        deterministic=True,
        max_model_len=192,
        max_num_seqs=16,
        num_blocks=40,
        max_logprobs=3,
        progress=False,
    )


def drawn(length, new_tokens, seed):
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(100, 40000) for _ in range(length))
    return EngineRequest(prompt, new_tokens, temperature=1.0, key=(0, seed), num_logprobs=3)


ONE = drawn(75, 24, 1000)
OTHERS = [drawn(random.Random(i).randrange(1, 90), 1 + 5 * i % 24, i) for i in range(32)]


def test_alone_among_32_neighbours_and_with_its_prompt_cached(llm):
    expected = bits(llm.engine, [ONE])[0]
    assert len(set(expected[0])) > 12
    before = int(llm.engine.state.scheduler.totals.cached_tokens)
    assert bits(llm.engine, [ONE], max_steps=1)[0] == expected
    assert int(llm.engine.state.scheduler.totals.cached_tokens) - before == 64
    llm.reset_prefix_cache()
    among = bits(llm.engine, [*OTHERS[:9], ONE, *OTHERS[9:]])
    assert among[9] == expected
    llm.reset_prefix_cache()
    turned = bits(llm.engine, [*OTHERS[::-1], ONE])
    assert turned[-1] == expected
    assert turned[-2::-1] == among[:9] + among[10:]


def test_preempted_and_computed_anew(llm):
    expected = bits(llm.engine, [ONE])[0]
    before = preemptions(llm.engine)
    # Each has a salt of its own, hence no blocks of another's.
    company = [dataclasses.replace(ONE, salt=salt) for salt in range(1, 9)]
    assert bits(llm.engine, company) == [expected] * 8
    assert preemptions(llm.engine) > before


def test_64_requests_with_every_option_are_each_as_alone(llm):
    letters = [llm.tokenizer.encode(" " + letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
    params = mixed_params(letters, 64)
    prompts = [f"Number {i} of the" for i in range(64)]
    assert together(llm, prompts, params) == solo(llm, prompts, params)
