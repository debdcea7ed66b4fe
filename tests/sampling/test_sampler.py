from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from sampler_rows import arrays, from_requests, no_sequences

from oxidize_jax.sampling import filters
from oxidize_jax.sampling.edits import NO_TOKEN
from oxidize_jax.sampling.keys import child_key, fold_in, gumbel, key_data_from_seed, random_bits
from oxidize_jax.sampling.sampler import SamplingArrays, sample
from oxidize_jax.types import replace

NONE = no_sequences()


run = jax.jit(sample, static_argnums=3)


def draw(logits, params: SamplingArrays, top: int = 0):
    """``sample`` in one of few shapes, to compile rarely: rows and vocabulary padded."""
    logits = np.asarray(logits, np.float32)
    rows, vocab = logits.shape
    if rows > 400:
        return run(logits, params, NONE, top)
    more_rows, more_vocab = (8 if rows <= 8 else 400) - rows, (64 if vocab <= 64 else 320) - vocab
    logits = np.pad(logits, ((0, more_rows), (0, more_vocab)), constant_values=-np.inf)
    logits[rows:, 0] = 0
    params = jax.tree.map(
        lambda leaf: np.pad(leaf, ((0, more_rows),) + ((0, 0),) * (leaf.ndim - 1)), params
    )
    neutral = np.arange(rows + more_rows) < rows
    edits = replace(
        params.edits,
        repetition_penalty=np.where(neutral, params.edits.repetition_penalty, np.float32(1)),
    )
    out = run(logits, replace(params, edits=edits), NONE, top)
    return jax.tree.map(lambda leaf: leaf[:rows], out)


def one_row(params: SamplingArrays, row: int) -> SamplingArrays:
    return jax.tree.map(lambda leaf: leaf[row : row + 1], params)


def expected_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """float64 reference by sorting; ties with the last kept token stay."""
    x = np.asarray(logits, np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    if 0 < top_k < len(p):
        p = np.where(p >= np.sort(p)[-top_k], p, 0)
        p /= p.sum()
    if top_p < 1:
        ordered = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(ordered), top_p)
        p = np.where(p >= ordered[min(last, len(p) - 1)], p, 0)
        p /= p.sum()
    return p


@jax.jit
def kept_rows(logits, temperature, top_k, top_p):
    distance = (jnp.max(logits, axis=-1, keepdims=True) - logits) / temperature
    off = jnp.zeros_like(top_p)
    return filters.kept_tokens(distance, off, top_k, top_p, off + 1).of(distance)


def kept(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Which tokens the filters keep: one row for each of the broadcast parameters."""
    top_k, top_p = np.broadcast_arrays(np.int32(top_k), np.float32(top_p))
    rows = np.broadcast_to(np.float32(logits), (top_k.size, len(logits)))
    mask = kept_rows(rows, np.float32(temperature), top_k.reshape(-1), top_p.reshape(-1))
    return np.asarray(mask).reshape(*top_k.shape, len(logits))


# --- filters ---------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [5, 97, 128, 129, 1000])
def test_sm09_top_k_keeps_what_sorting_keeps(vocab):
    logits = np.random.default_rng(vocab).normal(size=vocab) * 4
    top_k = [0, -1, 1, 2, 3, 50, 127, 128, 129, 500, 996, 9999999]
    mask = kept(logits, 0.7, top_k)
    for row, k in enumerate(top_k):
        np.testing.assert_array_equal(mask[row], expected_kept(logits, 0.7, k), str(k))


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 40.0])
def test_top_p_keeps_what_sorting_keeps(spread):
    logits = np.random.default_rng(3).normal(size=600) * spread
    options = [(k, p) for k in (0, 40, 200) for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 1.0)]
    mask = kept(logits, 1.3, *zip(*options, strict=True))
    for row, (k, p) in enumerate(options):
        np.testing.assert_array_equal(mask[row], expected_kept(logits, 1.3, k, p), str((k, p)))


def expected_kept(logits, temperature, top_k=0, top_p=1.0):
    return expected_probabilities(np.float32(logits), temperature, top_k, top_p) > 0


def test_ties_with_the_last_kept_token_stay():
    logits = [3.0, 1.0, 3.0, 1.0, 1.0, 0.0]
    np.testing.assert_array_equal(kept(logits, top_k=1), [1, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(kept(logits, top_k=3), [1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(kept(logits, top_p=0.3), [1, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(kept(logits, top_p=0.9), [1, 1, 1, 1, 1, 0])


def test_filters_beyond_the_sorted_tokens_agree_on_ties():
    logits = np.repeat([2.0, 1.0, 0.0], [100, 200, 300])
    assert kept(logits, top_k=101).sum() == 300
    assert kept(logits, top_k=300).sum() == 300
    assert kept(logits, top_k=301).sum() == 600
    assert kept(logits, top_p=0.9).sum() == 600
    assert kept(logits, top_p=0.8).sum() == 300


def test_top_p_is_of_what_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Alone, 0.5 needs two tokens; of the best two it needs one (0.4 / 0.7).
    np.testing.assert_array_equal(kept(logits, top_p=0.5), [1, 1, 0, 0])
    np.testing.assert_array_equal(kept(logits, top_p=0.5, top_k=2), [1, 0, 0, 0])


def test_temperature_comes_before_top_p():
    logits = np.log([0.6, 0.3, 0.1])
    assert kept(logits, temperature=1.0, top_p=0.6001).sum() == 2
    assert kept(logits, temperature=0.1, top_p=0.6001).sum() == 1
    assert kept(logits, temperature=9.0, top_p=0.75).sum() == 3


def test_banned_tokens_beyond_top_k_do_not_void_the_row():
    out = draw(np.zeros((40, 4)), arrays(40, top_k=3, suppress_ids=np.array([[0, 1]])), 0)
    assert set(np.asarray(out.tokens).tolist()) == {2, 3}


# --- draws -----------------------------------------------------------------------------


def test_draws_for_consecutive_tokens_are_independent():
    count = 50_000
    params = arrays(count, key=key_data_from_seed(5), token_index=np.arange(count))
    logits = np.broadcast_to(np.float32([0] * 4 + [-np.inf] * 5), (count, 9))
    tokens = np.asarray(draw(logits, params).tokens)
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert ((pairs - count / 16) ** 2 / (count / 16)).sum() < 50


def test_sm03_a_draw_depends_on_key_and_token_index_alone():
    logits = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    params = arrays(6, temperature=1.5, top_k=20, top_p=0.95, token_index=np.arange(6))
    together = np.asarray(run(logits, params, NONE, 0).tokens)
    order = [4, 0, 5, 2, 1, 3]
    shuffled = run(
        logits[order], jax.tree.map(lambda leaf: leaf[jnp.array(order)], params), NONE, 0
    )
    np.testing.assert_array_equal(np.asarray(shuffled.tokens), together[order])
    for row in (0, 5):
        alone = run(logits[row : row + 1], one_row(params, row), NONE, 0)
        assert int(alone.tokens[0]) == together[row]


def test_sm03_noise_does_not_change_with_batch_or_vocabulary():
    keys = np.stack([key_data_from_seed(i) for i in range(3)])
    index = np.array([0, 7, 7], np.int32)
    wide = np.asarray(gumbel(jnp.asarray(keys), jnp.asarray(index), 8))
    narrow = np.asarray(gumbel(jnp.asarray(keys[1:]), jnp.asarray(index[1:]), 5))
    # The bits are the same; the logarithm of a vector's last lanes may round otherwise.
    np.testing.assert_allclose(wide[1:, :5], narrow, rtol=1e-6)
    assert len(np.unique(wide)) == wide.size


def test_sm01_a_seeded_row_does_not_notice_its_neighbours():
    logits = np.random.default_rng(1).normal(size=(2, 97)).astype(np.float32)
    seen = set()
    for neighbour in range(5):
        key = np.stack([key_data_from_seed(42), key_data_from_seed(1000 + neighbour)])
        seen.add(int(draw(logits, arrays(2, key=key, temperature=[2.0, 0.0])).tokens[0]))
    assert len(seen) == 1


def test_random_bits_and_fold_in_are_those_of_jax():
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    keys = jnp.asarray(np.stack([key_data_from_seed(seed) for seed in seeds]))
    data = jnp.arange(len(seeds), dtype=jnp.uint32) * jnp.uint32(12345)
    folded = fold_in(keys, data)
    bits = random_bits(folded, 33)
    for row in range(len(seeds)):
        key = jax.random.fold_in(
            jax.random.wrap_key_data(keys[row], impl="threefry2x32"), data[row]
        )
        np.testing.assert_array_equal(jax.random.key_data(key), folded[row])
        np.testing.assert_array_equal(jax.random.bits(key, (33,)), bits[row])


def test_gumbel_noise_has_mean_and_variance_of_the_distribution():
    keys = jnp.asarray(key_data_from_seed(9))[None]
    noise = np.asarray(gumbel(keys, jnp.zeros(1, jnp.int32), 400_000), np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772157) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
    assert noise.max() > 11


def test_gumbel_noise_is_finite_at_both_ends_of_the_bits(monkeypatch):
    ends = jnp.array([[0, 1, 2**32 - 1, 2**32 - 2]], jnp.uint32)
    monkeypatch.setattr("oxidize_jax.sampling.keys.random_bits", lambda *_: ends)
    noise = np.asarray(gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), 4))
    assert np.isfinite(noise).all()
    assert noise[0, 0] > 22 > -2.8 > noise[0, 2]


# --- keys ------------------------------------------------------------------------------


def test_sm04_seeds_are_two_exact_words():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    words = [tuple(key_data_from_seed(seed).tolist()) for seed in seeds]
    assert words[-1] == (2**32 - 1, 2**32 - 1)
    assert words[4] == (1, 0)
    assert len(set(words)) == len(seeds)
    for seed in (0, 1, 2**31 - 1):
        np.testing.assert_array_equal(
            key_data_from_seed(seed), jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
        )


def test_kv13_child_0_has_the_seed_itself_and_others_differ():
    np.testing.assert_array_equal(child_key(77, 0), key_data_from_seed(77))
    keys = {tuple(child_key(77, i).tolist()) for i in range(64)}
    assert len(keys) == 64
    per_token = fold_in(
        jnp.asarray(np.broadcast_to(key_data_from_seed(77), (100, 2))),
        jnp.arange(100, dtype=jnp.uint32),
    )
    assert not keys & {tuple(row) for row in np.asarray(per_token).tolist()}


# --- greedy and extremes ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-5, 1e-12, 1e-38, 1e-45])
@pytest.mark.parametrize("logits", [[1.0, 2.0, 3.0], [-60.0, 60.0, 0.0]], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sm06_tiny_temperatures_give_the_argmax(temperature, logits, dtype):
    logits = np.asarray(jnp.array([logits] * 50, dtype).astype(jnp.float32))
    out = draw(logits, arrays(50, temperature=temperature, top_k=2, top_p=0.9))
    np.testing.assert_array_equal(out.tokens, np.argmax(logits, axis=-1))
    assert np.isfinite(np.asarray(out.logprobs)).all()


def test_extreme_logits_and_temperatures_stay_finite():
    logits = np.array([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [1.0, -np.inf, 1.0]], np.float32)
    for temperature in (1e-4, 1.0, 1000.0):
        out = draw(logits, arrays(3, temperature=temperature, top_k=2, top_p=0.5))
        tokens = np.asarray(out.tokens)
        assert tokens[0] == 0
        assert tokens[2] != 1
        assert np.isfinite(np.asarray(out.logprobs)).all()


def test_greedy_takes_the_first_of_equals_and_ignores_filters():
    out = draw([[1.0, 5.0, 5.0, 2.0]] * 2, arrays(2, temperature=0, top_k=[0, 1], top_p=[1, 0.1]))
    np.testing.assert_array_equal(out.tokens, [1, 1])


def test_sm09_rows_with_any_top_k_in_one_batch():
    logits = np.random.default_rng(2).normal(size=(6, 97)).astype(np.float32)
    mixed = run(logits, arrays(6, top_k=[97, 98, 9999999, 0, -1, 1]), NONE, 0)
    off = run(logits, arrays(6), NONE, 0)
    np.testing.assert_array_equal(mixed.tokens[:5], off.tokens[:5])
    assert int(mixed.tokens[5]) == logits[5].argmax()


def test_sv09_rows_of_every_kind_share_a_batch():
    logits = np.random.default_rng(5).normal(size=(4, 300)).astype(np.float32) * 3
    params = arrays(4, temperature=[0, 1, 1, 2], top_k=[0, 5, 200, 0], top_p=[1, 1, 0.9, 0.99])
    together = draw(logits, params)
    for row in range(4):
        alone = draw(logits[row : row + 1], one_row(params, row))
        assert int(alone.tokens[0]) == int(together.tokens[row])


# --- suppression and log probabilities ---------------------------------------------------


def test_sm15_suppressed_ids_are_never_drawn():
    logits = np.zeros((400, 6), np.float32)
    logits[:, [2, 5]] = 9.0
    both = np.array([[2, 5]])
    for temperature in (0.0, 1.0):
        free = set(np.asarray(draw(logits, arrays(400, temperature=temperature)).tokens).tolist())
        assert free <= {2, 5}
        held = draw(logits, arrays(400, temperature=temperature, suppress_ids=both))
        assert not {2, 5} & set(np.asarray(held.tokens).tolist())


@pytest.mark.parametrize("padding", [6, 7, NO_TOKEN])
def test_jx02_padding_of_suppress_ids_bans_nothing(padding):
    logits = jnp.arange(6, dtype=jnp.float32)[None]
    out = run(logits, arrays(1, temperature=0, suppress_ids=np.array([[4, padding]])), NONE, 0)
    assert int(out.tokens[0]) == 5


def test_logprobs_are_of_the_raw_logits():
    logits = np.random.default_rng(4).normal(size=(3, 20)).astype(np.float32) * 3
    best = int(logits[0].argmax())
    params = arrays(
        3,
        temperature=[0, 2.0, 0.5],
        top_k=[0, 2, 3],
        suppress_ids=np.array([[best, 20], [20, 20], [20, 20]]),
        want_logprobs=[True, False, True],
    )
    out = draw(logits, params, 4)
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = np.asarray(out.tokens)
    assert tokens[0] == np.argsort(logits[0])[-2]
    np.testing.assert_allclose(out.logprobs, log_softmax[np.arange(3), tokens], rtol=1e-5)
    for row in (0, 2):
        assert int(out.ranks[row]) == 1 + np.sum(logits[row] > logits[row, tokens[row]])
        order = np.argsort(-logits[row])[:4]
        np.testing.assert_array_equal(out.top_ids[row], order)
        np.testing.assert_allclose(out.top_logprobs[row], log_softmax[row, order], rtol=1e-5)
    assert not np.asarray(out.top_ids[1]).any()
    assert not np.asarray(out.top_logprobs[1]).any()
    assert int(out.ranks[1]) == 0


def test_a_rank_is_of_the_whole_vocabulary_and_goes_by_id_among_equals():
    logits = np.array([5.0, 1.0, 3.0, 3.0, 3.0, 9.0, -1.0, -np.inf], np.float32)
    ranks = {5: 1, 0: 2, 2: 3, 3: 4, 4: 5, 1: 6, 6: 7}
    wishes = [{"allowed": [token], "want_logprobs": True} for token in ranks]
    out = run(np.tile(logits, (len(ranks), 1)), *from_requests(wishes, logits.size), 2)
    assert out.tokens.tolist() == list(ranks)
    assert out.ranks.tolist() == list(ranks.values())
    assert out.top_ids.tolist() == [[5, 0]] * len(ranks)


@pytest.mark.parametrize("size", [0, 5, 6])
def test_sm09_more_alternatives_than_the_vocabulary(size):
    logits = jnp.array([[0.0, 2.0, 1.0, -1.0, 0.5]], jnp.float32)
    out = run(logits, arrays(1, want_logprobs=True), NONE, size)
    assert out.top_ids.shape == out.top_logprobs.shape == (1, size)
    np.testing.assert_array_equal(out.top_ids[0, :5], [1, 2, 4, 0, 3][:size])
    assert (np.asarray(out.top_logprobs[0, 5:]) == -np.inf).all()
    assert out.ranks.tolist() == [1]  # it needs no alternatives


def test_padding_rows_change_nothing_and_stay_finite():
    logits = np.random.default_rng(6).normal(size=(4, 30)).astype(np.float32)
    live = arrays(2, temperature=1.0, top_k=5)
    padding = arrays(2, temperature=0, top_p=0, top_k=0, key=np.zeros(2), want_logprobs=False)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), live, padding)
    out, alone = draw(logits, both, 3), draw(logits[:2], live, 3)
    np.testing.assert_array_equal(out.tokens[:2], alone.tokens)
    assert np.isfinite(np.asarray(out.logprobs)).all()


def unconditional(jaxpr) -> set[str]:
    """Names of the primitives that run whatever the values are: not those inside a cond."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        if eqn.primitive.name != "cond":
            for inner in jaxprs_in_params(eqn.params):
                names |= unconditional(inner)
    return names


def test_nothing_wanted_does_no_noise_and_no_sorting():
    work = {"top_k", "shift_left", "while", "log1p", "scatter-add"}
    edits = no_sequences(tokens=9, biases=3, words=2, mask_words=32)
    program = partial(sample, num_top_logprobs=3)
    jaxpr = jax.make_jaxpr(program)(jnp.zeros((4, 1000)), arrays(4), edits)
    assert {"reduce_max", "cond"} <= unconditional(jaxpr.jaxpr)
    assert not work & unconditional(jaxpr.jaxpr)
    assert all(f" {name}[" in str(jaxpr) or f" {name} " in str(jaxpr) for name in work)


def test_one_program_serves_every_mix_of_options():
    traced = 0

    def counted(logits, params):
        nonlocal traced
        traced += 1
        return sample(logits, params, NONE, 2)

    step = jax.jit(counted)
    logits = jnp.zeros((2, 9))
    base = arrays(2)
    for temperature, top_k, wanted in ((0, 0, False), (1, 3, True), (0.5, 9, False)):
        step(
            logits,
            replace(
                base,
                temperature=jnp.full((2,), temperature, jnp.float32),
                top_k=jnp.full((2,), top_k, jnp.int32),
                want_logprobs=jnp.full((2,), wanted),
            ),
        )
    assert traced == 1
