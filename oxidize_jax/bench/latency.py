"""Latency of one request alone: time to first token, time per token after it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from oxidize_jax.bench import workload
from oxidize_jax.bench.throughput import Note
from oxidize_jax.compile_clock import CompileClock
from oxidize_jax.engine.engine import STEPS_PER_DISPATCH, Engine
from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.llm import LLM


def measure(
    llm: LLM,
    input_len: int,
    output_len: int,
    *,
    repeat: int = 3,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """Random prompts of ``input_len`` tokens one after another, from an empty prefix cache.

    Each is run twice: read after every step, as a stream is, and after every
    ``STEPS_PER_DISPATCH`` steps, as a batch is. One prompt of each kind warms up. Times are
    in seconds.
    """
    vocab = min(workload.RANDOM_VOCAB, llm.model_config.vocab_size)
    lengths = (input_len, input_len), (output_len, output_len)
    items = workload.random_workload(1 + repeat, *lengths, vocab_size=vocab)
    workload.check_fits(items, llm.config.max_model_len, llm.model_config.vocab_size)
    first, gaps, batched = [], [], []
    with CompileClock() as clock:
        for turn, item in enumerate(items):
            note(f"prompt {turn} of {repeat}" if turn else "warm-up run")
            request = EngineRequest(item.prompt_token_ids, item.max_tokens)
            llm.reset_prefix_cache()
            streamed = arrivals(llm.engine, request, 1)
            llm.reset_prefix_cache()
            in_batches = arrivals(llm.engine, request, STEPS_PER_DISPATCH)
            if turn:
                first.append(streamed[0][0])
                gaps += token_gaps(streamed)
                batched += [mean_gap(in_batches)] if len(in_batches) > 1 else []
            else:
                compile_seconds = clock.seconds
    return {
        "input_len": input_len,
        "output_len": output_len,
        "compile_seconds": compile_seconds,
        "time_to_first_token": {"median": statistics.median(first), "runs": first},
        "time_per_token_streamed": _summary(gaps),
        "time_per_token_batched": {
            "median": statistics.median(batched) if batched else None,
            "steps_per_dispatch": STEPS_PER_DISPATCH,
            "runs": batched,
        },
    }


def arrivals(engine: Engine, request: EngineRequest, max_steps: int) -> list[tuple[float, int]]:
    """Run ``request`` alone: ``(seconds since its submission, new tokens)`` of each reading.

    The first reading comes after a prompt's last step whatever ``max_steps`` is.
    """
    start = time.perf_counter()
    request_id = engine.add(request)
    events: list[tuple[float, int]] = []
    while engine.has(request_id):
        updates = engine.step(max_steps if events else 1)
        now = time.perf_counter() - start
        count = sum(len(update.token_ids) for update in updates)
        if count:
            events.append((now, count))
    return events


def token_gaps(events: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds from each token to the next; tokens read together share theirs evenly."""
    gaps = []
    for (before, _), (now, count) in itertools.pairwise(events):
        gaps += [(now - before) / count] * count
    return gaps


def mean_gap(events: Sequence[tuple[float, int]]) -> float:
    """Seconds per token after the first reading."""
    return (events[-1][0] - events[0][0]) / sum(count for _, count in events[1:])


def _summary(seconds: Sequence[float]) -> dict[str, float | int | None]:
    if not seconds:
        return {"median": None, "p99": None, "count": 0}
    median, p99 = np.percentile(np.asarray(seconds), (50, 99)).tolist()
    return {"median": median, "p99": p99, "count": len(seconds)}
