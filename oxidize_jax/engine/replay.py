"""Replay: fold the events of a trace over the initial state again, and compare.

:func:`replay` runs the model as the engine did; bits and tokens must be the same.
:func:`replay_scheduler` needs no model: the tokens come from the trace, and every array that
does not hold logprobs must be the same. So a run from another machine is looked into
without its weights, one step at a time, with the invariants checked after each.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.arrays import at_index
from oxidize_jax.batch.build import sampling_rows
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine import programs
from oxidize_jax.engine.recorder import Seen, leaves, outcome, seen
from oxidize_jax.engine.step import EngineState, Model, Params
from oxidize_jax.engine.trace import (
    Abort,
    Event,
    Fork,
    Outcome,
    Restart,
    Run,
    SetMasks,
    Submit,
    Trace,
    mask_update,
    new_fork,
    new_request,
    scripted,
)
from oxidize_jax.sampling.sampler import SampleOutput
from oxidize_jax.scheduler import invariants
from oxidize_jax.scheduler.commit import commit
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import (
    FINISHED,
    RUNNING,
    UNUSED,
    WAITING,
    SchedulerState,
    init_scheduler,
)

MODEL_LEAVES = tuple(
    f"requests.{name}" for name in ("logprobs", "top_ids", "top_logprobs", "ranks")
)
"""Arrays that only the model can fill. Another backend rounds them otherwise."""


class TraceError(ValueError):
    """Events that do not fit the state they meet, so that no engine can have made them."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first run that came out otherwise."""

    event: int
    """Index into the events of the trace."""
    what: str
    leaves: tuple[str, ...] = ()
    """Names of the arrays that differ, of those that were compared."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a replay came to; it ends with the first difference."""

    state: EngineState | SchedulerState
    difference: Difference | None
    num_events: int = 0
    num_runs: int = 0
    num_compared: int = 0
    """Runs whose outcome was on record."""
    num_steps: int = 0
    num_tokens: int = 0


Progress = Callable[[Event], None]
"""Called after each event."""


def replay(
    trace: Trace,
    model: Model,
    params: Params,
    *,
    floats: bool | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Make the run of a trace again, with the programs of the engine.

    Args:
      floats: compare logprobs too, bit for bit; default: if the trace is of this backend
        and this version of JAX.

    Raises TraceError, and ValueError for a model of another vocabulary.
    """
    if model.vocab_size != trace.vocab_size:
        raise ValueError(
            f"vocab_size={model.vocab_size}: the trace is of a model with {trace.vocab_size} "
            f"({trace.model.get('name', 'not named')}): give that one."
        )
    config = trace.config
    if floats is None:
        here = (jax.default_backend(), jax.__version__)
        floats = here == (trace.backend, trace.jax_version)

    def start(secret: int) -> EngineState:
        kv = model.init_kv(config.num_blocks, config.block_size)
        return EngineState(scheduler=init_scheduler(config, secret), kv=kv)

    state = start(trace.secret)
    count = _Count()
    for index, event in enumerate(trace.events):
        if isinstance(event, Run):
            before = seen(state.scheduler)
            limit = np.int32(event.max_steps)
            with _noted(f"in {describe(event, index)}"):
                state = programs.run(config, model, params, state, limit)
                jax.block_until_ready(state.scheduler.totals.steps)
            what = count.run(index, event, before, state.scheduler, floats)
            if what is not None:
                return count.result(state, what)
        elif isinstance(event, Restart):
            state = start(event.secret)
        else:
            scheduler = _apply(config, state.scheduler, event, index)
            state = programs.with_scheduler(state, scheduler)
        count.event(event, progress)
    return count.result(state)


def replay_scheduler(
    trace: Trace, *, check: bool = True, progress: Progress | None = None
) -> Replay:
    """Make the run of a trace again without a model: ``commit`` and ``schedule`` only.

    The tokens are those on record; a request that needs more than are known (in a trace
    that was cut down, or of a run that failed) goes on with made-up ones.

    Args:
      check: check the invariants after every event and every step.

    Raises TraceError, InvariantError, and what a step raises, each with a note that says where.
    """
    config, script = trace.config, _Script(trace)
    state = init_scheduler(config, trace.secret)
    count = _Count()
    for index, event in enumerate(trace.events):
        script.event(index, event, state)
        if isinstance(event, Run):
            before = seen(state)
            state = _run(config, state, script, event, index, check)
            what = count.run(index, event, before, state, floats=False)
            if what is not None:
                return count.result(state, what)
        elif isinstance(event, Restart):
            state = init_scheduler(config, event.secret)
        else:
            with _noted(f"in {describe(event, index)}"):
                state = _apply(config, state, event, index)
                if check:
                    invariants.check(state)
        count.event(event, progress)
    return count.result(state)


def describe(event: Event, index: int) -> str:
    """``event 3 (run of 16 steps)``"""
    kind = type(event).__name__.lower()
    if isinstance(event, Run):
        kind = f"run of {event.max_steps} steps"
    elif isinstance(event, Submit | Abort):
        kind += f", slot {event.slot}"
    elif isinstance(event, Fork):
        kind += f" of slot {event.parent}"
    elif isinstance(event, SetMasks):
        kind += f" of {len(event.slots)} slots"
    return f"event {index} ({kind})"


def first_difference(ours: SchedulerState, theirs: SchedulerState) -> str | None:
    """The first place in which two states differ, with both values; None if they are equal."""
    for (name, a), (_, b) in zip(leaves(ours), leaves(theirs), strict=True):
        left, right = np.asarray(a), np.asarray(b)
        if left.tobytes() != right.tobytes():
            bits = left.view(np.uint8).reshape(*left.shape, -1) != right.view(np.uint8).reshape(
                *right.shape, -1
            )
            place = tuple(int(i) for i in np.argwhere(bits.any(axis=-1))[0])
            return f"{name}{list(place) or ''}: {left[place]} and {right[place]}"
    return None


def _apply(config: EngineConfig, state: SchedulerState, event: Event, index: int) -> SchedulerState:
    """One event from outside. ``state`` is donated."""
    if isinstance(event, Submit):
        _check_submit(config, state, event, index)
        return programs.submit(config, state, np.int32(event.slot), new_request(config, event))
    if isinstance(event, Abort):
        return programs.abort(state, np.int32(event.slot))
    if isinstance(event, Fork):
        state, ok = programs.fork(config, state, new_fork(config, event))
        if not ok:
            raise TraceError(
                f"{describe(event, index)}: the parent is not alive, or a child's slot in use."
            )
        return state
    if isinstance(event, SetMasks):
        return programs.set_masks(config, state, mask_update(config, event))
    return programs.reset_prefix_cache(state)


def _check_submit(config: EngineConfig, state: SchedulerState, event: Submit, index: int) -> None:
    """Refuse what would make a fault where there is none."""
    requests = state.requests
    status, row = np.asarray(requests.status), np.asarray(requests.row)
    slot, parent = event.slot, event.fork_of
    if status[slot] not in (UNUSED, FINISHED) or row[slot] < config.max_num_seqs:
        raise TraceError(f"{describe(event, index)}: the slot is still in use.")
    if parent is not None and status[parent] in (WAITING, RUNNING):
        tokens = np.asarray(requests.tokens)[parent, : len(event.prompt)]
        if tuple(tokens.tolist()) != event.prompt:
            raise TraceError(f"{describe(event, index)}: a fork of slot {parent}, another prompt.")


class _Count:
    """What has been replayed so far."""

    def __init__(self) -> None:
        self._events = self._runs = self._compared = self._steps = self._tokens = 0

    def event(self, event: Event, progress: Progress | None) -> None:
        self._events += 1
        if progress is not None:
            progress(event)

    def run(
        self, index: int, event: Run, before: Seen, state: SchedulerState, floats: bool
    ) -> Difference | None:
        recorded = event.outcome
        digests = recorded is not None and recorded.digests is not None
        found = outcome(state, before, digests=digests)
        self._runs += 1
        self._steps += found.steps
        self._tokens += sum(map(len, found.tokens.values()))
        if recorded is None:
            return None
        self._compared += 1
        what, names = _compare(recorded, found, floats)
        return Difference(index, f"{describe(event, index)}: {what}", names) if what else None

    def result(
        self, state: EngineState | SchedulerState, difference: Difference | None = None
    ) -> Replay:
        return Replay(
            state=state,
            difference=difference,
            num_events=self._events,
            num_runs=self._runs,
            num_compared=self._compared,
            num_steps=self._steps,
            num_tokens=self._tokens,
        )


def _compare(recorded: Outcome, found: Outcome, floats: bool) -> tuple[str, tuple[str, ...]]:
    """What is not the same, in words (empty for nothing), and the arrays."""
    theirs, ours = recorded.digests or {}, found.digests or {}
    names = tuple(
        name
        for name, word in ours.items()
        if name in theirs and theirs[name] != word and (floats or name not in MODEL_LEAVES)
    )
    arrays = f"; arrays that differ: {', '.join(names)}" if names else ""
    if recorded.steps != found.steps:
        return f"{recorded.steps} steps on record, {found.steps} now{arrays}", names
    for slot in sorted({*recorded.tokens, *found.tokens}):
        old, new = recorded.tokens.get(slot, ()), found.tokens.get(slot, ())
        if old != new:
            return f"slot {slot}: tokens {_list(old)} on record, {_list(new)} now{arrays}", names
    return arrays.removeprefix("; "), names


def _list(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens)) or "none"


class _Script:
    """The tokens that the sequences will get: ``tokens i32[R, N]``, by slot and position."""

    def __init__(self, trace: Trace) -> None:
        config = trace.config
        place = np.arange(config.max_model_len, dtype=np.int64)
        # Made-up tokens differ from one place to the next: equal blocks would be shared.
        self._made_up = ((place * 7919 + 31) % trace.vocab_size).astype(np.int32)
        self._events = scripted(trace).events
        self._tokens = np.tile(self._made_up, (config.max_num_requests, 1))

    def event(self, index: int, event: Event, state: SchedulerState) -> None:
        """Put down what the sequences that begin with this event will generate."""
        known = self._events[index]
        if isinstance(known, Submit):
            self._set(known.slot, len(known.prompt), known.output)
        elif isinstance(known, Fork):
            start = int(np.asarray(state.requests.num_tokens)[known.parent])
            for slot, output in zip(known.children, known.outputs, strict=True):
                self._set(slot, start, output)

    def _set(self, slot: int, start: int, output: tuple[int, ...]) -> None:
        row = self._made_up.copy()
        end = min(len(row), start + len(output))
        row[start:end] = output[: end - start]
        # A new array each time: a step that is still running may read the last.
        self._tokens = self._tokens.copy()
        self._tokens[slot] = row

    def on_device(self) -> jax.Array:
        """i32[R, N]"""
        return jnp.asarray(self._tokens)


def _run(
    config: EngineConfig,
    state: SchedulerState,
    script: _Script,
    event: Run,
    index: int,
    check: bool,
) -> SchedulerState:
    """As :func:`~oxidize_jax.engine.step.run_steps`, or as many steps as are on record."""
    limit = event.max_steps if event.outcome is None else event.outcome.steps
    tokens, turn, steps = script.on_device(), 0, 0
    planned = bool((np.asarray(state.plan.num_scheduled) > 0).any())
    while turn == 0 or (planned and steps < limit):
        steps += planned  # a turn that finds nothing planned only plans
        with _noted(f"in step {steps} of {describe(event, index)}"):
            state = _jitted_step(config, state, tokens)
            planned = bool((np.asarray(state.plan.num_scheduled) > 0).any())
            if check:
                invariants.check(state)
        turn += 1
    return state


def scripted_step(config: EngineConfig, state: SchedulerState, script: jax.Array) -> SchedulerState:
    """:func:`~oxidize_jax.engine.step.engine_step` with tokens from ``script i32[R, N]``."""
    s, a = config.max_num_seqs, config.max_logprobs
    row = jnp.arange(s, dtype=jnp.int32)
    rows = jnp.where(sampling_rows(state), row, s)
    request = at_index(state.rows.request, rows, config.max_num_requests)
    place = at_index(state.requests.num_tokens, request, config.max_model_len)
    samples = SampleOutput(
        tokens=script.at[request, place].get(mode="fill", fill_value=0),
        logprobs=jnp.zeros((s,), jnp.float32),
        top_ids=jnp.zeros((s, a), jnp.int32),
        top_logprobs=jnp.zeros((s, a), jnp.float32),
        ranks=jnp.zeros((s,), jnp.int32),
    )
    return schedule(config, commit(config, state, rows, samples))


_jitted_step = jax.jit(scripted_step, static_argnums=0, donate_argnums=1)


@contextlib.contextmanager
def _noted(where: str) -> Iterator[None]:
    """Let what is raised say where."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise
