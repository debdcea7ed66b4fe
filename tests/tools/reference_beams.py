"""Beam search in plain Python: every beam computed anew in each step, every candidate sorted.

It follows the rules of transformers 5 word for word: all that stands in a group's k * V
continuations, the best 2 k of them (more with several end ids), a pool of k hypotheses, the
bound on what may still come, and the three kinds of early stopping.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

NONE = np.float32(-1e9)
"""Score of what is no hypothesis."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A hypothesis."""

    tokens: tuple[int, ...]
    score: np.float32
    logprob: np.float32


def beam_search(
    logits: Callable[[list[int]], np.ndarray],
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    *,
    stop_ids: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> tuple[list[Found], float]:
    """``(hypotheses, margin)``, best first.

    ``logits`` gives f32[V] for a whole sequence. ``margin`` is the least distance between what
    was told apart: the last beam or hypothesis taken and the first left out, hypotheses that
    are neighbours in the end, and what may still come and the worst hypothesis.
    """
    beams: list[tuple[list[int], np.float32]] = [([], np.float32(0))]
    pool: list[Found] = []
    keep = max(2, 1 + len(stop_ids)) * width
    gaps = Gaps()
    for length in range(1, max_tokens + 1):
        sums = np.stack([_log_softmax(logits([*prompt, *t])) + total for t, total in beams])
        flat = sums.reshape(-1)
        order = np.argsort(-flat, kind="stable")
        candidates = [
            ([*beams[i // sums.shape[1]][0], int(i % sums.shape[1])], flat[i])
            for i in order[: 2 * keep]
        ]
        ends = [t[-1] in stop_ids or length == max_tokens for t, _ in candidates]
        going = [c for c, end in zip(candidates, ends, strict=True) if not end]
        gaps.cut([total for _, total in going], width)
        if any(ends[: 2 * width]):
            gaps.cut([total for _, total in candidates], width)
        beams = going[:width]
        divisor = np.float32(float(length) ** length_penalty)
        new = [
            Found(tuple(t), total / divisor, total)
            for (t, total), end in zip(candidates[:width], ends, strict=False)
            if end
        ]
        pool = sorted(pool + new, key=lambda found: -found.score)
        gaps.cut([found.score for found in pool], width)
        pool = pool[:width]
        if length == max_tokens:
            break
        reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        best = beams[0][1] / np.float32(float(reach) ** length_penalty)
        full = len(pool) == width
        if full and early_stopping is True:
            break
        worst = pool[-1].score if full else NONE
        gaps.note(best - worst)
        if not best > worst:
            break
    for one, other in itertools.pairwise(pool):
        gaps.note(one.score - other.score)
    return pool, gaps.least


class Gaps:
    """The least of the distances that it is told."""

    def __init__(self) -> None:
        self.least = np.inf

    def note(self, distance: float) -> None:
        self.least = min(self.least, abs(float(distance)))

    def cut(self, values: Sequence[float], count: int) -> None:
        """Of ``values``, largest first, ``count`` are taken."""
        if len(values) > count:
            self.note(values[count - 1] - values[count])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
