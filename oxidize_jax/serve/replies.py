"""What is answered, as OpenAI's reference has it: choices, log probabilities and usage."""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from oxidize_jax.completion import Group
from oxidize_jax.outputs import Logprob, Usage
from oxidize_jax.text.tokenizer import Tokenizer

_LEAST = -9999.0
"""For minus infinity, which JSON has not; vLLM's number."""


@dataclasses.dataclass(frozen=True)
class Head:
    """What is the same in all parts of an answer."""

    kind: str
    """``text_completion`` or ``chat.completion``"""
    id: str
    created: int
    model: str

    @classmethod
    def new(cls, kind: str, model: str) -> Head:
        """For a request that begins now."""
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        return cls(kind, f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def body(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """The whole answer."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """A part of a stream."""
        kind = self.kind if self.kind == "text_completion" else f"{self.kind}.chunk"
        return {**self.body(choices, **more), "object": kind}


def usage_body(groups: Sequence[Group]) -> dict[str, Any]:
    """Token counts of a request over all its prompts."""
    usages = [_usage(group) for group in groups]
    prompt, made = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
    }


def _usage(group: Group) -> Usage:
    return Usage(
        prompt_tokens=len(group.prompt_token_ids),
        completion_tokens=group.num_tokens,
        cached_tokens=group.completions[0].num_cached_tokens if group.completions else 0,
    )


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]] | None, offset: int
) -> tuple[dict[str, Any] | None, int]:
    """Of the completions API, and the offset in the text behind these tokens.

    A token whose number is NaN has none.
    """
    if entries is None:
        return None, offset
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, entry in zip(token_ids, entries, strict=True):
        own = entry[token]
        tokens.append(own.decoded_token)
        offsets.append(offset)
        offset += len(own.decoded_token)
        if math.isnan(own.logprob):  # the first token of a prompt
            values.append(None)
            tops.append(None)
            continue
        values.append(_finite(own.logprob))
        ranked = sorted(entry.values(), key=lambda one: -one.logprob)
        top: dict[str, float] = {}
        for one in ranked:  # two ids may have one spelling: the likelier stays
            top.setdefault(one.decoded_token, _finite(one.logprob))
        tops.append(top)
    body = {
        "tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets
    }  # fmt: skip
    return body, offset


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]] | None,
    count: int,
) -> dict[str, Any] | None:
    """Of the chat API, with ``count`` alternatives of each token."""
    if entries is None:
        return None

    def one(token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": logprob.decoded_token,
            "logprob": _finite(logprob.logprob),
            "bytes": list(tokenizer.bytes_of([token])),
        }

    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        ranked = sorted(
            (e.rank, i) for i, e in entry.items() if e.rank is not None and e.rank <= count
        )
        tops = [one(i, entry[i]) for _, i in ranked]
        content.append({**one(token, entry[token]), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _finite(value: float) -> float:
    return max(float(value), _LEAST)
