"""Recorder: writes the events of an engine to a file as they happen."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oxidize_jax.blocks import hashing
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.trace import (
    Abort,
    Event,
    Outcome,
    ResetPrefixCache,
    Restart,
    Run,
    Trace,
    fork_event,
    masks_event,
    submit_event,
)
from oxidize_jax.engine.tracefile import Lines
from oxidize_jax.scheduler import fork as forks
from oxidize_jax.scheduler.pause import MaskUpdate
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.scheduler.submit import NewRequest
from oxidize_jax.types import state as register


class NoRecorder:
    """What an engine tells while it runs: each event before it is applied. Keeps nothing."""

    def start(self, config: EngineConfig, vocab_size: int, state: SchedulerState) -> None:
        """The engine is made; ``state`` is its first."""

    def restart(self, state: SchedulerState) -> None:
        """A step failed; ``state`` takes the place of what was."""

    def submit(self, slot: int, new: NewRequest) -> None:
        """A request goes into ``slot``."""

    def abort(self, slot: int) -> None:
        """The request in ``slot`` is finished."""

    def fork(self, new: forks.Fork) -> None:
        """A fork was taken (``ok`` was true; one that was refused changes nothing)."""

    def set_masks(self, new: MaskUpdate) -> None:
        """Requests get other token masks."""

    def reset_prefix_cache(self) -> None:
        """The prefix cache is forgotten."""

    def run(self, state: SchedulerState, max_steps: int) -> None:
        """``state`` goes into a run, which may donate it."""

    def ran(self, state: SchedulerState) -> None:
        """The run came to ``state``."""


class Recorder(NoRecorder):
    """Writes one engine's trace to ``path``, in place of what is there.

    Nothing waits in a buffer, so that a crash leaves a file that can be read. If the file cannot
    be written any more (a full disk) recording ends with a warning and the engine goes on.

    Args:
      model: what to tell a reader of the model: ``name``, ``dtype``, ``kv_cache_dtype`` and
        ``attention`` are what the command ``replay`` builds it from.
      digest_every: take a digest of every array after every so many runs; 0 takes none. It
        reads the state once: on a CPU 4 ms for the default sizes, and as they grow.

    Raises ValueError if the file cannot be made. It holds the prompts of all requests.
    """

    def __init__(
        self, path: str | Path, *, model: Mapping[str, str] | None = None, digest_every: int = 1
    ) -> None:
        self.path = Path(path).expanduser()
        self._model = dict(model or {})
        if digest_every < 0:
            raise ValueError(f"digest_every={digest_every}: must be 0 (none) or more.")
        self._digest_every = digest_every
        self._runs = 0
        self._lines = Lines()
        self._config: EngineConfig | None = None
        self._before: Seen | None = None
        self._width = 1
        try:
            # Without a buffer: a line that could not be written does not come up again.
            # What is there goes when an engine starts, and not for one that cannot be made.
            self._file: FileIO | None = self.path.open("ab", buffering=0)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"trace={str(path)!r}: {reason}; give a file in a folder that "
                "exists and can be written to."
            ) from None
        # An engine that is forgotten leaves no open file, and no warning of one.
        weakref.finalize(self, self._file.close)

    def close(self) -> None:
        """End the recording; events that follow are not kept."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, config: EngineConfig, vocab_size: int, state: SchedulerState) -> None:
        """Write the header. Raises ValueError for a second engine."""
        if self._config is not None:
            raise ValueError(f"the recorder of {self.path} has an engine: make one for each.")
        self._config = config
        self._empty()
        trace = Trace(
            config=config,
            vocab_size=vocab_size,
            secret=int(state.pool.secret),
            model=self._model,
            backend=jax.default_backend(),
            jax_version=jax.__version__,
        )
        self._write(self._lines.header(trace))

    def restart(self, state: SchedulerState) -> None:
        """Write the event."""
        self._event(Restart(int(state.pool.secret)))

    def submit(self, slot: int, new: NewRequest) -> None:
        """Write the event."""
        self._event(submit_event(self._started(), slot, new))

    def abort(self, slot: int) -> None:
        """Write the event."""
        self._event(Abort(slot))

    def fork(self, new: forks.Fork) -> None:
        """Write the event."""
        self._event(fork_event(self._started(), new))

    def set_masks(self, new: MaskUpdate) -> None:
        """Write the event."""
        self._event(masks_event(self._started(), new))

    def reset_prefix_cache(self) -> None:
        """Write the event."""
        self._event(ResetPrefixCache())

    def run(self, state: SchedulerState, max_steps: int) -> None:
        """Write the event and take note of how long the sequences are."""
        if self._file is None:
            return
        self._event(Run(max_steps))
        self._before = seen(state)

    def ran(self, state: SchedulerState) -> None:
        """Write what came of the run."""
        if self._file is None or self._before is None:
            return
        self._runs += 1
        digests = self._digest_every > 0 and self._runs % self._digest_every == 0
        found = outcome(state, self._before, digests=digests)
        self._before = None
        self._write(self._lines.outcome(found))

    def _started(self) -> EngineConfig:
        if self._config is None:
            raise ValueError(f"the recorder of {self.path} has no engine yet: start it first.")
        return self._config

    def _event(self, event: Event) -> None:
        self._started()
        self._write(self._lines.event(event))

    def _empty(self) -> None:
        # A device such as /dev/full holds nothing that could be taken out.
        if self._file is not None and self._file.seekable() and self.path.is_file():
            self._file.truncate(0)

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            data = memoryview(line.encode())
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.close()
            warnings.warn(
                f"the trace {self.path} ends here: {error.strerror or error}; the engine goes on.",
                RuntimeWarning,
                stacklevel=3,
            )


@register
class Seen:
    """How far the sequences were before a run, on the host: the run may donate the state."""

    steps: Any
    """i32[]: ``totals.steps``"""
    num_tokens: Any
    """i32[R]"""


def seen(state: SchedulerState) -> Seen:
    """Take note before a run. Waits for ``state``."""
    return Seen(np.array(state.totals.steps), np.array(state.requests.num_tokens))


def outcome(state: SchedulerState, before: Seen, *, digests: bool = True) -> Outcome:
    """What the run from ``before`` to ``state`` gave. Waits for ``state``."""
    made = np.array(state.requests.num_tokens) - before.num_tokens
    steps = int(np.array(state.totals.steps) - before.steps)
    # A power of two, so that runs of many lengths share few programs.
    width = 1 << int(max(made.max(), 16) - 1).bit_length()
    tokens = np.asarray(_tokens_from(state.requests.tokens, before.num_tokens, width))
    return Outcome(
        steps=steps,
        tokens={
            slot: tuple(tokens[slot, : made[slot]].tolist())
            for slot in np.flatnonzero(made).tolist()
        },
        digests=digest(state) if digests else None,
    )


def digest(state: SchedulerState) -> dict[str, int]:
    """u32 of every array of a state, by its name (``rows.kv_len``). Equal for equal bits only,
    but for one case in 2**32."""
    names = [name for name, _ in leaves(state)]
    return dict(zip(names, np.asarray(_digests(state)).tolist(), strict=True))


def leaves(state: SchedulerState) -> list[tuple[str, jax.Array]]:
    """The arrays of a state with their names."""
    pairs = jax.tree_util.tree_leaves_with_path(state)
    return [(jax.tree_util.keystr(p, simple=True, separator="."), leaf) for p, leaf in pairs]


@partial(jax.jit, static_argnums=2)
def _tokens_from(tokens: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """i32[R, width]: ``tokens i32[R, N]`` of each slot from ``start i32[R]`` on."""
    slot = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    place = start[:, None] + jnp.arange(width, dtype=jnp.int32)
    return tokens.at[slot, place].get(mode="fill", fill_value=0)


@jax.jit
def _digests(state: SchedulerState) -> jax.Array:
    """u32[number of arrays]"""
    return jnp.stack([_digest(leaf) for leaf in jax.tree.leaves(state)])


def _digest(leaf: jax.Array) -> jax.Array:
    """u32[]: a digest of the bits in their order."""
    flat = leaf.reshape(-1)
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint32)
    return hashing.digest(lax.bitcast_convert_type(flat, jnp.uint32))[0]
