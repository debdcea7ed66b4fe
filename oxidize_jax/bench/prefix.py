"""Prefix caching: prompts that begin alike, with the cache and without."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from oxidize_jax.bench import throughput, workload
from oxidize_jax.bench.throughput import Note, Run
from oxidize_jax.bench.workload import Item
from oxidize_jax.engine.engine import Engine
from oxidize_jax.llm import LLM


def measure(
    llm: LLM,
    items: Sequence[Item],
    shareable_tokens: int,
    *,
    repeat: int = 3,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """Run ``items`` in turn on an engine that shares and on one that does not.

    ``shareable_tokens`` is how many prompt tokens could hit at best. Each round starts with
    an empty cache, so every hit is on what the round itself has computed. Needs an ``llm``
    with prefix caching (ValueError), and memory for two KV caches.
    """
    if not llm.config.enable_prefix_caching:
        raise ValueError("enable_prefix_caching=False: there would be nothing to compare.")
    workload.check_fits(items, llm.config.max_model_len, llm.model_config.vocab_size)
    sharing = llm.engine
    config = dataclasses.replace(llm.config, enable_prefix_caching=False)
    engines = {"on": sharing, "off": Engine(config, sharing.model, sharing.params)}
    runs: dict[str, list[Run]] = {"on": [], "off": []}
    try:
        for turn in range(1 + repeat):
            for name, engine in engines.items():
                what = f"run {turn} of {repeat}" if turn else "warm-up run"
                note(f"{what}, prefix caching {name}")
                llm.engine = engine
                runs[name].append(throughput.run(llm, items))
    finally:
        llm.engine = sharing
    # The first run of each compiles.
    runs = {name: all_runs[1:] for name, all_runs in runs.items()}
    ratios = [on.seconds / off.seconds for on, off in zip(runs["on"], runs["off"], strict=True)]
    medians = {name: throughput.medians(of) for name, of in runs.items()}
    prompt_tokens = sum(len(item.prompt_token_ids) for item in items)
    return {
        "workload": workload.describe(items),
        "on": {"runs": [one.record() for one in runs["on"]], "median": medians["on"]},
        "off": {"runs": [one.record() for one in runs["off"]], "median": medians["off"]},
        "time_ratio": statistics.median(ratios),
        "hit_rate": medians["on"]["cached_tokens"] / prompt_tokens,
        "shareable_rate": shareable_tokens / prompt_tokens,
    }


def shareable_tokens(
    groups: int, prompts_per_group: int, prefix_len: int, suffix_len: int, block_size: int
) -> int:
    """Prompt tokens that can hit: the whole blocks of a prefix, for all prompts but the first.

    The last token of a prompt is always computed, for its logits.
    """
    shared = min(prefix_len, prefix_len + suffix_len - 1)
    return groups * (prompts_per_group - 1) * (shared // block_size * block_size)
