"""Tool calls, in the form of Hermes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from oxidize_jax.serve.errors import ApiError
from oxidize_jax.serve.forced_calls import calls_grammar
from oxidize_jax.serve.tools import CallReader, check_tools, joined_calls, with_tool_calls

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content }}|{% endfor %}"
)
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def read(pieces, **options):
    """Text and calls of a stream of ``pieces``."""
    reader = CallReader(["f"], **options)
    parts = [part for piece in pieces for part in reader.add(piece)] + reader.finish()
    calls = joined_calls([part for part in parts if not isinstance(part, str)])
    functions = [call["function"] for call in calls]
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(f["name"], json.loads(f["arguments"])) for f in functions]


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("plain", "plain", []),
        (" plain \n", None, []),
        ("a < b <tool", None, []),
        (CALL, "", [("f", {"x": 1})]),
        (f"\n{CALL}\n", "", [("f", {"x": 1})]),
        (f"so:\n{CALL}\n{CALL}", "so:", [("f", {"x": 1})] * 2),
        (f"so:\n{CALL}\nyes", "so:\nyes", [("f", {"x": 1})]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("<tool_call>{}</tool_call>", None, []),
        ("<tool_call>[]</tool_call>", None, []),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": [], "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": 1}</tool_call>', None, []),
        ('<tool_call>{"name": "f"', None, []),
        (f"{CALL}<tool_call>", "<tool_call>", [("f", {"x": 1})]),
        (f"{CALL} <tool_call>{{}}</tool_call>", " <tool_call>{}</tool_call>", [("f", {"x": 1})]),
        ("<tool_call>" + "[" * 10_000 + "</tool_call>", None, []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_calls_are_read_from_text(text, rest, calls):
    want = text if rest is None else rest, calls
    assert read([text]) == want
    assert read(text) == want
    if len(text) < 1000:
        for cut in range(len(text)):
            assert read([text[:cut], text[cut:]]) == want


def test_text_goes_on_at_once_and_a_call_when_it_is_whole():
    reader = CallReader(["f"])
    assert reader.add("abc <") == ["abc"]
    assert reader.add("b> <tool") == [" <b>"]
    assert reader.add('_call>{"name": "f"}</tool_call') == []
    (part,) = reader.add(">")
    assert (part["index"], part["function"]) == (0, {"name": "f", "arguments": "{}"})
    assert reader.finish() == []


FORCED = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{", "b": [{}]}}\n</tool_call>'


def test_forced_calls_come_as_they_are_written():
    value = {"a": '}"{', "b": [{}]}
    assert read([FORCED], forced=True) == ("", [("f", value)])
    assert read(FORCED, forced=True) == ("", [("f", value)])
    assert read(f"{FORCED}\n{FORCED}", forced=True) == ("", [("f", value)] * 2)
    reader = CallReader(["f"], forced=True)
    begun = FORCED.index('{"a"')
    (head,) = reader.add(FORCED[: begun + 1])[:1]
    assert head["function"] == {"name": "f", "arguments": ""}
    (more,) = reader.add(FORCED[begun + 1 : begun + 6])
    assert more == {"index": 0, "function": {"arguments": FORCED[begun + 1 : begun + 6]}}
    # Cut by max_tokens: what there is of the arguments has been told.
    assert reader.finish() == []
    assert read([FORCED[:30]], forced=True) == (FORCED[:30], [])


SCHEMA = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/number"}, "next": {"$ref": "#"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("several", "text", "fits"),
    [
        (False, '{"name": "f", "arguments": {}}', True),
        (False, '{"name": "g", "arguments": {"x": 1}}', True),
        (False, '{"name": "g", "arguments": {"x": 1, "next": {"x": 2}}}', True),
        (False, '{"name": "g", "arguments": {"x": "1"}}', False),
        (False, '{"name": "g", "arguments": {}}', False),
        (False, '{"name": "h", "arguments": {}}', False),
        (False, '{"arguments": {}, "name": "f"}', False),
        (False, "twice", False),
        (True, "twice", True),
        (True, "", False),
    ],
)
def test_the_grammar_of_calls(llm, several, text, fits):
    tools = [TOOL, {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}]
    whole = f"<tool_call>\n{text}\n</tool_call>"
    if text == "twice":
        one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        whole = f"{one}\n{one}"
    grammar = llm._grammars.compile(calls_grammar(tools, several=several))
    ids = llm.tokenizer.encode(whole if text else "", add_special_tokens=False)
    assert (grammar.accept(ids) and grammar.is_complete) == fits


@pytest.mark.parametrize(
    ("template", "tools", "choice"),
    [
        (None, [TOOL], None),
        ("{{ messages }}", [TOOL], "auto"),
        ("{{ tools }}", [TOOL], "auto"),
        (TEMPLATE, [], "required"),
        (TEMPLATE, [TOOL], "any"),
        (TEMPLATE, [TOOL], {"type": "function", "function": {"name": "g"}}),
        (TEMPLATE, [TOOL], {"type": "function", "function": "f"}),
        (TEMPLATE, [TOOL], {"type": "tool", "function": {"name": "f"}}),
        (TEMPLATE, [{"type": "function", "function": {"name": "f", "parameters": 1}}], None),
        (TEMPLATE, [{"type": "function"}], None),
        (TEMPLATE, [{"type": "x", "function": {"name": "f"}}], None),
    ],
)
def test_tools_that_cannot_be_used_are_refused(template, tools, choice):
    with pytest.raises(ApiError) as caught:
        check_tools(template, tools, choice)
    assert caught.value.status == 400


def test_tools_that_are_not_wanted_change_nothing():
    assert not check_tools(None, [], None)
    assert not check_tools(None, [TOOL], "none")
    assert check_tools(TEMPLATE, [TOOL], None)


def test_earlier_calls_go_to_the_template_as_objects():
    function = {"name": "f", "arguments": '{"x": 1}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    (got,) = with_tool_calls([message])
    assert got["content"] == ""
    assert got["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    function["arguments"] = "{"
    with pytest.raises(ValueError, match="not JSON"):
        with_tool_calls([message])


def test_a_model_that_calls_a_tool(llm, served, client, monkeypatch):
    """A grammar has it write the call that a trained model would."""
    tokenizer = dataclasses.replace(llm.tokenizer, chat_template=TEMPLATE)
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    call = '<tool_call>{"name":"f"}</tool_call>'
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "extra_body": {"structured_outputs": {"choice": [call]}},
    }
    got = client.chat.completions.create(**asked)
    (made,) = got.choices[0].message.tool_calls
    assert (made.function.name, made.function.arguments) == ("f", "{}")
    assert got.choices[0].finish_reason == "tool_calls"
    assert got.choices[0].message.content is None
    chunks = list(client.chat.completions.create(**asked, stream=True, logprobs=True))
    (choice,) = [c.choices[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert choice.delta.tool_calls[0].function.name == "f"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    logprobs = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert "".join(one.token for content in logprobs for one in content).startswith(call)
    assert not any(c.choices[0].delta.content for c in chunks)
    plain = client.chat.completions.create(**asked, tool_choice="none")
    assert plain.choices[0].message.content == call
    assert plain.usage.prompt_tokens < got.usage.prompt_tokens


EMPTY = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}},
}
SHORT = "{# tools <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "f"}}, "stop")],
)
def test_a_call_that_is_forced(llm, served, client, monkeypatch, choice, reason):
    tokenizer = dataclasses.replace(llm.tokenizer, chat_template=SHORT)
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [EMPTY],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 1,
    }
    got = client.chat.completions.create(**asked)
    (made,) = got.choices[0].message.tool_calls
    assert (made.function.name, made.function.arguments) == ("f", "{}")
    assert got.choices[0].message.content is None
    assert got.choices[0].finish_reason == reason
    chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
    calls = [call for c in chunks for call in c.delta.tool_calls or ()]
    assert [call.function.name for call in calls] == ["f", *[None] * (len(calls) - 1)]
    assert "".join(call.function.arguments for call in calls) == "{}"
    assert len(calls) == 3, "the name, and two tokens"
    assert calls[0].id
    assert {call.index for call in calls} == {0}
    assert chunks[-1].finish_reason == reason
    cut = client.chat.completions.create(**asked, max_tokens=5)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content == "<tool"


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"parallel_tool_calls": False, "tool_choice": "auto"},
        {"ignore_eos": True},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_calls_that_cannot_be_forced_are_refused(llm, served, http, monkeypatch, more):
    tokenizer = dataclasses.replace(llm.tokenizer, chat_template=SHORT)
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [EMPTY],
        "tool_choice": "required",
        **more,
    }
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
