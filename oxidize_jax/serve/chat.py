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
from oxidize_jax.sampling.params import SamplingParams
from oxidize_jax.serve.answer import Answer
from oxidize_jax.serve.body import read_request
from oxidize_jax.serve.errors import ApiError, bad_request
from oxidize_jax.serve.forced_calls import calls_grammar
from oxidize_jax.serve.protocol import ChatRequest
from oxidize_jax.serve.replies import Head, chat_logprobs, usage_body
from oxidize_jax.serve.service import Service, Work
from oxidize_jax.serve.tools import (
    CallReader,
    ToolUse,
    check_tools,
    joined_calls,
    with_tool_calls,
)
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
    use = check_tools(template, asked.tools or [], asked.tool_choice)
    if use is not None:
        extra["tools"] = use.tools
    params = _forced(params, use, several=asked.parallel_tool_calls is not False)

    def prepare() -> list[Group]:
        prompt: Prompt = service.llm.chat_prompt(with_tool_calls(asked.messages), **extra)
        return service.prepare([prompt], params, asked)

    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    renderer = _Chat(
        Head.new("chat.completion", service.model_name),
        service.llm.tokenizer,
        num_top=asked.top_logprobs or 0,
        include_usage=include_usage,
        use=use,
    )
    work = Work(prepare=prepare, count=params.num_sampled, stream=bool(asked.stream))
    return Answer(service, work, renderer)


def _forced(params: SamplingParams, use: ToolUse | None, *, several: bool) -> SamplingParams:
    """``params`` under which the model calls the tools that it must call. Raises ApiError."""
    if use is None or not use.forced:
        if not several:
            raise ApiError(
                400, "parallel_tool_calls=false: cannot be enforced where the model may write "
                "what it likes; leave it out, or use tool_choice='required'.",
                param="parallel_tool_calls",
            )  # fmt: skip
        return params
    if params.structured_outputs is not None:
        raise ApiError(
            400, "tool_choice: cannot be joined with response_format or structured_outputs.",
            param="tool_choice",
        )  # fmt: skip
    try:
        grammar = calls_grammar(use.forced, several=several and use.choice == "required")
        return dataclasses.replace(params, structured_outputs=grammar)
    except ValueError as error:
        raise bad_request(error) from None


class _Chat:
    """Answers of the chat API."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        num_top: int,
        include_usage: bool,
        use: ToolUse | None,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._include_usage = include_usage
        self._use = use
        self._begun: set[int] = set()
        self._readers: dict[int, CallReader] = {}

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
                    "finish_reason": self._reason(output.finish_reason, len(calls)),
                    "stop_reason": output.stop_reason,
                }
            )
        return self._head.body(choices, usage=usage_body(groups))

    def part(self, place: int, group: Group, delta: StreamDelta) -> list[dict[str, Any]]:
        """The role before the first text; then the text; the reason with the last."""
        del place, group  # a chat has one prompt
        chunks = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        bodies, count = self._bodies(delta)
        ended = delta.finish_reason is not None
        for body in bodies[:-1]:
            chunks.append(self._chunk(delta.index, body))
        if bodies or ended or logprobs:
            body = bodies[-1] if bodies else {}
            reason = self._reason(delta.finish_reason, count)
            chunks.append(self._chunk(delta.index, body, logprobs, reason, delta.stop_reason))
        return chunks

    def _bodies(self, delta: StreamDelta) -> tuple[list[dict[str, Any]], int]:
        """What is new of a choice, and how many calls it has had."""
        if self._use is None:
            return [{"content": delta.text}], 0
        reader = self._readers.setdefault(delta.index, self._reader(self._use))
        parts = reader.add(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish()
        bodies: list[dict[str, Any]] = [
            {"content": part} if isinstance(part, str) else {"tool_calls": [part]} for part in parts
        ]
        return bodies, reader.num_calls

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

    def _reader(self, use: ToolUse) -> CallReader:
        return CallReader(use.names, forced=bool(use.forced))

    def _read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text round the calls, and the calls."""
        if self._use is None:
            return text, []
        reader = self._reader(self._use)
        parts = [*reader.add(text), *reader.finish()]
        calls = joined_calls([part for part in parts if not isinstance(part, str)])
        return "".join(part for part in parts if isinstance(part, str)), calls

    def _reason(self, reason: str | None, num_calls: int) -> str | None:
        """OpenAI's: a call by the model's own choice of tool is what ends a turn."""
        own_choice = self._use is not None and self._use.choice != "function"
        return "tool_calls" if num_calls and own_choice and reason == "stop" else reason

    def _logprobs(self, ids: Sequence[int], entries: Any) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, ids, entries, self._num_top)
