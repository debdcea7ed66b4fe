"""Beam search: which sequences go on, which have ended, and when a search is over.

The rules, and thus the sequences, are transformers' (``generation/utils.py``, ``_beam_search``):
of the continuations of a group's k beams the best C are looked at. Those that end are hypotheses
if they are among the first k; of the others the first k are the next beams. C is k times one more
than there are ids that end a sequence, so that k always go on.

A hypothesis is written down as its last token and the beam it continues; the tokens before are
found by going back through the history of the beams (:func:`read_sequences`).

Sizes: G groups, k beams in each, W the most new tokens, Z ids that end a sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oxidize_jax.sampling.beam_params import BeamSearchParams
from oxidize_jax.types import replace, state

STOP_WHEN_WORSE, STOP_WHEN_FULL, STOP_WHEN_HOPELESS = range(3)
"""``early_stopping`` False, True and "never"."""


@state
class BeamRules:
    """What is the same for all groups of a search."""

    stop_ids: jax.Array
    """i32[Z], padded with an id that no token has."""
    divisor: jax.Array
    """f32[W + 1]: ``n ** length_penalty`` for n new tokens."""
    longer_gains: jax.Array
    """bool[]: the length penalty is above 0."""
    early_stopping: jax.Array
    """i32[]: ``STOP_WHEN_WORSE`` .. ``STOP_WHEN_HOPELESS``."""


@state
class Hypotheses:
    """The best k sequences of each group that have ended, best first."""

    score: jax.Array
    """f32[G, k]; -inf where there is none yet."""
    logprob: jax.Array
    """f32[G, k]: sum over its tokens."""
    length: jax.Array
    """i32[G, k]: new tokens; 0 where there is none yet."""
    beam: jax.Array
    """i32[G, k]: the beam that it continues by its last token."""
    token: jax.Array
    """i32[G, k]: its last token."""


@state
class Beams:
    """G searches as they stand."""

    logprob: jax.Array
    """f32[G, k]: sum of each beam, best first."""
    length: jax.Array
    """i32[G]: new tokens of each beam."""
    max_tokens: jax.Array
    """i32[G], 1 .. W"""
    tokens: jax.Array
    """i32[G, W, k]: for each step the token that each beam got."""
    parents: jax.Array
    """i32[G, W, k]: and the beam before that it continues."""
    ended: Hypotheses
    done: jax.Array
    """bool[G]: nothing goes on."""


@state
class Selection:
    """The next beams of each group: where they come from, and what they add."""

    parents: jax.Array
    """i32[G, k]"""
    tokens: jax.Array
    """i32[G, k]"""


def num_candidates(width: int, num_stop_ids: int) -> int:
    """C: continuations of a group that a step looks at."""
    return max(2, 1 + num_stop_ids) * width


def make_rules(params: BeamSearchParams, stop_ids: tuple[int, ...], longest: int) -> BeamRules:
    """The rules of ``params`` for sequences of at most ``longest`` new tokens (W)."""
    lengths = np.arange(longest + 1, dtype=np.float64)
    lengths[0] = 1  # no sequence has 0 tokens, and 0 has no negative power
    modes = {False: STOP_WHEN_WORSE, True: STOP_WHEN_FULL, "never": STOP_WHEN_HOPELESS}
    return BeamRules(
        stop_ids=jnp.asarray(stop_ids or (-1,), jnp.int32),
        # In float64 and then rounded, as Python's own powers are in transformers.
        divisor=jnp.asarray((lengths**params.length_penalty).astype(np.float32)),
        longer_gains=jnp.asarray(params.length_penalty > 0),
        early_stopping=jnp.asarray(modes[params.early_stopping], jnp.int32),
    )


def begin(width: int, max_tokens: jax.Array, longest: int) -> Beams:
    """Searches of ``max_tokens i32[G]`` that have found nothing yet."""
    groups = max_tokens.shape[0]

    def ints(*shape: int) -> jax.Array:
        return jnp.zeros((groups, *shape), jnp.int32)

    # Every field has a buffer of its own: the state is donated.
    return Beams(
        logprob=jnp.zeros((groups, width), jnp.float32),
        length=ints(),
        max_tokens=max_tokens,
        tokens=ints(longest, width),
        parents=ints(longest, width),
        ended=Hypotheses(
            score=jnp.full((groups, width), -jnp.inf, jnp.float32),
            logprob=jnp.zeros((groups, width), jnp.float32),
            length=ints(width),
            beam=ints(width),
            token=ints(width),
        ),
        done=jnp.zeros((groups,), jnp.bool_),
    )


def continuations(logits: jax.Array, logprob: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The best ``count`` continuations of each of c sequences, the smaller id first among equals.

    Args:
      logits: f32[c, V]
      logprob: f32[c]: sum of each sequence so far.

    Returns:
      ``(tokens i32[c, count], sums f32[c, count])``, the likeliest first.
    """
    sums = jax.nn.log_softmax(logits, axis=-1) + logprob[:, None]
    values, tokens = lax.top_k(sums, count)
    return tokens, values


def advance(
    rules: BeamRules,
    beams: Beams,
    tokens: jax.Array,
    sums: jax.Array,
    moves: jax.Array,
) -> tuple[Beams, Selection]:
    """Make a step in the groups that ``moves bool[G]``; the others stay as they are.

    Args:
      tokens, sums: i32 and f32 [G, k, C]: :func:`continuations` of each beam. A beam that is
        none, as all but the first are in a first step, has sums of -inf.

    Returns:
      The beams, and where those of the moving groups come from. Of a group that is done the
      selection means nothing.
    """
    groups, width, count = tokens.shape
    flat_sums, places = lax.top_k(sums.reshape(groups, width * count), count)
    chosen = jnp.take_along_axis(tokens.reshape(groups, width * count), places, axis=1)
    parents = places // count
    length = beams.length + 1
    last = length >= beams.max_tokens
    ends = jnp.any(chosen[:, :, None] == rules.stop_ids, axis=-1) | last[:, None]
    selection, logprob = _next_beams(parents, chosen, flat_sums, ends, width)
    place = jnp.minimum(beams.length, beams.tokens.shape[1] - 1)
    group = jnp.where(moves, jnp.arange(groups, dtype=jnp.int32), groups)
    ended = _note_ended(rules, beams.ended, parents, chosen, flat_sums, ends, length)
    best = jnp.where(
        rules.longer_gains & (rules.early_stopping == STOP_WHEN_HOPELESS), beams.max_tokens, length
    )
    full = jnp.all(ended.length > 0, axis=1)
    hopeless = full & (logprob[:, 0] / rules.divisor[best] <= jnp.min(ended.score, axis=1))
    done = last | hopeless | (full & (rules.early_stopping == STOP_WHEN_FULL))

    def moved(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(moves.reshape(moves.shape + (1,) * (old.ndim - 1)), new, old)

    return replace(
        beams,
        logprob=moved(logprob, beams.logprob),
        length=moved(length, beams.length),
        tokens=beams.tokens.at[group, place].set(selection.tokens, mode="drop"),
        parents=beams.parents.at[group, place].set(selection.parents, mode="drop"),
        ended=jax.tree.map(moved, ended, beams.ended),
        done=beams.done | (moves & done),
    ), selection


def _next_beams(
    parents: jax.Array, tokens: jax.Array, sums: jax.Array, ends: jax.Array, width: int
) -> tuple[Selection, jax.Array]:
    """The first k continuations that do not end, and their sums f32[G, k]."""
    logprob, places = lax.top_k(jnp.where(ends, -jnp.inf, sums), width)

    def taken(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, places, axis=1)

    return Selection(parents=taken(parents), tokens=taken(tokens)), logprob


def _note_ended(
    rules: BeamRules,
    ended: Hypotheses,
    parents: jax.Array,
    tokens: jax.Array,
    sums: jax.Array,
    ends: jax.Array,
    length: jax.Array,
) -> Hypotheses:
    """The best k of those known and of the new ones, which are among the first k of a step."""
    width = ended.score.shape[1]
    first = slice(0, width)
    new = Hypotheses(
        score=jnp.where(ends, sums / rules.divisor[length][:, None], -jnp.inf)[:, first],
        logprob=sums[:, first],
        length=jnp.where(ends, length[:, None], 0)[:, first],
        beam=parents[:, first],
        token=tokens[:, first],
    )
    merged = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), ended, new)
    _, places = lax.top_k(merged.score, width)
    return jax.tree.map(lambda values: jnp.take_along_axis(values, places, axis=1), merged)


def read_sequences(beams: Beams, group: int) -> list[list[int]]:
    """New tokens of each hypothesis of a group, best first. ``beams`` is on the host."""
    ended = beams.ended
    sequences = []
    for nth in np.flatnonzero(ended.length[group]).tolist():
        beam, tokens = int(ended.beam[group, nth]), [int(ended.token[group, nth])]
        for step in range(int(ended.length[group, nth]) - 2, -1, -1):
            tokens.append(int(beams.tokens[group, step, beam]))
            beam = int(beams.parents[group, step, beam])
        sequences.append(tokens[::-1])
    return sequences
