"""The pure function against the dense reference, and inside other programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from write_checkpoints import TINY_LLAMA as CONFIG
from write_checkpoints import random_params

from oxidize_jax import ScoreConfig, pad_prompts, score
from oxidize_jax.model.functional import build
from oxidize_jax.model.reference import reference_forward

LENGTHS = [1, 2, 15, 16, 17, 29, 5]
NEAR = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(scope="module")
def params():
    return {name: jnp.asarray(values) for name, values in random_params(CONFIG).items()}


@pytest.fixture(scope="module")
def decoder(params):
    return build(CONFIG, params)[0]


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return pad_prompts(
        [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in LENGTHS],
        vocab_size=CONFIG.vocab_size,
    )


@pytest.fixture(scope="module")
def expected(params, prompts):
    run = jax.jit(jax.vmap(lambda ids: reference_forward(CONFIG, params, ids)))
    logprobs = jax.nn.log_softmax(run(prompts.tokens)[:, :-1])
    chosen = jnp.take_along_axis(logprobs, prompts.tokens[:, 1:, None], axis=-1)
    ranks = 1 + (logprobs > chosen).sum(axis=-1, dtype=jnp.int32)
    inside = np.arange(1, 32) < np.asarray(LENGTHS)[:, None]
    return inside, np.asarray(chosen[..., 0]), np.asarray(ranks)


def check(scored, expected):
    inside, logprobs, ranks = expected
    np.testing.assert_array_equal(scored.mask[:, 1:], inside)
    assert not np.asarray(scored.mask[:, 0]).any()
    assert not np.asarray(scored.logprobs)[~np.asarray(scored.mask)].any()
    np.testing.assert_allclose(scored.logprobs[:, 1:][inside], logprobs[inside], **NEAR)
    np.testing.assert_array_equal(scored.ranks[:, 1:][inside], ranks[inside])


@pytest.mark.parametrize("budget", [100, 12, 512], ids=["three rows", "parts of one", "all"])
def test_scores_are_the_references(params, decoder, prompts, expected, budget):
    config = ScoreConfig(decoder, max_num_batched_tokens=budget, block_size=5, prefill_tile=4)
    check(score(params, prompts, config), expected)
    check(score(build(CONFIG, params)[1], (prompts.tokens, prompts.lengths), config), expected)


def test_inside_jit_with_traced_parameters_and_without_a_gradient(
    params, decoder, prompts, expected
):
    config = ScoreConfig(decoder, max_num_batched_tokens=100, block_size=5, prefill_tile=4)

    @jax.jit
    def loss(params, factor):
        scaled = {name: leaf * factor for name, leaf in params.items()}
        scored = score(scaled, prompts, config)
        return jnp.sum(scored.logprobs), scored

    (total, scored), gradients = jax.value_and_grad(loss, has_aux=True)(params, jnp.float32(1))
    check(scored, expected)
    assert float(total) < 0
    assert not any(np.asarray(leaf).any() for leaf in gradients.values())
    assert float(loss(params, jnp.float32(0.9))[0]) != float(total)


def test_refusals(params, decoder, prompts):
    with pytest.raises(ValueError, match="model=3"):
        ScoreConfig(3)
    with pytest.raises(ValueError, match="block_size=0"):
        ScoreConfig(decoder, block_size=0)
    long = jnp.zeros((1, CONFIG.max_position_embeddings + 1), jnp.int32)
    with pytest.raises(ValueError, match=f"made for {CONFIG.max_position_embeddings}: shorten"):
        score(params, (long, jnp.ones((1,), jnp.int32)), ScoreConfig(decoder))
