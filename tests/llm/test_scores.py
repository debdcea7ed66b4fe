"""LLM.score, loglikelihood, perplexity, embed and prompt_logprobs against the dense model."""

import json
import math

import jax
import numpy as np
import pytest

from oxidize_jax import SamplingParams
from oxidize_jax.llm_scores import windows
from oxidize_jax.model.reference import reference_forward
from oxidize_jax.score_outputs import ContinuationScore, Perplexity

NEAR = {"rel": 2e-4, "abs": 2e-4}
PROMPT = "ninechars"
"""Nine tokens, in blocks of 4: two of them full."""


@pytest.fixture(scope="module")
def dense(llm):
    """``dense(ids, **leaves) -> f64[n, V]``: logits of the reference, some weights changed."""
    weights = {n: np.asarray(a) for n, a in llm.engine.params.items()}
    run = jax.jit(reference_forward, static_argnums=0)

    def logits(ids, **leaves):
        # What follows a token does not matter to it: one shape for all.
        padded = np.zeros(64, np.int32)
        padded[: len(ids)] = ids
        return np.asarray(run(llm.model_config, weights | leaves, padded), np.float64)[: len(ids)]

    return logits


@pytest.fixture(scope="module")
def logprobs_of(dense):
    """``logprobs_of(ids) -> f64[n, V]`` by the dense model."""

    def run(ids):
        logits = dense(ids)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    return run


@pytest.fixture(scope="module")
def tight(make_llm):
    """Every row is preempted sooner or later, and a prompt of nine tokens takes two chunks."""
    return make_llm(num_blocks=14, max_num_batched_tokens=5, policy="decode_first")


def check_prompt_logprobs(entries, ids, logprobs, count):
    assert entries[0] is None
    assert len(entries) == len(ids)
    for entry, token, row in zip(entries[1:], ids[1:], logprobs[:-1], strict=True):
        best = np.argsort(-row, kind="stable").tolist()
        assert list(entry) == [token, *(i for i in best[:count] if i != token)]
        for i, one in entry.items():
            assert one.rank == best.index(i) + 1
            assert one.logprob == pytest.approx(row[i], **NEAR)


def test_score_of_text_and_ids(llm, logprobs_of):
    ids = llm.tokenizer.encode(PROMPT)
    one, two, three = llm.score([PROMPT, ids, "a"], top_logprobs=3)
    logprobs = logprobs_of(ids)
    chosen = logprobs[np.arange(8), ids[1:]]
    assert (one.prompt, two.prompt) == (PROMPT, None)
    assert one.prompt_token_ids == two.prompt_token_ids == tuple(ids)
    assert one.token_logprobs[0] is one.token_ranks[0] is None
    assert one.token_logprobs[1:] == pytest.approx(chosen, **NEAR)
    assert one.token_ranks == two.token_ranks
    check_prompt_logprobs(one.prompt_logprobs, ids, logprobs, 3)
    pairs = zip(one.prompt_logprobs[1:], ids[1:], strict=True)
    assert "".join(entry[token].decoded_token for entry, token in pairs) == PROMPT[1:]
    assert one.cumulative_logprob == pytest.approx(chosen.sum(), **NEAR)
    assert one.mean_logprob == pytest.approx(chosen.mean(), **NEAR)
    assert one.perplexity == pytest.approx(math.exp(-chosen.mean()), **NEAR)
    assert (three.token_logprobs, three.prompt_logprobs) == ((None,), (None,))
    assert three.cumulative_logprob == 0
    assert math.isnan(three.perplexity)
    (plain,) = llm.score(PROMPT)
    assert plain.prompt_logprobs is None
    assert plain.token_logprobs == one.token_logprobs


def test_score_takes_as_many_tokens_as_the_model_has_room_for(llm, logprobs_of):
    ids = np.random.default_rng(0).integers(0, 256, 64).tolist()
    (one,) = llm.score(ids)
    assert one.token_logprobs[1:] == pytest.approx(logprobs_of(ids)[np.arange(63), ids[1:]], **NEAR)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ("", {}, "prompt is empty"),
        ([[]], {}, "prompt has 0 tokens: give at least one"),
        ("x" * 65, {}, "65 tokens, but max_model_len=64: .*use LLM.perplexity"),
        (["a", [0, 259]], {}, r"prompts\[1\]: prompt_token_ids\[1\]=259: .* 0 to 258"),
        ([3, -1], {}, r"prompt_token_ids\[1\]=-1"),
        ("a", {"top_logprobs": 4}, "top_logprobs=4: .* 0 to 3; raise max_logprobs"),
        ("a", {"top_logprobs": -1}, "top_logprobs=-1"),
        ("a", {"top_logprobs": True}, "top_logprobs=True"),
    ],
)
def test_score_refuses(llm, prompts, options, words):
    with pytest.raises(ValueError, match=words):
        llm.score(prompts, **options)


def test_loglikelihood(llm, logprobs_of):
    context, (output,) = (
        llm.tokenizer.encode("The sea"),
        llm.generate("The sea", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)),
    )
    greedy = list(output.outputs[0].token_ids)
    other = [*greedy[:2], (greedy[2] + 1) % 256]
    pairs = [(context, greedy), (context, other), ("The sea", " is"), ("The sea ", "is")]
    first, second, text, spaced = llm.loglikelihood(pairs)
    assert (first.is_greedy, second.is_greedy, text.is_greedy) == (True, False, False)
    for result, ids in ((first, greedy), (second, other), (text, llm.tokenizer.encode(" is"))):
        whole = [*context, *ids]
        rows = logprobs_of(whole)[len(context) - 1 : -1]
        assert result.token_ids == tuple(ids)
        assert result.token_logprobs == pytest.approx(rows[np.arange(len(ids)), ids], **NEAR)
        assert result.logprob == pytest.approx(sum(result.token_logprobs))
    # Bytes never merge: the space is the context's own.
    assert spaced.token_ids == tuple(llm.tokenizer.encode("is"))
    assert spaced.token_logprobs == pytest.approx(text.token_logprobs[1:], abs=1e-5)
    assert llm.loglikelihood([]) == []


def test_a_continuation_that_merges_with_its_context_is_scored_with_it(llm, monkeypatch):
    words = {"in": [1, 2], "put": [3], "input": [1, 7], "s": [5], "ins": [9]}
    monkeypatch.setattr(type(llm.tokenizer), "encode", lambda _, text: words[text])
    (merged,) = llm.loglikelihood([("in", "put")])
    assert merged.token_ids == (7,)
    with pytest.raises(ValueError, match="one token together"):
        llm.loglikelihood([("in", "s")])


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("", "x"), "context is empty: give at least one token"),
        (("x", ""), "continuation is empty"),
        (([], [1]), "context is empty"),
        (("x", [1]), "both as text or as ids"),
        ("xy", "context, continuation"),
        (("x" * 60, "y" * 5), "65 tokens, but max_model_len=64"),
    ],
)
def test_loglikelihood_refuses(llm, pair, words):
    with pytest.raises(ValueError, match=words):
        llm.loglikelihood([pair])
    with pytest.raises(ValueError, match=r"pairs\[1\]: "):
        llm.loglikelihood([("a", "b"), pair])


def test_windows():
    assert list(windows(9, 6, 2)) == [(0, 1, 6), (2, 6, 8), (4, 8, 9)]
    assert list(windows(6, 6, 2)) == [(0, 1, 6)]
    assert list(windows(8, 4, 4)) == [(0, 1, 4), (4, 5, 8)]
    assert list(windows(1, 6, 2)) == [(0, 1, 1)]
    for length in range(1, 40):
        for size in range(2, 9):
            for stride in range(1, size):
                cuts = list(windows(length, size, stride))
                scored = [place for _, first, end in cuts for place in range(first, end)]
                assert scored == list(range(1, length))
                assert all(end - begin <= size for begin, _, end in cuts)
                assert all(first - begin >= size - stride for begin, first, _ in cuts[1:])


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (150, {}),
        (150, {"stride": 64}),
        (64, {"stride": 1}),
        (40, {"window": 16, "stride": 5}),
        (33, {"window": 16, "stride": 16}),
        (2, {}),
    ],
)
def test_perplexity_is_that_of_the_windows(llm, logprobs_of, length, options):
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    size = options.get("window", 64)
    stride = options.get("stride", size // 2)
    losses, previous = [], 0
    for begin in range(0, length, stride):
        end = min(begin + size, length)
        rows = logprobs_of(ids[begin:end])
        places = range(max(previous, begin + 1), end)
        losses += [-rows[p - begin - 1, ids[p]] for p in places]
        previous = end
        if end == length:
            break
    result = llm.perplexity(ids, **options)
    assert result.num_tokens == len(losses)
    assert result.nll == pytest.approx(sum(losses), rel=1e-4)
    assert result.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_perplexity_of_text_and_of_no_token(llm):
    (scores,) = llm.score("The sea")
    assert llm.perplexity("The sea").perplexity == pytest.approx(scores.perplexity, rel=1e-6)
    with pytest.raises(ValueError, match="a list of texts: perplexity takes one"):
        llm.perplexity(["The sea", "The sun"])
    for pairs, words in ((5, "pairs is int"), ([(5, 6)], "context is int: give text")):
        with pytest.raises(ValueError, match=words):
            llm.loglikelihood(pairs)
    result = llm.perplexity("a")
    assert (result.nll, result.num_tokens, result.num_windows) == (0, 0, 1)
    assert math.isnan(result.perplexity)
    assert Perplexity(1e6, 1, 1).perplexity == math.inf


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "empty"),
        ([], {}, "0 tokens"),
        ([1, 300], {}, r"\[1\]=300"),
        ("a", {"window": 65}, "window=65: .* 2 to 64; raise max_model_len"),
        ("a", {"window": 1}, "window=1"),
        ("a", {"stride": 0}, "stride=0: .* 1 to 64"),
        ("a", {"window": 8, "stride": 9}, "stride=9: .* 1 to 8"),
    ],
)
def test_perplexity_refuses(llm, text, options, words):
    with pytest.raises(ValueError, match=words):
        llm.perplexity(text, **options)


def test_embeddings(llm, dense):
    size = llm.model_config.hidden_size
    # A head of unit vectors shows what it reads.
    head = {"lm_head.weight": np.eye(size, dtype=np.float32)}
    prompts = ["The sea", "a", "x" * 64]
    states = [dense(ids, **head) for ids in map(llm.tokenizer.encode, prompts)]
    for pooling, expected in (
        ("mean", [one.mean(axis=0) for one in states]),
        ("last", [one[-1] for one in states]),
    ):
        raw = llm.embed(prompts, pooling=pooling, normalize=False)
        assert (raw.dtype, raw.shape) == (np.float32, (3, size))
        np.testing.assert_allclose(raw, expected, rtol=2e-4, atol=2e-4)
        unit = llm.embed(prompts, pooling=pooling)
        np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(unit * np.linalg.norm(raw, axis=1)[:, None], raw, rtol=1e-4)
    assert llm.embed([]).shape == (0, size)
    np.testing.assert_allclose(llm.embed("a"), llm.embed(prompts)[1:2], atol=1e-6)
    with pytest.raises(ValueError, match="pooling='max'"):
        llm.embed("a", pooling="max")
    with pytest.raises(ValueError, match="normalize=1"):
        llm.embed("a", normalize=1)
    with pytest.raises(ValueError, match="65 tokens"):
        llm.embed("x" * 65)


@pytest.mark.parametrize("sharer_first", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
def test_kv17_prompt_logprobs_whatever_is_cached(llm, tight, logprobs_of, sharer_first, chunks):
    llm = llm if chunks == 1 else tight
    llm.reset_prefix_cache()
    ids = llm.tokenizer.encode(PROMPT)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    short = llm.tokenizer.encode(PROMPT[:6])
    logprobs = logprobs_of(ids)
    cached = []

    def run(prompt):
        (output,) = llm.generate({"prompt_token_ids": prompt}, params)
        check_prompt_logprobs(output.prompt_logprobs, prompt, logprobs[: len(prompt)], 1)
        cached.append(output.usage.cached_tokens)
        pairs = zip(output.prompt_logprobs, prompt, strict=True)
        return [entry and entry[i].logprob for entry, i in pairs]

    if sharer_first:
        run(short)
    first, second = run(ids), run(ids)
    assert len(first) == 9
    assert first[0] is second[0] is None
    assert first[1:] == pytest.approx(second[1:], abs=1e-5)
    if not sharer_first:
        run(short)
    assert max(cached) == 8  # so the cache did serve some


def test_prompt_logprobs_with_n_neighbours_and_preemption(tight, logprobs_of):
    prompts = [PROMPT, "ab" * 9, "Hello there", "x"]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=1, n=n, prompt_logprobs=k)
        for n, k in ((2, 0), (1, None), (1, 3), (1, 1))
    ]
    outputs = tight.generate(prompts, params)
    assert int(tight.engine.state.scheduler.totals.preemptions) > 0
    for output, one in zip(outputs, params, strict=True):
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        ids = output.prompt_token_ids
        check_prompt_logprobs(output.prompt_logprobs, ids, logprobs_of(ids), one.prompt_logprobs)
        assert len(output.outputs) == one.n


def test_prompt_logprobs_are_refused_where_they_cannot_be(llm):
    with pytest.raises(ValueError, match="prompt_logprobs=4: the limit is max_logprobs=3"):
        llm.generate("a", SamplingParams(prompt_logprobs=4))
    with pytest.raises(ValueError, match="prompt_logprobs=1: a stream has none"):
        llm.stream("a", SamplingParams(prompt_logprobs=1))
    with pytest.raises(ValueError, match="prompt_logprobs=-1"):
        SamplingParams(prompt_logprobs=-1)


def test_a_stream_goes_on_as_if_nothing_were_scored(llm):
    params = SamplingParams(temperature=1, max_tokens=20, seed=7, ignore_eos=True)
    (expected,) = llm.generate("The sea", params)
    stream, text = llm.stream("The sea", params), ""
    for delta in stream:
        text += delta.text
        llm.score(["The sea is", "b"], top_logprobs=2)
        llm.embed("The sea")
    assert text == expected.outputs[0].text


def test_nothing_is_compiled_for_other_lengths(llm):
    def use(*texts):
        llm.score(list(texts))
        llm.embed(list(texts))
        llm.generate(list(texts), SamplingParams(max_tokens=1, prompt_logprobs=1))

    for text in ("a", "b" * 20, "c" * 60):
        use(text)
    before = llm.num_compiles
    use("de", "f" * 31, "gh" * 25)
    llm.perplexity("i" * 200, stride=50)
    llm.loglikelihood([("j" * 3, "k" * 9)] * 5)
    assert llm.num_compiles == before


def test_results_are_plain_values(llm):
    (one,) = llm.loglikelihood([("a", "b")])
    assert isinstance(one, ContinuationScore)
    assert json.loads(json.dumps([one.logprob, one.is_greedy, one.token_ids]))
    (scores,) = llm.score("ab")
    assert json.loads(json.dumps([scores.token_logprobs, scores.token_ranks]))
