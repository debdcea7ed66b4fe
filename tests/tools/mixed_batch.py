"""Requests of which no two have the same options, and each has several."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from oxidize_jax import LLM, SamplingParams


def mixed_params(letters: Sequence[int], count: int, seed: int = 0) -> list[SamplingParams]:
    """``letters``: token ids, 16 or more, that the options name."""
    rng = random.Random(seed)
    return [SamplingParams(**_options(letters, rng, i)) for i in range(count)]


def options_used(params: Sequence[SamplingParams]) -> set[str]:
    """Fields that are not at their defaults in all of them."""
    default = SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return {n for n in names if any(getattr(p, n) != getattr(default, n) for p in params)}


def solo(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[tuple]:
    """What each gives with the engine to itself."""
    return [llm.generate(*pair)[0].outputs for pair in zip(prompts, params, strict=True)]


def together(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[tuple]:
    """What each gives among all the others."""
    return [output.outputs for output in llm.generate(list(prompts), list(params))]


def _options(letters: Sequence[int], rng: random.Random, seed: int) -> dict[str, Any]:
    some = list(letters)
    rng.shuffle(some)
    choices: dict[str, Callable[[], Any]] = {
        "n": lambda: rng.randint(2, 3),
        "top_p": lambda: rng.choice([0.3, 0.8, 0.95]),
        "top_k": lambda: rng.choice([1, 5, 40]),
        "min_p": lambda: rng.choice([0.05, 0.5]),
        "typical_p": lambda: rng.choice([0.2, 0.9]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "presence_penalty": lambda: rng.choice([-1.0, 1.5]),
        "frequency_penalty": lambda: rng.choice([-0.5, 1.0]),
        "logit_bias": lambda: {some[0]: 4.0, some[1]: -4.0, some[2]: 2.0},
        "allowed_token_ids": lambda: some[:12],
        "banned_token_ids": lambda: some[:2],
        "bad_words": lambda: ["a", "be"],
        "min_tokens": lambda: rng.randint(1, 4),
        "stop_token_ids": lambda: some[6:14],
        "stop": lambda: rng.sample(["a", "b", "d", " the", "e", "ing"], 3),
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.randint(0, 3),
        "prompt_logprobs": lambda: rng.randint(0, 3),
        "best_of": lambda: rng.randint(3, 4),
        "skip_special_tokens": lambda: False,
    }
    chosen = {name: make() for name, make in choices.items() if rng.random() < 0.3}
    if rng.random() < 0.15:
        # Not together with what may leave it no token, or no end.
        for name in (
            "allowed_token_ids",
            "banned_token_ids",
            "bad_words",
            "min_tokens",
            "ignore_eos",
        ):
            chosen.pop(name, None)
        chosen["structured_outputs"] = {"regex": "[a-e]{2,6}"}
    return {
        "seed": seed,
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
        "max_tokens": rng.randint(4, 9),
        **chosen,
    }
