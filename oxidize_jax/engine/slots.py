"""The host's side of the request slots: what goes to the device before a run."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np

from oxidize_jax.engine import programs
from oxidize_jax.engine.constraint import Constraint
from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.engine.trace import Submit, new_request, pad_masks
from oxidize_jax.engine.updates import Running
from oxidize_jax.scheduler.submit import NewRequest
from oxidize_jax.types import replace

if TYPE_CHECKING:
    from oxidize_jax.config import EngineConfig
    from oxidize_jax.engine.recorder import NoRecorder
    from oxidize_jax.engine.step import EngineState, Model


class Slots:
    """What :class:`~oxidize_jax.engine.engine.Engine` sends: aborts, masks, new requests."""

    if TYPE_CHECKING:
        config: EngineConfig
        model: Model
        state: EngineState
        _recorder: NoRecorder
        _queue: list[tuple[int, int, EngineRequest, int | None]]
        _unfinished: set[int]
        _slots: list[int | None]
        _requests: dict[int, Running]
        _aborted: list[tuple[int, int]]
        _masks: dict[int, tuple[int, np.ndarray]]

    def _send_aborts(self) -> None:
        # The slot stays taken until a drain sees that the row is gone.
        while self._aborted:
            slot, owner = self._aborted.pop()
            if self._slots[slot] == owner:
                self._recorder.abort(slot)
                self._update(programs.abort(self.state.scheduler, np.int32(slot)))

    def _waits_for_masks(self) -> bool:
        """Whether all requests on the device have to be read before they can go on."""
        constraints = self._constraints()
        return bool(constraints) and None not in constraints

    def _constraints(self) -> list[Constraint | None]:
        """Of each request on the device. Taken in one piece: an abort may come any time."""
        return [running.constraint for running in list(self._requests.values())]

    def _send_masks(self) -> None:
        """Send the masks of tokens that come next, as many as there are rows in one call."""
        due = [(*entry, self._requests.get(owner)) for owner, entry in self._masks.items()]
        due = [(slot, mask, running) for slot, mask, running in due if running is not None]
        self._masks.clear()
        while due:
            part, due = due[: self.config.max_num_seqs], due[self.config.max_num_seqs :]
            slots, masks, all_running = zip(*part, strict=True)
            pause_at = [running.cursor + 1 for running in all_running]
            new = pad_masks(self.config, slots, pause_at, masks)
            self._recorder.set_masks(new)
            self._update(programs.set_masks(self.config, self.state.scheduler, new))

    def _fill_slots(self) -> None:
        """Move queued requests into free slots, the first in line first."""
        for slot, owner in enumerate(self._slots):
            while self._queue and self._queue[0][1] not in self._unfinished:
                heapq.heappop(self._queue)  # aborted while it was queued
            if not self._queue:
                return
            if owner is not None:
                continue
            _, request_id, request, parent = heapq.heappop(self._queue)
            new = self._new_request(slot, request_id, request, parent)
            self._slots[slot] = request_id
            running = Running(slot, request, len(request.prompt_token_ids))
            if request.grammar is not None:
                running.constraint = request.constraint(self.config, request.grammar)
                mask = running.constraint.mask()
                new = replace(
                    new, token_mask=mask, has_mask=np.bool_(True), pause_after=np.int32(1)
                )
            self._requests[request_id] = running
            if request_id not in self._unfinished:  # aborted this moment
                self._requests.pop(request_id, None)
                self._aborted.append((slot, request_id))
            self._recorder.submit(slot, new)
            self._update(programs.submit(self.config, self.state.scheduler, np.int32(slot), new))

    def _new_request(
        self, slot: int, request_id: int, request: EngineRequest, parent: int | None
    ) -> NewRequest:
        # A parent that has gone, or has lost its slot, has no blocks to share any more.
        entry = None if parent is None else self._requests.get(parent)
        limit = self.config.max_model_len
        event = Submit(
            slot,
            prompt=request.prompt_token_ids,
            max_new_tokens=min(request.max_new_tokens, limit),
            arrival=request_id,
            stop_ids=request.stop_token_ids + tuple(~i for i in request.held_token_ids),
            fork_of=None if entry is None else entry.slot,
            want_logprobs=request.num_logprobs is not None,
            **request.options(
                min_new_tokens=min(request.min_new_tokens, limit),
                top_k=min(request.top_k, self.model.vocab_size),
            ),
        )
        return new_request(self.config, event)

    def _update(self, scheduler: Any) -> None:
        self.state = programs.with_scheduler(self.state, scheduler)
