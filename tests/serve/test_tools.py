"""Tool calls, in the form of Hermes."""

from __future__ import annotations

import json

import pytest
from serving import SIZES, serving
from tiny_model import write_tiny_model

from oxidize_jax import LLM
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


def test_a_model_that_calls_a_tool(tmp_path):
    """A grammar has it write the call that a trained model would."""
    folder = write_tiny_model(tmp_path / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": TEMPLATE})
    )
    llm = LLM(folder, **{**SIZES, "max_model_len": 128})
    with serving(llm) as served, served.client() as client:
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [TOOL],
            "extra_body": {"structured_outputs": {"choice": [CALL]}},
        }
        got = client.chat.completions.create(**asked)
        (call,) = got.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
        assert got.choices[0].finish_reason == "tool_calls"
        assert got.choices[0].message.content is None
        chunks = list(client.chat.completions.create(**asked, stream=True))
        (delta,) = [c.choices[0].delta for c in chunks if c.choices[0].delta.tool_calls]
        assert delta.tool_calls[0].function.name == "f"
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert not any(c.choices[0].delta.content for c in chunks)
        plain = client.chat.completions.create(**asked, tool_choice="none")
        assert plain.choices[0].message.content == CALL
        assert plain.usage.prompt_tokens < got.usage.prompt_tokens
