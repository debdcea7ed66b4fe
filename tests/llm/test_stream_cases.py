"""Streams and whole results side by side: ends without their text, order, tokens counted once."""

import dataclasses
import string
import threading
import time

import pytest

from oxidize_jax import SamplingParams
from oxidize_jax.completion import Completion

LIMIT = 120  # seconds until a thread counts as stuck


def letters(llm):
    """Ids of which each is a text of its own, so that each token of a stream is a delta."""
    return tuple(llm.tokenizer.encode(string.ascii_lowercase))


def streamed(llm, prompt, params):
    """``{index: (text, ids, finish_reason, stop_reason)}`` of all deltas, joined."""
    joined = {}
    for delta in llm.stream(prompt, params):
        text, ids, reason, _ = joined.get(delta.index, ("", (), None, None))
        assert reason is None, "a delta behind the end"
        ended = (delta.finish_reason, delta.stop_reason)
        joined[delta.index] = (text + delta.text, ids + delta.token_ids, *ended)
    return joined


# What ends the output, and the stop reason that is told: an id of the model's, a token of text,
# a special token that is no end by itself.
ENDS = {
    "eos": ("<|im_end|>", {}, False),
    "stop_token_ids, text": ("Q", {"stop_token_ids": True}, True),
    "stop_token_ids, special": ("<|im_start|>", {"stop_token_ids": True}, True),
    "stop_token_ids, eos": ("<|im_end|>", {"stop_token_ids": True, "ignore_eos": True}, True),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_tx04_the_token_that_ends_is_told_and_counted_and_is_no_text(
    llm, end, skip_special_tokens, n
):
    token, options, is_told = ENDS[end]
    (end_id,) = llm.tokenizer.encode(token)
    if "stop_token_ids" in options:
        options = {**options, "stop_token_ids": [end_id]}
    # Three letters, and then nothing is as likely as the end.
    params = SamplingParams(
        n=n,
        seed=3,
        max_tokens=9,
        min_tokens=3,
        logit_bias={end_id: 100},
        allowed_token_ids=(*letters(llm), end_id),
        skip_special_tokens=skip_special_tokens,
        **options,
    )
    (output,) = llm.generate("Hello", params)
    for completion in output.outputs:
        assert len(completion.token_ids) == 4
        assert completion.token_ids[-1] == end_id
        assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])
        assert completion.text.isalpha()
        assert token not in completion.text
        assert completion.finish_reason == "stop"
        assert completion.stop_reason == (end_id if is_told else None)
    assert output.usage.completion_tokens == 4 * n
    assert streamed(llm, "Hello", params) == {
        c.index: (c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs
    }


def test_tx04_a_special_token_that_ends_nothing_is_text_where_asked_for(llm):
    (special,) = llm.tokenizer.encode("<|im_start|>")
    params = SamplingParams(max_tokens=2, logit_bias={special: 100}, skip_special_tokens=False)
    for skip, text in ((False, "<|im_start|>" * 2), (True, "")):
        params = dataclasses.replace(params, skip_special_tokens=skip)
        (output,) = llm.generate("Hello", params)
        assert output.outputs[0].text == text
        assert output.usage.completion_tokens == 2
        assert streamed(llm, "Hello", params) == {0: (text, (special,) * 2, "length", None)}


@pytest.mark.parametrize("delayed", ["detokenizer", "reader"])
def test_tx10_20_streams_keep_their_order_while_the_first_token_of_one_is_late(
    llm, monkeypatch, delayed
):
    prompts = [[65 + i, 66] for i in range(20)]
    params = [
        SamplingParams(seed=i, max_tokens=8 + i % 5, ignore_eos=True) for i in range(len(prompts))
    ]
    alone = [llm.generate(p, one)[0].outputs[0] for p, one in zip(prompts, params, strict=True)]
    late, others = 7, threading.Semaphore(0)
    update, waited = Completion.update, []

    def slow_update(completion, news):
        # Who hands out the tokens of all is held up at the first of one.
        if completion._prompt_is_late and not waited:
            time.sleep(0.1)
            waited.append(True)
        update(completion, news)

    if delayed == "detokenizer":
        made = Completion.__init__

        def made_late(completion, index, prompt_token_ids, *rest):
            made(completion, index, prompt_token_ids, *rest)
            completion._prompt_is_late = list(prompt_token_ids) == prompts[late]

        monkeypatch.setattr(Completion, "__init__", made_late)
        monkeypatch.setattr(Completion, "update", slow_update)
    got, started = {}, threading.Barrier(len(prompts))

    def read(i):
        started.wait(LIMIT)
        ids, text, reasons = [], "", []
        for delta in llm.stream(prompts[i], params[i]):
            if i == late and delayed == "reader" and not ids:
                # Until five others have come to their end, which need not wait for this one.
                waited.extend(others.acquire(timeout=LIMIT) for _ in range(5))
            ids += delta.token_ids
            text += delta.text
            reasons.append(delta.finish_reason)
        others.release()
        got[i] = (tuple(ids), text, reasons)

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(got) == list(range(len(prompts)))
    assert waited, "nothing was late"
    assert all(waited), "the others waited for the late one"
    for i, one in enumerate(alone):
        ids, text, reasons = got[i]
        assert (ids, text) == (one.token_ids, one.text)
        assert reasons[-1] == "length"
        assert not any(reasons[:-1])


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_tx11_tokens_are_counted_once(llm, n, coalesced):
    params = SamplingParams(
        n=n, seed=1, max_tokens=7, ignore_eos=True, allowed_token_ids=letters(llm)
    )
    (whole,) = llm.generate("Hello", params)
    deltas, stream = [], llm.stream("Hello", params)
    deltas.append(next(stream))
    if coalesced:
        # Others run while nobody reads: all that is left comes in one piece for each index.
        llm.generate("another one", SamplingParams(max_tokens=30, ignore_eos=True))
    deltas += stream
    assert len(deltas) == (n + 1 if coalesced else 7 * n)
    counts = [sum(len(d.token_ids) for d in deltas if d.index == index) for index in range(n)]
    assert counts == [7] * n
    assert [len(c.token_ids) for c in whole.outputs] == counts
    assert whole.usage.completion_tokens == sum(counts) == 7 * n
    assert "".join(d.text for d in deltas if d.index == n - 1) == whole.outputs[-1].text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 7 * n
