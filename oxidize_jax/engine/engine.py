"""Engine: the host shell round the pure step. The only mutable object of the core.

It holds the state, feeds it from an unbounded host queue through the request slots, runs
the step program, and reads new tokens back once per dispatch. It knows token ids only;
text belongs to :mod:`oxidize_jax.llm`.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine import programs
from oxidize_jax.engine.recorder import NoRecorder
from oxidize_jax.engine.request import EngineRequest, check_keys, check_request
from oxidize_jax.engine.step import EngineState, Model, Params, init_state
from oxidize_jax.scheduler import invariants, stats
from oxidize_jax.scheduler.fork import Fork
from oxidize_jax.scheduler.state import (
    ABORTED,
    FINISHED,
    LENGTH,
    NO_TOKEN,
    POOL_EXHAUSTED,
    STOPPED,
)
from oxidize_jax.scheduler.stats import StepStats
from oxidize_jax.scheduler.submit import NewRequest

FINISH_REASONS = {STOPPED: "stop", LENGTH: "length", ABORTED: "abort", POOL_EXHAUSTED: "length"}
"""Finish reasons as OpenAI and vLLM name them."""
STEPS_PER_DISPATCH = 16
"""Most steps that the device makes before the host looks."""


@dataclasses.dataclass(frozen=True)
class RequestUpdate:
    """What one dispatch added to a request."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None
    """For each token its likeliest alternatives ``(id, logprob)``, best first."""
    finish_reason: str | None
    pool_exhausted: bool
    num_cached_tokens: int
    num_preemptions: int


class EngineStepError(RuntimeError):
    """A step failed. Requests that were running are lost; the engine itself goes on."""


class Engine:
    """Runs requests through the pure step.

    Args:
      config: sizes and policy.
      model: the static part of the model (see :class:`~oxidize_jax.engine.step.Model`).
      params: its arrays.
      check_invariants: check every state that the host sees; slow, to hunt a fault.
      secret: word that enters every block hash; drawn at random unless given.
      recorder: is told every event, to write a trace that can be replayed.
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
        self._check = check_invariants
        self._secret = secrets.randbits(32) if secret is None else secret
        self.peak_blocks_used = 0
        """Most blocks that requests held in a step so far."""
        self._ids = itertools.count()
        self._queue: list[tuple[int, int, EngineRequest, int | None]] = []
        self._unfinished: set[int] = set()
        self._reset()
        self._recorder = recorder or NoRecorder()
        self._recorder.start(config, model.vocab_size, self.state.scheduler)

    def _reset(self) -> None:
        """A fresh device state. What had a slot is forgotten; the host queue stays."""
        r = self.config.max_num_requests
        self._unfinished &= {request_id for _, request_id, _, _ in self._queue}
        self.state: EngineState = init_state(self.config, self.model, self._secret)
        self._slots: list[int | None] = [None] * r
        self._requests: dict[int, tuple[int, EngineRequest]] = {}
        self._cursor = np.zeros((r,), np.int32)
        self._aborted_slots: list[int] = []
        self.step_stats: tuple[StepStats, ...] = ()
        """Statistics of the steps that the last :meth:`step` made, in order."""
        self._steps = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting, queued or running."""
        return len(self._unfinished)

    def has(self, request_id: int) -> bool:
        """Whether the request is still waiting, queued or running."""
        return request_id in self._unfinished

    def add(self, request: EngineRequest) -> int:
        """Queue a request and return its id. Raises ValueError for what can never run."""
        return self.add_group(request, [request.key])[0]

    def add_group(self, request: EngineRequest, keys: Sequence[tuple[int, int]]) -> list[int]:
        """Queue several continuations of one prompt, one for each threefry key; their ids.

        The prompt is computed once: the others are forks of the first and share its blocks
        until they write. Raises ValueError for what can never run.
        """
        self.validate(request)
        check_keys(keys)
        parent: int | None = None
        ids = []
        for key in keys:
            request_id = next(self._ids)
            self._unfinished.add(request_id)
            one = dataclasses.replace(request, key=key)
            heapq.heappush(self._queue, (request.priority, request_id, one, parent))
            ids.append(request_id)
            parent = ids[0]
        return ids

    def fork(self, request_id: int, keys: Sequence[tuple[int, int]]) -> list[int] | None:
        """Let a running request go on several times, one for each key, from where it stands.

        The children have its tokens so far, of which no update tells again, and share its
        blocks. Returns their ids, or None where nothing was done: it is not on the device
        (queued, finished, unknown), or there are fewer free request slots than keys. Raises
        ValueError for keys that are none.
        """
        check_keys(keys)
        self._abort_slots()
        entry = self._requests.get(request_id)
        free = [slot for slot, owner in enumerate(self._slots) if owner is None]
        if entry is None or request_id not in self._unfinished or len(free) < len(keys):
            return None
        (slot, request), taken = entry, free[: len(keys)]
        ids = [next(self._ids) for _ in keys]
        event = self._fork_event(slot, taken, keys, ids)
        scheduler, ok = programs.fork(self.config, self.state.scheduler, event)
        self._update(scheduler)
        if not ok:
            return None
        self._recorder.fork(event)
        for child, key, child_slot in zip(ids, keys, taken, strict=True):
            self._unfinished.add(child)
            self._slots[child_slot] = child
            self._requests[child] = (child_slot, dataclasses.replace(request, key=key))
            self._cursor[child_slot] = self._cursor[slot]
        return ids

    def _fork_event(
        self, parent: int, slots: list[int], keys: Sequence[tuple[int, int]], ids: list[int]
    ) -> Fork:
        """The event in the one shape that the program is compiled for."""
        r = self.config.max_num_requests
        children = np.full((r,), r, np.int32)
        children[: len(slots)] = slots
        words = np.zeros((r, 2), np.uint32)
        words[: len(keys)] = np.asarray(keys, np.uint32).reshape(-1, 2)
        arrivals = np.zeros((r,), np.int32)
        arrivals[: len(ids)] = ids
        fields: dict[str, Any] = {
            "parent": np.int32(parent),
            "children": children,
            "keys": words,
            "arrivals": arrivals,
            "last_tokens": np.full((r,), NO_TOKEN, np.int32),
            "last_logprobs": np.zeros((r,), np.float32),
        }
        return Fork(**fields)

    def reset_prefix_cache(self) -> None:
        """Let nothing computed so far be hit again: call it when ``params`` have changed.

        Requests that run go on with the KV they have, and nobody else will share it.
        """
        self._recorder.reset_prefix_cache()
        self._update(programs.reset_prefix_cache(self.state.scheduler))

    def abort(self, request_id: int) -> bool:
        """Drop a request, queued or running. False if it is unknown or has finished.

        Its blocks are free after the next :meth:`step`. It touches no device state, so a
        garbage collector may call it at any moment, in the middle of a step too.
        """
        if request_id not in self._unfinished:
            return False
        self._unfinished.discard(request_id)
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._aborted_slots.append(running[0])
        return True

    def step(self, max_steps: int = STEPS_PER_DISPATCH) -> list[RequestUpdate]:
        """Let the device make up to ``max_steps`` steps; return what is new.

        Raises EngineStepError if a step fails; the state is then made anew, without the
        requests that were on the device.
        """
        if not 1 <= max_steps <= STEPS_PER_DISPATCH:
            raise ValueError(f"max_steps={max_steps}: must be 1 to {STEPS_PER_DISPATCH}.")
        try:
            self._abort_slots()
            self._fill_slots()
            self._recorder.run(self.state.scheduler, max_steps)
            self.state = programs.run(
                self.config, self.model, self.params, self.state, np.int32(max_steps)
            )
            self._recorder.ran(self.state.scheduler)
            return self._collect(self._drain())
        except BaseException as error:
            # The state was donated: whatever stopped the run, it cannot be used again.
            lost = sorted(self._requests)
            self._reset()
            self._recorder.restart(self.state.scheduler)
            if not isinstance(error, Exception) or isinstance(error, invariants.InvariantError):
                raise
            raise EngineStepError(
                f"a step failed and {len(lost)} running requests were lost ({error}); "
                "the engine was reset: submit them again."
            ) from error

    def validate(self, request: EngineRequest) -> None:
        """Refuse, with a ValueError, what :meth:`add` would refuse."""
        check_request(self.config, self.model.vocab_size, request)

    def _abort_slots(self) -> None:
        # The slot stays taken until a drain sees that the row is gone.
        while self._aborted_slots:
            slot = self._aborted_slots.pop()
            self._recorder.abort(slot)
            self._update(programs.abort(self.state.scheduler, np.int32(slot)))

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
            new = self._new_request(request_id, request, parent)
            self._slots[slot] = request_id
            self._requests[request_id] = (slot, request)
            self._cursor[slot] = len(request.prompt_token_ids)
            self._recorder.submit(slot, new)
            self._update(programs.submit(self.config, self.state.scheduler, np.int32(slot), new))

    def _new_request(
        self, request_id: int, request: EngineRequest, parent: int | None
    ) -> NewRequest:
        config, prompt = self.config, request.prompt_token_ids
        # A parent that has gone, or has lost its slot, has no blocks to share any more.
        entry = None if parent is None else self._requests.get(parent)
        fork_of = config.max_num_requests if entry is None else entry[0]
        tokens = np.zeros((config.max_model_len,), np.int32)
        tokens[: len(prompt)] = prompt
        stops = np.full((config.max_stop_token_ids,), NO_TOKEN, np.int32)
        stops[: len(request.stop_token_ids)] = request.stop_token_ids
        limit = config.max_model_len
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "prompt_len": np.int32(len(prompt)),
            "max_new_tokens": np.int32(min(request.max_new_tokens, limit)),
            "min_new_tokens": np.int32(min(request.min_new_tokens, limit)),
            "arrival": np.int32(request_id),
            "priority": np.int32(request.priority),
            "stop_ids": stops,
            "temperature": np.float32(request.temperature),
            "top_k": np.int32(min(request.top_k, self.model.vocab_size)),
            "top_p": np.float32(request.top_p),
            "key": np.asarray(request.key, np.uint32),
            "salt": np.int32(request.salt),
            "use_cache": np.bool_(request.use_cache),
            "fork_of": np.int32(fork_of),
            "want_logprobs": np.bool_(bool(request.num_logprobs)),
        }
        return NewRequest(**arrays)

    def _update(self, scheduler: Any) -> None:
        self.state = programs.with_scheduler(self.state, scheduler)

    def _drain(self) -> programs.Drained:
        if self._check:
            invariants.check(self.state.scheduler)
        drained = programs.drain(
            self.config, self.state.scheduler, self._cursor.copy(), STEPS_PER_DISPATCH
        )
        drained = jax.device_get(drained)
        steps = int(drained.steps)
        self.step_stats = stats.read(drained.history, self._steps, steps)
        self._steps = steps
        used = [step.blocks_used for step in self.step_stats]
        self.peak_blocks_used = max([self.peak_blocks_used, *used])
        return drained

    def _collect(self, drained: programs.Drained) -> list[RequestUpdate]:
        """Updates of the requests that moved; frees the slots of those that are done."""
        ended = (drained.status == FINISHED) & (drained.row == self.config.max_num_seqs)
        moved = (drained.num_tokens > self._cursor) | ended
        updates = []
        for slot in np.flatnonzero(moved).tolist():
            owner = self._slots[slot]
            if owner is None:
                continue
            if ended[slot]:
                self._slots[slot] = None
            entry = self._requests.get(owner)
            if entry is None:  # aborted
                continue
            updates.append(self._read(slot, owner, entry[1], drained, bool(ended[slot])))
            self._cursor[slot] = drained.num_tokens[slot]
            if ended[slot]:
                self._requests.pop(owner, None)
                self._unfinished.discard(owner)
        return updates

    def _read(
        self,
        slot: int,
        owner: int,
        request: EngineRequest,
        drained: programs.Drained,
        ended: bool,
    ) -> RequestUpdate:
        count = int(drained.num_tokens[slot] - self._cursor[slot])
        reason = int(drained.finish_reason[slot])
        alternatives = request.num_logprobs
        top = None
        if alternatives:
            ids = drained.top_ids[slot, :count, :alternatives].tolist()
            values = drained.top_logprobs[slot, :count, :alternatives].tolist()
            top = tuple(tuple(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True))
        return RequestUpdate(
            request_id=owner,
            token_ids=tuple(drained.tokens[slot, :count].tolist()),
            logprobs=tuple(drained.logprobs[slot, :count].tolist()),
            top_logprobs=top,
            finish_reason=FINISH_REASONS[reason] if ended else None,
            pool_exhausted=ended and reason == POOL_EXHAUSTED,
            num_cached_tokens=int(drained.num_cached[slot]),
            num_preemptions=int(drained.num_preemptions[slot]),
        )
