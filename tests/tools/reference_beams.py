"""Beam search in plain Python: every beam computed anew in each step, every candidate sorted.

It follows the rules of transformers 5 word for word: all that stands in a group's k * V
continuations, the best 2 k of them (more with several end ids), a pool of k hypotheses, the
bound on what may still come, and the three kinds of early stopping.
"""

from __future__ import annotations

import dataclasses
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

    ``logits`` gives f32[V] for a whole sequence. ``margin`` is the least distance between two
    sums that were told apart: of the last taken and the first left out, and of neighbours
    among those taken.
    """
    beams: list[tuple[list[int], np.float32]] = [([], np.float32(0))]
    pool: list[Found] = []
    keep = max(2, 1 + len(stop_ids)) * width
    margin = np.inf
    for length in range(1, max_tokens + 1):
        sums = np.stack([_log_softmax(logits([*prompt, *t])) + total for t, total in beams])
        flat = sums.reshape(-1)
        order = np.argsort(-flat, kind="stable")
        margin = min(margin, float(np.min(flat[order[:-1]][:keep] - flat[order[1:]][:keep])))
        candidates = [
            ([*beams[i // sums.shape[1]][0], int(i % sums.shape[1])], flat[i]) for i in order[:keep]
        ]
        ends = [t[-1] in stop_ids or length == max_tokens for t, _ in candidates]
        beams = [c for c, end in zip(candidates, ends, strict=True) if not end][:width]
        divisor = np.float32(float(length) ** length_penalty)
        new = [
            Found(tuple(t), total / divisor, total)
            for (t, total), end in zip(candidates[:width], ends, strict=False)
            if end
        ]
        pool = sorted(pool + new, key=lambda found: -found.score)[:width]
        if length == max_tokens or _is_over(
            pool, beams[0][1], width, length, max_tokens, length_penalty, early_stopping
        ):
            break
    return pool, margin


def _is_over(
    pool: list[Found],
    best: np.float32,
    width: int,
    length: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> bool:
    full = len(pool) == width
    if full and early_stopping is True:
        return True
    reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
    worst = pool[-1].score if full else NONE
    return not best / np.float32(float(reach) ** length_penalty) > worst


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
