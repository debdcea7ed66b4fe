"""The host's side of the request slots: who has which, and what is to be sent about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.constraint import Constraint, Verdict
from oxidize_jax.engine.device import Device
from oxidize_jax.engine.host_queue import HostQueue, Queued
from oxidize_jax.engine.programs import Drained
from oxidize_jax.engine.trace import Submit, new_request, pad_masks
from oxidize_jax.engine.updates import RequestUpdate, Running, judged, news
from oxidize_jax.scheduler.state import FINISHED
from oxidize_jax.scheduler.submit import NewRequest
from oxidize_jax.types import replace


class Slots:
    """The request slots of one state.

    Attributes:
      owners: the request in each slot, None for a free one.
      running: of each request in a slot, unless it was aborted, where it stands.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.owners: list[int | None] = [None] * config.max_num_requests
        self.running: dict[int, Running] = {}
        self._aborted: list[tuple[int, int]] = []
        self._masks: dict[int, tuple[int, np.ndarray]] = {}  # by owner: slot, next mask

    @property
    def free(self) -> list[int]:
        """The slots without an owner."""
        return [slot for slot, owner in enumerate(self.owners) if owner is None]

    @property
    def constraints(self) -> list[Constraint | None]:
        """Of each running request. Taken in one piece: an abort may come any time."""
        return [running.constraint for running in list(self.running.values())]

    @property
    def all_wait_for_masks(self) -> bool:
        """Whether all requests on the device have to be read before they can go on."""
        constraints = self.constraints
        return bool(constraints) and None not in constraints

    def take(self, request_id: int, running: Running) -> None:
        """The request has the slot that ``running`` names."""
        self.owners[running.slot] = request_id
        self.running[request_id] = running

    def withdraw(self, request_id: int) -> None:
        """The request goes on no more. Its slot stays taken until its row is seen to be gone."""
        running = self.running.pop(request_id, None)
        if running is not None:
            self._aborted.append((running.slot, request_id))

    def send_aborts(self, device: Device) -> None:
        """Tell the device of the requests that were withdrawn."""
        while self._aborted:
            slot, owner = self._aborted.pop()
            if self.owners[slot] == owner:
                device.abort(slot)

    def send_masks(self, device: Device) -> None:
        """Send the masks of tokens that come next, as many as there are rows in one call."""
        due = [(*entry, self.running.get(owner)) for owner, entry in self._masks.items()]
        due = [(slot, mask, running) for slot, mask, running in due if running is not None]
        self._masks.clear()
        while due:
            part, due = due[: self.config.max_num_seqs], due[self.config.max_num_seqs :]
            slots, masks, all_running = zip(*part, strict=True)
            pause_at = [running.cursor + 1 for running in all_running]
            device.set_masks(pad_masks(self.config, slots, pause_at, masks))

    def fill(self, device: Device, queue: HostQueue) -> None:
        """Move queued requests into free slots, the first in line first."""
        for slot in self.free:
            entry = queue.pop()
            if entry is None:
                return
            new, running = self._new_request(slot, entry)
            self.take(entry.request_id, running)
            if entry.request_id not in queue:  # aborted this moment
                self.withdraw(entry.request_id)
            device.submit(slot, new)

    def collect(self, owners: Sequence[int | None], drained: Drained) -> list[RequestUpdate]:
        """News of the requests that moved; frees the slots of those that are done.

        ``owners`` are those of the time at which the run was dispatched.
        """
        done = (drained.status == FINISHED) & (drained.row == self.config.max_num_seqs)
        lengths, is_done = drained.num_tokens.tolist(), done.tolist()
        updates = []
        for slot, owner in enumerate(owners):
            if owner is None:
                continue
            if is_done[slot] and self.owners[slot] == owner:
                self.owners[slot] = None
            running = self.running.get(owner)
            if running is None:  # aborted, or told of already
                continue
            in_row = bool(drained.row[slot] < self.config.max_num_seqs)
            running.scheduled |= in_row or lengths[slot] > running.cursor
            if is_done[slot] or lengths[slot] > running.cursor:
                update = news(owner, running, drained, is_done[slot])
                if running.constraint is not None:
                    update = self._constrained(running, running.constraint, update)
                updates.append(update)
            if is_done[slot]:
                self.running.pop(owner, None)
        return updates

    def _new_request(self, slot: int, entry: Queued) -> tuple[NewRequest, Running]:
        """What the device gets of a request, and what the host keeps."""
        request, limit = entry.request, self.config.max_model_len
        # A parent that has gone, or has lost its slot, has no blocks to share any more.
        parent = None if entry.parent is None else self.running.get(entry.parent)
        event = Submit(
            slot,
            prompt=request.prompt_token_ids,
            max_new_tokens=min(request.max_new_tokens, limit),
            arrival=entry.request_id,
            stop_ids=request.stop_token_ids + tuple(~i for i in request.held_token_ids),
            fork_of=None if parent is None else parent.slot,
            num_logprobs=-1 if request.num_logprobs is None else request.num_logprobs,
            **request.options(
                min_new_tokens=min(request.min_new_tokens, limit),
                top_k=min(request.top_k, self.vocab_size),
            ),
        )
        new = new_request(self.config, event)
        running = Running(slot, request, len(request.prompt_token_ids))
        if request.grammar is not None:
            running.constraint = request.constraint(self.config, request.grammar)
            mask = running.constraint.mask()
            new = replace(new, token_mask=mask, has_mask=np.bool_(True), pause_after=np.int32(1))
        return new, running

    def _constrained(
        self, running: Running, constraint: Constraint, update: RequestUpdate
    ) -> RequestUpdate:
        """Move a grammar on, and keep the mask that comes next; or end the request."""
        owner, ended = update.request_id, update.finish_reason is not None
        verdict = constraint.accept(update.token_ids, ended=ended)
        if verdict.finish_reason is None and not ended:
            try:
                self._masks[owner] = running.slot, constraint.mask()
            except Exception as error:
                verdict = Verdict(len(update.token_ids), "abort", str(error))
        if verdict.finish_reason is not None:
            self.withdraw(owner)
        return judged(update, verdict)
