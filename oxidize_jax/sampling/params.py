"""SamplingParams: what a user asks of one request, checked before it can cost anything."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable
from typing import Any

MAX_N = 64
"""Most completions of one prompt."""
MAX_STOP_STRINGS = 16
"""Most stop strings of one request."""
MAX_TEMPERATURE = 1000.0
"""Above this every distribution is flat to float32 precision."""

_INT32_MAX = 2**31 - 1
_UINT64_MAX = 2**64 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Names and defaults follow vLLM's.

    Every field is checked on construction; a ValueError names the field, the value, what is
    allowed and what to do. Numbers may be Python's or numpy's; strings, booleans, NaN and
    infinities are refused where a number is meant, and None where a field has no "off".
    """

    n: int = 1
    """Completions of the prompt, 1 to :data:`MAX_N`."""
    temperature: float = 1.0
    """0 (greedy) to :data:`MAX_TEMPERATURE`."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 or -1 keeps all, as does the vocabulary's size."""
    seed: int | None = None
    """0 to 2**64 - 1: the same seed draws the same tokens, whatever runs beside it."""
    max_tokens: int | None = 16
    """Most new tokens; None: as many as ``max_model_len`` has room for."""
    min_tokens: int = 0
    """Until there are this many new tokens, no end-of-sequence or stop id is sampled."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the request, beside the model's own."""
    stop: tuple[str, ...] | str | None = None
    """Strings that end the request; the text is cut before the first match. Kept as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence ids. Ids of ``stop_token_ids`` still stop."""
    logprobs: int | None = None
    """Alternatives per token to report log probabilities of; 0: the chosen token's alone."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "n", _integer("n", self.n, 1, MAX_N))
        set_(self, "temperature", _temperature(self.temperature))
        set_(self, "top_p", _top_p(self.top_p))
        set_(self, "top_k", _integer("top_k", self.top_k, -1, _INT32_MAX, "use 0 for no limit"))
        set_(self, "min_tokens", _integer("min_tokens", self.min_tokens, 0, _INT32_MAX))
        set_(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        set_(self, "stop", _stop(self.stop))
        if self.seed is not None:
            hint = "use a seed in that range, or None for a random one"
            set_(self, "seed", _integer("seed", self.seed, 0, _UINT64_MAX, hint))
        if self.max_tokens is not None:
            hint = "use None for as many as max_model_len allows"
            set_(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, _INT32_MAX, hint))
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: "
                    f"lower min_tokens or raise max_tokens."
                )
        if self.logprobs is not None:
            hint = "use None for no log probabilities"
            set_(self, "logprobs", _integer("logprobs", self.logprobs, 0, _INT32_MAX, hint))
        for name in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: must be true or false.")


def _temperature(value: Any) -> float:
    number = _real("temperature", value)
    if not (number >= 0 and number <= MAX_TEMPERATURE):
        raise ValueError(
            f"temperature={value!r}: must be from 0 to {MAX_TEMPERATURE:g}; use 0 for greedy."
        )
    return number


def _top_p(value: Any) -> float:
    number = _real("top_p", value)
    if not (number > 0 and number <= 1):
        raise ValueError(f"top_p={value!r}: must be above 0 and at most 1; use 1 to keep all.")
    return number


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"stop_token_ids={value!r}: must be a list of token ids; use [] for none.")
    hint = "use ids of the vocabulary"
    return tuple(_integer("stop_token_ids", item, 0, _INT32_MAX, hint) for item in value)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        raise ValueError(f"stop={value!r}: must be a string or a list of strings; use [] for none.")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(
            f"stop has {len(strings)} strings: at most {MAX_STOP_STRINGS} are allowed; drop some."
        )
    for item in strings:
        if not isinstance(item, str) or not item:
            raise ValueError(f"stop={item!r}: must be a non-empty string; remove it.")
    return tuple(strings)


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r}: must be a number; give one, or leave {name} out.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={str(value)[:40]}: must be a finite number; give one.")
    return number


def _integer(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not low <= int(value) <= high:
        advice = hint or "use one in that range"
        raise ValueError(f"{name}={value!r}: must be a whole number, {low} to {high}; {advice}.")
    return int(value)
