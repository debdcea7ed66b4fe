"""The engine's state, with the programs that change it and the recorder that is told of each."""

from __future__ import annotations

import jax
import numpy as np

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine import programs
from oxidize_jax.engine.recorder import NoRecorder
from oxidize_jax.engine.step import EngineState, Model, Params
from oxidize_jax.scheduler import fork as forks
from oxidize_jax.scheduler import invariants
from oxidize_jax.scheduler.pause import MaskUpdate
from oxidize_jax.scheduler.state import SchedulerState
from oxidize_jax.scheduler.submit import NewRequest


class Device:
    """Holds the state and sends it through one program after the other.

    Every program donates the state, so one that fails leaves none: see :meth:`forget`.

    Args:
      secret: word that enters every block hash.
      recorder: is told each event before it is applied.
      check_invariants: check the state after every run, and wait for it to be there.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        *,
        secret: int,
        recorder: NoRecorder,
        check_invariants: bool,
    ) -> None:
        self.config = config
        self.model = model
        self.secret = secret
        self.recorder = recorder
        self.check_invariants = check_invariants
        self._state: EngineState | None = None
        recorder.start(config, model.vocab_size, self.state.scheduler)

    @property
    def state(self) -> EngineState:
        """The state after all that has been dispatched, made anew where there is none."""
        if self._state is None:
            self._state = programs.start(self.config, self.model, np.uint32(self.secret))
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state

    def forget(self) -> None:
        """Drop the state, whatever a failed program has left of it."""
        self._state = None

    def restart(self) -> None:
        """Begin with a new state, after :meth:`forget`."""
        self.recorder.restart(self.state.scheduler)

    def submit(self, slot: int, new: NewRequest) -> None:
        """A request goes into ``slot``."""
        self.recorder.submit(slot, new)
        self._update(programs.submit(self.config, self.state.scheduler, np.int32(slot), new))

    def abort(self, slot: int) -> None:
        """The request in ``slot`` is finished."""
        self.recorder.abort(slot)
        self._update(programs.abort(self.state.scheduler, np.int32(slot)))

    def set_masks(self, new: MaskUpdate) -> None:
        """Requests get other token masks."""
        self.recorder.set_masks(new)
        self._update(programs.set_masks(self.config, self.state.scheduler, new))

    def fork(self, new: forks.Fork) -> None:
        """A request goes on in other slots too. The caller knows that it can be done."""
        self.recorder.fork(new)
        scheduler, _ = programs.fork(self.config, self.state.scheduler, new)
        self._update(scheduler)

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is hit again."""
        self.recorder.reset_prefix_cache()
        self._update(programs.reset_prefix_cache(self.state.scheduler))

    def preempt_all(self) -> None:
        """Every row is taken away. It is recorded nowhere: refuse it to who records."""
        self._update(programs.preempt_all(self.state.scheduler))

    def run(self, params: Params, max_steps: int) -> jax.Array:
        """Dispatch up to ``max_steps`` steps, and the read-out of what they come to.

        Returns ``i32[P]``, on its way to the host: see :func:`programs.unpack`.
        """
        self.recorder.run(self.state.scheduler, max_steps)
        self.state = programs.run(self.config, self.model, params, self.state, np.int32(max_steps))
        self.recorder.ran(self.state.scheduler)
        if self.check_invariants:
            invariants.check(self.state.scheduler)
        packed = programs.drain(self.config, self.state.scheduler)
        packed.copy_to_host_async()
        return packed

    def _update(self, scheduler: SchedulerState) -> None:
        self.state = programs.with_scheduler(self.state, scheduler)
