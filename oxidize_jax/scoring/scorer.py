"""Scorer: sequences in, numbers out, in as many steps as it takes.

It has KV pages of its own, made for a call and gone after it: an engine beside it, with its
blocks, its prefix cache and what it runs, is not touched, and every number is computed anew.
The pages hold the longest sequence of the call (rounded up, see
:func:`~oxidize_jax.scoring.layout.choose_shape`) and a step of ``max_num_batched_tokens``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from oxidize_jax.engine.step import Params
from oxidize_jax.scoring.layout import (
    NO_TARGET,
    Chunk,
    Shape,
    Step,
    Tables,
    build_step,
    choose_shape,
    plan_steps,
)
from oxidize_jax.scoring.programs import (
    Pooled,
    ScoringModel,
    TokenScores,
    pool_step,
    score_step,
)
from oxidize_jax.types import BLOCK_SIZE

_Program = Callable[[Any, Step], tuple[Any, Any]]
"""``(kv, step) -> (result, kv)``"""
Progress = Callable[[int], object]
"""Is told, now and then, how many more tokens have been run."""


@dataclasses.dataclass(frozen=True)
class SequenceScores:
    """What a model says of the n tokens of one sequence behind its first, or behind ``start``."""

    start: int
    """Place of the first token that is scored, 1 or more."""
    logprobs: np.ndarray
    """f32[n - start]: natural log of the probability of each token given all before it."""
    ranks: np.ndarray
    """i32[n - start]: see :class:`~oxidize_jax.scoring.programs.TokenScores`."""
    top_ids: np.ndarray
    """i32[n - start, A]: the likeliest, best first"""
    top_logprobs: np.ndarray
    """f32[n - start, A]"""


class Scorer:
    """Runs sequences through the paged model for what it says of them.

    Args:
      model: the static part of a model; its parameters come with each call.
      max_len: longest sequence.
      max_num_batched_tokens: T, most tokens of a step.
      num_top: A, most alternatives of a token that can be asked for.

    Programs are compiled where they are first used, for few sizes: T is this one, or smaller
    for calls of few tokens, and the pages grow fourfold. Threads may share it.
    """

    def __init__(
        self,
        model: ScoringModel,
        *,
        max_len: int,
        max_num_batched_tokens: int = 512,
        block_size: int = BLOCK_SIZE,
        tile: int = 16,
        num_top: int = 0,
    ) -> None:
        self.model = model
        self.num_top = num_top
        self._shape = partial(
            choose_shape,
            max_tokens=max_num_batched_tokens,
            max_len=max_len,
            block_size=block_size,
            tile=tile,
        )

    def score(
        self,
        params: Params,
        sequences: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        top: int = 0,
        progress: Progress | None = None,
    ) -> list[SequenceScores]:
        """Score each of ``sequences``, of one token id or more, from its ``starts`` on (or 1).

        ``top`` is how many alternatives to give of each token, ``num_top`` at most. The last
        token of a sequence is not run: nothing follows it.
        """
        starts = [1] * len(sequences) if starts is None else starts
        ids = [np.asarray(sequence, np.int32) for sequence in sequences]
        inputs = [each[:-1] for each in ids]
        targets, room = [], []
        for each, start in zip(ids, starts, strict=True):
            wanted = each[1:].copy()
            wanted[: start - 1] = NO_TARGET
            targets.append(wanted)
            room.append(_room(start, each.size - start, top))
        want_top = np.bool_(top > 0)

        def program(kv: Any, step: Step) -> tuple[Any, Any]:
            successors = (step.batch, step.targets, step.num_targets, want_top)
            return score_step(self.model, self.num_top, params, kv, *successors)

        for step, scores in self._run(program, inputs, targets, progress):
            at = 0
            for chunk in step.chunks:
                at = _take(room[chunk.sequence], chunk, scores, at)
        return room

    def pool(
        self,
        params: Params,
        sequences: Sequence[Sequence[int]],
        *,
        progress: Progress | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """``(mean f32[N, E], last f32[N, E])`` of what the head reads, over each one's tokens.

        Sums are taken in float32 within a step, and in float64 over the steps.
        """
        inputs = [np.asarray(sequence, np.int32) for sequence in sequences]
        targets = [np.full(each.size, NO_TARGET, np.int32) for each in inputs]
        means: list[Any] = [0.0] * len(inputs)
        lasts: list[Any] = [0.0] * len(inputs)

        def program(kv: Any, step: Step) -> tuple[Any, Any]:
            return pool_step(self.model, params, kv, step.batch, step.last)

        pooled: Pooled
        for step, pooled in self._run(program, inputs, targets, progress):
            for row, chunk in enumerate(step.chunks):
                total = np.asarray(pooled.total[row], np.float64)
                means[chunk.sequence] += total / inputs[chunk.sequence].size
                lasts[chunk.sequence] = pooled.last[row]
        return np.asarray(means, np.float32), np.asarray(lasts, np.float32)

    def _run(
        self,
        program: _Program,
        inputs: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        progress: Progress | None,
    ) -> Iterator[tuple[Step, Any]]:
        """Each step with what came of it, on the host; one more is under way meanwhile."""
        lengths = [each.size for each in inputs]
        if not any(lengths):
            return
        shape: Shape = self._shape(lengths)
        kv = self.model.init_kv(shape.num_blocks, shape.block_size)
        tables = Tables(shape, lengths)
        under_way: collections.deque[tuple[Step, Any]] = collections.deque()
        for chunks in plan_steps(shape, lengths):
            step = build_step(shape, chunks, tables, inputs, targets)
            result, kv = program(kv, step)
            under_way.append((step, result))
            if len(under_way) > 1:
                yield _read(*under_way.popleft(), progress)
        while under_way:
            yield _read(*under_way.popleft(), progress)


def _read(step: Step, result: Any, progress: Progress | None) -> tuple[Step, Any]:
    result = jax.device_get(result)
    if progress is not None:
        progress(sum(chunk.end - chunk.start for chunk in step.chunks))
    return step, result


def _room(start: int, count: int, top: int) -> SequenceScores:
    ids, values = np.zeros((count, top), np.int32), np.zeros((count, top), np.float32)
    logprobs, ranks = np.zeros(count, np.float32), np.zeros(count, np.int32)
    return SequenceScores(start, logprobs, ranks, ids, values)


def _take(into: SequenceScores, chunk: Chunk, scores: TokenScores, at: int) -> int:
    """Copy the scores of a chunk, which stand from ``at`` on; return where they end."""
    # The token in place p says what follows it, in place p + 1.
    begin, end = max(chunk.start + 1, into.start), chunk.end + 1
    count = max(0, end - begin)
    here, there = slice(begin - into.start, begin - into.start + count), slice(at, at + count)
    into.logprobs[here], into.ranks[here] = scores.logprobs[there], scores.ranks[there]
    top = into.top_ids.shape[1]
    into.top_ids[here] = scores.top_ids[there, :top]
    into.top_logprobs[here] = scores.top_logprobs[there, :top]
    return at + count
