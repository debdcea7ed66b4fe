"""Tool calls, in the form of Hermes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from oxidize_jax.serve.errors import ApiError
from oxidize_jax.serve.tools import check_tools, read_tool_calls, with_tool_calls

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content }}|{% endfor %}"
)
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("plain", "plain", []),
        (CALL, "", [("f", {"x": 1})]),
        (f"so:\n{CALL}\n{CALL}", "so:", [("f", {"x": 1})] * 2),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("<tool_call>{}</tool_call>", None, []),
        ("<tool_call>[]</tool_call>", None, []),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": 1}</tool_call>', None, []),
        ('<tool_call>{"name": "f"', None, []),
        (f"{CALL}<tool_call>", None, []),
        ("<tool_call>" + "[" * 10_000 + "</tool_call>", None, []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_calls_are_read_from_text(text, rest, calls):
    got_rest, got = read_tool_calls(text, ["f"])
    assert got_rest == (text if rest is None else rest)
    functions = [call["function"] for call in got]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == calls
    assert len({call["id"] for call in got}) == len(got)


@pytest.mark.parametrize(
    ("template", "tools", "choice"),
    [
        (None, [TOOL], None),
        ("{{ messages }}", [TOOL], "auto"),
        ("{{ tools }}", [TOOL], "auto"),
        (TEMPLATE, [TOOL], "required"),
        (TEMPLATE, [TOOL], {"type": "function", "function": {"name": "f"}}),
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
    assert choice.finish_reason == "tool_calls"
    assert "".join(c.token for c in choice.logprobs.content).startswith(call)
    assert not any(c.choices[0].delta.content for c in chunks)
    plain = client.chat.completions.create(**asked, tool_choice="none")
    assert plain.choices[0].message.content == call
    assert plain.usage.prompt_tokens < got.usage.prompt_tokens
