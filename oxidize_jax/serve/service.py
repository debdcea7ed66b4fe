"""Service: what all endpoints of one server share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from oxidize_jax.completion import Group
from oxidize_jax.llm import LLM
from oxidize_jax.prompts import Prompt
from oxidize_jax.sampling.params import SamplingParams
from oxidize_jax.serve.engine_thread import EngineThread
from oxidize_jax.serve.errors import ApiError, bad_request
from oxidize_jax.serve.job import Job, now
from oxidize_jax.serve.metrics import Metrics
from oxidize_jax.serve.protocol import Generation
from oxidize_jax.serve.settings import ServeSettings
from oxidize_jax.serve.watch import Picture

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_ENCODERS = 2
"""Threads that encode texts, render templates and wait for grammars."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a request wants of the engine."""

    prepare: Callable[[], list[Group]]
    """Makes its groups, in a thread. Raises ValueError for what cannot run."""
    count: int
    """Completions, over all its prompts."""
    stream: bool
    score: bool = False
    """Its prompts get their log probabilities first."""
    generate: bool = True
    """False: nothing is left to do then."""


class Service:
    """An LLM with the thread that runs it, and the limits of the server."""

    def __init__(self, llm: LLM, settings: ServeSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.model_name = settings.served_model_name or _base_name(llm.options.model)
        self.metrics = Metrics(self.model_name)
        self.thread = EngineThread(llm, settings, self.metrics)
        self.started = now()
        self._encoders = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._num_scoring = 0
        self._can_look = False

    def start(self) -> None:
        """Start the engine thread."""
        self.thread.start()

    async def stop(self) -> None:
        """Abort what is left and end all threads."""
        stopped = await asyncio.to_thread(self.thread.stop)
        if not stopped:
            _log.error("the engine thread did not end")
        for pool in (self._encoders, self._scorer):
            pool.shutdown(wait=stopped, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served; None is the one that is."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"there is no model of that name; this server has {self.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    def prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams, asked: Generation
    ) -> list[Group]:
        """Groups for ``prompts``, with the priority and the salt of the request."""
        salted = [_salted(prompt, asked.cache_salt) for prompt in prompts]
        return self.llm.prepare(salted, params, priority=[asked.priority or 0] * len(prompts))

    @contextlib.asynccontextmanager
    async def running(self, work: Work) -> AsyncIterator[Job]:
        """A job for ``work``, submitted; at the end what is left of it is aborted.

        Raises ApiError for what cannot run, and where there is no room.
        """
        self.thread.reserve(work.count)
        job, arrival = None, now()
        try:
            groups = await self.encode(work.prepare)
            if work.score:
                await self.score(lambda: self.llm.score_prompts(groups))
            job = Job(groups, stream=work.stream, arrival=arrival)
            if work.generate:
                self.thread.submit(job)
            else:
                job.ended = True
                job.event.set()
            yield job
        finally:
            if job is not None:
                self.thread.release(job)
            self.thread.unreserve(work.count)

    async def picture(self) -> Picture | None:
        """The engine as it is about now; None where there is nothing to see yet."""
        if not self._can_look:
            await self.encode(self.thread.watch.compile)
            self._can_look = True
        return await self.thread.watch.picture()

    async def encode(self, function: Callable[[], _T]) -> _T:
        """``function()`` in a thread that encodes. Raises ApiError 400 where it refuses."""
        return await self._call(self._encoders, function)

    async def score(self, function: Callable[[], _T]) -> _T:
        """``function()`` in the thread for embeddings and scores; a bounded number of them wait."""
        if self._num_scoring > self.settings.max_queue:
            self.metrics.refused.inc()
            raise ApiError(
                429, "too many embeddings and scores wait; try again.", code="queue_full",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        self._num_scoring += 1
        try:
            return await self._call(self._scorer, function)
        finally:
            self._num_scoring -= 1

    async def _call(self, pool: ThreadPoolExecutor, function: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function)
        except ValueError as error:
            raise bad_request(error) from None
        except RecursionError:
            raise ApiError(400, "the request is nested too deeply; make it flatter.") from None
        except ImportError as error:
            raise ApiError(400, f"this server cannot do that: {error}") from None


def _salted(prompt: Prompt, salt: str | None) -> Prompt:
    if salt is None:
        return prompt
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": salt}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


def _base_name(model: str) -> str:
    """Name of a model for clients: no folder of this machine is part of it."""
    path = Path(model).expanduser()
    return path.name if path.exists() else model
