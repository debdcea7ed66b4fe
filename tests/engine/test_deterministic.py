"""deterministic: a request's tokens and logprobs are the same bits in any company."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import bits, bits_of, preemptions
from hypothesis import given, settings
from hypothesis import strategies as st
from write_checkpoints import random_params

from oxidize_jax.batch.buckets import buckets
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine import programs
from oxidize_jax.engine.engine import Engine, EngineRequest
from oxidize_jax.engine.step import init_state
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.functional import build
from oxidize_jax.sampling.keys import child_key

MODEL = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=160,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
"""Wide enough that products of unlike shapes round otherwise."""
ROOMY = EngineConfig(
    max_num_seqs=8,
    max_model_len=64,
    num_blocks=128,
    block_size=4,
    max_num_requests=48,
    max_logprobs=2,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_bad_words=2,
    max_bad_word_tokens=2,
    token_mask_size=97,
    deterministic=True,
)
TIGHT = dataclasses.replace(
    ROOMY, num_blocks=20, max_num_batched_tokens=11, policy="decode_first", max_num_requests=40
)
"""Blocks for one sequence and a little, and chunks of other lengths."""
ONE = EngineRequest(tuple(range(3, 40)), 12, temperature=1.0, key=(0, 7), num_logprobs=2)


@pytest.fixture(scope="module")
def decoder():
    return build(MODEL, jax.tree.map(jnp.asarray, random_params(MODEL)))


@pytest.fixture(scope="module")
def roomy(decoder):
    return Engine(ROOMY, *decoder)


@pytest.fixture(scope="module")
def tight(decoder):
    return Engine(TIGHT, *decoder)


@pytest.fixture(scope="module")
def alone(roomy):
    """``alone(request)``: its bits with the engine to itself and nothing cached."""

    def run(request):
        roomy.reset_prefix_cache()
        return bits(roomy, [request])[0]

    return run


def cached_tokens(engine):
    return int(engine.state.scheduler.totals.cached_tokens)


def varied(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        EngineRequest(
            tuple(rng.integers(0, 97, rng.integers(1, 45)).tolist()),
            int(rng.integers(1, 18)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.9, 1.0])),
            presence_penalty=float(rng.choice([0.0, 1.5])),
            num_logprobs=int(rng.integers(0, 3)),
            key=(1, i),
        )
        for i in range(count)
    ]


def test_there_is_one_shape_and_the_budget_does_not_change_it():
    (shape,) = buckets(ROOMY)
    assert buckets(TIGHT) == (shape,)
    assert (shape.tokens, shape.decode_rows, shape.tiles, shape.samples) == (32, 32, 0, 8)
    assert (ROOMY.token_budget, TIGHT.token_budget) == (32, 11)
    (wide,) = buckets(dataclasses.replace(ROOMY, max_num_seqs=33))
    assert (wide.tokens, wide.samples) == (64, 33)
    assert buckets(dataclasses.replace(ROOMY, max_num_seqs=1))[0].samples == 2
    assert dataclasses.replace(ROOMY, deterministic=False).token_budget == 512
    with pytest.raises(ValueError, match="deterministic=1: must be true or false"):
        dataclasses.replace(ROOMY, deterministic=1)


def test_sm01_alone_and_among_32_neighbours_in_any_order(roomy, alone):
    expected = alone(ONE)
    others = varied(32)
    roomy.reset_prefix_cache()
    for place in (0, 17, 32):
        company = [*others[:place], ONE, *others[place:]]
        assert bits(roomy, company)[place] == expected
    assert bits(roomy, [ONE, *others[::-1]], max_steps=1)[0] == expected


def test_preempted_and_computed_anew_in_other_chunks(tight, alone):
    """In a pool for one and a half, each is preempted by those before it."""
    company = [
        dataclasses.replace(ONE, prompt_token_ids=ONE.prompt_token_ids[i:]) for i in range(5)
    ]
    before = preemptions(tight)
    for first in (company, company[::-1]):
        for salt in (1, 2):  # no blocks of the last time
            run = [dataclasses.replace(request, salt=salt + len(first)) for request in first]
            assert bits(tight, run) == [alone(request) for request in first]
    assert preemptions(tight) >= before + 8


def test_a_prefix_hit_of_any_length_gives_what_computing_it_gives(roomy, alone):
    """The blocks were filled as prompt or as output, by chunks or one by one."""
    expected = alone(ONE)
    tokens = ONE.prompt_token_ids + expected[0]
    # What the first makes as output the second has in its prompt.
    longer = dataclasses.replace(ONE, prompt_token_ids=tokens[:45], max_new_tokens=8)
    computed = alone(longer)
    roomy.reset_prefix_cache()
    assert bits(roomy, [ONE])[0] == expected
    ids = [roomy.add(longer)]
    assert bits_of(roomy, ids) == [computed]
    assert bits(roomy, [dataclasses.replace(longer, use_cache=False)]) == [computed]
    for length in (4, 5, 20, 36, 37):
        short = dataclasses.replace(ONE, prompt_token_ids=tokens[:length])
        want = alone(short)
        bits(roomy, [ONE])
        hits = int(roomy.state.scheduler.totals.cached_tokens)
        assert bits(roomy, [short]) == [want]
        assert int(roomy.state.scheduler.totals.cached_tokens) - hits == min(
            length // 4 * 4, length - 1
        )


def test_completions_of_one_prompt_are_those_of_their_keys(tight, alone):
    keys = [tuple(child_key(7, child).tolist()) for child in range(5)]
    ids = tight.add_group(ONE, keys)
    want = [alone(dataclasses.replace(ONE, key=key)) for key in keys]
    assert bits_of(tight, ids) == want


@st.composite
def requests(draw):
    """Anything that may share the batch; many begin as ``ONE`` does."""
    shared = draw(st.integers(0, len(ONE.prompt_token_ids)))
    own = draw(st.lists(st.integers(0, 96), min_size=1, max_size=12))
    return EngineRequest(
        (ONE.prompt_token_ids[:shared] + tuple(own))[:45],
        draw(st.integers(1, 18)),
        temperature=draw(st.sampled_from([0.0, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.5])),
        min_p=draw(st.sampled_from([0.0, 0.2])),
        typical_p=draw(st.sampled_from([1.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 1.0])),
        logit_bias=draw(st.sampled_from([(), ((5, 3.0),)])),
        banned_token_ids=draw(st.sampled_from([(), (1, 2)])),
        bad_words=draw(st.sampled_from([(), ((4, 5),)])),
        stop_token_ids=draw(st.sampled_from([(), (8,)])),
        num_logprobs=draw(st.sampled_from([None, 0, 2])),
        use_cache=draw(st.booleans()),
        key=(0, draw(st.integers(0, 9))),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    before=st.lists(requests(), max_size=8),
    after=st.lists(requests(), max_size=8),
    one=requests(),
    pool=st.sampled_from(["roomy", "tight"]),
    steps=st.sampled_from([1, 3, 16]),
)
def test_any_neighbours(roomy, tight, alone, before, after, one, pool, steps):
    expected = alone(one)
    engine = {"roomy": roomy, "tight": tight}[pool]
    got = bits(engine, [*before, one, *after], max_steps=steps)
    assert got[len(before)] == expected


def test_the_program_does_not_copy_the_cache(decoder, roomy):
    """The program that the tests above ran, so that nothing is compiled."""
    model, params = decoder
    state = jax.eval_shape(lambda: init_state(ROOMY, model))
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    text = programs.traced_run.lower(ROOMY, model, params, state, limit).compile().as_text()
    shape = ",".join(str(n) for n in state.kv.shape)
    assert re.search(rf"f32\[{shape}\]", text), "the cache is not in the program"
    assert not re.findall(rf"f32\[{shape}\]\S* (?:copy|convert)\(", text)
