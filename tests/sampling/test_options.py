"""Every sampling option against a slow sampler in numpy, and in what order they act."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_sampler as reference
from fake_model import quick_jit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_rows import arrays, from_requests, no_sequences

from oxidize_jax.sampling import sampler
from oxidize_jax.sampling.edits import NO_TOKEN, Sequences
from oxidize_jax.sampling.keys import key_data_from_seed
from oxidize_jax.sampling.sampler import sample
from oxidize_jax.sampling.token_mask import (
    pack_bits,
    pack_token_mask,
    unpack_bits,
    unpack_token_mask,
)

VOCAB, ROWS = 45, 6
EDITS = ["prompt", "output", "allowed", "banned", "bad_words", "suppress", "logit_bias"]
EDITS += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
FILTERS = ["temperature", "min_p", "top_k", "top_p", "typical_p"]


def distribution(logits, params, sequences):
    """``(edited logits, probabilities of a draw, greedy tokens)``, by the sampler's own parts."""
    hot = params.temperature >= sampler.GREEDY_BELOW
    changes = sampler._changes(params.edits, logits.shape[1])
    edited = sampler._edited(logits, params.edits, sequences, changes)
    scores = sampler._perturbed(edited, params, hot)
    return edited, jax.nn.softmax(scores, axis=-1), sample(logits, params, sequences, 0).tokens


@pytest.fixture(scope="module")
def distribution_of():
    """``f(logits, requests)``: :func:`distribution` without noise, of one shape."""
    program = quick_jit(distribution)

    def run(logits, requests):
        more = ROWS - len(requests)
        logits = np.pad(np.float32(logits), ((0, more), (0, 0)))
        out = program(logits, *from_requests([*requests, *[{}] * more], VOCAB))
        return [x[: len(requests)] for x in jax.device_get(out)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "gumbel", lambda *_: jnp.float32(0))
        run(np.zeros((1, VOCAB)), [{}])  # traced while it is patched
    return run


def split(request):
    edits = {name: request[name] for name in EDITS if name in request}
    return edits, {name: request[name] for name in FILTERS if name in request}


def floats(low, high):
    return st.floats(low, high, width=32, allow_subnormal=False)


ids = st.integers(0, VOCAB - 1)
few_ids = st.lists(st.sampled_from(range(6)), max_size=8)


@st.composite
def requests(draw):
    """Options of a request, each at times left out. Bans leave token 0."""
    some = {
        "prompt": st.lists(ids, max_size=20),
        "output": few_ids,
        "allowed": st.lists(ids, min_size=1, max_size=30).map(lambda x: [0, *x]),
        "banned": st.lists(st.integers(1, VOCAB - 1), max_size=10),
        "bad_words": st.lists(
            st.tuples(st.lists(st.sampled_from(range(6)), max_size=3), st.integers(1, 9)).map(
                lambda pair: [*pair[0], pair[1]]
            ),
            max_size=4,
        ),
        "suppress": st.lists(st.integers(1, VOCAB - 1), max_size=2),
        "logit_bias": st.dictionaries(ids, floats(-100, 100), max_size=8),
        "repetition_penalty": floats(0.125, 3),
        "presence_penalty": floats(-2, 2),
        "frequency_penalty": floats(-2, 2),
        "temperature": st.one_of(st.just(0.0), floats(0.25, 4)),
        "min_p": floats(0, 1),
        "top_k": st.integers(-1, VOCAB + 2),
        "top_p": floats(0.0625, 1),
        "typical_p": floats(0.0625, 1),
    }
    wanted = draw(st.lists(st.sampled_from(sorted(some)), unique=True))
    return {name: draw(some[name]) for name in wanted}


@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(seed=st.integers(0, 2**16), batch=st.lists(requests(), min_size=1, max_size=ROWS))
def test_any_options_give_the_distribution_of_the_slow_sampler(distribution_of, seed, batch):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(len(batch), VOCAB)) * rng.choice([0.3, 2, 8])).astype(np.float32)
    edited, probabilities, tokens = distribution_of(logits, batch)
    for row, request in enumerate(batch):
        edits, filters = split(request)
        want = reference.edited_logits(logits[row], **edits)
        np.testing.assert_allclose(edited[row], want, rtol=1e-5, atol=1e-4)
        filters.setdefault("temperature", 1.0)
        if filters["temperature"] == 0:
            best = np.flatnonzero(want >= want.max() - 1e-3)
            assert tokens[row] in best
            continue
        if reference.near_an_edge(want, **filters):
            continue
        expected = reference.probabilities(want, **filters)
        np.testing.assert_array_equal(probabilities[row] > 0, expected > 1e-30, str(request))
        np.testing.assert_allclose(probabilities[row], expected, rtol=2e-3, atol=1e-6)
        assert expected[tokens[row]] > 0


def test_hundreds_of_rows_are_far_from_an_edge():
    """The test above would say nothing if all its rows were skipped."""
    rng, skipped = np.random.default_rng(0), 0
    for _ in range(200):
        options = {
            "temperature": rng.uniform(0.25, 4),
            "min_p": rng.uniform(0, 0.3),
            "top_k": int(rng.integers(0, VOCAB)),
            "top_p": rng.uniform(0.1, 1),
            "typical_p": rng.uniform(0.1, 1),
        }
        skipped += reference.near_an_edge(rng.normal(size=VOCAB) * 2, **options)
    assert skipped < 20


# --- draws -------------------------------------------------------------------------------

DRAWS = 100_000
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -2.0, 0.7, 0.1], np.float32)
PROMPT, OUTPUT = [0, 3, 3], [5, 5, 1]
MIXES = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"min_p": 0.3, "temperature": 2.0},
    {"typical_p": 0.5},
    {"typical_p": 0.3, "temperature": 0.4},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.5, "min_p": 0.1, "top_k": 7, "top_p": 0.95, "typical_p": 0.9},
    {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"frequency_penalty": -1.0, "top_p": 0.9, "logit_bias": {4: 2.0, 6: 3.0}, "banned": [7]},
]


@pytest.fixture(scope="module")
def counts_of():
    """``f(mix)``: how often each token came in 100,000 draws with it, all in one program."""
    program = jax.jit(sample, static_argnums=3)

    def run(mix):
        one, sequences = from_requests(
            [mix | {"prompt": PROMPT, "output": OUTPUT}], len(LOGITS), length=8
        )
        params = jax.tree.map(lambda x: jnp.broadcast_to(x, (DRAWS, *x.shape[1:])), one)
        keys = jnp.broadcast_to(jnp.asarray(key_data_from_seed(1234)), (DRAWS, 2))
        index = jnp.arange(DRAWS, dtype=jnp.int32)
        params = type(params)(**(vars(params) | {"key": keys, "token_index": index}))
        logits = jnp.broadcast_to(jnp.asarray(LOGITS), (DRAWS, len(LOGITS)))
        tokens = program(logits, params, sequences, 0).tokens
        return np.bincount(np.asarray(tokens), minlength=len(LOGITS))

    return run


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_draws_follow_the_distribution(counts_of, mix):
    """Chi-square with up to 8 degrees of freedom: above 40 by chance once in 300,000 keys."""
    edits, filters = split(mix | {"prompt": PROMPT, "output": OUTPUT})
    p = reference.probabilities(reference.edited_logits(LOGITS, **edits), **filters)
    counts, live = counts_of(mix), p > 0
    assert counts[~live].sum() == 0
    assert ((counts - DRAWS * p)[live] ** 2 / (DRAWS * p[live])).sum() < 40


# --- the cases -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "min_p", "kept"),
    # As transformers keeps at temperature 1. At 3 the ratios are the third roots of these.
    [(1, 0.1, 3), (1, 0.6, 2), (1, 1, 1), (3, 0.1, 4), (3, 0.6, 3), (3, 1, 1)],
)
def test_sm11_min_p_is_of_the_probabilities_after_the_temperature(
    distribution_of, temperature, min_p, kept
):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[:4] = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    # Both 0.05 and 0.3 stand at an edge, and the parameter in float32 is on their far side.
    options = {"temperature": temperature, "min_p": min_p + (1e-6 if min_p == 0.1 else -1e-6)}
    _, probabilities, _ = distribution_of([logits], [options])
    assert (probabilities[0] > 0).sum() == kept
    assert (probabilities[0, :kept] > 0).all()


def test_min_p_comes_before_top_k_and_top_p(distribution_of):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[:4] = np.log(np.float32([0.4, 0.3, 0.2, 0.1]))
    # Of all, 0.56 needs two tokens; of the two that min_p keeps, which have 4/7 and 3/7, one.
    rows = [{"top_p": 0.56}, {"top_p": 0.56, "min_p": 0.6}]
    _, probabilities, _ = distribution_of([logits] * 2, rows)
    assert (probabilities > 0).sum(axis=1).tolist() == [2, 1]


def test_typical_p_drops_the_likeliest_where_it_is_not_typical(distribution_of):
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[:21] = np.log(np.float32([0.2, *[0.04] * 20]))
    _, probabilities, tokens = distribution_of(
        [logits] * 2, [{"typical_p": 0.5}, {"typical_p": 0.5, "temperature": 0}]
    )
    np.testing.assert_allclose(probabilities[0, :22], [0, *[0.05] * 20, 0], atol=1e-6)
    assert tokens[1] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repetition_penalty": 2.0}, [1.5, -6, 1, 0]),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, [3, -3, 1, 0]),
        ({"repetition_penalty": 2.0, "output": [2, 2]}, [1.5, -6, 0.5, 0]),
        ({"presence_penalty": 0.5, "output": [2]}, [3, -3, 0.5, 0]),
        ({"presence_penalty": 0.5, "output": [2, 2]}, [3, -3, 0.5, 0]),
        ({"frequency_penalty": 0.5, "output": [2, 2]}, [3, -3, 0, 0]),
        ({"frequency_penalty": -0.5, "output": [2, 2, 1]}, [3, -2.5, 2, 0]),
        (
            {
                "repetition_penalty": 2.0,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "output": [0, 0, 0],
            },
            [1.5 - 0.75 - 0.5, -6, 1, 0],
        ),
    ],
)
def test_sm12_repetition_sees_the_prompt_and_the_others_the_output(
    distribution_of, options, expected
):
    logits = np.zeros(VOCAB, np.float32)
    logits[:4] = [3, -3, 1, 0]
    edited, _, _ = distribution_of([logits], [{"prompt": [0, 1, 1], **options}])
    np.testing.assert_array_equal(edited[0, :4], np.float32(expected))
    assert not edited[0, 4:].any()


def test_sm12_histories_of_any_length_are_counted(monkeypatch):
    """Longer than one turn takes, to the last token and not beyond; prompts of any share."""
    monkeypatch.setattr("oxidize_jax.sampling.edits._CHUNK", 8)
    rng = np.random.default_rng(2)
    length, program = 40, quick_jit(sampler.penalized_logits)
    logits = rng.normal(size=(6, VOCAB)).astype(np.float32)
    for total in ([0, 1, 7, 8, 9, 40], [16, 17, 23, 24, 25, 39]):
        batch = []
        for n in total:
            tokens = rng.integers(0, 5, n).tolist()
            cut = int(rng.integers(0, n + 1))
            batch.append(
                {
                    "prompt": tokens[:cut],
                    "output": tokens[cut:],
                    "repetition_penalty": 1.25,
                    "presence_penalty": 0.5,
                    "frequency_penalty": 0.25,
                }
            )
        params, sequences = from_requests(batch, VOCAB, length=length)
        edited = np.asarray(program(logits, params.edits, sequences))
        for row, request in enumerate(batch):
            want = reference.edited_logits(logits[row], **request)
            np.testing.assert_allclose(edited[row], want, rtol=1e-6, atol=1e-6)


def test_a_row_without_penalties_costs_no_turns():
    """A long neighbour without penalties is not counted, and changes nothing."""
    params, sequences = from_requests(
        [{"prompt": [1] * 30}, {"prompt": [2], "presence_penalty": 1.0, "output": [3]}], VOCAB
    )
    counts = sampler.penalized_logits(jnp.zeros((2, VOCAB)), params.edits, sequences)
    assert not np.asarray(counts)[0].any()
    assert np.flatnonzero(np.asarray(counts)[1]).tolist() == [3]


@pytest.mark.parametrize(
    ("output", "words", "banned"),
    [
        ([], [[5]], [5]),
        ([], [[4, 5]], []),
        ([4], [[4, 5]], [5]),
        ([4, 4, 5], [[4, 5]], []),
        ([3, 4], [[3, 4, 5], [3, 4, 6], [4, 4, 7], [4, 8]], [5, 6, 8]),
        ([4, 3], [[3, 4, 5]], []),
        ([4], [[3, 4, 5]], []),
        ([7, 7, 7], [[7, 7, 7, 7]], [7]),
    ],
)
def test_bad_words_ban_the_token_that_would_complete_them(distribution_of, output, words, banned):
    # What the prompt ends with does not count, as in vLLM.
    for prompt in ([], [3, 4], [7]):
        request = {"prompt": prompt, "output": output, "bad_words": words}
        edited, _, _ = distribution_of(np.zeros((1, VOCAB)), [request])
        assert np.flatnonzero(np.isneginf(edited[0])).tolist() == banned


def test_a_ban_outweighs_a_bias(distribution_of):
    bias = {3: 100.0, 4: 100.0, 5: 100.0, 6: 1.0}
    row = {"banned": [3], "bad_words": [[4]], "suppress": [5], "logit_bias": bias, "temperature": 0}
    _, probabilities, tokens = distribution_of(np.zeros((1, VOCAB)), [row])
    assert tokens[0] == 6
    assert probabilities[0, 3:6].sum() == 0


def test_extreme_penalties_and_biases_stay_finite(distribution_of):
    logits = np.full((2, VOCAB), -3e4, np.float32)
    logits[:, 0], logits[:, 1] = 3e4, 2.9e4
    rows = [
        {"prompt": [0, 2], "repetition_penalty": penalty, "logit_bias": {0: 100.0, 2: -100.0}}
        for penalty in (1000.0, 0.001)
    ]
    edited, probabilities, tokens = distribution_of(logits, rows)
    assert np.isfinite(edited).all()
    assert np.isfinite(probabilities).all()
    assert tokens.tolist() == [1, 0]


def test_rows_of_padding_want_nothing_and_read_nothing():
    """A padding row names no sequence; its neighbour's lists are not its own."""
    params = arrays(2, temperature=0, sequence=[0, 7], masked=[True, False], listed=[True, False])
    sequences = Sequences(
        tokens=jnp.zeros((1, 4), jnp.int32),
        bias_ids=jnp.array([[2, NO_TOKEN]], jnp.int32),
        bias_values=jnp.array([[9.0, 0.0]], jnp.float32),
        bad_words=jnp.full((1, 1, 2), NO_TOKEN, jnp.int32),
        token_mask=jnp.asarray(pack_token_mask(6, [2, 3])[None]),
    )
    out = sample(jnp.array([[0.0, 5, 0, 1, 0, 0]] * 2, jnp.float32), params, sequences, 0)
    assert out.tokens.tolist() == [2, 1]
    assert np.isfinite(np.asarray(out.logprobs)).all()


def test_tables_without_room_are_not_compiled():
    def size(sequences):
        return len(str(jax.make_jaxpr(sample, static_argnums=3)(logits, arrays(2), sequences, 0)))

    logits = jnp.zeros((2, 40))
    bare, whole = no_sequences(), no_sequences(biases=3, words=2, mask_words=2)
    assert size(bare) < size(whole) - 1000


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 97])
def test_token_masks_are_packed_alike_on_host_and_device(vocab):
    rng = np.random.default_rng(vocab)
    allowed = rng.random(vocab) < 0.5
    ids = np.flatnonzero(allowed).tolist()
    words = pack_token_mask(vocab, ids)
    assert words.shape == (-(-vocab // 32),)
    np.testing.assert_array_equal(words, pack_bits(jnp.asarray(allowed)))
    np.testing.assert_array_equal(unpack_bits(jnp.asarray(words), vocab), allowed)
    np.testing.assert_array_equal(unpack_token_mask(words, vocab), allowed)
    np.testing.assert_array_equal(
        words, pack_token_mask(vocab, None, np.flatnonzero(~allowed).tolist())
    )
    assert int(words[0]) & 1 == allowed[0]  # bit 0 of word 0 is id 0
