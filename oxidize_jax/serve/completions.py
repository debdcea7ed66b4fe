"""``POST /v1/completions``"""

from __future__ import annotations

from collections import defaultdict
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
from oxidize_jax.serve.protocol import CompletionRequest
from oxidize_jax.serve.replies import Head, completion_logprobs, usage_body
from oxidize_jax.serve.service import Service, Work


async def completions(service: Service, request: Request) -> Response:
    """Complete one prompt, or several."""
    settings = service.settings
    asked = await read_request(request, CompletionRequest, settings)
    service.check_model(asked.model)
    prompts = several(asked.prompt, "prompt", settings.max_prompts)
    params = asked.params(settings)
    work = Work(
        prepare=lambda: service.prepare(prompts, params, asked),
        count=len(prompts) * params.num_sampled,
        stream=bool(asked.stream),
    )
    head = Head.new("text_completion", service.model_name)
    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    return Answer(service, work, _Completions(head, params.n, include_usage))


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


class _Completions:
    """Answers of the completions API; choices of the second prompt follow those of the first."""

    def __init__(self, head: Head, n: int, include_usage: bool) -> None:
        self._head = head
        self._n = n
        self._include_usage = include_usage
        self._offsets: dict[int, int] = defaultdict(int)

    def whole(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for place, group in enumerate(groups):
            for output in group.output().outputs:
                logprobs, _ = completion_logprobs(output.token_ids, output.logprobs, 0)
                choices.append(
                    {
                        "index": place * self._n + output.index,
                        "text": output.text,
                        "logprobs": logprobs,
                        "finish_reason": output.finish_reason,
                        "stop_reason": output.stop_reason,
                    }
                )
        return self._head.body(choices, usage=usage_body(groups))

    def part(self, place: int, delta: StreamDelta) -> list[dict[str, Any]]:
        """One chunk."""
        index = place * self._n + delta.index
        logprobs, self._offsets[index] = completion_logprobs(
            delta.token_ids, delta.logprobs, self._offsets[index]
        )
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return [self._head.chunk([choice], **({"usage": None} if self._include_usage else {}))]

    def last(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """The token counts, where they are wanted."""
        return [self._head.chunk([], usage=usage_body(groups))] if self._include_usage else []
