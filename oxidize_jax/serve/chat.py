"""``POST /v1/chat/completions``"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oxidize_jax.completion import Group
from oxidize_jax.outputs import StreamDelta
from oxidize_jax.prompts import Prompt
from oxidize_jax.serve.answer import Answer
from oxidize_jax.serve.body import read_request
from oxidize_jax.serve.errors import ApiError
from oxidize_jax.serve.protocol import ChatRequest
from oxidize_jax.serve.replies import Head, chat_logprobs, usage_body
from oxidize_jax.serve.service import Service, Work
from oxidize_jax.serve.tools import check_tools, read_tool_calls, with_tool_calls
from oxidize_jax.text.tokenizer import Tokenizer

_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    asked = await read_request(request, ChatRequest, service.settings)
    service.check_model(asked.model)
    params = asked.params(service.settings)
    extra = dict(asked.chat_template_kwargs or {})
    if taken := sorted(set(extra) & set(_RESERVED)):
        raise ApiError(
            400, f"chat_template_kwargs: {taken[0]} is not for it.", param="chat_template_kwargs"
        )
    template = service.llm.tokenizer.chat_template
    names: list[str] | None = None
    if check_tools(template, asked.tools or [], asked.tool_choice):
        extra["tools"] = asked.tools
        names = [tool["function"]["name"] for tool in asked.tools or []]

    def prepare() -> list[Group]:
        prompt: Prompt = service.llm.chat_prompt(with_tool_calls(asked.messages), **extra)
        return service.prepare([prompt], params, asked)

    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    renderer = _Chat(
        Head.new("chat.completion", service.model_name),
        service.llm.tokenizer,
        num_top=asked.top_logprobs or 0,
        include_usage=include_usage,
        tools=names,
    )
    work = Work(prepare=prepare, count=params.num_sampled, stream=bool(asked.stream))
    return Answer(service, work, renderer)


@dataclasses.dataclass
class _Held:
    """What a stream with tools holds back of a completion until its end."""

    text: str = ""
    logprobs: list[Any] = dataclasses.field(default_factory=list)


class _Chat:
    """Answers of the chat API.

    With tools the text of a stream comes in one piece at its end: only then is it known whether
    what looks like a call is one.
    """

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        num_top: int,
        include_usage: bool,
        tools: Sequence[str] | None,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._include_usage = include_usage
        self._tools = tools
        self._begun: set[int] = set()
        self._held: dict[int, _Held] = {}

    def whole(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for output in groups[0].output().outputs:
            text, calls = self._read(output.text)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            choices.append(
                {
                    "index": output.index,
                    "message": message,
                    "logprobs": self._logprobs(output.token_ids, output.logprobs),
                    "finish_reason": _reason(output.finish_reason, calls),
                    "stop_reason": output.stop_reason,
                }
            )
        return self._head.body(choices, usage=usage_body(groups))

    def part(self, place: int, delta: StreamDelta) -> list[dict[str, Any]]:
        """The role before the first text; then the text; the reason with the last."""
        del place  # a chat has one prompt
        chunks = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        text, calls = delta.text, list[dict[str, Any]]()
        if self._tools is not None:
            held = self._held.setdefault(delta.index, _Held())
            held.text += text
            held.logprobs += logprobs["content"] if logprobs else []
            if delta.finish_reason is None:
                return chunks
            text, calls = self._read(held.text)
            logprobs = {**logprobs, "content": held.logprobs} if logprobs else None
        body: dict[str, Any] = {"content": text} if text or not calls else {}
        if calls:
            body["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        reason = _reason(delta.finish_reason, calls)
        chunks.append(self._chunk(delta.index, body, logprobs, reason, delta.stop_reason))
        return chunks

    def last(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """The token counts, where they are wanted."""
        return [self._head.chunk([], usage=usage_body(groups))] if self._include_usage else []

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        return self._head.chunk([choice], **({"usage": None} if self._include_usage else {}))

    def _read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return (text, []) if self._tools is None else read_tool_calls(text, self._tools)

    def _logprobs(self, ids: Sequence[int], entries: Any) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, ids, entries, self._num_top)


def _reason(reason: str | None, calls: Sequence[Any]) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason
