"""What scoring returns."""

from __future__ import annotations

import dataclasses
import math

from oxidize_jax.outputs import Logprob

PromptLogprobs = tuple[dict[int, Logprob] | None, ...]
"""For each token of a prompt its own log probability and those of the alternatives asked for;
None for the first, which follows nothing. Names and shape are vLLM's."""


@dataclasses.dataclass(frozen=True)
class ScoreOutput:
    """What a model says of one prompt of n tokens."""

    prompt: str | None
    """The text that was encoded; None for token ids."""
    prompt_token_ids: tuple[int, ...]
    token_logprobs: tuple[float | None, ...]
    """Of each token, given all before it; None for the first."""
    token_ranks: tuple[int | None, ...]
    """Place of each token in the vocabulary, 1 for the likeliest; None for the first."""
    prompt_logprobs: PromptLogprobs | None
    """With the alternatives; None where ``top_logprobs`` is 0."""

    @property
    def num_scored(self) -> int:
        """Tokens that have a log probability: all but the first."""
        return len(self.token_logprobs) - 1

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log probabilities."""
        return math.fsum(value for value in self.token_logprobs if value is not None)

    @property
    def mean_logprob(self) -> float:
        """Of a scored token; NaN where there is none."""
        return self.cumulative_logprob / self.num_scored if self.num_scored else math.nan

    @property
    def perplexity(self) -> float:
        """``exp(-mean_logprob)``; NaN where no token is scored."""
        return exp(-self.mean_logprob)


@dataclasses.dataclass(frozen=True)
class ContinuationScore:
    """How likely a continuation is behind its context."""

    logprob: float
    """Sum over the continuation's tokens, natural log."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest in its place, so that greedy decoding of
    as many tokens writes it."""
    token_ids: tuple[int, ...]
    """The tokens that were scored."""
    token_logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How surprising a text is to a model."""

    nll: float
    """Sum of minus the log probabilities (natural)."""
    num_tokens: int
    """Tokens scored."""
    num_windows: int
    """Windows that the text was cut into."""

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean of what ``nll`` is the sum of; NaN where no token is scored."""
        return exp(self.nll / self.num_tokens) if self.num_tokens else math.nan


def exp(value: float) -> float:
    """``math.exp``, infinite where that overflows."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
