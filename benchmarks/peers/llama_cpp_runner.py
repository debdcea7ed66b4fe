"""llama.cpp with continuous batching, run by compare.py. See runner.py.

In an environment of its own: ``pip install llama-cpp-python==0.3.36 numpy`` (it builds from
source). The weights are those of the GGUF file, so ``--dtype`` has no effect.

Where llama.cpp's AMX kernels end in an illegal instruction (some virtual machines), set
``LLAMA_EXTRA_BUFFERS=0``: weights then stay as they are in the file and its AVX kernels run.

Python makes the batches: rows that decode first, then whole prompts while they fit. It takes
the likeliest token of each row's logits with numpy. Both cost little beside the model.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import runner

BATCH = 2048
"""Tokens of a call."""
UBATCH = 512
"""Tokens that are computed at a time."""


class LlamaCpp:
    def __init__(self, args: argparse.Namespace) -> None:
        llama_cpp.llama_backend_init()
        how = llama_cpp.llama_model_default_params()
        how.use_extra_bufts = os.environ.get("LLAMA_EXTRA_BUFFERS", "1") != "0"
        model = llama_cpp.llama_model_load_from_file(args.model.encode(), how)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {args.model}")
        params = llama_cpp.llama_context_default_params()
        # The context is cut into equal parts, one for each sequence.
        params.n_ctx = args.rows * args.max_model_len
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH, UBATCH, args.rows
        params.n_threads = params.n_threads_batch = args.cpus
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._rows = args.rows

    def generate(self, requests: list[tuple[runner.Prompt, int]]) -> list[int]:
        counts = [0] * len(requests)

        def count(request: int) -> None:
            counts[request] += 1

        self._run(requests, count)
        return counts

    def arrivals(self, prompt: runner.Prompt, count: int) -> list[float]:
        times: list[float] = []
        self._run([(prompt, count)], lambda request: times.append(time.perf_counter()))
        return times

    def _run(
        self, requests: list[tuple[runner.Prompt, int]], token_is_there: Callable[[int], None]
    ) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)
        waiting = list(range(len(requests)))[::-1]
        free = list(range(self._rows))[::-1]
        running: dict[int, _Sequence] = {}
        while waiting or running:
            self._batch.n_tokens = 0
            for row, one in running.items():
                one.place = self._add(one.token, one.position, row, wanted=True)
            while waiting and free and self._room() >= len(requests[waiting[-1]][0]):
                request, row = waiting.pop(), free.pop()
                prompt, count = requests[request]
                for position, token in enumerate(prompt):
                    last = position == len(prompt) - 1
                    place = self._add(token, position, row, wanted=last)
                running[row] = _Sequence(request, count, len(prompt) - 1, place)
            if status := llama_cpp.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode gives {status}")
            for row, one in list(running.items()):
                one.token = self._likeliest(one.place)
                one.position += 1
                one.left -= 1
                token_is_there(one.request)
                if not one.left:
                    llama_cpp.llama_memory_seq_rm(self._memory, row, -1, -1)
                    del running[row]
                    free.append(row)

    def _room(self) -> int:
        return BATCH - self._batch.n_tokens

    def _add(self, token: int, position: int, row: int, *, wanted: bool) -> int:
        """Put a token into the batch; its place."""
        batch: Any = self._batch
        place = batch.n_tokens
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        batch.logits[place] = wanted
        batch.n_tokens = place + 1
        return place

    def _likeliest(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


class _Sequence:
    """A request in a row: its newest token, where that goes, and how many are to come."""

    def __init__(self, request: int, left: int, position: int, place: int) -> None:
        self.request, self.left, self.position, self.place = request, left, position, place
        self.token = 0


if __name__ == "__main__":
    arguments = runner.arguments(__doc__)
    runner.serve(arguments, lambda: LlamaCpp(arguments))
