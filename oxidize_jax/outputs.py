"""What a generation returns; names as in vLLM's ``outputs.py``."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Logprob:
    """One candidate at one position."""

    logprob: float
    """Natural log of its probability under the model, before temperature and filters."""
    rank: int | None
    """1 for the likeliest token of the vocabulary, and among equals the smaller id first (vLLM
    counts a token's equals as before it)."""
    decoded_token: str


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One of the ``n`` completions of a prompt."""

    index: int
    text: str
    """Without the stop string or the text of the stop token that ended it."""
    token_ids: tuple[int, ...]
    """All generated ids, the stop token included."""
    cumulative_logprob: float
    """Sum of the logprobs of ``token_ids``."""
    logprobs: tuple[dict[int, Logprob], ...] | None
    """For each token the alternatives asked for and the chosen one; None if not asked for."""
    finish_reason: str | None
    """``stop``, ``length`` or ``abort``; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop id that ended it, or ``kv_cache_exhausted`` where a request
    outgrew the whole block pool (with finish reason ``length``); None for end-of-sequence."""

    def _repr_markdown_(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of a request, over all its completions."""

    prompt_tokens: int
    completion_tokens: int
    """Each that was generated once, the stop token included whose text is left out."""
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The result for one prompt."""

    request_id: int
    prompt: str | None
    """The text that was encoded: the rendered template for a chat; None for token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    finished: bool = True
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    """For each prompt token itself and the alternatives asked for, None for the first; None if
    not asked for. Ranks count the whole vocabulary."""

    def _repr_markdown_(self) -> str:
        return "\n\n---\n\n".join(output.text for output in self.outputs)


@dataclasses.dataclass(frozen=True)
class StreamDelta:
    """New text of one completion of a stream. Deltas of one index, joined, are its text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Ids generated since the last delta; their text may still be held back."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """As those of :class:`CompletionOutput`, for each of ``token_ids``."""


@dataclasses.dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that a beam search found."""

    text: str
    """Without the text of the end-of-sequence token."""
    token_ids: tuple[int, ...]
    """All new ids, the end-of-sequence token included."""
    cumulative_logprob: float
    """Sum of the logprobs of ``token_ids``."""
    score: float
    """``cumulative_logprob / len(token_ids) ** length_penalty``"""
    finish_reason: str
    """``stop`` or ``length``"""

    def _repr_markdown_(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """What a beam search found for one prompt."""

    prompt: str | None
    """The text that was encoded; None for token ids."""
    prompt_token_ids: tuple[int, ...]
    sequences: tuple[BeamSearchSequence, ...]
    """``beam_width`` of them, best first."""
    usage: Usage
    """Completion tokens are those of ``sequences``."""

    def _repr_markdown_(self) -> str:
        return "\n\n---\n\n".join(sequence.text for sequence in self.sequences)
