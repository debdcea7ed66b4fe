"""A scripted model with a distribution worth searching, and a driver that checks every step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fake_model import VOCAB, FakeModel, quick_jit, solo

from oxidize_jax.batch.buckets import buckets
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.beams import NewSearch, search_steps, start_search
from oxidize_jax.engine.step import EngineState
from oxidize_jax.sampling.beam_params import BeamSearchParams
from oxidize_jax.sampling.beams import make_rules, read_sequences
from oxidize_jax.scheduler import invariants

ENDS = (7, 50)
"""Tokens that are likely everywhere, to be used as ids that end a sequence."""


@functools.cache
def _table() -> np.ndarray:
    """f32[V, V]: a distribution for each token that the scripted model may find best."""
    table = np.random.default_rng(5).standard_normal((VOCAB, VOCAB), np.float32)
    table[:, ENDS] += np.float32(1.5)
    return table


@dataclasses.dataclass(frozen=True)
class SpreadModel(FakeModel):
    """As the scripted model, whose likeliest token now only chooses a row of a table."""

    def forward(self, params: None, kv: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits, kv = super().forward(params, kv, batch)
        return jnp.asarray(_table())[jnp.argmax(logits, axis=-1)], kv


def spread_logits(tokens: list[int]) -> np.ndarray:
    """f32[V]: what SpreadModel says behind ``tokens``, computed alone."""
    return _table()[solo(tokens, 1)[-1]]


@functools.cache
def _programs(config: EngineConfig, width: int, num_stop_ids: int) -> tuple[Any, Any]:
    steps = functools.partial(
        search_steps, config, SpreadModel(), None, shapes=buckets(config)[-1:]
    )
    start = functools.partial(start_search, config, width, num_stop_ids)
    return quick_jit(start), quick_jit(steps)


@dataclasses.dataclass
class Seen:
    """A search that has come to its end, and what it took."""

    sequences: list[list[tuple[int, ...]]]
    scores: np.ndarray
    logprobs: np.ndarray
    steps: int
    most_used: int
    """Most blocks that were held after a step."""
    totals: Any


def run(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    *,
    stop_ids: tuple[int, ...] = (),
    max_tokens: Sequence[int] | None = None,
    watch: Any = None,
    max_steps: int = 2000,
) -> Seen:
    """Step by step, the whole state checked after each."""
    start, step = _programs(config, params.beam_width, max(1, len(stop_ids)))
    scheduler, search = start(new_search(config, prompts, params, max_tokens))
    state = EngineState(
        scheduler=scheduler, kv=SpreadModel().init_kv(config.num_blocks, config.block_size)
    )
    rules = make_rules(params, stop_ids, config.max_model_len)
    most = steps = 0
    while not np.asarray(search.beams.done).all():
        state, search = step(state, rules, search, np.int32(1))
        steps += 1
        assert steps <= max_steps, "the search does not come to an end"
        host = jax.device_get(state.scheduler)
        invariants.check(host)
        most = max(most, int((host.pool.ref_count > 0).sum()))
        if watch is not None:
            watch(host, jax.device_get(search))
    assert not host.pool.ref_count.any()
    assert (host.rows.request == config.max_num_requests).all()
    beams = jax.device_get(search.beams)
    found = [[tuple(s) for s in read_sequences(beams, g)] for g in range(len(prompts))]
    return Seen(found, beams.ended.score, beams.ended.logprob, steps, most, host.totals)


def new_search(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    max_tokens: Sequence[int] | None,
) -> NewSearch:
    groups = config.max_num_requests // params.beam_width
    tokens = np.full((groups, config.max_model_len), 88, np.int32)
    limits = max_tokens or [params.max_tokens] * len(prompts)
    for group, prompt in enumerate(prompts):
        tokens[group, : len(prompt)] = prompt

    def padded(values: Sequence[int]) -> np.ndarray:
        return np.array([*values, *[0] * (groups - len(values))], np.int32)

    return NewSearch(
        tokens=tokens,
        prompt_len=padded([len(prompt) for prompt in prompts]),
        max_tokens=padded(limits),
        salt=padded([]),
    )
