"""Prompts, keys and sampling parameters of generate: what is taken, and what is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import VOCAB, FakeModel

from oxidize_jax.engine.generate import GenerateConfig, generate
from oxidize_jax.engine.inputs import (
    Sampling,
    check_sampling,
    compact_prompts,
    pad_prompts,
    request_keys,
)
from oxidize_jax.sampling.keys import child_key, key_data_from_seed

KEY = jax.random.key(3)
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "prefill_tile": 4}


def test_numbers_of_any_kind_are_arrays_of_one_type():
    kinds = [
        Sampling(KEY, 0, 0, 1, 5, 0, [1, 2], 0, 1, 1, 0, 0),
        Sampling(KEY, 0.5, np.int64(3), np.float64(0.5), None, 2, np.array([[3, -1]])),
        Sampling(
            KEY, jnp.float32(1), jnp.int8(1), jnp.bfloat16(1), stop_token_ids=jnp.array([4, 5])
        ),
    ]
    first, *rest = (jax.tree.map(jax.typeof, check_sampling(k, 3, VOCAB, 8)) for k in kinds)
    for other in rest:
        assert other == first


def test_a_prompt_has_the_same_key_in_any_batch():
    keys = request_keys(KEY, 5, 3)
    chex.assert_trees_all_equal(request_keys(KEY, 2, 2), keys[:2, :2])
    assert len({tuple(key) for key in np.asarray(keys).reshape(-1, 2).tolist()}) == 15
    chex.assert_trees_all_equal(
        keys[:, 0],
        jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.arange(5))),
    )
    chex.assert_trees_all_equal(request_keys(jax.random.PRNGKey(3), 5, 3), keys)


def test_keys_of_their_own_are_those_of_seeds():
    seeds = [7, 2**40 + 1]
    keys = request_keys(np.stack([key_data_from_seed(seed) for seed in seeds]), 2, 3)
    want = [[child_key(seed, child) for child in range(3)] for seed in seeds]
    chex.assert_trees_all_equal(keys, np.array(want))


def test_prompts_padded_anywhere():
    tokens = jnp.array([[0, 0, 5, 6], [7, 8, 0, 0], [0, 3, 0, 4], [0, 0, 0, 0]], jnp.int32)
    mask = jnp.array([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]], jnp.int32)
    for given in (mask, mask == 1):
        prompts = compact_prompts(tokens, given)
        assert prompts.lengths.tolist() == [2, 2, 2, 0]
        assert prompts.tokens[:3, :2].tolist() == [[5, 6], [7, 8], [3, 4]]


def test_prompts_of_about_one_length_have_one_width():
    assert pad_prompts([[1] * 3, [2] * 15], vocab_size=9).tokens.shape == (2, 16)
    assert pad_prompts([[1] * 17], vocab_size=9).tokens.shape == (1, 32)
    assert pad_prompts(np.ones((2, 3), np.int64), vocab_size=9, width=3).tokens.shape == (2, 3)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[1], []], r"prompts\[1\] has 0 tokens"),
        ([[1], [2, 9]], r"prompts\[1\]\[1\]=9: token ids must be in 0 to 8"),
        ([[1], [2, 1.5]], r"prompts\[1\]\[1\]=1.5: token ids must be whole"),
        (
            [[1], [-(10**5000)]],
            r"prompts\[1\]\[0\]=a number of over \d+ digits: token ids must be in",
        ),
        ([[np.int64(9)]], r"prompts\[0\]\[0\]=9: token ids must be in 0 to 8"),
        ([[["x" * 10**5]]], r"prompts\[0\]\[0\]=\['x{38}\.\.\.: token ids must be whole"),
        ([[1] * 5, [1] * 3], r"prompts\[0\] has 5 tokens, but width=4"),
        ([1, 2], r"prompts\[0\]=1: must be a list"),
        (["ab"], r"prompts\[0\]='ab': must be a list"),
    ],
)
def test_prompts_that_cannot_be_are_refused_on_the_host(prompts, message):
    with pytest.raises(ValueError, match=message):
        pad_prompts(prompts, vocab_size=9, width=4)


def call(prompts=None, key=KEY, **sampling):
    prompts = pad_prompts([[1], [2]], vocab_size=VOCAB, width=4) if prompts is None else prompts
    config = GenerateConfig(FakeModel(), 4, **SIZES)
    return jax.eval_shape(lambda: generate(None, prompts, Sampling(key, **sampling), config))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature=-1: must be from 0"),
        ({"temperature": float("nan")}, "temperature=nan: must be from 0"),
        ({"top_p": 1.5}, "top_p=1.5: must be from 0 to 1"),
        ({"top_k": 2.5}, "top_k is float64: must be whole numbers"),
        ({"top_k": jnp.ones((), jnp.float32)}, "top_k is float32: must be whole numbers"),
        ({"temperature": "hot"}, "temperature is <U3: must be numbers"),
        ({"max_new_tokens": [4, 5]}, r"max_new_tokens=\[4, 5\]: must be from 0 to 4, the max_new"),
        ({"max_new_tokens": np.int64(5)}, "max_new_tokens=5: must be from 0 to 4"),
        ({"temperature": [[1], [1, 2]]}, "temperature has lists of different lengths: make"),
        ({"stop_token_ids": [[1], [1, 2]]}, "stop_token_ids has lists of different .* with -1"),
        ({"bias_ids": [[1], [1, 2]], "bias_values": [[1], [1, 2]]}, "bias_ids has lists"),
        ({"bias_ids": [[1], [2]], "bias_values": [[1], [1, 2]]}, "bias_values has lists"),
        ({"token_mask": [[True], [True, False]]}, "token_mask has lists of different lengths"),
        ({"max_new_tokens": [1, 2, 3]}, r"max_new_tokens has shape \[3\]: .* 2, one for each"),
        ({"stop_token_ids": [VOCAB]}, rf"stop_token_ids=\[{VOCAB}\]: must be from .* to 96"),
        ({"stop_token_ids": [[1]] * 3}, r"stop_token_ids has shape \[3, 1\]"),
        ({"min_p": 1.5}, "min_p=1.5: must be from 0 to 1"),
        ({"typical_p": -0.1}, "typical_p=-0.1: must be from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be from 0.001 to 1000"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: must be from -2.0 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan: must be from -2.0 to 2"),
        ({"bias_ids": [1, VOCAB], "bias_values": [1, 1]}, "bias_ids=.*: must be from .* to 96"),
        ({"bias_ids": [1, 2], "bias_values": [1]}, r"bias_values has shape \[1, 1\] and bias_ids"),
        (
            {"bias_ids": [1], "bias_values": [101]},
            r"bias_values=\[101\]: must be from -100.0 to 100",
        ),
        ({"bias_ids": [1]}, "give one value for each id"),
        ({"stop_token_ids": [97] * 3000}, r"stop_token_ids=\[(97, ?){10}\.\.\.: must be from"),
        ({"token_mask": [True]}, r"token_mask is bool\[1, 1\]: must be bool, \[97\] or \[2, 97\]"),
        ({"token_mask": [1] * VOCAB}, r"token_mask is int64\[1, 97\]"),
        ({"token_mask": np.zeros((2, VOCAB), bool)}, "leaves a prompt no id"),
        ({"key": jax.random.key(0, impl="rbg")}, r"key has data uint32\[4\]"),
        ({"key": jnp.zeros((3, 2), jnp.uint32)}, r"key has data uint32\[3, 2\]: .* 2, one"),
        ({"prompts": (jnp.ones((2,), jnp.int32),) * 2}, r"prompts.tokens is int32\[2\]"),
        ({"prompts": ([[1]], [1])}, "prompts.tokens is list: must be an array of integers"),
        ({"prompts": (jnp.ones((2, 3)), jnp.ones((2,), jnp.int32))}, "prompts.tokens is float32"),
        ({"prompts": (jnp.ones((2, 3), jnp.int32), jnp.ones((3,), jnp.int32))}, "one length for"),
        ({"prompts": (jnp.ones((0, 3), jnp.int32), jnp.ones((0,), jnp.int32))}, "at least one row"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_runs(given, message):
    with pytest.raises(ValueError, match=message):
        call(**given)
