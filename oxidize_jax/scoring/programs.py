"""The jitted programs of scoring. Donated: the KV pages; static: model and sizes.

The head is applied to a few tokens at a time, so that no array of all tokens times the
vocabulary exists: a step of 512 tokens of Llama 3 would need 263 MB for its logits, and as
much again for what is made of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.engine.step import Model, Params
from oxidize_jax.types import state

HEAD_TOKENS = 128
"""Tokens that have logits at the same time."""


class ScoringModel(Model, Protocol):
    """What scoring asks of a model beside what the engine does. Hashable: a static argument."""

    def hidden_states(
        self, params: Params, kv: Any, batch: BatchDescriptor
    ) -> tuple[jax.Array, Any]:
        """``(x f32[T, E], kv)``: write the batch's KV, attend; before the final norm."""
        ...

    def final_norm(self, params: Params, hidden: jax.Array) -> jax.Array:
        """``f32[C, E] -> f32[C, E]``"""
        ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """``f32[C, E] -> f32[C, V]``: final norm and head."""
        ...


@state
class TokenScores:
    """What a model says of T tokens, each given those before it; A alternatives."""

    logprobs: jax.Array
    """f32[T]: natural log of the token's probability."""
    ranks: jax.Array
    """i32[T]: its place in the vocabulary, 1 for the likeliest. Among equals the smaller id comes
    first, as in ``top_ids`` and as greedy decoding chooses. (vLLM counts equals as before it.)"""
    top_ids: jax.Array
    """i32[T, A]: the likeliest tokens, best first; 0 where not wanted."""
    top_logprobs: jax.Array
    """f32[T, A]; 0 where not wanted."""


@state
class Pooled:
    """Sums over a step's chunks, for S rows, of what the head reads."""

    total: jax.Array
    """f32[S, E]: summed over the row's tokens in this step."""
    last: jax.Array
    """f32[S, E]: of its last one."""


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def score_step(
    model: ScoringModel,
    num_top: int,
    params: Params,
    kv: Any,
    batch: BatchDescriptor,
    targets: jax.Array,
    num_targets: jax.Array,
    want_top: jax.Array,
) -> tuple[TokenScores, Any]:
    """Run ``batch``; score ``targets i32[T]`` as successors of ``batch.logits_indices i32[T]``.

    The first ``num_targets i32[]`` of both count. A is ``num_top``, filled where ``want_top
    bool[]``. Returns ``(scores, kv)``, the scores in the order of ``targets``.
    """
    hidden, kv = model.hidden_states(params, kv, batch)
    successors = (batch.logits_indices, targets, num_targets)
    return score_tokens(model, num_top, params, hidden, *successors, want_top), kv


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def pool_step(
    model: ScoringModel, params: Params, kv: Any, batch: BatchDescriptor, last: jax.Array
) -> tuple[Pooled, Any]:
    """Run ``batch``; ``last i32[S]`` is the last token of each row. Returns ``(pooled, kv)``."""
    hidden, kv = model.hidden_states(params, kv, batch)
    hidden = model.final_norm(params, hidden)
    total = jnp.zeros((last.shape[0], hidden.shape[1]), jnp.float32)
    total = total.at[batch.token_rows].add(hidden, mode="drop")
    return Pooled(total, hidden.at[last].get(mode="clip")), kv


def score_tokens(
    model: ScoringModel,
    num_top: int,
    params: Params,
    hidden: jax.Array,
    indices: jax.Array,
    targets: jax.Array,
    count: jax.Array,
    want_top: jax.Array,
) -> TokenScores:
    """Scores of the first ``count i32[]`` of ``targets i32[C]``.

    ``indices i32[C]`` say which rows of ``hidden f32[T, E]`` they follow. Behind ``count`` there
    are zeros, up to the end of a part of :data:`HEAD_TOKENS`; the head is run for no more.
    """
    (size,) = targets.shape
    some = min(size, HEAD_TOKENS)
    padding = (0, -size % some)
    indices, targets = jnp.pad(indices, padding), jnp.pad(targets, padding)

    def part(i: jax.Array, scores: TokenScores) -> TokenScores:
        rows = lax.dynamic_slice_in_dim(indices, i * some, some)
        logits = model.logits(params, hidden.at[rows].get(mode="clip"))
        labels = lax.dynamic_slice_in_dim(targets, i * some, some)
        new = _scores(logits, labels, num_top, want_top)
        return jax.tree.map(
            lambda all_, x: lax.dynamic_update_slice_in_dim(all_, x, i * some, axis=0), scores, new
        )

    def room(dtype: Any, *shape: int) -> jax.Array:
        return jnp.zeros((targets.shape[0], *shape), dtype)

    scores = TokenScores(
        room(jnp.float32), room(jnp.int32), room(jnp.int32, num_top), room(jnp.float32, num_top)
    )
    scores = lax.fori_loop(0, (count + some - 1) // some, part, scores)
    return jax.tree.map(lambda x: x[:size], scores)


def _scores(logits: jax.Array, labels: jax.Array, num_top: int, want_top: jax.Array) -> TokenScores:
    """Scores of ``labels i32[C]`` under ``logits f32[C, V]``."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    smaller = jnp.arange(logits.shape[1], dtype=jnp.int32) < labels[:, None]
    before = (logits > chosen) | ((logits == chosen) & smaller)
    ranks = 1 + jnp.sum(before, axis=-1, dtype=jnp.int32)
    normalizer = chosen[:, 0] + losses
    return TokenScores(-losses, ranks, *_alternatives(logits, normalizer, num_top, want_top))


def _alternatives(
    logits: jax.Array, normalizer: jax.Array, num_top: int, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(i32[C, A], f32[C, A])``; past the end of a small vocabulary -inf."""
    shape = (logits.shape[0], num_top)
    present = min(num_top, logits.shape[1])
    padding = ((0, 0), (0, num_top - present))

    def find() -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logits, present)
        values = jnp.pad(values, padding, constant_values=-jnp.inf)
        return jnp.pad(ids, padding), values - normalizer[:, None]

    def skip() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return lax.cond(wanted, find, skip) if num_top else skip()
