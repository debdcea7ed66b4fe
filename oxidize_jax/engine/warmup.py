"""Warm-up: compile every program of an engine before there is a request, or even a weight."""

from __future__ import annotations

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX tells its listeners of each program that it compiles or takes from its disk cache."""


class CompileCounter:
    """Counts the programs that this process has compiled since the counter was made."""

    _total = 0

    def __init__(self) -> None:
        self._start = CompileCounter._total

    @property
    def count(self) -> int:
        """Programs so far, whoever asked for them."""
        return CompileCounter._total - self._start

    @classmethod
    def _listen(cls, event: str, *_: object, **__: object) -> None:
        cls._total += event == COMPILE_EVENT


jax.monitoring.register_event_duration_secs_listener(CompileCounter._listen)
