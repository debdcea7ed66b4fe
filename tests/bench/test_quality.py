"""Perplexity through the paged path against the dense reference; agreement of two runs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from write_checkpoints import TINY_LLAMA as CONFIG
from write_checkpoints import random_params

from oxidize_jax.bench import quality
from oxidize_jax.bench.quality import Scores
from oxidize_jax.model.functional import build
from oxidize_jax.model.reference import reference_forward


@pytest.fixture(scope="module")
def params():
    return {name: jnp.asarray(values) for name, values in random_params(CONFIG).items()}


@pytest.fixture(scope="module")
def scored(params):
    windows = np.random.default_rng(0).integers(0, 61, (3, 24), dtype=np.int32)
    decoder, leaves = build(CONFIG, params)
    # Three chunks a window; blocks that end within a chunk.
    return windows, quality.score(decoder, leaves, windows, chunk=8, tile=4, block_size=6)


def test_scores_are_those_of_the_dense_reference(params, scored):
    windows, scores = scored
    assert scores.num_tokens == 3 * 23
    total = []
    reference = jax.jit(lambda ids: reference_forward(CONFIG, params, ids))
    for window, nll, best in zip(windows, scores.nll, scores.best, strict=True):
        logits = reference(window)[:-1]
        expected = optax.softmax_cross_entropy_with_integer_labels(logits, window[1:])
        np.testing.assert_allclose(nll, expected, rtol=2e-4, atol=2e-4)
        np.testing.assert_array_equal(best, jnp.argmax(logits, -1))
        total.append(np.asarray(expected, np.float64))
    assert scores.perplexity == pytest.approx(math.exp(np.mean(total)), rel=1e-4)


def test_a_model_that_knows_nothing_is_as_perplexed_as_it_has_words(params):
    blank = params | {"final_norm.weight": jnp.zeros((24,), jnp.float32)}
    decoder, leaves = build(CONFIG, blank)
    windows = np.arange(48, dtype=np.int32).reshape(2, 24)
    scores = quality.score(decoder, leaves, windows, chunk=8, tile=4, block_size=6)
    assert scores.perplexity == pytest.approx(61, rel=1e-6)


def test_windows_are_cut_in_order_and_a_short_text_is_refused():
    assert quality.cut_windows(range(9), 4, 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="7 tokens, but 2 windows of 4 take 8"):
        quality.cut_windows(range(7), 4, 2)


def test_agreement_counts_places_and_prefixes(scored):
    _, scores = scored
    other = Scores(scores.nll, scores.best.copy())
    other.best[0, :5] += 1
    assert quality.agreement(scores, scores) == 1
    assert quality.agreement(other, scores) == pytest.approx(1 - 5 / 69)
    assert quality.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert quality.common_prefix([1, 2], [1, 2, 4]) == 2
    assert quality.common_prefix([], [1]) == 0
    assert quality.mean_common_prefix([[1, 2], [3, 4]], [[1, 2], [4, 3]]) == 1
