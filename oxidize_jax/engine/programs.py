"""The jitted programs of the host engine. Donated: the state; static: config and model.

They are module-level, so engines of the same configuration share what is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.step import EngineState, Model, Params, init_state, run_steps
from oxidize_jax.scheduler import beams, pause, reset
from oxidize_jax.scheduler import fork as forks
from oxidize_jax.scheduler import submit as submission
from oxidize_jax.scheduler.state import SchedulerState, init_scheduler
from oxidize_jax.types import replace, state

WINDOW = 16
"""W: most steps of a run, hence most tokens that it adds to a request."""


@state
class Drained:
    """What the host reads of a run, for A logprob alternatives."""

    status: jax.Array
    """i32[R]"""
    finish_reason: jax.Array
    """i32[R]"""
    row: jax.Array
    """i32[R]"""
    num_tokens: jax.Array
    """i32[R]"""
    num_cached: jax.Array
    """i32[R]"""
    num_preemptions: jax.Array
    """i32[R]"""
    tokens: jax.Array
    """i32[R, W]: the last tokens of each request, whose number the host knows by itself."""
    logprobs: jax.Array
    """f32[R, W]"""
    top_ids: jax.Array
    """i32[R, W, A]"""
    top_logprobs: jax.Array
    """f32[R, W, A]"""
    ranks: jax.Array
    """i32[R, W]"""
    steps: jax.Array
    """i32[]: made since the state is."""
    history: jax.Array
    """i32[HISTORY, F]: see :mod:`~oxidize_jax.scheduler.stats`."""


@partial(jax.jit, static_argnums=(0, 1))
def start(config: EngineConfig, model: Model, secret: Any) -> EngineState:
    """:func:`~oxidize_jax.engine.step.init_state` in one program; array by array takes many.

    ``secret`` is ``u32[]``.
    """
    return init_state(config, model, secret)


COMPILER_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
"""XLA:CPU takes half of what AVX-512 has unless told otherwise; elsewhere it says nothing."""


def run(
    config: EngineConfig, model: Model, params: Params, state: EngineState, limit: ArrayLike
) -> EngineState:
    """:func:`~oxidize_jax.engine.step.run_steps`"""
    adopted = _adopted.get((config, model))
    if adopted is not None and adopted.settings == _settings():
        try:
            return adopted.executable(params, state, limit)
        except (TypeError, ValueError):  # compiled for other shapes, types or devices
            _adopted.pop((config, model), None)
    return traced_run(config, model, params, state, limit)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3, compiler_options=COMPILER_OPTIONS)
def traced_run(
    config: EngineConfig, model: Model, params: Params, state: EngineState, limit: jax.Array
) -> EngineState:
    """:func:`run` as JAX caches it."""
    return run_steps(config, model, params, state, limit)


class _Adopted(NamedTuple):
    executable: jax.stages.Compiled
    discard: Callable[[], None]
    """To be called if it fails."""
    settings: tuple[Any, ...]
    """Of JAX, when it was adopted."""


_adopted: dict[tuple[EngineConfig, Model], _Adopted] = {}
_SETTINGS = (
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_enable_x64",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_debug_infs",
)
"""What a context manager can change, and an executable not follow."""


def adopt_run(
    config: EngineConfig,
    model: Model,
    executable: jax.stages.Compiled,
    discard: Callable[[], None],
) -> None:
    """Let :func:`run` call ``executable``, of an earlier process, and neither trace nor compile.

    It is what :func:`traced_run` compiles to with the same ``config`` and ``model``. Arguments
    that it was not compiled for are traced as ever. ``discard`` is called if it fails.
    """
    _adopted[config, model] = _Adopted(executable, discard, _settings())


def distrust_run(config: EngineConfig, model: Model) -> None:
    """A run has failed: if its executable came from an earlier process, use it no more."""
    adopted = _adopted.pop((config, model), None)
    if adopted is not None:
        adopted.discard()


def _settings() -> tuple[Any, ...]:
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def submit(
    config: EngineConfig, state: SchedulerState, slot: jax.Array, new: submission.NewRequest
) -> SchedulerState:
    """:func:`~oxidize_jax.scheduler.submit.submit`"""
    return submission.submit(config, state, slot, new)


@partial(jax.jit, donate_argnums=0)
def abort(state: SchedulerState, slot: jax.Array) -> SchedulerState:
    """:func:`~oxidize_jax.scheduler.submit.abort`"""
    return submission.abort(state, slot)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def fork(
    config: EngineConfig, state: SchedulerState, new: forks.Fork
) -> tuple[SchedulerState, jax.Array]:
    """:func:`~oxidize_jax.scheduler.fork.fork`"""
    return forks.fork(config, state, new)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def set_masks(config: EngineConfig, state: SchedulerState, new: pause.MaskUpdate) -> SchedulerState:
    """:func:`~oxidize_jax.scheduler.pause.set_masks`"""
    return pause.set_masks(config, state, new)


@partial(jax.jit, donate_argnums=0)
def preempt_all(state: SchedulerState) -> SchedulerState:
    """:func:`~oxidize_jax.scheduler.beams.preempt_all`"""
    return beams.preempt_all(state)


@partial(jax.jit, donate_argnums=0)
def reset_prefix_cache(state: SchedulerState) -> SchedulerState:
    """:func:`~oxidize_jax.scheduler.reset.reset_prefix_cache`"""
    return reset.reset_prefix_cache(state)


@partial(jax.jit, static_argnums=0)
def drain(config: EngineConfig, state: SchedulerState) -> jax.Array:
    """``i32[P]``: a :class:`Drained` of ``state`` in one array, hence one transfer.

    Nothing in it depends on what the host has read before, so it is dispatched right after
    the run, and the next run after it, before the host has seen either.
    """
    leaves = jax.tree.leaves(_drained(config, state))
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.int32).reshape(-1) for x in leaves])


def unpack(config: EngineConfig, packed: np.ndarray) -> Drained:
    """What :func:`drain` packed, as views of ``packed``."""
    leaves, at = [], 0
    shapes, structure = jax.tree.flatten(drained_shapes(config))
    for leaf in shapes:
        end = at + math.prod(leaf.shape)
        leaves.append(packed[at:end].view(leaf.dtype).reshape(leaf.shape))
        at = end
    return jax.tree.unflatten(structure, leaves)


@cache
def drained_shapes(config: EngineConfig) -> Drained:
    """The shapes of what :func:`drain` packs. Traces once; call it before there is a request."""
    return jax.eval_shape(lambda: _drained(config, init_scheduler(config)))


def _drained(config: EngineConfig, state: SchedulerState) -> Drained:
    requests = state.requests
    lane = jnp.arange(config.max_num_requests, dtype=jnp.int32)[:, None]
    place = requests.num_tokens[:, None] - WINDOW + jnp.arange(WINDOW, dtype=jnp.int32)
    place = jnp.where(place < 0, config.max_model_len, place)

    def window(values: jax.Array) -> jax.Array:
        return values.at[lane, place].get(mode="fill", fill_value=0)

    return Drained(
        status=requests.status,
        finish_reason=requests.finish_reason,
        row=requests.row,
        num_tokens=requests.num_tokens,
        num_cached=requests.num_cached,
        num_preemptions=requests.num_preemptions,
        tokens=window(requests.tokens),
        logprobs=window(requests.logprobs),
        top_ids=window(requests.top_ids),
        top_logprobs=window(requests.top_logprobs),
        ranks=window(requests.ranks),
        steps=state.totals.steps,
        history=state.history,
    )


def with_scheduler(state: EngineState, scheduler: SchedulerState) -> EngineState:
    """``state`` with another scheduler state, the cache untouched."""
    return replace(state, scheduler=scheduler)
