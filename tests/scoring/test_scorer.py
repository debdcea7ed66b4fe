"""Scores and embeddings through the pages against the dense reference, in float32."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from write_checkpoints import TINY_LLAMA as CONFIG
from write_checkpoints import random_params

from oxidize_jax.engine.warmup import CompileCounter
from oxidize_jax.model.functional import build
from oxidize_jax.model.reference import reference_forward
from oxidize_jax.scoring import programs
from oxidize_jax.scoring.layout import Chunk, Shape, Tables, build_step
from oxidize_jax.scoring.scorer import Scorer

LENGTHS = [1, 2, 15, 16, 17, 33, 70]
"""A step has 32 tokens, a block 4."""
TOP = 3
NEAR = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(scope="module")
def params():
    return {name: jnp.asarray(values) for name, values in random_params(CONFIG).items()}


@pytest.fixture(scope="module")
def built(params):
    return build(CONFIG, params)


@pytest.fixture(scope="module")
def scorer(built):
    return Scorer(
        built[0], max_len=80, max_num_batched_tokens=32, block_size=4, tile=4, num_top=TOP
    )


@pytest.fixture(scope="module")
def dense(params):
    """``dense(ids) -> logits f32[n, V]``: what follows a token does not matter to it."""
    run = jax.jit(lambda ids: reference_forward(CONFIG, params, ids))
    return lambda ids: np.asarray(run(np.pad(ids, (0, 80 - len(ids)))))[: len(ids)]


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length, dtype=np.int32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check(scores, ids, logits, start=1):
    logprobs = log_softmax(logits)[start - 1 : -1]
    chosen = np.take_along_axis(logprobs, ids[start:, None], axis=1)
    np.testing.assert_allclose(scores.logprobs, chosen[:, 0], **NEAR)
    nll = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits[start - 1 : -1], ids[start:]
    )
    np.testing.assert_allclose(-scores.logprobs, nll, **NEAR)
    np.testing.assert_array_equal(scores.ranks, 1 + (logprobs > chosen).sum(axis=1))
    best = np.argsort(-logprobs, axis=1, kind="stable")[:, : scores.top_ids.shape[1]]
    np.testing.assert_array_equal(scores.top_ids, best)
    np.testing.assert_allclose(
        scores.top_logprobs, np.take_along_axis(logprobs, best, axis=1), **NEAR
    )


def test_every_length_alone(built, scorer, dense):
    for length in LENGTHS:
        ids = text(length)
        (scores,) = scorer.score(built[1], [ids], top=TOP)
        assert scores.logprobs.shape == (length - 1,)
        check(scores, ids, dense(ids))


@pytest.mark.parametrize("order", range(3))
def test_many_at_once_in_any_order(built, scorer, dense, order):
    texts = [text(length, seed) for length in LENGTHS for seed in range(1 + (length < 40))]
    random.Random(order).shuffle(texts)
    told = []
    scores = scorer.score(built[1], texts, top=TOP, progress=told.append)
    assert sum(told) == sum(len(ids) - 1 for ids in texts)
    for one, ids in zip(scores, texts, strict=True):
        check(one, ids, dense(ids))


def test_only_what_comes_behind_a_start(built, scorer, dense):
    texts = [text(length) for length in (17, 2, 40, 33)]
    starts = [16, 1, 35, 33]
    scores = scorer.score(built[1], texts, starts=starts)
    for one, ids, start in zip(scores, texts, starts, strict=True):
        assert one.logprobs.size == len(ids) - start
        check(one, ids, dense(ids), start)


def test_nothing_to_score(built, scorer):
    assert scorer.score(built[1], []) == []
    (one, two) = scorer.score(built[1], [[5], [7]])
    assert one.logprobs.size == two.logprobs.size == 0


def test_equals_are_ranked_by_their_ids(params, scorer):
    """A head that gives tokens 5, 9 and 20 the same logit, and all others another."""
    decoder, _ = build(CONFIG, params)
    head = "embed.weight" if CONFIG.tie_word_embeddings else "lm_head.weight"
    rows = np.array(params[head])
    rows[:] = rows[0]
    rows[[5, 9, 20]] = 2 * rows[0]
    leaves = build(CONFIG, params | {head: jnp.asarray(rows)})[1]
    ids = np.array([3, 9, 20, 5, 0, 60], np.int32)
    (scores,) = scorer.score(leaves, [ids], top=TOP)
    for rank, own, top in zip(scores.ranks, ids[1:], scores.top_ids, strict=True):
        order = [5, 9, 20] if top[0] == 5 else [i for i in range(61) if i not in (5, 9, 20)]
        assert top.tolist() == order[:3]
        others = [i for i in range(61) if i not in order]
        assert rank == [*order, *others].index(own) + 1
    assert decoder == scorer.model


def hidden_states(params, ids):
    """The reference's final hidden states: an untied head of unit vectors shows them."""
    size = CONFIG.hidden_size
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    shown = {**params, "lm_head.weight": jnp.eye(size, dtype=jnp.float32)}
    return np.asarray(reference_forward(config, shown, jnp.asarray(ids)))


def test_pooled_hidden_states(params, built, scorer):
    texts = [text(length) for length in (70, 1, 33, 16)]
    mean, last = scorer.pool(built[1], texts)
    for ids, one, end in zip(texts, mean, last, strict=True):
        states = hidden_states(params, ids)
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, states.mean(axis=0), **NEAR)
        np.testing.assert_allclose(end, states[-1], **NEAR)


def test_other_lengths_compile_nothing(built, scorer):
    def use(*lengths):
        texts = [text(length) for length in lengths]
        scorer.score(built[1], texts)
        scorer.score(built[1], texts, top=1)
        scorer.pool(built[1], texts)

    use(5)
    use(30, 30, 30)
    use(70)
    compiles = CompileCounter()
    use(3)
    use(11, 32, 4, 9)
    use(51, 2, 64)
    assert compiles.count == 0
    use(*[2] * 40)
    assert compiles.count == 0


@pytest.fixture(scope="module")
def compiled():
    """A step of 512 tokens with a vocabulary that outweighs everything else."""
    config = dataclasses.replace(CONFIG, vocab_size=8192)
    params = {
        name: jax.ShapeDtypeStruct(values.shape, jnp.float32)
        for name, values in random_params(config).items()
    }
    decoder, leaves = build(config, params)

    def compile_with(head_tokens):
        shape = Shape(tokens=512, rows=32, tile=32, table_width=32, block_size=16)
        ids = [np.zeros(512, np.int32)]
        step = build_step(shape, [Chunk(0, 0, 512)], Tables(shape, [512]), ids, ids)
        kv = jax.eval_shape(lambda: decoder.init_kv(shape.num_blocks, 16))
        args = (leaves, kv, step.batch, step.targets, step.num_targets, np.bool_(True))
        before, programs.HEAD_TOKENS = programs.HEAD_TOKENS, head_tokens
        try:
            lowered = jax.jit(
                lambda *args: programs.score_step.__wrapped__(decoder, 5, *args), donate_argnums=1
            ).lower(*args)
            return lowered.compile(), kv
        finally:
            programs.HEAD_TOKENS = before

    return compile_with


def test_there_are_never_logits_of_all_tokens(compiled):
    program, kv = compiled(programs.HEAD_TOKENS)
    text = program.as_text()
    assert "f32[128,8192]" in text
    assert "[512,8192]" not in text
    assert program.memory_analysis().temp_size_in_bytes < 4 * 512 * 8192
    size = kv.dtype.itemsize * kv.size
    assert program.memory_analysis().alias_size_in_bytes >= size
    whole, _ = compiled(512)  # the check sees it
    assert "[512,8192]" in whole.as_text()
