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
from oxidize_jax.model.quantize import quantize
from oxidize_jax.sampling.keys import child_key

MODEL = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
"""Wide enough that products of unlike shapes round otherwise."""
CONFIG = EngineConfig(
    max_num_seqs=8,
    max_model_len=64,
    num_blocks=40,
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
"""A pool for three or four sequences, so that those that come later are preempted."""
ONE = EngineRequest(tuple(range(3, 40)), 12, temperature=1.0, key=(0, 7), num_logprobs=2)


@pytest.fixture(scope="module")
def decoder():
    return build(MODEL, jax.tree.map(jnp.asarray, random_params(MODEL)))


@pytest.fixture(scope="module")
def engine(decoder):
    return Engine(CONFIG, *decoder)


@pytest.fixture(scope="module")
def alone(engine):
    """``alone(request)``: its bits with the engine to itself and nothing cached."""

    def run(request):
        engine.reset_prefix_cache()
        return bits(engine, [request])[0]

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
    (shape,) = buckets(CONFIG)
    small = dataclasses.replace(CONFIG, num_blocks=20, max_num_batched_tokens=11)
    assert buckets(small) == (shape,)
    assert (shape.tokens, shape.decode_rows, shape.tiles, shape.samples) == (32, 32, 0, 8)
    assert (CONFIG.token_budget, small.token_budget) == (32, 11)
    (wide,) = buckets(dataclasses.replace(CONFIG, max_num_seqs=33))
    assert (wide.tokens, wide.samples) == (64, 33)
    assert buckets(dataclasses.replace(CONFIG, max_num_seqs=1))[0].samples == 2
    assert dataclasses.replace(CONFIG, deterministic=False).token_budget == 512
    with pytest.raises(ValueError, match="deterministic=1: must be true or false"):
        dataclasses.replace(CONFIG, deterministic=1)


def test_sm01_alone_and_among_32_neighbours_in_any_order(engine, alone):
    expected = alone(ONE)
    others = varied(32)
    engine.reset_prefix_cache()
    for place in (0, 17, 32):
        company = [*others[:place], ONE, *others[place:]]
        assert bits(engine, company)[place] == expected
    assert bits(engine, [ONE, *others[::-1]], max_steps=1)[0] == expected


def test_preempted_and_computed_anew_in_other_chunks(engine, alone):
    """Each of the later ones is preempted, some more than once."""
    tokens = ONE.prompt_token_ids
    company = [dataclasses.replace(ONE, prompt_token_ids=tokens[i:]) for i in range(7)]
    for use_cache in (True, False):  # with its blocks found again, and all of it computed again
        run = [dataclasses.replace(request, use_cache=use_cache) for request in company]
        for turn in (run, run[::-1]):
            before = preemptions(engine)
            got = bits(engine, turn)
            assert preemptions(engine) > before
            assert got == [alone(request) for request in turn]


def test_a_prefix_hit_of_any_length_gives_what_computing_it_gives(engine, alone):
    """The blocks were filled as prompt or as output, by chunks or one by one."""
    expected = alone(ONE)
    tokens = ONE.prompt_token_ids + expected[0]
    # What the first makes as output the second has in its prompt.
    longer = dataclasses.replace(ONE, prompt_token_ids=tokens[:45], max_new_tokens=8)
    computed = alone(longer)
    engine.reset_prefix_cache()
    assert bits(engine, [ONE])[0] == expected
    ids = [engine.add(longer)]
    assert bits_of(engine, ids) == [computed]
    assert bits(engine, [dataclasses.replace(longer, use_cache=False)]) == [computed]
    for length in (4, 5, 20, 36, 37):
        short = dataclasses.replace(ONE, prompt_token_ids=tokens[:length])
        want = alone(short)
        bits(engine, [ONE])
        hits = int(engine.state.scheduler.totals.cached_tokens)
        assert bits(engine, [short]) == [want]
        assert int(engine.state.scheduler.totals.cached_tokens) - hits == min(
            length // 4 * 4, length - 1
        )


def test_completions_of_one_prompt_are_those_of_their_keys(engine, alone):
    keys = [tuple(child_key(7, child).tolist()) for child in range(5)]
    want = [alone(dataclasses.replace(ONE, key=key)) for key in keys]
    assert bits_of(engine, engine.add_group(ONE, keys)) == want


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
    steps=st.sampled_from([1, 3, 16]),
)
def test_any_neighbours(engine, alone, before, after, one, steps):
    expected = alone(one)
    got = bits(engine, [*before, one, *after], max_steps=steps)
    assert got[len(before)] == expected


def test_int8_alone_among_neighbours_preempted_in_chunks_and_with_its_prefix_cached():
    """The tests above are of float32; of these weights the sums are whole numbers, the scales,
    norms and attention round as theirs do, and keys and values once more."""
    params = quantize(jax.tree.map(jnp.asarray, random_params(MODEL)))
    engine = Engine(CONFIG, *build(MODEL, params, kv_dtype="bfloat16"))

    def alone(request):
        engine.reset_prefix_cache()
        return bits(engine, [request])[0]

    expected = alone(ONE)
    assert len(set(expected[0])) > 6
    hits = cached_tokens(engine)
    assert bits(engine, [ONE], max_steps=1) == [expected]
    assert cached_tokens(engine) - hits == 36
    others = varied(12)
    for place in (0, 7):
        engine.reset_prefix_cache()
        assert bits(engine, [*others[:place], ONE, *others[place:]])[place] == expected
    tokens = ONE.prompt_token_ids
    company = [dataclasses.replace(ONE, prompt_token_ids=tokens[i:]) for i in range(6)]
    before = preemptions(engine)
    got = bits(engine, [dataclasses.replace(one, use_cache=False) for one in company])
    assert preemptions(engine) > before
    assert got == [alone(one) for one in company]


def test_the_program_does_not_copy_the_cache(decoder, engine):
    """The program that the tests above ran, so that nothing is compiled."""
    model, params = decoder
    state = jax.eval_shape(lambda: init_state(CONFIG, model))
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    text = programs.traced_run.lower(CONFIG, model, params, state, limit).compile().as_text()
    shape = ",".join(str(n) for n in state.kv.shape)
    assert re.search(rf"f32\[{shape}\]", text), "the cache is not in the program"
    assert not re.findall(rf"f32\[{shape}\]\S* (?:copy|convert)\(", text)
