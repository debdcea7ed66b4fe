"""Structured outputs through the LLM interface: a model of random weights keeps to a grammar."""

import json
import re

import jsonschema
import pytest

from oxidize_jax import SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tag": {"enum": ["x", "yy"]},
    },
    "required": ["n", "tag"],
    "additionalProperties": False,
}


def params(max_tokens=50, **fields):
    options = {
        name: fields.pop(name) for name in ("n", "seed", "stop", "min_tokens") & fields.keys()
    }
    structured = StructuredOutputsParams(**fields)
    return SamplingParams(max_tokens=max_tokens, structured_outputs=structured, **options)


def test_each_kind_in_one_batch_beside_free_text(llm):
    asked = [
        params(json=SCHEMA, seed=1),
        params(regex="(ab|cd){2,5}", seed=2),
        SamplingParams(max_tokens=30, seed=3),
        params(choice=["left", "right"], seed=4),
        params(grammar='start: "(" start ")" | "x"', max_tokens=30, seed=5),
    ]
    outputs = [out.outputs[0] for out in llm.generate(["hello"] * 5, asked)]
    first, second, free, third, last = outputs
    assert [out.finish_reason for out in (first, second, third)] == ["stop"] * 3
    jsonschema.validate(json.loads(first.text), SCHEMA)
    assert re.fullmatch("(ab|cd){2,5}", second.text)
    assert third.text in ("left", "right")
    assert re.fullmatch(r"\(*x?\)*", last.text)
    (alone,) = llm.generate("hello", SamplingParams(max_tokens=30, seed=3))
    assert free.token_ids == alone.outputs[0].token_ids
    for i in (0, 1, 3):
        (alone,) = llm.generate("hello", asked[i])
        assert alone.outputs[0].token_ids == outputs[i].token_ids


def test_several_completions_and_stop_strings(llm):
    (output,) = llm.generate("hello", params(regex="[ab]{8}", n=4, seed=7))
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[ab]{8}", text) for text in texts)
    assert len(set(texts)) > 1
    (output,) = llm.generate("hello", params(regex="[ab]{30}c", seed=7, stop="b"))
    assert re.fullmatch("a*", output.outputs[0].text)
    assert output.outputs[0].stop_reason == "b"


def test_cut_off_it_is_a_beginning(llm):
    (output,) = llm.generate("hello", params(regex="(ab){20}", max_tokens=7, seed=1))
    assert output.outputs[0].text == "abababa"
    assert output.outputs[0].finish_reason == "length"


def test_an_id_that_stops_may_be_text_of_the_grammar_and_ends_it_there(llm):
    (b,) = llm.tokenizer.encode("b")
    structured = StructuredOutputsParams(regex="a{4}b{3}c")
    for asked, ids, text in (
        ({}, 5, "aaaa"),
        ({"min_tokens": 2}, 5, "aaaa"),
        ({"max_tokens": 4}, 4, "aaaa"),
    ):
        asked = {"stop_token_ids": [b], "structured_outputs": structured, "max_tokens": 20, **asked}
        (output,) = llm.generate("hello", SamplingParams(**asked))
        (one,) = output.outputs
        assert (len(one.token_ids), one.text) == (ids, text)
        stopped = ("stop", b) if ids == 5 else ("length", None)
        assert (one.finish_reason, one.stop_reason) == stopped
        deltas = list(llm.stream("hello", SamplingParams(**asked)))
        assert "".join(delta.text for delta in deltas) == text
    # It is kept from being sampled, and nothing else may come: the request ends by name.
    (output,) = llm.generate("hello", SamplingParams(**{**asked, "min_tokens": 6, "max_tokens": 9}))
    assert output.outputs[0].text == "aaaa"
    assert output.outputs[0].finish_reason == "abort"
    assert "min_tokens" in output.outputs[0].stop_reason
    # Where the text may go on with another token, it does.
    structured = StructuredOutputsParams(regex="a{4}[bd]c")
    asked = {**asked, "structured_outputs": structured, "min_tokens": 5, "max_tokens": 9}
    (output,) = llm.generate("hello", SamplingParams(**asked))
    assert output.outputs[0].text == "aaaadc"
    assert output.outputs[0].finish_reason == "stop"


def test_a_stream_gives_the_same(llm):
    asked = params(json=SCHEMA, seed=9)
    (whole,) = llm.generate("hello", asked)
    deltas = list(llm.stream("hello", asked))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert deltas[-1].finish_reason == "stop"


def test_what_is_refused_and_what_ends_early_says_why(llm):
    with pytest.raises(ValueError, match=r"^structured_outputs\.json: .*uniqueItems"):
        llm.generate("hello", params(json={"type": "array", "uniqueItems": True}))
    with pytest.raises(ValueError, match=r"prompts\[1\]: structured_outputs\.regex"):
        llm.generate(["a", "b"], [SamplingParams(), params(regex="(")])
    with pytest.raises(ValueError, match=r"grammar: <\|im_end\|> ends an output, .*leave it out"):
        llm.generate("hello", params(grammar='start: "a" <|im_end|>'))
    (output,) = llm.generate("hello", params(choice=["ab"], min_tokens=5))
    assert output.outputs[0].text == "ab"
    assert output.outputs[0].finish_reason == "abort"
    assert "min_tokens" in output.outputs[0].stop_reason


def test_a_grammar_compiles_once(llm):
    before = llm._grammars.num_compiled
    for seed in range(3):
        llm.generate("hello", params(regex="only[0-9]here", seed=seed))
    assert llm._grammars.num_compiled == before + 1


def test_text_that_spells_the_end_is_text(llm):
    (output,) = llm.generate("hello", params(choice=["a<|im_end|>b"]))
    assert output.outputs[0].text == "a<|im_end|>b"
    assert output.outputs[0].finish_reason == "stop"
