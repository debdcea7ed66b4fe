"""EngineThread: one thread that runs the engine for a server, and what it tells the event loop.

::

    event loop                          engine thread
    submit(job)   ---- commands ---->   start its groups
                                        turn: a dispatch for everyone
    job.event     <-- one call a turn   whoever has news
    take(job)          text waits in the completions until it is read
    release(job)  ---- commands ---->   (aborted at once; its blocks are free two steps on)

New requests join the running batch at the next turn; the scheduler on the device decides who
gets a row. The idea of an engine core apart from the front end is vLLM's (``v1/engine/core.py``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Sequence

from oxidize_jax.llm import LLM
from oxidize_jax.outputs import StreamDelta
from oxidize_jax.runner import Turn
from oxidize_jax.serve.errors import ApiError
from oxidize_jax.serve.job import Job, now
from oxidize_jax.serve.metrics import Metrics
from oxidize_jax.serve.settings import ServeSettings
from oxidize_jax.serve.watch import Watch

_log = logging.getLogger(__name__)
_MOST_FAILURES = 3
"""Steps that fail one after the other before the server calls itself unhealthy."""
_POLL_S = 0.5
"""How often an idle thread looks up."""
LOST = "the engine lost this request in a step that failed; send it again."


class EngineThread:
    """Runs the engine of ``llm``. All methods but its own thread's are the event loop's."""

    def __init__(self, llm: LLM, settings: ServeSettings, metrics: Metrics) -> None:
        self._llm = llm
        self._runner = llm.runner
        self._settings = settings
        self._metrics = metrics
        self._commands: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.watch = Watch(llm, wake=lambda: self._commands.put(None))
        self._live: list[Job] = []
        self._reserved = 0
        self._stopping = False
        self._settled = True
        self._progress_at = now()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Abort what is left and end the thread. False if a step does not come to its end."""
        self.cut()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def cut(self) -> None:
        """Take nothing new, and end what is left with status 503 after the step that runs."""
        self._stopping = True
        self._commands.put(None)

    @property
    def num_reserved(self) -> int:
        """Sequences that have a place: waiting, running or being encoded."""
        return self._reserved

    @property
    def is_idle(self) -> bool:
        """Nothing is reserved, waits or runs, and the device has let the last rows go."""
        return self._reserved == 0 and self._commands.empty() and self._settled

    def reserve(self, count: int) -> None:
        """Take ``count`` places. Raises ApiError: 429 if the queue is full, 503 when stopping."""
        if self._stopping:
            raise ApiError(503, "the server is shutting down.", headers={"Retry-After": "10"})
        room = self._llm.config.max_num_seqs + self._settings.max_queue
        if count > room:
            raise ApiError(
                400, f"{count} completions in one request: the server has room for {room}."
            )
        if self._reserved + count > room:
            self._metrics.refused.inc()
            raise ApiError(
                429,
                f"the queue is full: {self._reserved} of {room} places are taken; try again.",
                code="queue_full",
                headers={"Retry-After": str(self._retry_after())},
            )
        self._reserved += count

    def unreserve(self, count: int) -> None:
        """Give places back."""
        self._reserved -= count

    def submit(self, job: Job) -> None:
        """Let a job begin with the next turn."""
        if not self._reserved:
            raise RuntimeError("reserve places for a job before it is submitted")
        if len(self._live) == 0:
            self._progress_at = now()  # it was idle: no stall until now
        self._commands.put(job)

    def take(self, job: Job) -> list[tuple[int, StreamDelta]]:
        """What is new of a job since the last call, and the place of its group."""
        return self._runner.take(job.groups)

    def release(self, job: Job) -> None:
        """Abort what is left of a job; nobody reads it any more."""
        job.cancelled = True
        for group in job.groups:
            self._runner.abandon(group)

    def trouble(self) -> str | None:
        """Why the server is not healthy, if it is not."""
        if self._stopping:
            return "shutting down"
        if not self._thread.is_alive():
            return "the engine thread has ended"
        if self._failures >= _MOST_FAILURES:
            return f"the last {self._failures} steps failed"
        stalled = now() - self._progress_at
        if (self._live or not self._commands.empty()) and stalled > self._settings.stall_s:
            return f"the engine has made no progress for {stalled:.0f} s"
        return None

    def _retry_after(self) -> int:
        """Seconds, a guess: a longer line takes longer."""
        return min(60, 1 + math.ceil(self._reserved / (8 * self._llm.config.max_num_seqs)))

    # What follows is the engine thread's own.

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._take_commands()
                if self._live:
                    self._turn()
                self.watch.turn(idle=not self._live)
            except Exception as error:  # nothing here should fail; the thread lives on if it does
                _log.exception("the engine thread met an error")
                self._fail_all(error)
        self._fail_all(ApiError(503, "the server is shutting down."))
        self._settle()

    def _take_commands(self) -> None:
        """Start the jobs that have come; wait for one where there is nothing to do."""
        wait = not self._live
        while True:
            try:
                job = self._commands.get(block=wait, timeout=_POLL_S)
            except queue.Empty:
                return
            wait = False
            if job is not None and not job.cancelled:
                self._begin(job)

    def _begin(self, job: Job) -> None:
        if not self._live:
            self._progress_at = now()
        self._settled = False
        self._live.append(job)
        try:
            for group in job.groups:
                self._runner.start(group)
        except Exception as error:
            job.error = error
            self._end(job)
        if job.cancelled:  # while it was started
            self.release(job)

    def _turn(self) -> None:
        streams = any(job.stream and not job.cancelled for job in self._live)
        steps = 1 if streams else self._settings.steps_per_dispatch
        turn = self._runner.turn(steps)
        self._note(turn)
        news = [job for job in self._live if self._update(job, turn)]
        self._live = [job for job in self._live if not (job.ended or job.cancelled)]
        _announce(news)
        if not self._live:
            self._settle()

    def _note(self, turn: Turn) -> None:
        if turn.error is not None:
            self._failures += 1
            self._metrics.step_failures.inc()
            _log.error("a step failed", exc_info=turn.error)
        elif turn.progressed:
            self._failures = 0
        if turn.progressed:
            self._progress_at = now()
        stats = self._llm.engine.step_stats if turn.error is None else ()
        if stats:
            last = stats[-1]
            self._metrics.running.set(last.num_running)
            waiting = self._llm.engine.num_unfinished - last.num_running
            self._metrics.waiting.set(max(0, waiting))
            self._metrics.kv_usage.set(last.blocks_used / self._llm.config.num_blocks)
            self._metrics.preemptions.inc(sum(step.preemptions for step in stats))

    def _update(self, job: Job, turn: Turn) -> bool:
        """Take note of what a turn brought a job; whether its reader is to be told."""
        if job.cancelled:
            return False
        if turn.lost and not turn.lost.isdisjoint(job.request_ids):
            job.error = ApiError(500, LOST, code="engine_step_failed")
            self._end(job)
            return True
        news = self._measure(job)
        if job.finished:
            self._end(job)
            return True
        return news and job.stream

    def _measure(self, job: Job) -> bool:
        """Count the tokens of a job; whether it has new ones."""
        time, news, metrics = now(), False, self._metrics
        for group, clock in zip(job.groups, job.clocks, strict=True):
            if clock.scheduled is None and (
                group.num_tokens or any(map(self._llm.engine.is_scheduled, group.ids))
            ):
                clock.scheduled = time
                metrics.queue_time.observe(time - job.arrival)
            for index, completion in enumerate(group.completions):
                before, count = clock.tokens.get(index, 0), completion.num_tokens
                if count > before:
                    news = True
                    if not clock.last:
                        clock.first = time
                        metrics.first_token.observe(time - job.arrival)
                        metrics.prompt_tokens.inc(len(group.prompt_token_ids))
                        metrics.prefix_queries.inc(len(group.prompt_token_ids))
                        metrics.prefix_hits.inc(completion.num_cached_tokens)
                    if index in clock.last:
                        gap = (time - clock.last[index]) / (count - before)
                        for _ in range(count - before):
                            metrics.inter_token.observe(gap)
                    metrics.generation_tokens.inc(count - before)
                    clock.tokens[index], clock.last[index] = count, time
                if completion.finish_reason is not None and index not in clock.ended:
                    news = True
                    clock.ended.add(index)
                    metrics.ended(completion.finish_reason)
                    metrics.whole.observe(time - job.arrival)
        return news

    def _end(self, job: Job) -> None:
        """Nothing more comes of a job."""
        for group in job.groups:
            self._runner.abandon(group)
        job.ended = True

    def _settle(self) -> None:
        """Let the device see the last rows go, and show that nothing runs."""
        turn = self._runner.turn(1)
        if turn.error is not None:
            _log.error("the engine could not be cleaned", exc_info=turn.error)
        for gauge in (self._metrics.running, self._metrics.waiting, self._metrics.kv_usage):
            gauge.set(0)
        self._settled = True

    def _fail_all(self, error: Exception) -> None:
        jobs, self._live = self._live, []
        with contextlib.suppress(queue.Empty):
            while self._stopping:
                job = self._commands.get_nowait()
                jobs += [] if job is None else [job]
        for job in jobs:
            job.error = error
            self._end(job)
        _announce(jobs)


def _announce(jobs: Sequence[Job]) -> None:
    """Wake the readers of ``jobs``, with one call for each event loop."""
    by_loop: dict[object, list[Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for those in by_loop.values():
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            those[0].loop.call_soon_threadsafe(_wake, those)


def _wake(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.event.set()
