"""Tool calls: into the prompt by the model's chat template, and out of the text it writes."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from oxidize_jax.serve.errors import ApiError

_MARK = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAKES_TOOLS = re.compile(r"\btools\b")


def check_tools(template: str | None, tools: Sequence[Any], choice: Any) -> bool:
    """Whether ``tools`` go into the prompt. Raises ApiError where calls could not be read.

    They are read in the form of Hermes, which Qwen and others were trained on:
    ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A template tells of it.
    """
    if choice not in (None, "auto", "none"):
        raise ApiError(
            400, "tool_choice: only 'auto' and 'none' are supported; use one of them.",
            param="tool_choice",
        )  # fmt: skip
    if not tools or choice == "none":
        return False
    if template is None or not _TAKES_TOOLS.search(template):
        raise ApiError(400, "tools: this model's chat template takes none.", param="tools")
    if _MARK not in template:
        raise ApiError(
            400, "tools: this model calls them in a form that cannot be read here.", param="tools"
        )
    for i, tool in enumerate(tools):
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type") != "function" or not named:
            raise ApiError(
                400,
                f"tools[{i}]: must be {{'type': 'function', 'function': {{'name': ...}}}}.",
                param="tools",
            )
    return True


def with_tool_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: earlier calls with their arguments as objects, and
    empty text where there was none."""
    return [_with_tool_calls(message) for message in messages]


def _with_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    opened = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                raise ValueError("messages: arguments of a tool call are not JSON.") from None
            call = {**call, "function": {**function, "arguments": arguments}}
        opened.append(call)
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": opened}


def read_tool_calls(text: str, names: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """The text round the calls, and the calls as OpenAI has them.

    Where one of them is not whole, not JSON or of no known name, all is text: nothing that the
    model wrote is lost.
    """
    if _MARK not in text:
        return text, []
    calls = []
    for match in _CALL.finditer(text):
        try:
            value = json.loads(match.group(1))
        except (ValueError, RecursionError):
            return text, []
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get("arguments", {}) if isinstance(value, dict) else None
        if name not in names or not isinstance(arguments, dict):
            return text, []
        calls.append(
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
        )
    rest = _CALL.sub("", text)
    return (text, []) if _MARK in rest or not calls else (rest.strip(), calls)
