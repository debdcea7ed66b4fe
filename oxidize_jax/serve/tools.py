"""Tool calls: into the prompt by the model's chat template, and out of the text it writes."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from oxidize_jax.serve.errors import ApiError

_MARK = "<tool_call>"
_END = "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_TAKES_TOOLS = re.compile(r"\btools\b")


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """How a chat uses its tools."""

    tools: list[dict[str, Any]]
    """Those that go into the prompt."""
    forced: list[dict[str, Any]]
    """Those of which one must be called; none: the model is free."""
    choice: str
    """``auto``, ``required``, or ``function`` for one by name."""

    @property
    def names(self) -> list[str]:
        """Of the tools that may be called."""
        return [tool["function"]["name"] for tool in self.forced or self.tools]


def check_tools(template: str | None, tools: Sequence[Any], choice: Any) -> ToolUse | None:
    """What a chat wants of ``tools``; None for nothing. Raises ApiError where calls could not be
    read.

    They are read in the form of Hermes, which Qwen and others were trained on:
    ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A template tells of it.
    """
    wanted = _wanted_name(choice)
    if not tools and choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice: there are no tools; send some.", param="tool_choice")
    if not tools or choice == "none":
        return None
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
        if not isinstance(function.get("parameters") or {}, dict):
            raise ApiError(400, f"tools[{i}]: parameters must be a JSON schema.", param="tools")
    if wanted is None:
        given = choice or "auto"
        return ToolUse(list(tools), list(tools) if given == "required" else [], given)
    forced = [tool for tool in tools if tool["function"]["name"] == wanted][:1]
    if not forced:
        raise ApiError(400, "tool_choice: names none of the tools.", param="tool_choice")
    return ToolUse(list(tools), forced, "function")


def _wanted_name(choice: Any) -> str | None:
    """The function that ``choice`` names, if any. Raises ApiError for what is no choice."""
    if choice is None or choice in ("auto", "none", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    known = isinstance(choice, dict) and choice.get("type") == "function"
    if not known or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400,
            "tool_choice: must be 'auto', 'none', 'required', or "
            "{'type': 'function', 'function': {'name': ...}}.",
            param="tool_choice",
        )
    return function["name"]


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


class CallReader:
    """Text as it comes, into text and calls, for a stream or in one piece.

    Text goes on at once, but for what may be the beginning of a call, and white space, which
    is dropped beside one. What stands in the marks of a call and is none (not JSON, or of no known
    name) is text: nothing that the model wrote is lost. Where calls are ``forced`` by a grammar,
    arguments go on as they come.
    """

    def __init__(self, names: Sequence[str], *, forced: bool = False) -> None:
        self._names = names
        self._forced = forced
        self._held = ""
        self._space = ""
        self._inside = False
        self._arguments: _Arguments | None = None
        self.num_calls = 0

    def add(self, text: str) -> list[str | dict[str, Any]]:
        """What is certain with ``text``: text, and parts of OpenAI's ``delta.tool_calls``."""
        self._held += text
        parts: list[str | dict[str, Any]] = []
        while (found := self._next()) is not None:
            parts += found
        return parts

    def finish(self) -> list[str | dict[str, Any]]:
        """What is left when nothing more comes: all of it is text."""
        rest = ("" if self._arguments else _MARK if self._inside else "") + self._held
        self._held, self._inside = "", False
        if self._arguments is not None:
            return []
        parts = self._text(rest)
        if self._space and not self.num_calls:
            parts.append(self._space)
        self._space = ""
        return parts

    def _next(self) -> list[str | dict[str, Any]] | None:
        """Take a part off what is held; None where more must come first."""
        if not self._inside:
            before, mark, after = self._held.partition(_MARK)
            if not mark:
                return self._plain()
            self._held, self._inside = after, True
            return self._text(before)
        if self._forced:
            return self._growing()
        body, mark, after = self._held.partition(_END)
        if not mark:
            return None
        self._held, self._inside = after, False
        function = _function(body, self._names)
        return self._text(_MARK + body + _END) if function is None else [self._begin(**function)]

    def _plain(self) -> list[str | dict[str, Any]] | None:
        """Text in front of what may become a mark."""
        keep = next(n for n in range(len(_MARK) - 1, -1, -1) if self._held.endswith(_MARK[:n]))
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return self._text(text) if text else None

    def _text(self, text: str) -> list[str | dict[str, Any]]:
        """``text``, the white space at its end held back."""
        whole = self._space + text
        seen = whole.rstrip()
        self._space = whole[len(seen) :]
        return [seen] if seen else []

    def _begin(self, name: str, arguments: str) -> dict[str, Any]:
        self._space = ""
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _growing(self) -> list[str | dict[str, Any]] | None:
        """Of a call that a grammar has the model write: its name, then its arguments."""
        if self._arguments is None:
            head = _HEAD.match(self._held)
            if head is None:
                return None
            self._arguments = _Arguments()
            self._held = self._held[head.end() :]
            return [self._begin(name=json.loads(head.group(1)), arguments="")]
        if not self._arguments.ended:
            fragment = self._arguments.take(self._held)
            self._held = self._held[len(fragment) :]
            part = {"index": self.num_calls - 1, "function": {"arguments": fragment}}
            return [part] if fragment else None
        _, mark, after = self._held.partition(_END)
        if not mark:
            return None
        self._held, self._inside, self._arguments = after, False, None
        return []


class _Arguments:
    """Finds the end of a JSON object as it comes."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.ended = False

    def take(self, text: str) -> str:
        """As much of ``text`` as belongs to the object."""
        for i, character in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    self.ended = True
                    return text[: i + 1]
        return text


def _function(body: str, names: Sequence[str]) -> dict[str, str] | None:
    """Name and arguments of a call, or None for what is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}


def joined_calls(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole calls, of the parts of a stream."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if "id" in part:
            kept = {name: value for name, value in part.items() if name != "index"}
            calls.append({**kept, "function": dict(part["function"])})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls
