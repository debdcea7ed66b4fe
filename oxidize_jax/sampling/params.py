"""SamplingParams: what a user asks of one request, checked before it can cost anything."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from oxidize_jax.messages import short_repr
from oxidize_jax.sampling.structured import StructuredOutputsParams, as_structured_outputs

MAX_N = 64
"""Most completions of one prompt."""
MAX_STOP_STRINGS = 16
"""Most stop strings of one request."""
MAX_TEMPERATURE = 1000.0
"""Above this every distribution is flat to float32 precision."""
MAX_PENALTY = 2.0
"""Largest presence and frequency penalty either way (OpenAI's and vLLM's range)."""
MAX_REPETITION_PENALTY = 1000.0
"""Largest repetition penalty, and by its inverse the least: no logit overflows."""
MAX_BIAS = 100.0
"""Largest logit bias either way (OpenAI's range)."""
MAX_BAD_WORDS = 256
"""Most bad words of one request, whatever the engine has room for."""
MAX_TOKEN_IDS = 1_000_000
"""Most ids in a list of one request, doubles counted."""

_INT32_MAX = 2**31 - 1
_UINT64_MAX = 2**64 - 1
_NO_IDS = (str, bytes, bytearray, memoryview, Mapping)
"""Things of whole numbers that are no list of ids."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Names and defaults follow vLLM's.

    Every field is checked on construction; a ValueError names the field, the value, what is
    allowed and what to do. Numbers may be Python's or numpy's; strings, booleans, NaN and
    infinities are refused where a number is meant, and None where a field has no "off".
    """

    n: int = 1
    """Completions of the prompt, 1 to :data:`MAX_N`."""
    best_of: int | None = None
    """Completions to sample, ``n`` to :data:`MAX_N`, of which the ``n`` of the highest cumulative
    logprob are returned, best first; None: ``n``, in the order of their seeds. Usage counts the
    tokens of all."""
    temperature: float = 1.0
    """0 to :data:`MAX_TEMPERATURE`. 0 is greedy: the likeliest token, whatever ``top_p``,
    ``top_k``, ``min_p`` and ``typical_p`` are; penalties, bias and bans change it."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability; 1 keeps all."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 or -1 keeps all, as does the vocabulary's size."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest, 0 to 1; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the tokens nearest to the expected surprise that together have this probability
    (locally typical sampling, Meister et al., 2023; transformers' name); 1 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt or output, and multiplies the negative;
    above 1 discourages, below 1 encourages."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the output once for each time, -2 to 2."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    """Added to the logits of token ids, -100 to 100. Ids may be strings of digits, as JSON has
    them. Kept as a tuple of pairs; at most ``max_logit_bias`` of the engine."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing but these is sampled; None allows all."""
    banned_token_ids: tuple[int, ...] = ()
    """These are never sampled."""
    bad_words: tuple[str, ...] | str | None = None
    """Words that the output never spells: where it has all tokens of one but the last, that
    one is not sampled. At the start of a text or behind a space, as vLLM does. Kept as a tuple."""
    seed: int | None = None
    """0 to 2**64 - 1: the same seed draws the same tokens, whatever runs beside it."""
    max_tokens: int | None = 16
    """Most new tokens; None: as many as ``max_model_len`` has room for."""
    min_tokens: int = 0
    """Until there are this many new tokens, no id that would end the request is sampled, nor one
    of the model's end-of-sequence ids that ``ignore_eos`` passes over, and none of their text is
    taken for a stop string (vLLM's rules too)."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the request, beside the model's own."""
    stop: tuple[str, ...] | str | None = None
    """Strings that end the request; the text is cut before the first match. Kept as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence ids. Ids of ``stop_token_ids`` still stop."""
    logprobs: int | None = None
    """Alternatives per token to report log probabilities of; 0: the chosen token's alone. At most
    ``max_logprobs`` of the engine; vLLM's -1, for the whole vocabulary, is refused."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token to report log probabilities of; 0: the token's alone. They
    come from a pass of their own, which costs as much as to compute the prompt once more, and
    not with a stream. Its limit is that of ``logprobs``."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must keep to. A dict of its fields will do."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "n", _integer("n", self.n, 1, MAX_N))
        if self.best_of is not None:
            hint = "use None for n"
            set_(self, "best_of", _integer("best_of", self.best_of, 1, MAX_N, hint))
            if self.best_of < self.n:
                raise ValueError(
                    f"best_of={self.best_of} is below n={self.n}: raise best_of or lower n."
                )
        set_(self, "temperature", _temperature(self.temperature))
        set_(self, "top_p", _share("top_p", self.top_p))
        set_(self, "typical_p", _share("typical_p", self.typical_p))
        set_(self, "min_p", _between("min_p", self.min_p, 0, 1, "use 0 to keep all"))
        for name in ("presence_penalty", "frequency_penalty"):
            value = _between(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY, "use 0 for none")
            set_(self, name, value)
        set_(self, "repetition_penalty", _repetition_penalty(self.repetition_penalty))
        set_(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", _token_ids(self, "allowed_token_ids", "None for all"))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty: allow one, or use None for all.")
        set_(self, "banned_token_ids", _token_ids(self, "banned_token_ids", "[] for none"))
        set_(self, "bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        for word in self.bad_words or ():
            if not word.strip():
                raise ValueError(
                    f"bad_words={short_repr(word)}: is blank; ban its id by banned_token_ids."
                )
        set_(self, "top_k", _integer("top_k", self.top_k, -1, _INT32_MAX, "use 0 for no limit"))
        set_(self, "min_tokens", _integer("min_tokens", self.min_tokens, 0, _INT32_MAX))
        set_(self, "stop_token_ids", _token_ids(self, "stop_token_ids", "[] for none"))
        set_(self, "stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
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
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                set_(self, name, _num_logprobs(name, count))
        set_(self, "structured_outputs", as_structured_outputs(self.structured_outputs))
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos=True: structured_outputs ends with the model's end-of-sequence id; "
                "leave ignore_eos out."
            )
        for name in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={short_repr(value)}: must be true or false.")

    @property
    def num_sampled(self) -> int:
        """Completions that are sampled: ``best_of``, or else ``n``."""
        return self.n if self.best_of is None else self.best_of


def _temperature(value: Any) -> float:
    return _between("temperature", value, 0, MAX_TEMPERATURE, "use 0 for greedy")


def _share(name: str, value: Any) -> float:
    number = _real(name, value)
    if not (number > 0 and number <= 1):
        raise ValueError(
            f"{name}={short_repr(value)}: must be above 0 and at most 1; use 1 to keep all."
        )
    return number


def _repetition_penalty(value: Any) -> float:
    low, high = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    return _between("repetition_penalty", value, low, high, "use 1 for none")


def _between(name: str, value: Any, low: float, high: float, hint: str) -> float:
    number = _real(name, value)
    if not (number >= low and number <= high):
        raise ValueError(f"{name}={short_repr(value)}: must be from {low:g} to {high:g}; {hint}.")
    return number


def _num_logprobs(name: str, value: Any) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not 0 <= int(value) <= _INT32_MAX:
        all_ = " (-1 is vLLM's for the whole vocabulary, which nothing here has room for)"
        raise ValueError(
            f"{name}={short_repr(value)}: must be a whole number from 0 to max_logprobs, the LLM's "
            f"limit{all_ if whole and int(value) == -1 else ''}; ask for fewer, raise that where "
            "the LLM is made, LLM(max_logprobs=...), or use None for no log probabilities."
        )
    return int(value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple):
        raise ValueError(
            f"logit_bias={short_repr(value)}: must be a dict of token ids and numbers; use None "
            "for none."
        )
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(
                f"logit_bias: {short_repr(pair)} must be a token id and a number; mend it."
            )
        key, bias = pair
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        hint = "use ids of the vocabulary"
        token = _integer("logit_bias: id", int(key) if digits else key, 0, _INT32_MAX, hint)
        if token in biases:
            raise ValueError(f"logit_bias: the id {token} stands twice; give one number for it.")
        hint = "use allowed_token_ids or banned_token_ids to decide it"
        biases[token] = _between(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS, hint)
    return tuple(biases.items())


def _token_ids(params: SamplingParams, name: str, none: str) -> tuple[int, ...]:
    value = getattr(params, name)
    if isinstance(value, _NO_IDS) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={short_repr(value)}: must be a list of token ids; use {none}.")
    given = tuple(itertools.islice(value, MAX_TOKEN_IDS + 1))
    if len(given) > MAX_TOKEN_IDS:
        raise ValueError(
            f"{name} has over {MAX_TOKEN_IDS} ids, more than a vocabulary: name each id once."
        )
    hint = "use ids of the vocabulary"
    return tuple(_integer(name, item, 0, _INT32_MAX, hint) for item in given)


def _strings(name: str, value: Any, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        raise ValueError(
            f"{name}={short_repr(value)}: must be a string or a list of strings; use [] for none."
        )
    if len(strings) > most:
        raise ValueError(
            f"{name} has {len(strings)} strings: at most {most} are allowed; drop some."
        )
    for item in strings:
        if not isinstance(item, str) or not item:
            raise ValueError(f"{name}={short_repr(item)}: must be a non-empty string; remove it.")
        if any("\ud800" <= character <= "\udfff" for character in item):
            raise ValueError(
                f"{name}={short_repr(item)}: has a lone surrogate, which no text has; send the "
                "character whole."
            )
    return tuple(strings)


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(
            f"{name}={short_repr(value)}: must be a number; give one, or leave {name} out."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={short_repr(value)}: must be a finite number; give one.")
    return number


def _integer(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not low <= int(value) <= high:
        advice = hint or "use one in that range"
        raise ValueError(
            f"{name}={short_repr(value)}: must be a whole number, {low} to {high}; {advice}."
        )
    return int(value)
