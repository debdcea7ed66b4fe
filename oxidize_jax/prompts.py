"""The shapes in which prompts, conversations and parameters may come, made uniform."""

from __future__ import annotations

import difflib
import numbers
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oxidize_jax.messages import short_repr
from oxidize_jax.sampling.params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``; a dict may have a
``"cache_salt"`` too: only prompts of one salt share cached KV (vLLM's name)."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": "user", "content": "..."}]``."""

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_INT64 = 2**63
_BYTES = (bytes, bytearray, memoryview)
_FORMS = "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one or many. A non-empty list of whole numbers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise ValueError(f"prompts is {type(prompts).__name__}: give {_FORMS}, or a list of those.")
    if prompts and all(_is_whole(item) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """A list of conversations from one or many."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(
            f"messages is {type(messages).__name__}: give a list of "
            "{'role': ..., 'content': ...} dicts, or a list of such lists."
        )
    if messages and all(
        isinstance(m, Sequence) and not isinstance(m, str | bytes) for m in messages
    ):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One SamplingParams for each of ``count`` prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            f"sampling_params is {type(params).__name__}: give a SamplingParams, or a list with "
            "one for each prompt."
        )
    if len(params) != count:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {count} prompts: give one for all, "
            "or one for each."
        )
    return list(params)


def as_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    """A priority for each of ``count`` prompts; the engine judges the numbers."""
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or isinstance(priority, str) or len(priority) != count:
        raise ValueError(
            f"priority={short_repr(priority)}: must be a list with a whole number for each of "
            f"{count} prompts."
        )
    return list(priority)


def as_ids(prompt: Any) -> tuple[int, ...]:
    """Token ids of a prompt given as such."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, _BYTES):
        raise ValueError(f"prompt is {type(prompt).__name__}: give {_FORMS}.")
    for i, item in enumerate(prompt):
        if not _is_whole(item):
            shown = short_repr(item)
            raise ValueError(f"prompt_token_ids[{i}]={shown}: token ids must be whole numbers.")
        if not -_INT64 <= int(item) < _INT64:
            raise ValueError(
                f"prompt_token_ids[{i}]={short_repr(item)}: token ids must be in the model's "
                "vocabulary."
            )
    return tuple(int(item) for item in prompt)


class CacheSalts:
    """Numbers for salts given as text. A number never stands for two of them.

    The ``limit`` salts used last are remembered; one that comes back after that gets a new
    number, which costs it its cache hits. Threads may share it.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._next = 1
        self._lock = threading.Lock()

    def number(self, prompt: Prompt) -> int:
        """The salt of a prompt: 0 where it has none. Raises ValueError for one that is no text."""
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if salt is None:
            return 0
        if not isinstance(salt, str) or not salt:
            raise ValueError(
                f"cache_salt={short_repr(salt)}: must be text of one character or more."
            )
        with self._lock:
            if salt not in self._numbers:
                self._numbers[salt] = self._next
                self._next += 1
            self._numbers.move_to_end(salt)
            if len(self._numbers) > self._limit:
                self._numbers.popitem(last=False)
            return self._numbers[salt]


def single_text_or_ids(prompt: Prompt) -> str | Sequence[int]:
    """The text or the ids in a prompt; a dict must have exactly one of them."""
    if not isinstance(prompt, Mapping):
        return prompt
    keys = {"prompt", "prompt_token_ids"} & prompt.keys()
    if len(keys) != 1:
        raise ValueError(
            "prompt is a dict that must have exactly one of 'prompt' and 'prompt_token_ids', "
            f"and has {short_repr(sorted(map(_key_text, prompt)), 80)}."
        )
    for key in prompt:
        if key not in _KEYS:
            near = difflib.get_close_matches(_key_text(key), _KEYS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(_KEYS)}."
            raise ValueError(f"prompt: {short_repr(key)} is not a key of a prompt.{hint}")
    return prompt[keys.pop()]


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else short_repr(key)


def _is_whole(item: Any) -> bool:
    return isinstance(item, numbers.Integral) and not isinstance(item, bool)
