"""Quality of a model as it is run here: perplexity of a text, and agreement of two runs.

Scores come from the paged forward pass that the engine runs, chunk by chunk through the KV
cache, so what is judged is the arithmetic that serves requests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.engine.step import Model, Params
from oxidize_jax.llm import LLM
from oxidize_jax.prompts import Prompt
from oxidize_jax.sampling.params import SamplingParams

TILE = 16
"""Tokens that attend together."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model says of W windows of N tokens, each token but the first of its window."""

    nll: np.ndarray
    """f32[W, N - 1]: minus the log probability (natural) of the token that is there."""
    best: np.ndarray
    """i32[W, N - 1]: the likeliest token in its place."""

    @property
    def num_tokens(self) -> int:
        """Tokens scored."""
        return self.nll.size

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean of ``nll``."""
        return math.exp(float(np.mean(self.nll, dtype=np.float64)))


def cut_windows(token_ids: Sequence[int], size: int, count: int) -> np.ndarray:
    """``i32[count, size]``: the text from its start, cut without overlap.

    Raises ValueError if it is too short for them.
    """
    if len(token_ids) < size * count:
        raise ValueError(
            f"the text has {len(token_ids)} tokens, but {count} windows of {size} take "
            f"{size * count}: give a longer text or fewer windows."
        )
    return np.asarray(token_ids[: size * count], np.int32).reshape(count, size)


def score(
    model: Model,
    params: Params,
    windows: np.ndarray,
    *,
    chunk: int = 256,
    tile: int = TILE,
    block_size: int = 16,
) -> Scores:
    """Score ``windows i32[W, N]``, each a sequence of its own, ``chunk`` tokens in a step.

    Every token sees the true ones before it in its window (teacher forcing). Raises
    ValueError where N is no multiple of ``chunk``, or ``chunk`` none of ``tile``.
    """
    count, size = windows.shape
    if size % chunk or chunk % tile:
        raise ValueError(
            f"a window of {size} tokens must be a multiple of chunk={chunk}, and that of "
            f"tile={tile}: choose others."
        )
    num_blocks = -(-size // block_size)
    kv = model.init_kv(num_blocks, block_size)
    # The last token has no successor; its score is dropped.
    targets = np.concatenate([windows[:, 1:], np.zeros((count, 1), np.int32)], axis=1)
    nll, best = np.zeros((count, size), np.float32), np.zeros((count, size), np.int32)
    for window in range(count):
        for start in range(0, size, chunk):
            part = slice(start, start + chunk)
            ids = windows[window, part], targets[window, part], np.int32(start)
            values, argmax, kv = _score_chunk(
                model, tile, (num_blocks, block_size), params, kv, *ids
            )
            nll[window, part], best[window, part] = jax.device_get((values, argmax))
    return Scores(nll[:, :-1], best[:, :-1])


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _score_chunk(
    model: Model,
    tile: int,
    pool: tuple[int, int],
    params: Params,
    kv: Any,
    ids: jax.Array,
    targets: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array, Any]:
    """``(nll f32[C], likeliest i32[C], kv)`` of the tokens ``ids i32[C]`` from ``start`` on."""
    logits, kv = model.forward(params, kv, _one_chunk(ids, start, tile, *pool))
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return nll, jnp.argmax(logits, axis=-1).astype(jnp.int32), kv


def _one_chunk(
    ids: jax.Array, start: jax.Array, tile: int, num_blocks: int, block_size: int
) -> BatchDescriptor:
    """A prefill chunk of one sequence whose block ``i`` is block ``i`` of the pool."""
    count = ids.shape[0]
    place = jnp.arange(count, dtype=jnp.int32)
    none = jnp.full((1,), num_blocks, jnp.int32)
    return BatchDescriptor(
        token_ids=ids,
        positions=start + place,
        token_rows=jnp.zeros((count,), jnp.int32),
        slot_mapping=start + place,
        block_tables=jnp.arange(num_blocks, dtype=jnp.int32)[None],
        kv_lens=(start + jnp.int32(count))[None],
        decode_rows=jnp.ones((1,), jnp.int32),  # padding: no step is without a row for it
        tile_rows=jnp.zeros((count // tile,), jnp.int32),
        tile_tokens=place.reshape(-1, tile),
        sample_rows=jnp.zeros((count,), jnp.int32),
        logits_indices=place,
        copy_src=none,
        copy_dst=none,
        num_copies=jnp.zeros((), jnp.int32),
    )


def agreement(scores: Scores, reference: Scores) -> float:
    """Share of the positions where both have the same likeliest token."""
    return float(np.mean(scores.best == reference.best))


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """``count`` tokens after each prompt, the likeliest each time, past end-of-sequence."""
    given: list[Prompt] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(given, params)]


def mean_common_prefix(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Tokens that two lists of continuations have in common before they part, on average."""
    return float(np.mean([common_prefix(a, b) for a, b in zip(one, other, strict=True)]))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that are the same in both."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
