"""Seconds that JAX spent compiling, so that a report can keep them apart."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from jax import monitoring

_COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """A context manager; ``seconds`` grows while JAX traces, lowers, compiles or fetches.

    These intervals nest, so they are joined and not added.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> CompileClock:
        monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_event_duration_listener(self._note)

    @property
    def seconds(self) -> float:
        """So far."""
        return self.between(-math.inf, math.inf)

    def between(self, start: float, end: float) -> float:
        """Of the seconds from ``start`` to ``end``, both as ``time.time`` tells them."""
        return joined((max(a, start), min(b, end)) for a, b in self._spans)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in _COMPILING:
            now = time.time()
            self._spans.append((now - duration_secs, now))


def joined(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals ``(start, end)``."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        start = max(start, reached)
        if end > start:
            total, reached = total + end - start, end
    return total
