"""A slow sampler in plain numpy and float64: what every option does, by the book.

It shares no code and no idea with the sampler under test: it sorts, it loops over tokens, and
it knows nothing of thresholds. Options are keyword arguments, off by default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np


def edited_logits(
    logits: Sequence[float],
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    allowed: Collection[int] | None = None,
    banned: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    suppress: Collection[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> np.ndarray:
    """What a greedy request takes the largest of."""
    x = np.array(logits, np.float64)
    for token in range(len(x)):
        if allowed is not None and token not in allowed:
            x[token] = -np.inf
    x[list(banned)] = -np.inf
    for word in bad_words:
        *before, last = word
        if list(output)[len(output) - len(before) :] == before and len(output) >= len(before):
            x[last] = -np.inf
    x[list(suppress)] = -np.inf
    for token, bias in (logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt) | set(output):
        if x[token] > 0:
            x[token] /= repetition_penalty
        else:
            x[token] *= repetition_penalty
    for token in output:
        x[token] -= frequency_penalty
    for token in set(output):
        x[token] -= presence_penalty
    return x


def probabilities(
    x: np.ndarray,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    typical_p: float = 1.0,
) -> np.ndarray:
    """The distribution of a draw from edited logits ``x``; ties with the last kept stay."""
    p = _normal(np.exp((x - x.max()) / temperature))
    if min_p > 0:
        p = _normal(np.where(p >= min_p * p.max(), p, 0))
    if 0 < top_k < len(p):
        p = _normal(np.where(p >= np.sort(p)[-top_k], p, 0))
    if top_p < 1:
        p = _normal(np.where(p >= _last_needed(p, -p, top_p), p, 0))
    if typical_p < 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = np.where(p > 0, -np.log(p), np.inf)
            mean = np.nansum(np.where(p > 0, p * surprise, 0))
            oddness = np.where(p > 0, np.abs(surprise - mean), np.inf)
        last = _last_needed(p, oddness, typical_p, of=oddness)
        p = _normal(np.where(oddness <= last + 1e-9, p, 0))
    return p


EDGED = {"temperature": 1.0, "min_p": 0.0, "top_p": 1.0, "typical_p": 1.0}
"""Parameters of :func:`probabilities` that can lie close to where another token is kept."""


def near_an_edge(x: np.ndarray, margin: float = 1e-4, **options: Any) -> bool:
    """Whether a slightly different parameter keeps other tokens: float32 may then, too."""
    options = EDGED | options
    kept = probabilities(x, **options) > 0
    for name in EDGED:
        for factor in (1 - margin, 1 + margin):
            moved = options | {name: options[name] * factor}
            if moved["min_p"] > 1:
                continue
            if ((probabilities(x, **moved) > 0) != kept).any():
                return True
    return False


def _normal(p: np.ndarray) -> np.ndarray:
    return p / p.sum()


def _last_needed(
    p: np.ndarray, order: np.ndarray, mass: float, of: np.ndarray | None = None
) -> float:
    """Value (of ``p``, or ``of``) of the last token needed for ``mass``, in ascending ``order``."""
    places = np.argsort(order, kind="stable")
    total, values = 0.0, p if of is None else of
    for place in places:
        total += p[place]
        if total >= mass - 1e-12:
            return float(values[place])
    return float(values[places[(p[places] > 0).nonzero()[0][-1]]])
