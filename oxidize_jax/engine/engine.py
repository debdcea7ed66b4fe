"""Engine: the host shell round the pure step. The only mutable object of the core.

It holds the state, feeds it from an unbounded host queue through the request slots, runs
the step program, and reads new tokens back once per dispatch. It knows token ids only;
text belongs to :mod:`oxidize_jax.llm`.

The device does not wait for the host: a run is dispatched before the one before it is read::

    device   | run 1 | run 2          | run 3          | run 4
    host     |       | read 1, text 1 | read 2, text 2 | ...
                 dispatch 3 ^     dispatch 4 ^

So the host is one run behind. What it does to a request takes effect in the order in which
it was done, after the run that is under way; a slot is given to the next request once the
host has *seen* its request end.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine import programs
from oxidize_jax.engine.device import Device
from oxidize_jax.engine.host_queue import HostQueue
from oxidize_jax.engine.observe import Observation, look
from oxidize_jax.engine.recorder import NoRecorder, Recorder
from oxidize_jax.engine.request import EngineRequest, check_keys, check_request
from oxidize_jax.engine.slots import Slots
from oxidize_jax.engine.step import EngineState, Model, Params
from oxidize_jax.engine.trace import Fork, new_fork
from oxidize_jax.engine.updates import FINISH_REASONS as FINISH_REASONS
from oxidize_jax.engine.updates import RequestUpdate as RequestUpdate
from oxidize_jax.engine.updates import Running
from oxidize_jax.engine.warmup import CompileCounter, WarmUp
from oxidize_jax.scheduler import invariants, stats
from oxidize_jax.scheduler.stats import StepStats

STEPS_PER_DISPATCH = programs.WINDOW
"""Most steps that the device makes before the host looks."""


class EngineStepError(RuntimeError):
    """A step failed. Requests that were running are lost; the engine itself goes on."""


@dataclasses.dataclass(frozen=True)
class _Dispatch:
    """A run that has not been read."""

    packed: jax.Array
    """What :func:`~oxidize_jax.engine.programs.drain` made of its state."""
    owners: tuple[int | None, ...]
    """Request in each slot at the time; some slots may have other owners by now."""


class Engine:
    """Runs requests through the pure step.

    Args:
      config: sizes and policy.
      model: the static part of the model (see :class:`~oxidize_jax.engine.step.Model`).
      params: its arrays.
      check_invariants: check every state before the next run takes it, and wait for it to be
        there; slow, to hunt a fault.
      secret: word that enters every block hash; drawn at random unless given.
      recorder: is told every event, to write a trace that can be replayed. It waits for each
        run; the events and their order are the same without it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        params: Params,
        *,
        check_invariants: bool = False,
        secret: int | None = None,
        recorder: NoRecorder | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.params = params
        self._compiles = CompileCounter()
        self.peak_blocks_used = 0
        """Most blocks that requests held in a step so far."""
        self.step_stats: tuple[StepStats, ...] = ()
        """Statistics of the steps that the last :meth:`step` read, in order."""
        programs.drained_shapes(config)  # so that no read traces it
        self._queue = HostQueue()
        self._device = Device(
            config,
            model,
            secret=secrets.randbits(32) if secret is None else secret,
            recorder=recorder or NoRecorder(),
            check_invariants=check_invariants,
        )
        self._forget()

    def _forget(self) -> None:
        """Drop what was on the device and what is known of it; the host queue stays."""
        # What is done here can be done again, if Ctrl-C comes in the middle.
        self._queue.forget_others()
        self._slots = Slots(self.config, self.model.vocab_size)
        self._in_flight: collections.deque[_Dispatch] = collections.deque()
        self._news: list[RequestUpdate] = []
        self._new_stats: list[StepStats] = []
        self._steps = 0

    @property
    def state(self) -> EngineState:
        """The state after all that has been dispatched; reading it waits for that."""
        return self._device.state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._device.state = state

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting, queued or running, or whose end is still to be told."""
        return self._queue.num_unfinished

    @property
    def num_compiles(self) -> int:
        """Programs that this process has compiled, or taken from its disk cache, since the
        engine was made. It stands still once everything is warm."""
        return self._compiles.count

    def warm_up(self) -> None:
        """Compile every program now, so that no request waits for a compiler."""
        for _ in WarmUp(self.config, self.model, self.params).finish():
            pass

    def has(self, request_id: int) -> bool:
        """Whether the request is still waiting, queued or running."""
        return request_id in self._queue

    def is_scheduled(self, request_id: int) -> bool:
        """Whether the request is on the device, and was seen to have had a row there."""
        running = self._slots.running.get(request_id)
        return running is not None and running.scheduled

    def add(self, request: EngineRequest) -> int:
        """Queue a request and return its id. Raises ValueError for what can never run."""
        return self.add_group(request, [request.key])[0]

    def add_group(self, request: EngineRequest, keys: Sequence[tuple[int, int]]) -> list[int]:
        """Queue several continuations of one prompt, one for each threefry key; their ids.

        Like :meth:`abort` it touches no device state, and other threads may call it any time.
        The prompt is computed once: the others are forks of the first and share its blocks
        until they write. Raises ValueError for what can never run.
        """
        self.validate(request)
        check_keys(keys)
        parent: int | None = None
        ids = []
        for key in keys:
            grammar = None if request.grammar is None else request.grammar.copy()
            one = dataclasses.replace(request, key=key, grammar=grammar)
            ids.append(self._queue.push(one, parent))
            parent = ids[0]
        return ids

    def fork(self, request_id: int, keys: Sequence[tuple[int, int]]) -> list[int] | None:
        """Let a running request go on several times, one for each key, from where it stands.

        Waits for the run under way, whose news the next :meth:`step` tells. The children have
        the tokens that :meth:`step` told of the parent before, so each is told the same news;
        they share its blocks. Returns their ids, or None where nothing was done: it is not on
        the device (queued, finished, unknown), or there are fewer free request slots than
        keys. Raises ValueError for keys that are none.
        """
        check_keys(keys)
        if request_id not in self._slots.running:
            return None
        with self._guarded():
            self._read_all()
            self._slots.send_masks(self._device)
            parent = self._slots.running.get(request_id)
            slots = tuple(self._slots.free[: len(keys)])
            if parent is None or len(slots) < len(keys):
                return None
            ids, n = tuple(self._queue.new_id() for _ in keys), len(keys)
            words = tuple((int(first), int(second)) for first, second in keys)
            fork = Fork(parent.slot, slots, words, ids, (None,) * n, (0.0,) * n)
            # All runs have been read: the parent is alive and the slots are free.
            self._device.fork(new_fork(self.config, fork))
            told = [update for update in self._news if update.request_id == request_id]
            for child, key, slot in zip(ids, keys, slots, strict=True):
                self._queue.begin(child)
                request = dataclasses.replace(parent.request, key=key)
                constraint = None if parent.constraint is None else parent.constraint.copy()
                self._slots.take(child, Running(slot, request, parent.cursor, constraint))
                self._news += [dataclasses.replace(update, request_id=child) for update in told]
            return list(ids)

    @property
    def checks_invariants(self) -> bool:
        """Whether the state is checked after every run."""
        return self._device.check_invariants

    def lend(self, borrow: Callable[[EngineState], EngineState]) -> None:
        """Let another program use the pool and the cache of the state that ``borrow`` gets.

        Every block in it is free or cached, no row is taken, and so it must be given back; it may
        be donated. Whoever runs is preempted and goes on with the next :meth:`step`. The prefix
        cache stays. Raises ValueError where events are recorded: a replay would miss this one.
        """
        if isinstance(self._device.recorder, Recorder):
            raise ValueError("a beam search cannot be recorded: make the LLM without trace.")
        with self._guarded():
            self._read_all()
            self._device.preempt_all()
            self.state = borrow(self.state)
            self._steps = int(self.state.scheduler.totals.steps)

    def reset_prefix_cache(self) -> None:
        """Let nothing computed so far be hit again: call it when ``params`` have changed.

        Requests that run go on with the KV they have, and nobody else will share it.
        """
        with self._guarded():
            self._device.reset_prefix_cache()

    def abort(self, request_id: int) -> bool:
        """Drop a request, queued or running. False if it is unknown or has finished.

        No update tells of it any more, and its blocks are free after the next :meth:`step`.
        It touches no device state, so a garbage collector may call it at any moment, in the
        middle of a step too.
        """
        if request_id not in self._queue:
            return False
        self._queue.end(request_id)
        self._slots.withdraw(request_id)
        return True

    def step(self, max_steps: int = STEPS_PER_DISPATCH) -> list[RequestUpdate]:
        """Dispatch a run of up to ``max_steps`` steps; return what is new in the one before.

        Where there is none before, two are dispatched and the first is read: a caller never
        waits for nothing. Nothing is dispatched where nothing is left to do.

        Raises EngineStepError if a step fails; the state is then made anew, without the
        requests that were on the device.
        """
        if not 1 <= max_steps <= STEPS_PER_DISPATCH:
            raise ValueError(f"max_steps={max_steps}: must be 1 to {STEPS_PER_DISPATCH}.")
        with self._guarded():
            if not (self._in_flight and self._slots.all_wait_for_masks):
                self._dispatch(max_steps)
            if len(self._in_flight) == 1 and not self._slots.all_wait_for_masks:
                self._dispatch(max_steps)
            if self._in_flight:
                self._read()
            while self._in_flight and not self._slots.running and self._queue.is_empty:
                self._read()  # only aborted requests are left: see them go
            return self._deliver()

    def observe(self) -> Observation:
        """What there is to see of the state after all that has been dispatched.

        It waits for nothing: the :class:`Observation` can be read a step later without a wait.
        """
        queued = self._queue.num_unfinished - len(self._slots.running)
        return Observation(look(self.state.scheduler), self._slots.owners, max(0, queued))

    def validate(self, request: EngineRequest) -> None:
        """Refuse, with a ValueError, what :meth:`add` would refuse."""
        check_request(self.config, self.model.vocab_size, request)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Make the state anew if what is done to it does not come to its end."""
        try:
            yield
        except BaseException as error:
            # The state was donated: whatever stopped the run, it cannot be used again.
            lost, under_way = len(self._slots.running), list(self._in_flight)
            self._forget()
            self._device.forget()
            with contextlib.suppress(Exception):
                # There may be no memory for a second state before they have ended.
                jax.block_until_ready([dispatch.packed for dispatch in under_way])
            self._device.restart()
            if not isinstance(error, Exception) or isinstance(error, invariants.InvariantError):
                raise
            programs.distrust_run(self.config, self.model)
            raise EngineStepError(
                f"a step failed and {lost} running requests were lost ({error}); "
                "the engine was reset: submit them again."
            ) from error

    def _dispatch(self, max_steps: int) -> None:
        """Send the events that are due, then a run and the read-out of its state."""
        slots = self._slots
        slots.send_aborts(self._device)
        slots.send_masks(self._device)
        slots.fill(self._device, self._queue)
        if any(constraint is not None for constraint in slots.constraints):
            max_steps = 1  # it could make no use of more
        owners = tuple(slots.owners)
        if all(owner is None for owner in owners):
            return
        self._in_flight.append(_Dispatch(self._device.run(self.params, max_steps), owners))

    def _read_all(self) -> None:
        """Take note of all that has been dispatched."""
        self._slots.send_aborts(self._device)
        while self._in_flight:
            self._read()

    def _read(self) -> None:
        """Wait for the oldest run, and take note of what is new in it."""
        dispatch = self._in_flight.popleft()
        drained = programs.unpack(self.config, fetch(dispatch.packed))
        steps = int(drained.steps)
        read = stats.read(np.asarray(drained.history), self._steps, steps)
        self._new_stats += read
        self._steps = steps
        self.peak_blocks_used = max([self.peak_blocks_used, *(s.blocks_used for s in read)])
        self._news += self._slots.collect(dispatch.owners, drained)
        if all(owner is None for owner in self._slots.owners):
            self._in_flight.clear()  # dispatched before this was known, and empty

    def _deliver(self) -> list[RequestUpdate]:
        # An abort may have come since a run was read.
        updates = [update for update in self._news if update.request_id in self._queue]
        for update in updates:
            if update.finish_reason is not None:
                self._queue.end(update.request_id)
        self.step_stats = tuple(self._new_stats)
        self._news, self._new_stats = [], []
        return updates


def fetch(packed: jax.Array) -> np.ndarray:
    """The one place in which the engine reads from the device."""
    return np.asarray(jax.device_get(packed))
