"""Warm-up: compile every program of an engine before there is a request, or even a weight.

A program is compiled for shapes, and those follow from the configuration and the header of
a checkpoint. So it is done in threads while the weights are read. The programs are those of
:mod:`~oxidize_jax.engine.programs`, through ``jit(...).lower(...).compile()``: JAX keeps what
comes of it, and the first call neither traces nor compiles. The largest program, if an
earlier process has left its executable on disk, is not even traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine import programs
from oxidize_jax.engine.step import Model, Params, init_state
from oxidize_jax.engine.trace import Fork, Submit, new_fork, new_request, pad_masks
from oxidize_jax.executables import COMPILE_EVENT, StoredExecutable

_THREADS = 2


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


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that an engine takes on its device, parameters apart."""

    state: int
    """KV cache and scheduler."""
    temporary: int
    """What a run needs beside them, as the compiler says."""

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.temporary


_CODE_OF_A_RUN = tuple(
    f"oxidize_jax.{name}"
    for name in (
        "arrays",
        "batch",
        "blocks",
        "config",
        "engine.step",
        "messages",
        "model",
        "sampling",
        "scheduler",
        "types",
    )
)
"""Modules that the program of a run may be traced from."""


class WarmUp:
    """Compiles the programs of one engine in threads, from now on.

    Args:
      params: the arrays of the model, or jax.ShapeDtypeStruct in their places.

    The threads do not see JAX's context managers (``jax.default_device`` and the like) that
    surround the call; in such a context the engine compiles once more when it is used.
    """

    def __init__(self, config: EngineConfig, model: Model, params: Params) -> None:
        self._state = jax.eval_shape(partial(init_state, config, model))
        jobs = _programs(config, model, params, self._state)
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="warm-up")
        self._jobs: dict[str, Future[Any]] = {name: pool.submit(job) for name, job in jobs.items()}
        pool.shutdown(wait=False)

    def __len__(self) -> int:
        return len(self._jobs)

    def finish(self, every: float = 0.5) -> Iterator[int]:
        """How many are compiled, each ``every`` seconds until all are. Raises what went wrong."""
        waiting = set(self._jobs.values())
        while waiting:
            done, waiting = wait(waiting, timeout=every)
            for job in done:
                job.result()
            yield len(self._jobs) - len(waiting)

    def cancel(self) -> None:
        """Begin no program any more. One that is being compiled cannot be stopped."""
        for job in self._jobs.values():
            job.cancel()

    def memory(self) -> Memory:
        """What the engine takes. Waits for the largest program."""
        analysis = self._jobs["run"].result().memory_analysis()
        leaves = jax.tree.leaves(self._state)
        return Memory(
            state=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
            # Not every backend analyses.
            temporary=analysis.temp_size_in_bytes if analysis is not None else 0,
        )


def _programs(
    config: EngineConfig, model: Model, params: Params, state: Any
) -> dict[str, Callable[[], jax.stages.Compiled]]:
    """What compiles each program, the largest first."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    scheduler = state.scheduler
    request = new_request(config, Submit(0, (0,), 1))
    fork = new_fork(config, Fork(0, (1,), ((0, 0),), (0,), (None,), (0.0,)))
    secret = jax.ShapeDtypeStruct((), jnp.uint32)
    lowered: dict[str, Callable[[], jax.stages.Lowered]] = {
        "start": lambda: programs.start.lower(config, model, secret),
        "drain": lambda: programs.drain.lower(config, scheduler),
        "submit": lambda: programs.submit.lower(config, scheduler, number, request),
        "abort": lambda: programs.abort.lower(scheduler, number),
        "fork": lambda: programs.fork.lower(config, scheduler, fork),
        "reset_prefix_cache": lambda: programs.reset_prefix_cache.lower(scheduler),
    }
    if config.token_mask_words:
        masks = pad_masks(config, (), (), ())
        lowered["set_masks"] = lambda: programs.set_masks.lower(config, scheduler, masks)
    jobs = {name: partial(_compile, lower) for name, lower in lowered.items()}
    return {"run": partial(_prepare_run, config, model, params, state), **jobs}


def _compile(lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
    return lower().compile()


def _prepare_run(
    config: EngineConfig, model: Model, params: Params, state: Any
) -> jax.stages.Compiled:
    """The executable of a run: of an earlier process, or compiled and left to later ones."""
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    if not type(model).__module__.startswith("oxidize_jax.model."):  # nobody sees its code change
        return programs.traced_run.lower(config, model, params, state, limit).compile()
    static = (config, model, programs.COMPILER_OPTIONS)
    stored = StoredExecutable("run", _CODE_OF_A_RUN, static, (params, state, limit), state)
    executable, is_stored = stored.load(), True
    if executable is None:
        lowered = programs.traced_run.lower(config, model, params, state, limit)
        executable, is_stored = stored.compile(lowered)
    if is_stored:
        programs.adopt_run(config, model, executable, stored.discard)
    return executable
