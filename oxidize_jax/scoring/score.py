"""score: log probabilities of given tokens in one jitted program, beside ``generate``.

What a policy gradient or an evaluation inside a training step wants of sequences that are
there, through the same paged model, with parameters that may be traced::

    config = ScoreConfig(decoder)
    scored = score(params, pad_prompts(sequences, vocab_size=decoder.vocab_size), config)
    scored.logprobs, scored.mask  # [sequences, tokens]
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.engine.inputs import Prompts, check_prompts
from oxidize_jax.engine.step import Params
from oxidize_jax.messages import short_repr
from oxidize_jax.model.functional import Decoder
from oxidize_jax.model.leaves import leaves_of
from oxidize_jax.scoring.programs import ScoringModel, score_tokens
from oxidize_jax.types import BLOCK_SIZE, state

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """What is compiled in: the model and the sizes. Hashable, a static argument."""

    model: ScoringModel
    """The static part of a model, such as a :class:`~oxidize_jax.model.functional.Decoder`."""
    max_num_batched_tokens: int = 512
    """Tokens of one step: as many sequences as fit, or a part of a longer one."""
    block_size: int = BLOCK_SIZE
    prefill_tile: int = 16

    def __post_init__(self) -> None:
        if not hasattr(self.model, "hidden_states"):
            raise ValueError(
                f"model={short_repr(self.model)}: must be a model, such as the decoder that "
                f"oxidize_jax.model.functional.build returns."
            )
        for name in ("max_num_batched_tokens", "block_size", "prefill_tile"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not 1 <= value <= _INT32_MAX:
                raise ValueError(
                    f"{name}={short_repr(value)}: must be a whole number, 1 to {_INT32_MAX}."
                )


@state
class Scored:
    """What came out, for N sequences padded to P tokens. The first token of a sequence, and
    padding, have logprob and rank 0."""

    logprobs: jax.Array
    """f32[N, P]: natural log of the probability of the token in each place, given those
    before it."""
    ranks: jax.Array
    """i32[N, P]: place of that token in the vocabulary, 1 for the likeliest."""
    mask: jax.Array
    """bool[N, P]: where there is a score."""


def score(
    params: Params, prompts: Prompts | tuple[jax.Array, jax.Array], config: ScoreConfig
) -> Scored:
    """Score every sequence, in one program on the device.

    Pure, as :func:`~oxidize_jax.engine.generate.generate` is, and may stand where it may. Takes
    KV pages for one step of sequences, and logits of 128 tokens. Every sequence takes the time
    of P tokens. Not differentiable: gradients stop at ``params``. Nothing is donated.

    Args:
      params: what ``config.model`` reads, as for ``generate``.
      prompts: N sequences; ids outside the vocabulary count as the nearest that is in it.
      config: static.

    Raises:
      ValueError: arrays of the wrong shape or type, or more tokens than the model was made for.
    """
    prompts = prompts if isinstance(prompts, Prompts) else Prompts(*prompts)
    check_prompts(prompts)
    width, model = prompts.tokens.shape[1], config.model
    if isinstance(model, Decoder) and width > model.config.max_position_embeddings:
        raise ValueError(
            f"prompts have {width} tokens, but this model was made for "
            f"{model.config.max_position_embeddings}: shorten them."
        )
    return _score(config, params, prompts)


@partial(jax.jit, static_argnums=0)
def _score(config: ScoreConfig, params: Params, prompts: Prompts) -> Scored:
    params, prompts = lax.stop_gradient((params, prompts))
    if isinstance(config.model, Decoder):
        params = leaves_of(config.model, params)
    (count, width), tile = prompts.tokens.shape, config.prefill_tile
    budget = max(config.max_num_batched_tokens, tile)
    rows = max(1, min(count, budget // width))
    chunk = _up(min(width, budget), tile)
    padded = (_up(count, rows), _up(width, chunk))
    tokens = jnp.clip(prompts.tokens.astype(jnp.int32), 0, config.model.vocab_size - 1)
    tokens = jnp.pad(tokens, ((0, padded[0] - count), (0, padded[1] - width)))
    lengths = jnp.clip(prompts.lengths.astype(jnp.int32), 0, width)
    lengths = jnp.pad(lengths, (0, padded[0] - count))
    # The token in each place is told what comes next.
    targets = jnp.roll(tokens, -1, axis=1)
    width_blocks = -(-padded[1] // config.block_size)
    kv = config.model.init_kv(rows * width_blocks, config.block_size)

    def group(kv: Any, inputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        tokens, targets, lengths = inputs

        def part(kv: Any, inputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            start, tokens, targets = inputs
            batch = _batch(config, width_blocks, tokens, start, lengths)
            hidden, kv = config.model.hidden_states(params, kv, batch)
            place = jnp.arange(targets.size, dtype=jnp.int32)
            successors = (place, targets.reshape(-1), jnp.int32(targets.size))
            scores = score_tokens(
                config.model, 0, params, hidden, *successors, jnp.zeros((), jnp.bool_)
            )
            return kv, (scores.logprobs.reshape(targets.shape), scores.ranks.reshape(targets.shape))

        def parts(x: jax.Array) -> jax.Array:
            return x.reshape(rows, -1, chunk).swapaxes(0, 1)

        starts = jnp.arange(0, padded[1], chunk, dtype=jnp.int32)
        kv, scores = lax.scan(part, kv, (starts, parts(tokens), parts(targets)))
        return kv, jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, padded[1]), scores)

    groups = jax.tree.map(
        lambda x: x.reshape(padded[0] // rows, rows, *x.shape[1:]), (tokens, targets, lengths)
    )
    _, (logprobs, ranks) = lax.scan(group, kv, groups)
    place = jnp.arange(width, dtype=jnp.int32)
    mask = (place > 0) & (place < prompts.lengths[:, None])

    def of_prompts(x: jax.Array) -> jax.Array:
        x = jnp.roll(x.reshape(padded), 1, axis=1)[:count, :width]
        return jnp.where(mask, x, jnp.zeros((), x.dtype))

    return Scored(of_prompts(logprobs), of_prompts(ranks), mask)


def _batch(
    config: ScoreConfig, width: int, tokens: jax.Array, start: jax.Array, lengths: jax.Array
) -> BatchDescriptor:
    """A chunk ``i32[S, C]`` of S sequences from ``start i32[]`` on; row r has its own blocks."""
    (rows, chunk), k, tile = tokens.shape, config.block_size, config.prefill_tile
    t, num_blocks = rows * chunk, rows * width
    place = start + jnp.arange(chunk, dtype=jnp.int32)
    live = place < lengths[:, None]
    row = jnp.arange(rows, dtype=jnp.int32)
    slots = jnp.where(live, row[:, None] * width * k + place, num_blocks * k)
    token = jnp.arange(t, dtype=jnp.int32)
    tile_tokens = jnp.where(live.reshape(-1), token, t).reshape(-1, tile)
    none = jnp.full((rows,), num_blocks, jnp.int32)
    return BatchDescriptor(
        token_ids=tokens.reshape(-1),
        positions=jnp.where(live, place, 0).reshape(-1),
        token_rows=jnp.where(live, row[:, None], rows).reshape(-1),
        slot_mapping=slots.reshape(-1),
        block_tables=jnp.arange(num_blocks, dtype=jnp.int32).reshape(rows, width),
        kv_lens=jnp.clip(lengths, 0, start + jnp.int32(chunk)),
        decode_rows=jnp.zeros((0,), jnp.int32),
        tile_rows=jnp.repeat(row, chunk // tile),
        tile_tokens=tile_tokens,
        sample_rows=jnp.full((t,), rows, jnp.int32),
        logits_indices=token,
        copy_src=none,
        copy_dst=none,
        num_copies=jnp.zeros((), jnp.int32),
    )


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
