"""Requests through a host engine, and all that comes of them to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oxidize_jax.engine.engine import Engine, EngineRequest

Bits = tuple[tuple[int, ...], tuple[Any, ...], str | None]
"""Tokens; for each its logprob and its alternatives; the finish reason. Floats print and compare
as the float32 they are."""


def bits(engine: Engine, requests: Sequence[EngineRequest], max_steps: int = 16) -> list[Bits]:
    """What each request gave, all of them run together, in the order of ``requests``."""
    return bits_of(engine, [engine.add(request) for request in requests], max_steps)


def bits_of(engine: Engine, ids: Sequence[int], max_steps: int = 16) -> list[Bits]:
    """What requests that have been added gave, once nothing is left to do."""
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    logprobs: dict[int, list[Any]] = {i: [] for i in ids}
    reasons: dict[int, str | None] = {}
    while engine.num_unfinished:
        for update in engine.step(max_steps):
            tokens[update.request_id] += update.token_ids
            top = update.top_logprobs or [()] * len(update.token_ids)
            logprobs[update.request_id] += zip(update.logprobs, top, strict=True)
            reasons[update.request_id] = update.finish_reason
    return [(tuple(tokens[i]), tuple(logprobs[i]), reasons[i]) for i in ids]


def preemptions(engine: Engine) -> int:
    """So far."""
    return int(engine.state.scheduler.totals.preemptions)
