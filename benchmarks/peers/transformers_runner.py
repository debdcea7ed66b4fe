"""Hugging Face transformers in static batches, run by compare.py. See runner.py.

In an environment of its own: ``pip install torch transformers``. Requests are batched in the
order in which they come, padded on the left, and each batch runs until its longest request
is done; only the tokens that were asked for count.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import runner

BATCH = 16


class Transformers:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(args.cpus)
        self._batch = min(BATCH, args.rows)
        self._model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype), local_files_only=True
        ).eval()

    def generate(self, requests: list[tuple[runner.Prompt, int]]) -> list[int]:
        counts = []
        for first in range(0, len(requests), self._batch):
            batch = requests[first : first + self._batch]
            longest = max(count for _, count in batch)
            made = self._run([prompt for prompt, _ in batch], longest)
            counts += [min(made, count) for _, count in batch]
        return counts

    def arrivals(self, prompt: runner.Prompt, count: int) -> list[float]:
        clock = _Clock()
        self._run([prompt], count, streamer=clock)
        return clock.times

    def _run(self, prompts: list[runner.Prompt], count: int, **more: Any) -> int:
        """Generate exactly ``count`` tokens for each prompt; how many there are."""
        import torch

        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
                **more,
            )
        return out.shape[1] - width


class _Clock:
    """A streamer: told the prompt first, then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        pass


if __name__ == "__main__":
    arguments = runner.arguments(__doc__)
    runner.serve(arguments, lambda: Transformers(arguments))
