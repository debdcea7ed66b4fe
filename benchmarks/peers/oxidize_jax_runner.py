"""oxidize_jax, run by compare.py. See runner.py."""

from __future__ import annotations

import argparse
import time

import runner


class OxidizeJax:
    def __init__(self, args: argparse.Namespace) -> None:
        from oxidize_jax import LLM

        self._llm = LLM(
            args.model,
            dtype=args.dtype,
            max_num_seqs=args.rows,
            max_model_len=args.max_model_len,
            max_logprobs=0,
            enable_prefix_caching=False,
            progress=False,
        )

    def generate(self, requests: list[tuple[runner.Prompt, int]]) -> list[int]:
        from oxidize_jax import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            for _, count in requests
        ]
        outputs = self._llm.generate(prompts, params)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def arrivals(self, prompt: runner.Prompt, count: int) -> list[float]:
        from oxidize_jax.bench import latency
        from oxidize_jax.engine.request import EngineRequest

        start = time.perf_counter()
        events = latency.arrivals(self._llm.engine, EngineRequest(tuple(prompt), count), 1)
        return [start + seconds for seconds, tokens in events for _ in range(tokens)]


if __name__ == "__main__":
    arguments = runner.arguments(__doc__)
    runner.serve(arguments, lambda: OxidizeJax(arguments))
