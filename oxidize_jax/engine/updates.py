"""From what a dispatch brought to the news of each request."""

from __future__ import annotations

import dataclasses

from oxidize_jax.engine.constraint import Constraint, Verdict
from oxidize_jax.engine.programs import WINDOW, Drained
from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.scheduler.state import ABORTED, LENGTH, POOL_EXHAUSTED, STOPPED

FINISH_REASONS = {STOPPED: "stop", LENGTH: "length", ABORTED: "abort", POOL_EXHAUSTED: "length"}
"""Finish reasons as OpenAI and vLLM name them."""


@dataclasses.dataclass(frozen=True)
class RequestUpdate:
    """What some dispatches, most often one, added to a request."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None
    """For each token its likeliest alternatives ``(id, logprob)``, best first."""
    finish_reason: str | None
    pool_exhausted: bool
    num_cached_tokens: int
    num_preemptions: int
    keeps_last: bool = False
    """It stopped, but not with an id that stops: the last token is text like the others."""
    failure: str | None = None
    """Why the engine gave it up, in one line."""
    ranks: tuple[int, ...] | None = None
    """Of each token its place in the vocabulary, 1 for the likeliest; where logprobs are asked for,
    of no alternatives too."""


@dataclasses.dataclass
class Running:
    """A request that has a slot on the device."""

    slot: int
    request: EngineRequest
    cursor: int
    """Tokens, the prompt included, that have been read."""
    constraint: Constraint | None = None
    scheduled: bool = False
    """It was seen in a row, or had tokens."""


def news(request_id: int, running: Running, drained: Drained, ended: bool) -> RequestUpdate:
    """What is in ``drained`` behind the cursor, which moves on."""
    slot, request = running.slot, running.request
    num_tokens = int(drained.num_tokens[slot])
    # The window ends with the last token: of W, the new ones are the last.
    first = WINDOW - (num_tokens - running.cursor)
    running.cursor = num_tokens
    reason = int(drained.finish_reason[slot])
    top = ranks = None
    if request.num_logprobs is not None:
        ranks = tuple(drained.ranks[slot, first:].tolist())
    if request.num_logprobs:
        ids = drained.top_ids[slot, first:, : request.num_logprobs].tolist()
        values = drained.top_logprobs[slot, first:, : request.num_logprobs].tolist()
        top = tuple(tuple(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True))
    return RequestUpdate(
        request_id=request_id,
        token_ids=tuple(drained.tokens[slot, first:].tolist()),
        logprobs=tuple(drained.logprobs[slot, first:].tolist()),
        top_logprobs=top,
        finish_reason=FINISH_REASONS[reason] if ended else None,
        pool_exhausted=ended and reason == POOL_EXHAUSTED,
        num_cached_tokens=int(drained.num_cached[slot]),
        num_preemptions=int(drained.num_preemptions[slot]),
        ranks=ranks,
    )


def judged(update: RequestUpdate, verdict: Verdict) -> RequestUpdate:
    """``update`` as far as a grammar accepts it."""
    count = verdict.num_accepted
    return dataclasses.replace(
        update,
        token_ids=update.token_ids[:count],
        logprobs=update.logprobs[:count],
        top_logprobs=None if update.top_logprobs is None else update.top_logprobs[:count],
        finish_reason=verdict.finish_reason or update.finish_reason,
        keeps_last=verdict.finish_reason == "stop",
        failure=verdict.failure,
        ranks=None if update.ranks is None else update.ranks[:count],
    )
