"""Throughput: a whole workload at once, as fast as the engine goes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from oxidize_jax.bench import workload
from oxidize_jax.bench.workload import Item
from oxidize_jax.compile_clock import CompileClock
from oxidize_jax.llm import LLM
from oxidize_jax.prompts import Prompt
from oxidize_jax.sampling.params import SamplingParams

Note = Callable[[str], None]
"""Is told what is about to run."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a workload from the first submission to the last token."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    preemptions: int
    peak_blocks: int
    """Most KV blocks that requests held in a step."""

    @property
    def output_tokens_per_second(self) -> float:
        """Generated tokens over the whole time, prompts included."""
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        """Prompt and generated tokens."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {
            "output_tokens_per_second": self.output_tokens_per_second,
            "total_tokens_per_second": self.total_tokens_per_second,
        }


def measure(
    llm: LLM, items: Sequence[Item], *, repeat: int = 3, note: Note = lambda text: None
) -> dict[str, Any]:
    """Run ``items`` once to warm up and ``repeat`` times more: every run, and medians.

    Each run starts with an empty prefix cache. Raises ValueError if a request does not fit
    the engine.
    """
    workload.check_fits(items, llm.config.max_model_len, llm.model_config.vocab_size)
    note("warm-up run")
    with CompileClock() as clock:
        warm_up = run(llm, items)
    runs = []
    for turn in range(repeat):
        note(f"run {turn + 1} of {repeat}")
        runs.append(run(llm, items))
    return {
        "workload": workload.describe(items),
        "num_blocks": llm.config.num_blocks,
        "warm_up_seconds": warm_up.seconds,
        "compile_seconds": clock.seconds,
        "runs": [one.record() for one in runs],
        "median": medians(runs),
    }


def run(llm: LLM, items: Sequence[Item]) -> Run:
    """One run from an empty prefix cache, greedy, each request to its ``max_tokens``.

    Raises RuntimeError if a request came out shorter: the KV cache cannot hold it.
    """
    llm.reset_prefix_cache()
    engine = llm.engine
    before = jax.device_get(engine.state.scheduler.totals)
    engine.peak_blocks_used = 0
    prompts: list[Prompt] = [{"prompt_token_ids": list(i.prompt_token_ids)} for i in items]
    params = [
        SamplingParams(temperature=0.0, max_tokens=i.max_tokens, ignore_eos=True) for i in items
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    after = jax.device_get(engine.state.scheduler.totals)
    generated = [output.usage.completion_tokens for output in outputs]
    for index, (count, item) in enumerate(zip(generated, items, strict=True)):
        if count != item.max_tokens:
            raise RuntimeError(
                f"request {index} gave {count} of {item.max_tokens} tokens: the KV cache of "
                f"num_blocks={llm.config.num_blocks} cannot hold it; raise num_blocks."
            )
    return Run(
        seconds=seconds,
        prompt_tokens=sum(len(item.prompt_token_ids) for item in items),
        output_tokens=sum(generated),
        steps=int(after.steps) - int(before.steps),
        cached_tokens=int(after.cached_tokens) - int(before.cached_tokens),
        preemptions=int(after.preemptions) - int(before.preemptions),
        peak_blocks=engine.peak_blocks_used,
    )


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """The median of each figure of ``runs`` by itself."""
    records = [one.record() for one in runs]
    return {name: statistics.median(r[name] for r in records) for name in records[0]}
