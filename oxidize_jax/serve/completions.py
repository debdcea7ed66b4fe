"""``POST /v1/completions``"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oxidize_jax.completion import Group, spell
from oxidize_jax.outputs import CompletionOutput, Logprob, StreamDelta
from oxidize_jax.prompts import Prompt
from oxidize_jax.serve.answer import Answer
from oxidize_jax.serve.body import read_request
from oxidize_jax.serve.errors import ApiError
from oxidize_jax.serve.protocol import CompletionRequest
from oxidize_jax.serve.replies import Head, completion_logprobs, usage_body
from oxidize_jax.serve.service import Service, Work
from oxidize_jax.text.tokenizer import Tokenizer


async def completions(service: Service, request: Request) -> Response:
    """Complete one prompt, or several."""
    settings = service.settings
    asked = await read_request(request, CompletionRequest, settings)
    service.check_model(asked.model)
    prompts = several(asked.prompt, "prompt", settings.max_prompts)
    params = asked.params(settings)
    work = Work(
        prepare=lambda: service.prepare(prompts, params, asked),
        count=len(prompts) * params.num_sampled if asked.generates else 0,
        stream=bool(asked.stream),
        score=params.prompt_logprobs is not None,
        generate=asked.generates,
    )
    head = Head.new("text_completion", service.model_name)
    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    echo = _Echo(service.llm.tokenizer, params.skip_special_tokens) if asked.echo else None
    return Answer(service, work, _Completions(head, params.n, include_usage, echo))


def several(value: str | list[Any], name: str, limit: int) -> list[Prompt]:
    """A list of prompts of one or many. Raises ApiError for none, or more than ``limit``."""
    prompts = [value] if isinstance(value, str) or isinstance((value or [None])[0], int) else value
    if not prompts:
        raise ApiError(400, f"{name}: is empty; give one at least.", param=name)
    if len(prompts) > limit:
        raise ApiError(
            400, f"{name}: has {len(prompts)} texts; this server takes {limit}.", param=name
        )
    return list(prompts)


class _Echo:
    """Prompts as answers begin with them."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def text(self, group: Group) -> str:
        """The prompt as it was given; of token ids their text."""
        if group.prompt is not None:
            return group.prompt
        return self._tokenizer.decode(group.prompt_token_ids, skip_special_tokens=self._skip)

    def entries(self, group: Group) -> list[dict[int, Logprob]] | None:
        """Log probabilities of its tokens, where they are wanted. The first has none."""
        if group.prompt_logprobs is None:
            return None
        return [
            entry or {token: Logprob(math.nan, None, spell(self._tokenizer, token))}
            for token, entry in zip(group.prompt_token_ids, group.prompt_logprobs, strict=True)
        ]


class _Completions:
    """Answers of the completions API; choices of the second prompt follow those of the first."""

    def __init__(self, head: Head, n: int, include_usage: bool, echo: _Echo | None) -> None:
        self._head = head
        self._n = n
        self._include_usage = include_usage
        self._echo = echo
        self._offsets: dict[int, int] = defaultdict(int)
        self._begun: set[int] = set()

    def whole(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self._choice(group, place, StreamDelta(**_fields(output)))
            for place, group in enumerate(groups)
            for output in self._outputs(group)
        ]
        return self._head.body(choices, usage=usage_body(groups))

    def part(self, place: int, group: Group, delta: StreamDelta) -> list[dict[str, Any]]:
        """One chunk."""
        return [self._chunk(self._choice(group, place, delta))]

    def last(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """The prompts, where nothing else was wanted; and the token counts, where they are."""
        chunks = [
            self._chunk(self._choice(group, place, StreamDelta(**_fields(output))))
            for place, group in enumerate(groups)
            if not group.ids
            for output in self._outputs(group)
        ]
        if self._include_usage:
            chunks.append(self._head.chunk([], usage=usage_body(groups)))
        return chunks

    def _outputs(self, group: Group) -> Sequence[CompletionOutput]:
        if group.ids:
            return group.output().outputs
        logprobs = None if group.prompt_logprobs is None else ()
        return [CompletionOutput(i, "", (), 0.0, logprobs, "length") for i in range(self._n)]

    def _choice(self, group: Group, place: int, delta: StreamDelta) -> dict[str, Any]:
        """One choice or a part of it; the first part of each begins with the prompt."""
        index = place * self._n + delta.index
        text, ids, entries = delta.text, delta.token_ids, delta.logprobs
        if self._echo is not None and index not in self._begun:
            self._begun.add(index)
            text, ids = self._echo.text(group) + text, (*group.prompt_token_ids, *ids)
            before = self._echo.entries(group)
            entries = None if before is None else (*before, *(entries or ()))
        logprobs, self._offsets[index] = completion_logprobs(ids, entries, self._offsets[index])
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head.chunk([choice], **({"usage": None} if self._include_usage else {}))


def _fields(output: CompletionOutput) -> dict[str, Any]:
    """Of a whole output, as a delta that is all of it."""
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs")
    return {name: getattr(output, name) for name in names}
