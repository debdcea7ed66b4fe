"""How much of a decode step is not the model."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.bench import workload
from oxidize_jax.bench.throughput import Note
from oxidize_jax.engine.engine import STEPS_PER_DISPATCH, Engine
from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.llm import LLM


@dataclasses.dataclass(frozen=True)
class TableModel:
    """Next to no model: logits are rows of a table ``f32[N, V]``, picked by token and position.

    Nothing of it can be worked out before the step, and the sampler reads ``C x V`` fresh
    numbers, as it does behind a real head.
    """

    vocab_size: int

    def init_kv(self, num_blocks: int, block_size: int) -> jax.Array:
        """No cache."""
        return jnp.zeros((1,), jnp.float32)

    def forward(
        self, params: jax.Array, kv: jax.Array, batch: BatchDescriptor
    ) -> tuple[jax.Array, jax.Array]:
        """``(logits f32[C, V], kv)``"""
        token = batch.token_ids.at[batch.logits_indices].get(mode="clip")
        position = batch.positions.at[batch.logits_indices].get(mode="clip")
        return params[(token + position) % params.shape[0]], kv


def measure(
    llm: LLM,
    context: int,
    *,
    temperature: float = 0.0,
    dispatches: int = 5,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """Milliseconds of a decode step of ``max_num_seqs`` rows, with the model and without.

    Without: a :class:`TableModel` of the same vocabulary in the same engine, so what is left
    is the descriptor, the sampler, the scheduler, and the host's part of a dispatch. It
    still writes the logits once, so the share is an upper bound. Rows start at ``context``
    tokens.
    """
    note("decode steps with the model")
    full = decode_steps(llm.engine, context, temperature, dispatches)
    note("decode steps without the model")
    model = TableModel(llm.model_config.vocab_size)
    table = np.random.default_rng(0).standard_normal((64, model.vocab_size), dtype=np.float32)
    engine = Engine(llm.config, model, jnp.asarray(table))
    rest = decode_steps(engine, context, temperature, dispatches)
    step, without = statistics.median(full), statistics.median(rest)
    return {
        "rows": llm.config.max_num_seqs,
        "context": context,
        "temperature": temperature,
        "step_ms": 1e3 * step,
        "without_model_ms": 1e3 * without,
        "share": without / step,
        "steps_per_dispatch": STEPS_PER_DISPATCH,
        "step_ms_runs": [1e3 * seconds for seconds in full],
        "without_model_ms_runs": [1e3 * seconds for seconds in rest],
    }


def decode_steps(engine: Engine, context: int, temperature: float, dispatches: int) -> list[float]:
    """Seconds per step, host part included, of dispatches in which every row decodes.

    Raises ValueError if ``max_model_len`` or ``num_blocks`` leaves no room for them.
    """
    rows, budget = engine.config.max_num_seqs, engine.config.token_budget
    rng = random.Random(0)
    vocab = min(workload.RANDOM_VOCAB, engine.model.vocab_size)
    ids = []
    for row in range(rows):
        prompt = tuple(rng.randrange(workload.FIRST_TOKEN, vocab) for _ in range(context))
        limit = engine.config.max_model_len - context
        request = EngineRequest(
            prompt, limit, temperature=temperature, key=(0, row), use_cache=False
        )
        ids.append(engine.add(request))
    try:
        # Prompts first: as many steps as the budget needs, and a row more each at worst.
        for _ in range(rows * (2 + context // budget)):
            engine.step(1)
            if engine.step_stats and engine.step_stats[-1].decode_rows == rows:
                break
        # The engine reads a run after it has dispatched the next: let the short ones pass.
        for _ in range(3):
            engine.step()
            if len(engine.step_stats) == STEPS_PER_DISPATCH:
                break
        return [_timed_dispatch(engine) for _ in range(dispatches)]
    finally:
        for request_id in ids:
            engine.abort(request_id)
        engine.step()


def room_for_decodes(rows: int, context: int, budget: int, dispatches: int) -> int:
    """``max_model_len`` that :func:`decode_steps` needs: prompts, and the steps after them."""
    filling = -(-rows * context // max(1, budget - rows)) + 2
    return context + filling + STEPS_PER_DISPATCH * (dispatches + 6)


def _timed_dispatch(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - start
    stats = engine.step_stats
    if len(stats) != STEPS_PER_DISPATCH or any(
        step.decode_rows != engine.config.max_num_seqs for step in stats
    ):
        raise ValueError(
            f"max_model_len={engine.config.max_model_len} and num_blocks="
            f"{engine.config.num_blocks} leave no room for {engine.config.max_num_seqs} rows to "
            "decode throughout: raise them, or lower max_num_seqs or the context."
        )
    return seconds / len(stats)
