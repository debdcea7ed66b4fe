"""What changes logits before anything is chosen: masks, bans, bias and penalties.

All of it follows from arrays of the requests and from their tokens, read anew in every step:
there is no count that preemption, a fork or a new owner of a slot could leave stale.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import at_index
from oxidize_jax.sampling.token_mask import unpack_bits
from oxidize_jax.types import state

NO_TOKEN = 2**31 - 1
"""Padding of token ids: no vocabulary has it, and scatters drop it."""

_CHUNK = 256
"""Tokens of each row that are counted together."""
_IN_PROMPT = 2.0**-30
"""What a token of the prompt adds to the count of the output's tokens: it never makes a whole
one, and shows where that is 0."""


@state
class Sequences:
    """R requests, of which a step samples for some. Read only where a row asks for it.

    A table without room (0 entries, or 0 words) takes no part in the compiled program.
    """

    tokens: jax.Array
    """i32[R, N]: prompt and output"""
    bias_ids: jax.Array
    """i32[R, E], distinct in a row; padding ``NO_TOKEN``"""
    bias_values: jax.Array
    """f32[R, E]"""
    bad_words: jax.Array
    """i32[R, W, L]: token sequences *backwards*, the last token first; padding ``NO_TOKEN``"""
    token_mask: jax.Array
    """u32[R, ceil(V / 32)]: see :mod:`~oxidize_jax.sampling.token_mask`"""


@state
class Edits:
    """What C rows want of their logits."""

    sequence: jax.Array
    """i32[C]: the row's place in :class:`Sequences`, R for padding"""
    prompt_len: jax.Array
    """i32[C]"""
    num_tokens: jax.Array
    """i32[C]: prompt and output"""
    suppress_ids: jax.Array
    """i32[C, Z]: ids that must not be drawn; V or more at padding"""
    masked: jax.Array
    """bool[C]: has a token mask"""
    listed: jax.Array
    """bool[C]: has a bias, or bad words"""
    repetition_penalty: jax.Array
    """f32[C] > 0; 1: none"""
    presence_penalty: jax.Array
    """f32[C]"""
    frequency_penalty: jax.Array
    """f32[C]"""


def is_penalized(edits: Edits) -> jax.Array:
    """bool[C]"""
    return (
        (edits.repetition_penalty != 1)
        | (edits.presence_penalty != 0)
        | (edits.frequency_penalty != 0)
    )


def masked_logits(logits: jax.Array, edits: Edits, sequences: Sequences) -> jax.Array:
    """``logits f32[C, V]``, -inf for ids that a row's mask leaves out."""
    words = at_index(sequences.token_mask, edits.sequence, 0)
    allowed = unpack_bits(words, logits.shape[1]) | ~edits.masked[:, None]
    return jnp.where(allowed, logits, -jnp.inf)


def biased_logits(logits: jax.Array, edits: Edits, sequences: Sequences) -> jax.Array:
    """``logits f32[C, V]`` plus the bias of each id; -inf for those that must not be drawn."""
    words = _completed_words(edits, sequences)
    banned = jnp.concatenate([edits.suppress_ids, words], axis=1)
    bias_ids = at_index(sequences.bias_ids, edits.sequence, NO_TOKEN)
    bias = at_index(sequences.bias_values, edits.sequence, 0)
    ids = jnp.concatenate([banned, bias_ids], axis=1)
    values = jnp.concatenate([jnp.full(banned.shape, -jnp.inf, jnp.float32), bias], axis=1)
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    # One scatter for all: nothing makes up for -inf.
    return logits.at[row, ids].add(values, mode="drop", wrap_negative_indices=False)


def _completed_words(edits: Edits, sequences: Sequences) -> jax.Array:
    """``i32[C, W]``: the last token of each bad word whose others the output ends with.

    ::

        output      ... 7 8 9         tail   9 8 7 ...
        bad words   [9 5] [1 9 5] [4] back   [5 9] [5 9 1] [4]
        not drawn   5 and 4                   ^ 9   ^ 9 8    ^
    """
    (_, count, length), c = sequences.bad_words.shape, edits.sequence.shape[0]
    if not count:
        return jnp.zeros((c, 0), jnp.int32)
    words = at_index(sequences.bad_words, edits.sequence, NO_TOKEN)
    place = edits.num_tokens[:, None] - 1 - jnp.arange(length - 1, dtype=jnp.int32)
    inside = place >= edits.prompt_len[:, None]
    tail = sequences.tokens.at[edits.sequence[:, None], jnp.maximum(place, 0)].get(
        mode="fill", fill_value=-1
    )
    tail = jnp.where(inside, tail, -1)
    before = words[:, :, 1:]
    complete = jnp.all((before == tail[:, None, :]) | (before == NO_TOKEN), axis=-1)
    return jnp.where(complete, words[:, :, 0], NO_TOKEN)


def penalized_logits(logits: jax.Array, edits: Edits, sequences: Sequences) -> jax.Array:
    """``logits f32[C, V]`` less what each row's tokens cost.

    The repetition penalty (Keskar et al., 2019) sees prompt and output, the other two, which
    are OpenAI's, the output alone.
    """
    counts = _token_counts(logits.shape[1], edits, sequences.tokens)
    repetition = edits.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    in_output = jnp.floor(counts)
    logits = logits - edits.frequency_penalty[:, None] * in_output
    return logits - edits.presence_penalty[:, None] * jnp.minimum(in_output, 1)


def _token_counts(vocab: int, edits: Edits, tokens: jax.Array) -> jax.Array:
    """``f32[C, V]``: how often each id is in the output, and a little more if in the prompt.

    As many turns as the longest row that has a penalty needs.
    """
    wanted = is_penalized(edits)
    length = jnp.where(wanted, edits.num_tokens, 0)
    row = jnp.arange(length.shape[0], dtype=jnp.int32)[:, None]
    lane = jnp.arange(min(_CHUNK, tokens.shape[1]), dtype=jnp.int32)

    def count(turn: jax.Array, counts: jax.Array) -> jax.Array:
        place = turn * lane.shape[0] + lane
        found = tokens.at[edits.sequence[:, None], place].get(mode="fill", fill_value=NO_TOKEN)
        found = jnp.where(place < length[:, None], found, NO_TOKEN)
        weight = jnp.where(place < edits.prompt_len[:, None], jnp.float32(_IN_PROMPT), 1)
        return counts.at[row, found].add(weight, mode="drop", wrap_negative_indices=False)

    turns = -(-jnp.max(length) // lane.shape[0])
    return lax.fori_loop(0, turns, count, jnp.zeros((length.shape[0], vocab), jnp.float32))
