"""The fields of a trace's events as JSON has them: their values, checked by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from oxidize_jax import __version__
from oxidize_jax.config import EngineConfig
from oxidize_jax.messages import short_repr

_F32 = 3.4028235677973366e38
"""Where a float of 32 bits rounds to infinity."""


class Limits:
    """Reads the values of fields, which mean the same in every event."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        def whole(low: int, high: int) -> Callable[[str, Any], int]:
            return lambda name, value: read_whole(name, value, low, high)

        slot, token = whole(0, config.max_num_requests), whole(0, vocab_size)
        signed, word = whole(-(2**31), 2**31), whole(0, 2**32)
        count, positive = whole(0, 2**31), whole(1, 2**31)
        key = _many(word, 2)
        self._kinds: dict[str, Callable[[str, Any], Any]] = {
            "slot": slot,
            "parent": slot,
            "children": _many(slot),
            "slots": _many(slot),
            "pause_after": count,
            "pause_at": _many(count),
            "masks": _many(_text),
            "prompt": _many(token),
            "stop_ids": _many(whole(-vocab_size, vocab_size)),
            "output": _many(token),
            "outputs": _many(_many(token)),
            "last_tokens": _many(_optional(token)),
            "last_logprobs": _many(_number),
            "keys": _many(key),
            "key": key,
            "arrivals": _many(signed),
            "arrival": signed,
            "priority": signed,
            "max_new_tokens": positive,
            "min_new_tokens": count,
            "temperature": _number,
            "top_k": count,
            "top_p": _number,
            "min_p": _number,
            "typical_p": _number,
            "repetition_penalty": _number,
            "presence_penalty": _number,
            "frequency_penalty": _number,
            "logit_bias": _many(lambda name, value: _pair(token, _number, name, value)),
            "bad_words": _many(_many(token)),
            "allowed_token_ids": _optional(_many(token)),
            "banned_token_ids": _many(token),
            "salt": count,
            "use_cache": _flag,
            "want_logprobs": _flag,
            "fork_of": _optional(slot),
            "secret": word,
            "max_steps": positive,
            "steps": count,
            "tokens": lambda name, value: {
                slot(
                    f"{name}: slot", int(key) if key.isdecimal() and len(key) < 11 else key
                ): tokens
                for key, tokens in _object(_many(token))(name, value).items()
            },
            "digests": _object(word),
        }

    def read(self, path: str, name: str, value: Any) -> Any:
        """The value of field ``name``. Raises ValueError naming ``path`` and the limit."""
        return self._kinds[name](path, value)


def read_whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number, ``low`` and more, below ``high``. Raises ValueError naming ``name``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise ValueError(
            f"{name}={short_repr(value)}: must be a whole number from {low} to {high - 1}."
        )
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={short_repr(value)}: must be true or false.")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={short_repr(value)}: must be text.")
    return value


def _number(name: str, value: Any) -> float:
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if type(value) in (int, float) and abs(value) < _F32:
        return float(value)
    raise ValueError(
        f'{name}={short_repr(value)}: must be a number of 32 bits, or "inf", "-inf" or "nan".'
    )


def _optional(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else read(name, value)


def _many(read: Callable[[str, Any], Any], length: int | None = None) -> Callable[[str, Any], Any]:
    def each(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or length not in (None, len(value)):
            raise ValueError(
                f"{name}={short_repr(value)}: must be a list{f' of {length}' if length else ''}."
            )
        return tuple(read(f"{name}[{i}]", item) for i, item in enumerate(value))

    return each


def _pair(
    first: Callable[[str, Any], Any], second: Callable[[str, Any], Any], name: str, value: Any
) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{name}={short_repr(value)}: must be a list of 2.")
    return first(name, value[0]), second(name, value[1])


def _object(read: Callable[[str, Any], Any]) -> Callable[[str, Any], dict[str, Any]]:
    def each(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{name}={short_repr(value)}: must be an object.")
        return {key: read(f"{name}.{key[:40]}", item) for key, item in value.items()}

    return each


def check_names(where: str, given: Mapping[str, Any], known: Any) -> None:
    """Refuse, with a ValueError, a name of ``given`` that is not among the ``known``."""
    for name in given:
        if name not in known:
            raise ValueError(
                f"{where}.{name[:40]} is not known to oxidize_jax {__version__}"
                f"{nearest(name, known)}: read the trace with the version that wrote it, "
                "or mend the name."
            )


def nearest(name: str, known: Any) -> str:
    """Words on the known name that is meant, if there is one like it."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
