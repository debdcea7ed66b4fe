"""The real OpenAI client against the running server; its texts are those of LLM.generate."""

from __future__ import annotations

import base64
import json
import math

import jsonschema
import numpy as np
import openai
import pytest

from oxidize_jax import SamplingParams
from oxidize_jax.serve.errors import json_bytes
from oxidize_jax.serve.replies import usage_body

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "hi"}]


def solo(llm, prompt, **params):
    (output,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output


def test_a_completion(llm, client):
    got = client.completions.create(model="tiny", prompt="abc", max_tokens=12, seed=3)
    want = solo(llm, "abc", max_tokens=12, seed=3)
    (choice,) = got.choices
    assert choice.text == want.outputs[0].text
    assert choice.finish_reason == want.outputs[0].finish_reason
    assert (got.object, got.model) == ("text_completion", "tiny")
    assert got.usage.prompt_tokens == 3
    assert got.usage.completion_tokens == want.usage.completion_tokens
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


def test_prompts_of_all_shapes_and_n(llm, client):
    got = client.completions.create(
        model="tiny", prompt=["abc", "de"], n=3, max_tokens=6, seed=5, extra_body={"top_k": 20}
    )
    want = [solo(llm, p, n=3, max_tokens=6, seed=5, top_k=20) for p in ("abc", "de")]
    assert [c.index for c in got.choices] == list(range(6))
    assert [c.text for c in got.choices] == [o.text for w in want for o in w.outputs]
    ids = llm.tokenizer.encode("abc")
    for prompt in (ids, [ids]):
        one = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, seed=5)
        assert one.choices[0].text == solo(llm, "abc", max_tokens=6, seed=5).outputs[0].text


def test_best_of(llm, client):
    got = client.completions.create(model="tiny", prompt="q", best_of=3, max_tokens=5, seed=1)
    want = solo(llm, "q", best_of=3, max_tokens=5, seed=1)
    assert [c.text for c in got.choices] == [o.text for o in want.outputs]
    assert got.usage.completion_tokens == want.usage.completion_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_of_completions(llm, client, n):
    stream = client.completions.create(
        model="tiny", prompt="abc", max_tokens=12, seed=3, n=n, stream=True, logprobs=2,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, reasons, usages = [""] * n, [None] * n, []
    offsets, spelt = [[] for _ in range(n)], [[] for _ in range(n)]
    for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "nothing comes after the reason"
            offsets[choice.index] += choice.logprobs.text_offset
            spelt[choice.index] += choice.logprobs.tokens
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    want = solo(llm, "abc", max_tokens=12, seed=3, n=n)
    assert texts == [o.text for o in want.outputs]
    assert reasons == [o.finish_reason for o in want.outputs]
    assert [len(tokens) for tokens in spelt] == [len(o.token_ids) for o in want.outputs]
    for begins, tokens in zip(offsets, spelt, strict=True):
        assert begins == np.cumsum([0] + [len(t) for t in tokens])[:-1].tolist()
    assert [u.completion_tokens for u in usages] == [want.usage.completion_tokens]


def test_logprobs_of_completions(llm, client):
    got = client.completions.create(model="tiny", prompt="abc", max_tokens=4, seed=3, logprobs=2)
    want = solo(llm, "abc", max_tokens=4, seed=3, logprobs=2).outputs[0]
    reported = got.choices[0].logprobs
    own = [entry[i] for i, entry in zip(want.token_ids, want.logprobs, strict=True)]
    assert reported.tokens == [o.decoded_token for o in own]
    np.testing.assert_allclose(reported.token_logprobs, [o.logprob for o in own], rtol=1e-5)
    assert all(2 <= len(top) <= 3 for top in reported.top_logprobs)
    assert reported.text_offset == np.cumsum([0] + [len(t) for t in reported.tokens])[:-1].tolist()


def test_a_chat(llm, client):
    got = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=8, seed=2, n=2, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    (want,) = llm.chat(CHAT, SamplingParams(max_tokens=8, seed=2, n=2, logprobs=2))
    assert [c.message.content for c in got.choices] == [o.text for o in want.outputs]
    assert got.object == "chat.completion"
    assert got.choices[0].message.role == "assistant"
    for choice, output in zip(got.choices, want.outputs, strict=True):
        content = choice.logprobs.content
        assert [bytes(c.bytes) for c in content] == [
            llm.tokenizer.bytes_of([i]) for i in output.token_ids
        ]
        assert all(len(c.top_logprobs) == 2 for c in content)
        assert all(c.top_logprobs[0].logprob >= c.top_logprobs[1].logprob for c in content)
        assert all(math.isfinite(c.logprob) and c.logprob <= 0 for c in content)


def test_a_stream_of_a_chat(llm, client):
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=8, seed=2, stream=True
    )
    chunks = list(stream)
    (want,) = llm.chat(CHAT, SamplingParams(max_tokens=8, seed=2))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want.outputs[0].text
    assert [c.choices[0].finish_reason for c in chunks][-1] == want.outputs[0].finish_reason


def test_a_chat_has_room_for_its_answer_by_default(llm, client):
    got = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert got.usage.total_tokens == llm.config.max_model_len
    assert got.choices[0].finish_reason == "length"


def test_stop_strings_end_a_stream_before_them(llm, client):
    whole = solo(llm, "abc", max_tokens=30, seed=4, ignore_eos=True).outputs[0].text
    stop = next(c for c in whole[3:] if c.isascii() and c.isprintable())
    more = {"ignore_eos": True}
    chunks = list(
        client.completions.create(
            model="tiny", prompt="abc", max_tokens=30, seed=4, stop=[stop], stream=True,
            extra_body=more,
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks) == whole.partition(stop)[0]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == stop


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    got = client.chat.completions.create(
        model="tiny", messages=CHAT, response_format=wanted, seed=0, max_tokens=50, stream=stream
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in got)
    else:
        text = got.choices[0].message.content
    if text.rstrip().endswith("}"):  # white space may have taken all tokens
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert text.lstrip()[:1] in ("", "{")


def test_json_object(client):
    got = client.chat.completions.create(
        model="tiny", messages=CHAT, response_format={"type": "json_object"}, seed=0, max_tokens=9
    )
    assert got.choices[0].message.content.lstrip()[:1] in ("", "{")


def test_models(client, llm):
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len) == ("tiny", llm.config.max_model_len)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_embeddings(client, llm):
    want = llm.embed(["abc", "de"], use_tqdm=False)
    got = client.embeddings.create(model="tiny", input=["abc", "de"])  # it asks for base64
    np.testing.assert_allclose([d.embedding for d in got.data], want, atol=1e-6)
    assert got.usage.prompt_tokens == 5
    floats = client.embeddings.create(
        model="tiny", input=llm.tokenizer.encode("abc"), encoding_format="float"
    )
    np.testing.assert_allclose(floats.data[0].embedding, want[0], atol=1e-6)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="tiny", input="")


def test_base64_is_little_endian_float32(http):
    body = {"input": "abc", "encoding_format": "base64"}
    vector = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert abs(np.linalg.norm(np.frombuffer(base64.b64decode(vector), "<f4")) - 1) < 1e-5


def test_tokenize_and_back(http, llm):
    text = "ab <|im_end|> ü"
    got = http.post("/tokenize", json={"prompt": text}).json()
    assert got["tokens"] == llm.tokenizer.encode(text)
    assert (got["count"], got["max_model_len"]) == (len(got["tokens"]), 64)
    assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == llm.tokenizer.apply_chat_template(CHAT)


def test_the_prefix_cache_shows_in_the_usage(llm, client):
    llm.reset_prefix_cache()
    prompt = "the same sixteen characters"
    first, second = (
        client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
        for _ in range(2)
    )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    assert first.choices[0].text == second.choices[0].text


def test_usage_is_summed_over_prompts(llm):
    groups = llm.prepare(["ab", "c"], SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
    llm.runner.run(groups, lambda *_: None)
    body = usage_body(groups)
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (3, 6, 9)


def test_no_text_ends_a_line_of_a_stream():
    text = "a\x85b\u2028c\u2029d\x1ce\x0bf\nü"
    written = json_bytes({"text": text})
    assert json.loads(written) == {"text": text}
    assert len(written.decode().splitlines()) == 1
