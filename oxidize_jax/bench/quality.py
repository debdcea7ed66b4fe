"""Quality of a model as it is run here: perplexity of a text, and agreement of two runs.

Scores come from the paged forward pass that the engine runs, chunk by chunk through the KV
cache, so what is judged is the arithmetic that serves requests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from oxidize_jax.engine.step import Params
from oxidize_jax.llm import LLM
from oxidize_jax.prompts import Prompt
from oxidize_jax.sampling.params import SamplingParams
from oxidize_jax.scoring.programs import ScoringModel
from oxidize_jax.scoring.scorer import Scorer
from oxidize_jax.types import BLOCK_SIZE

TILE = 32
"""Tokens that attend together."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model says of W windows of N tokens, each token but the first of its window."""

    nll: np.ndarray
    """f32[W, N - 1]: minus the log probability (natural) of the token that is there."""
    best: np.ndarray
    """i32[W, N - 1]: the likeliest token in its place."""

    @property
    def num_tokens(self) -> int:
        """Tokens scored."""
        return self.nll.size

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean of ``nll``."""
        return math.exp(float(np.mean(self.nll, dtype=np.float64)))


def cut_windows(token_ids: Sequence[int], size: int, count: int) -> np.ndarray:
    """``i32[count, size]``: the text from its start, cut without overlap.

    Raises ValueError if it is too short for them.
    """
    if len(token_ids) < size * count:
        raise ValueError(
            f"the text has {len(token_ids)} tokens, but {count} windows of {size} take "
            f"{size * count}: give a longer text or fewer windows."
        )
    return np.asarray(token_ids[: size * count], np.int32).reshape(count, size)


def score(
    model: ScoringModel,
    params: Params,
    windows: np.ndarray,
    *,
    chunk: int = 512,
    tile: int = TILE,
    block_size: int = BLOCK_SIZE,
) -> Scores:
    """Score ``windows i32[W, N]``, each a sequence of its own, ``chunk`` tokens in a step.

    Every token sees the true ones before it in its window (teacher forcing).
    """
    sizes = {"max_len": windows.shape[1], "max_num_batched_tokens": chunk, "num_top": 1}
    scorer = Scorer(model, block_size=block_size, tile=tile, **sizes)
    scored = scorer.score(params, windows.tolist(), top=1)
    nll = np.stack([-one.logprobs for one in scored])
    return Scores(nll, np.stack([one.top_ids[:, 0] for one in scored]))


def agreement(scores: Scores, reference: Scores) -> float:
    """Share of the positions where both have the same likeliest token."""
    return float(np.mean(scores.best == reference.best))


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """``count`` tokens after each prompt, the likeliest each time, past end-of-sequence."""
    given: list[Prompt] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(given, params)]


def mean_common_prefix(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Tokens that two lists of continuations have in common before they part, on average."""
    return float(np.mean([common_prefix(a, b) for a, b in zip(one, other, strict=True)]))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that are the same in both."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
