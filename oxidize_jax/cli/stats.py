"""``--stats``: where the time and the memory went."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oxidize_jax.compile_clock import CompileClock
    from oxidize_jax.engine.engine import Engine
    from oxidize_jax.outputs import RequestOutput

_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Stats:
    """Times of one run, in seconds since it was made.

    Compilation is what :class:`~oxidize_jax.compile_clock.CompileClock` takes it to be.
    """

    def __init__(self) -> None:
        self._start = time.time()
        self._clock: CompileClock | None = None
        self._cache_hits = 0
        self._loaded = self._first_text = self._end = 0.0
        self._prompt_tokens = self._first_tokens = 0
        self._completion_tokens = 0
        self._steps = self._blocks = "none"

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of what JAX compiles within the block."""
        from jax import monitoring

        from oxidize_jax.compile_clock import CompileClock

        monitoring.register_event_listener(self._on_event)
        try:
            with CompileClock() as self._clock:
                yield
        finally:
            monitoring.unregister_event_listener(self._on_event)

    def loaded(self) -> None:
        """The model is in memory."""
        self._loaded = time.time()

    def text(self, num_tokens: int) -> None:
        """Text of some more tokens has come."""
        if not self._first_text:
            self._first_text, self._first_tokens = time.time(), num_tokens
        self._completion_tokens += num_tokens

    def finished(self, prompt_tokens: int) -> None:
        """The last text has come."""
        self._end = time.time()
        self._prompt_tokens = prompt_tokens

    def count(self, outputs: Sequence[RequestOutput]) -> None:
        """All of it came in one piece."""
        self._completion_tokens = sum(output.usage.completion_tokens for output in outputs)
        self.finished(sum(output.usage.prompt_tokens for output in outputs))

    def engine(self, engine: Engine) -> None:
        """What the scheduler did, read from its totals."""
        totals = engine.state.scheduler.totals
        tokens = int(totals.scheduled_tokens)
        self._steps = f"{int(totals.steps)}, which computed {tokens} tokens"
        self._blocks = (
            f"{engine.peak_blocks_used} of {engine.config.num_blocks} at peak; "
            f"{int(totals.cached_tokens)} tokens from the prefix cache, "
            f"{int(totals.forked_tokens)} shared by forks, {int(totals.preemptions)} preemptions"
        )

    def print(self) -> None:
        """Write the table to standard error."""
        rows = [
            ("load", f"{self._loaded - self._start:.1f} s, imports, model and its programs"),
            ("compile", f"{self._compiling(self._start, self._end):.1f} s, {self._cached()}"),
        ]
        if self._first_text:
            waited = self._first_text - self._loaded
            compiling = self._compiling(self._loaded, self._first_text)
            rows.append(
                ("first text", f"{waited:.2f} s after loading, {compiling:.2f} s of it compiling")
            )
        tokens = f"{self._prompt_tokens} in the prompts, {self._completion_tokens} generated"
        rows += [("tokens", tokens), ("speed", self._speed())]
        rows += [("steps", self._steps), ("KV blocks", self._blocks)]
        if peak := peak_memory_gib():
            rows.append(("peak memory", f"{peak:.2f} GiB of this process"))
        for name, value in rows:
            print(f"{name:<12} {value}", file=sys.stderr)

    def _speed(self) -> str:
        """Of a stream after its first text, of a batch from the prompts on."""
        start = self._first_text or self._loaded
        tokens = self._completion_tokens - self._first_tokens
        seconds = self._end - start - self._compiling(start, self._end)
        if tokens == 0 or seconds <= 0:
            return "too few tokens to tell"
        after = "after the first text" if self._first_text else "prompts included"
        return f"{tokens / seconds:.1f} tokens/s, {after}, compiling left out"

    def _cached(self) -> str:
        return f"with {self._cache_hits} programs taken from the disk cache"

    def _compiling(self, start: float, end: float) -> float:
        """Seconds between ``start`` and ``end`` in which something was being compiled."""
        return self._clock.between(start, end) if self._clock is not None else 0.0

    def _on_event(self, event: str, **_: Any) -> None:
        self._cache_hits += event == _CACHE_HIT


def peak_memory_gib() -> float:
    """Most memory this process has had resident, in GiB; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
