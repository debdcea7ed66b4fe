"""EngineRequest: one sequence to generate, and what is refused of it before it is queued."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.constraint import Constraint, Grammar
from oxidize_jax.messages import short_repr
from oxidize_jax.sampling.params import MAX_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY
from oxidize_jax.sampling.token_mask import pack_token_mask
from oxidize_jax.scheduler.submit import check_prompt, check_token_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What may be wished of a request, on the host; requests and their traces have it."""

    min_new_tokens: int = 0
    priority: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Distinct ids, each with its bias."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain."""
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    key: tuple[int, int] = (0, 0)
    """Threefry key data, two 32-bit words."""
    salt: int = 0
    """Only requests of one salt share blocks."""
    use_cache: bool = True
    """Read the prefix cache, and leave blocks in it."""

    def options(self, **changes: Any) -> dict[str, Any]:
        """The fields of this class, some of them changed."""
        names = (field.name for field in dataclasses.fields(RequestOptions))
        return {name: getattr(self, name) for name in names} | changes


@dataclasses.dataclass(frozen=True)
class EngineRequest(RequestOptions):
    """One sequence to generate, in token ids."""

    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    held_token_ids: tuple[int, ...] = ()
    """Not sampled before ``min_new_tokens``, as ``stop_token_ids`` are not; they end nothing."""
    num_logprobs: int | None = None
    """Alternatives per token to return, at most ``max_logprobs``."""
    grammar: Grammar | None = None
    """What its output must keep to; see :mod:`~oxidize_jax.engine.constraint`."""

    def constraint(self, config: EngineConfig, grammar: Grammar) -> Constraint:
        """``grammar``, its own or a copy, with the other wishes that touch what it allows."""
        own = None
        if self.allowed_token_ids is not None or self.banned_token_ids:
            own = pack_token_mask(
                config.token_mask_size, self.allowed_token_ids, self.banned_token_ids
            )
        return Constraint(grammar, own, self.stop_token_ids, self.min_new_tokens, self.bad_words)


def check_request(config: EngineConfig, vocab_size: int, request: EngineRequest) -> None:
    """Raise ValueError, in one line, for a request that can never run, or not as it says."""
    check_prompt(config, len(request.prompt_token_ids))
    stops = request.stop_token_ids
    check_token_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    check_token_ids("stop_token_ids", stops, vocab_size)
    check_token_ids("held_token_ids", request.held_token_ids, vocab_size)
    num_stops = len(stops) + len(request.held_token_ids)
    if num_stops > config.max_stop_token_ids:
        raise ValueError(
            f"stop_token_ids has {num_stops} ids, end-of-sequence ids included; the limit "
            f"is max_stop_token_ids={config.max_stop_token_ids}."
        )
    for name, low in _WHOLE.items():
        _check_whole(name, getattr(request, name), low)
    if (request.num_logprobs or 0) > config.max_logprobs:
        raise ValueError(
            f"logprobs={short_repr(request.num_logprobs)}: the limit is max_logprobs="
            f"{config.max_logprobs}; ask for fewer, or raise that where the engine is made, "
            "LLM(max_logprobs=...)."
        )
    for name in ("top_p", "typical_p"):
        value = getattr(request, name)
        if not _is_number(value) or not 0 < value <= 1:
            raise ValueError(f"{name}={short_repr(value)}: must be a number above 0, at most 1.")
    for name, (least, most) in _RANGES.items():
        _check_number(name, getattr(request, name), least, most)
    _check_lists(config, vocab_size, request)
    check_keys([request.key])
    if request.grammar is not None:
        _check_grammar(config, vocab_size, request, request.grammar)


def _check_grammar(
    config: EngineConfig, vocab_size: int, request: EngineRequest, grammar: Grammar
) -> None:
    """A grammar needs room for its masks, and must allow a first token."""
    if config.token_mask_size < vocab_size:
        raise ValueError(
            f"structured_outputs: this engine has token_mask_size={config.token_mask_size}; make "
            f"it with {vocab_size}, the model's vocabulary."
        )
    words = request.constraint(config, grammar).mask()
    if words.shape != (config.token_mask_words,):
        raise ValueError(
            f"structured_outputs: the grammar's masks have shape {list(words.shape)}; they must "
            f"have {config.token_mask_words} words, for token_mask_size={config.token_mask_size}."
        )


def _check_lists(config: EngineConfig, vocab_size: int, request: EngineRequest) -> None:
    """Bias, bad words, allowed and banned ids: within their limits, and a token is left."""
    if len(request.logit_bias) > config.max_logit_bias:
        raise ValueError(
            f"logit_bias has {len(request.logit_bias)} ids; the limit is max_logit_bias="
            f"{config.max_logit_bias}, set where the engine is made."
        )
    biased = [token for token, _ in request.logit_bias]
    check_token_ids("logit_bias", biased, vocab_size)
    if len(set(biased)) < len(biased):
        raise ValueError("logit_bias names an id twice: give one number for each.")
    for token, bias in request.logit_bias:
        _check_number(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
    _check_bad_words(config, vocab_size, request.bad_words)
    _check_mask(config, vocab_size, request)


def _check_bad_words(config: EngineConfig, vocab_size: int, words: Sequence[Sequence[int]]) -> None:
    if len(words) > config.max_bad_words:
        raise ValueError(
            f"bad_words are {len(words)} token sequences (a word at the start of a text and one "
            f"behind a space may be two); the limit is max_bad_words={config.max_bad_words}, "
            "set where the engine is made."
        )
    for i, word in enumerate(words):
        if not 1 <= len(word) <= config.max_bad_word_tokens:
            raise ValueError(
                f"bad_words[{i}] has {len(word)} tokens; the limit is 1 to max_bad_word_tokens="
                f"{config.max_bad_word_tokens}, set where the engine is made."
            )
        check_token_ids(f"bad_words[{i}]", word, vocab_size)


def _check_mask(config: EngineConfig, vocab_size: int, request: EngineRequest) -> None:
    allowed, banned = request.allowed_token_ids, request.banned_token_ids
    for name, ids in (("allowed_token_ids", allowed or ()), ("banned_token_ids", banned)):
        check_token_ids(name, ids, vocab_size)
        if ids and config.token_mask_size < vocab_size:
            raise ValueError(
                f"{name}: this engine has token_mask_size={config.token_mask_size}; make it with "
                f"{vocab_size}, the model's vocabulary."
            )
    # What may be banned at some time, by a word that is complete or by min_new_tokens.
    sometimes = {word[-1] for word in request.bad_words}
    if request.min_new_tokens > 0:
        sometimes.update(request.stop_token_ids, request.held_token_ids)
    never = sometimes.union(banned)
    if all(token in never for token in (range(vocab_size) if allowed is None else allowed)):
        raise ValueError(
            "allowed_token_ids less banned_token_ids, the ends of bad_words and, with min_tokens, "
            "the ids that end a request, leaves no token: allow another."
        )


def check_keys(keys: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless there is a key, and each is two words of 32 bits."""
    if not len(keys):
        raise ValueError("keys is empty: give one key for each sequence.")
    for key in keys:
        if (
            not isinstance(key, Sequence)
            or len(key) != 2
            or not all(_is_whole(word) and 0 <= word < 2**32 for word in key)
        ):
            raise ValueError(
                f"key={short_repr(key)}: must be two whole numbers from 0 to {2**32 - 1}."
            )


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


_RANGES = {
    "temperature": (0.0, 3e38),  # a number of 32 bits
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
}
"""Fields that are numbers, and the least and most that each may be."""


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:
        raise ValueError(f"{name}={short_repr(value)}: must be a number from {low:g} to {high:g}.")


def _check_whole(name: str, value: Any, low: int) -> None:
    if name == "num_logprobs" and value is None:
        return
    # What only bounds a count may be as large as it likes.
    high = _HIGHEST if name in ("priority", "salt") else None
    if not _is_whole(value) or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name}={short_repr(value)}: must be a whole number, {limit}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
