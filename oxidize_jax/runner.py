"""Runner: runs an engine for whole texts and for streams, of one thread or of several.

What a dispatch brings goes to the completions of all, whoever made it. One thread at a time runs
the engine; the others wait for what comes of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from oxidize_jax.completion import Completion, Group
from oxidize_jax.engine.engine import STEPS_PER_DISPATCH, Engine, EngineStepError
from oxidize_jax.engine.updates import RequestUpdate
from oxidize_jax.outputs import StreamDelta
from oxidize_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Turn:
    """What came of :meth:`Runner.turn`."""

    error: Exception | None
    """Why the step failed, if it did."""
    progressed: bool
    """Whether a step ran tokens, or a request had news."""
    lost: frozenset[int]
    """Requests that are lost, of all callers, until somebody abandons them."""


class Runner:
    """Brings groups of completions through ``engine``. Threads may share it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        # Held by the thread that runs the engine.
        self._engine_lock = threading.RLock()
        # Held for moments, by who reads or writes what follows; notified after each dispatch.
        self._news = threading.Condition()
        self._running: dict[int, Completion] = {}
        self._streams: set[Group] = set()
        self._lost: set[int] = set()

    def run(self, groups: Sequence[Group], report: Callable[[int, int], None]) -> None:
        """Run ``groups`` to their ends.

        ``report`` is told after each dispatch how many completions are done, and how many tokens
        all have. Raises EngineStepError if a step fails.
        """
        total, tokens, left = sum(len(group.keys) for group in groups), 0, groups
        try:
            for group in groups:
                self.start(group)
            while left:
                self.advance(left)
                tokens += sum(group.num_tokens for group in left if group.finished)
                left = [group for group in left if not group.finished]
                running = sum(len(group.keys) - group.num_finished for group in left)
                report(total - running, tokens + sum(group.num_tokens for group in left))
        finally:
            for group in groups:
                self.abandon(group)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine for one thread alone, to do with it what is no step.

        If that fails, the engine has lost what it ran: those who wait for it are told.
        """
        try:
            with self._engine_lock:
                try:
                    yield self.engine
                except BaseException:
                    with self._news:
                        self._lost.update(i for i in self._running if not self.engine.has(i))
                    raise
        finally:
            with self._news:
                self._news.notify_all()  # that the engine can be run again

    def stream(self, group: Group) -> Iterator[StreamDelta]:
        """What is new of a group, as it comes. Closing the iterator aborts what is left."""
        self.start(group)
        self._streams.add(group)
        try:
            while True:
                # Deltas wait in the completions: another thread's dispatch may make them,
                # even while this one stands at its yield.
                with self._news:
                    fresh = [delta for c in group.completions if (delta := c.delta()) is not None]
                    ended = group.finished
                yield from fresh
                if not fresh and ended:
                    return
                if not fresh:
                    self.advance([group])
        finally:
            self.abandon(group)

    def start(self, group: Group) -> None:
        """Queue all of a group."""
        with self._news:
            group.ids = self.engine.add_group(group.request, group.keys)
            for index, request_id in enumerate(group.ids):
                completion = Completion(index, group.prompt_token_ids, group.params, self.tokenizer)
                group.completions.append(completion)
                self._running[request_id] = completion

    def abandon(self, group: Group) -> None:
        """Abort what an exception or a closed iterator left running.

        Without a lock: the garbage collector may close an iterator in any thread.
        """
        self._streams.discard(group)
        for request_id in group.ids:
            self._lost.discard(request_id)
            if self._running.pop(request_id, None) is not None:
                self.engine.abort(request_id)

    def advance(self, groups: Sequence[Group]) -> None:
        """A dispatch for everyone, or where another thread is at it, wait for that."""
        with self._news:
            if any(group.num_unshown for group in groups if group in self._streams):
                return
            for request_id in (i for group in groups for i in group.ids):
                if request_id in self._lost:
                    raise EngineStepError(
                        f"request {request_id} was lost in a failed step of another caller: "
                        "submit it again."
                    )
            if not self._engine_lock.acquire(blocking=False):
                self._news.wait()
                return
        try:
            self._dispatch(steps_per_dispatch(list(self._streams)))
        finally:
            with self._news:
                self._engine_lock.release()
                self._news.notify_all()

    def turn(self, max_steps: int) -> Turn:
        """A dispatch for everyone, by a thread that runs the engine for others.

        Unlike :meth:`advance` it raises nothing for what fails. A failed step loses what was on
        the device; where the text of one request cannot be made, that one alone is lost.
        """
        self._engine_lock.acquire()
        try:
            error, updates = self._step(max_steps)
            steps = self.engine.step_stats if error is None else ()
            with self._news:
                for update in updates:
                    try:
                        self._hand_over(update)
                    except Exception as failure:
                        error = failure
                        self.engine.abort(update.request_id)
                        self._lost.add(update.request_id)
                self._lost.update(i for i in list(self._running) if not self.engine.has(i))
                lost = frozenset(self._lost)
        finally:
            with self._news:
                self._engine_lock.release()
                self._news.notify_all()
        progressed = bool(updates) or any(step.scheduled_tokens for step in steps)
        return Turn(error, progressed, lost)

    def _step(self, max_steps: int) -> tuple[Exception | None, list[RequestUpdate]]:
        try:
            return None, self.engine.step(max_steps)
        except Exception as error:
            return error, []

    def take(self, groups: Sequence[Group]) -> list[tuple[int, StreamDelta]]:
        """What is new of ``groups`` since it was last taken, with the place of its group."""
        with self._news:
            return [
                (place, delta)
                for place, group in enumerate(groups)
                for completion in group.completions
                if (delta := completion.delta()) is not None
            ]

    def _dispatch(self, max_steps: int) -> None:
        """Run some steps for everyone, and hand each completion what is new of it."""
        taken = False
        try:
            updates = self.engine.step(max_steps)
            taken = True
            with self._news:
                for update in updates:
                    self._hand_over(update)
        except BaseException:
            # Whose updates were not handed over has a gap: it is lost too.
            with self._news:
                for request_id in list(self._running):
                    if not self.engine.has(request_id) or (taken and self.engine.abort(request_id)):
                        self._lost.add(request_id)
            raise

    def _hand_over(self, update: RequestUpdate) -> None:
        completion = self._running.get(update.request_id)
        if completion is None:
            return
        completion.update(update)
        if completion.finish_reason is not None:
            self._running.pop(update.request_id, None)
            if completion.matched_stop_string:
                # What the run under way adds to it is dropped.
                self.engine.abort(update.request_id)


def steps_per_dispatch(streams: Iterable[Group]) -> int:
    """How many steps the device makes before the host reads their tokens.

    1 while there is a stream whose reader has seen all there is, for a token that has been
    made is worth nothing until it is shown. Else as many as there can be: who waits for whole
    texts gains nothing by seeing half of one, and each dispatch costs the host some work. A
    stream that nobody reads any more soon has text unread, and holds nobody up.
    """
    waiting = any(not group.num_unshown for group in streams)
    return 1 if waiting else STEPS_PER_DISPATCH
