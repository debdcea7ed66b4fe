"""Completion: tokens in any chunks to the text of a completion, cut at a stop."""

import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxidize_jax import SamplingParams
from oxidize_jax.completion import Completion
from oxidize_jax.engine.updates import RequestUpdate

BROKEN = "\ufffd"


def update(ids, reason=None):
    return RequestUpdate(
        request_id=0,
        token_ids=tuple(ids),
        logprobs=(-1.0,) * len(ids),
        top_logprobs=None,
        finish_reason=reason,
        pool_exhausted=False,
        num_cached_tokens=0,
        num_preemptions=0,
    )


def known(tokenizer, ids, prompt, skip):
    """What is certain of the text after these ids: all but a character that has not ended."""
    text = tokenizer.decode(ids, skip, prompt)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tokenizer.bytes_of(ids, skip))
    return text[:-1] if decoder.getstate()[0] else text


def expected(tokenizer, ids, prompt, skip, stops, min_tokens):
    """``(text, stop)``: the one-shot text up to the first stop that a token completes.

    Of stops that one token completes, the one that begins first; of those the first in order.
    The text of the first ``min_tokens`` tokens is no part of a stop.
    """
    whole = tokenizer.decode(ids, skip, prompt)
    early = len(known(tokenizer, ids[:min_tokens], prompt, skip))
    for count in range(1, len(ids) + 2):
        seen = known(tokenizer, ids[:count], prompt, skip) if count <= len(ids) else whole
        found = [(at, nth) for nth, stop in enumerate(stops) if (at := seen.find(stop, early)) >= 0]
        if found:
            at, nth = min(found)
            return whole[:at], stops[nth]
    return whole, None


def run(tokenizer, chunks, prompt, params, reason):
    """The completion, and what a reader had been shown after each update."""
    completion = Completion(0, tuple(prompt), params, tokenizer)
    shown, seen, ids = "", [], ()
    for nth, chunk in enumerate(chunks):
        completion.update(update(chunk, reason if nth == len(chunks) - 1 else None))
        delta = completion.delta()
        if delta is not None:
            shown, ids = shown + delta.text, ids + delta.token_ids
        assert completion.delta() is None, "nothing is told twice"
        assert shown == completion.output().text
        seen.append(shown)
        if completion.finish_reason is not None:
            break
    return completion, seen, ids


@st.composite
def cases(draw, tokenizer):
    """``(ids, chunks, reason, prompt, params)``; most stops are taken from the text."""
    skip = draw(st.booleans())
    word = st.sampled_from(["a é", " the", "😀", "ab", "👩‍👧", "\n", "aab"])
    piece = st.one_of(
        word.map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=4),
        st.sampled_from([[1], [2]]),
    )
    pieces = draw(st.lists(piece, min_size=1, max_size=12))
    ids = list(itertools.chain.from_iterable(pieces))[:40] or [5]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    chunks = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    while not chunks[-1]:  # the reason comes with the token that brought it about
        chunks.pop()
    prompt = draw(st.sampled_from([(), (1,), tuple(tokenizer.encode("the dog"))]))
    reason = draw(st.sampled_from(["length", "stop", "abort"]))
    whole = tokenizer.decode(ids, skip, prompt)
    stops = []
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(whole)))
        part = whole[at : at + draw(st.integers(1, 6))]
        # Perhaps one that the text begins, and goes on otherwise.
        stops.append(part + draw(st.sampled_from(["", "", "", "x", BROKEN, part])) or "ab")
    params = SamplingParams(
        stop=tuple(stops),
        skip_special_tokens=skip,
        max_tokens=None,
        min_tokens=draw(st.sampled_from([0, 0, 1, 5])),
    )
    return ids, chunks, reason, prompt, params


@settings(max_examples=200, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", ["byte_level", "spm"])
def test_tx01_tx06_any_chunks_give_the_one_shot_text_up_to_the_first_stop(request, family, data):
    tokenizer = request.getfixturevalue(family)
    ids, chunks, reason, prompt, params = data.draw(cases(tokenizer))
    completion, seen, told = run(tokenizer, chunks, prompt, params, reason)
    # The text of a token that ended the generation is not part of it.
    spoken = ids[:-1] if reason == "stop" else ids
    skip, stops, early = params.skip_special_tokens, params.stop, params.min_tokens
    text, stop = expected(tokenizer, spoken, prompt, skip, stops, early)
    output = completion.output()
    assert output.text == text
    assert told == output.token_ids == tuple(ids[: len(told)])
    for shown in seen:
        # Never a mark, nor anything else, that the whole text has not in that place.
        assert text.startswith(shown)
    if stop is None:
        assert (output.finish_reason, output.stop_reason) == (reason, None)
        assert told == tuple(ids)
    else:
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert early or not any(stop in output.text for stop in stops)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", ["byte_level", "spm"])
def test_chunks_change_nothing_but_when_it_is_told(request, family, data):
    tokenizer = request.getfixturevalue(family)
    ids, chunks, reason, prompt, params = data.draw(cases(tokenizer))
    want = run(tokenizer, [ids], prompt, params, reason)[0].output()
    assert run(tokenizer, chunks, prompt, params, reason)[0].output() == want
    assert run(tokenizer, [[i] for i in ids], prompt, params, reason)[0].output() == want


def test_tx02_what_may_begin_a_stop_is_shown_once_it_did_not(byte_level):
    params = SamplingParams(stop=["abc", "cab"], max_tokens=None)
    ids = [byte_level.encode(letter)[0] for letter in "xababcab"]
    _, seen, _ = run(byte_level, [[i] for i in ids], (), params, "length")
    assert seen == ["x", "x", "x", "xab", "xab", "xab"]
