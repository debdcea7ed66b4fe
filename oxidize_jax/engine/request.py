"""EngineRequest: one sequence to generate, and what is refused of it before it is queued."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.submit import check_prompt, check_token_ids


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """One sequence to generate, in token ids."""

    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    key: tuple[int, int] = (0, 0)
    """Threefry key data, two 32-bit words."""
    num_logprobs: int | None = None
    """Alternatives per token to return, at most ``max_logprobs``."""
    priority: int = 0
    salt: int = 0
    """Only requests of one salt share blocks."""
    use_cache: bool = True
    """Read the prefix cache, and leave blocks in it."""


def check_request(config: EngineConfig, vocab_size: int, request: EngineRequest) -> None:
    """Raise ValueError, in one line, for a request that can never run, or not as it says."""
    check_prompt(config, len(request.prompt_token_ids))
    stops = request.stop_token_ids
    check_token_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    check_token_ids("stop_token_ids", stops, vocab_size)
    if len(stops) > config.max_stop_token_ids:
        raise ValueError(
            f"stop_token_ids has {len(stops)} ids, end-of-sequence ids included; the limit "
            f"is max_stop_token_ids={config.max_stop_token_ids}."
        )
    for name, low in _WHOLE.items():
        _check_whole(name, getattr(request, name), low)
    if (request.num_logprobs or 0) > config.max_logprobs:
        raise ValueError(
            f"logprobs={request.num_logprobs}: the limit is max_logprobs="
            f"{config.max_logprobs}, set where the engine is made."
        )
    if not _is_number(request.temperature) or not 0 <= request.temperature < math.inf:
        raise ValueError(f"temperature={request.temperature!r}: must be a number from 0 up.")
    if not _is_number(request.top_p) or not 0 < request.top_p <= 1:
        raise ValueError(f"top_p={request.top_p!r}: must be a number above 0, at most 1.")
    check_keys([request.key])


def check_keys(keys: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError unless there is a key, and each is two words of 32 bits."""
    if not len(keys):
        raise ValueError("keys is empty: give one key for each sequence.")
    for key in keys:
        if (
            not isinstance(key, Sequence)
            or len(key) != 2
            or not all(_is_whole(word) and 0 <= word < 2**32 for word in key)
        ):
            raise ValueError(f"key={key!r}: must be two whole numbers from 0 to {2**32 - 1}.")


_WHOLE = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "top_k": 0,
    "num_logprobs": 0,
    "priority": -(2**31),
    "salt": 0,
}
"""Fields that are whole numbers, and the least that each may be."""
_HIGHEST = 2**31 - 2


def _check_whole(name: str, value: Any, low: int) -> None:
    if name == "num_logprobs" and value is None:
        return
    # What only bounds a count may be as large as it likes.
    high = _HIGHEST if name in ("priority", "salt") else None
    if not _is_whole(value) or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name}={value!r}: must be a whole number, {limit}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
