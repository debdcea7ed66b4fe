"""Answer: brings a job to its client, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oxidize_jax.completion import Group
from oxidize_jax.outputs import StreamDelta
from oxidize_jax.serve.access import note_job, request_id_of
from oxidize_jax.serve.errors import ApiError, json_bytes, json_response
from oxidize_jax.serve.job import Job
from oxidize_jax.serve.service import Service, Work

_log = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy would hold the text back
]


class Renderer(Protocol):
    """Makes an answer of groups."""

    def whole(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def part(self, place: int, group: Group, delta: StreamDelta) -> list[dict[str, Any]]:
        """Chunks for what is new of a completion of ``group``, the one at ``place``."""
        ...

    def last(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Chunks behind all others."""
        ...


class Answer(Response):
    """Runs ``work`` and sends what comes of it.

    Whatever ends it early (the client has gone, or does not read; a time-out; the server stops)
    aborts the job.
    """

    def __init__(self, service: Service, work: Work, renderer: Renderer) -> None:
        super().__init__()
        self._service = service
        self._work = work
        self._renderer = renderer
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this one response."""
        try:
            error = await self._run(receive, scope, send)
        except _Unread:
            fields = {"request_id": request_id_of(scope)}
            _log.warning("a client did not read its stream: aborted", extra={"fields": fields})
            return  # without an end: the server closes the connection
        if error is None:
            return
        if not self._begun:
            await error.response()(scope, receive, send)
            return
        try:
            await self._write(send, b"data: " + json_bytes(error.body) + b"\n\n" + _DONE, end=True)
        except _Unread:
            _log.warning("a client did not read its stream")

    async def _run(self, receive: Receive, scope: Scope, send: Send) -> ApiError | None:
        limit = self._service.settings.request_timeout_s
        try:
            async with asyncio.timeout(limit), self._service.running(self._work) as job:
                note_job(scope, job)
                listener = asyncio.create_task(_gone(receive))
                listener.add_done_callback(lambda _: job.event.set())
                try:
                    if self._work.stream:
                        await self._stream(job, listener, send)
                    else:
                        await self._whole(job, listener, scope, receive, send)
                finally:
                    listener.cancel()
        except ApiError as error:
            return error
        except TimeoutError:
            return ApiError(504, f"the request took longer than {limit:g} s and was aborted.")
        except _Unread:
            raise
        except Exception:
            _log.exception(
                "a request failed", extra={"fields": {"request_id": request_id_of(scope)}}
            )
            return ApiError(500, "the server met an error; it has been logged.")
        return None

    async def _whole(
        self, job: Job, listener: asyncio.Task[None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        while not job.ended:
            await job.event.wait()
            job.event.clear()
            if listener.done():
                return
        if job.error is not None:
            raise job.error
        await json_response(self._renderer.whole(job.groups))(scope, receive, send)

    async def _stream(self, job: Job, listener: asyncio.Task[None], send: Send) -> None:
        """Nothing is sent before the first news, so that what fails until then has a status."""
        ended = False
        while not ended:
            await job.event.wait()
            job.event.clear()
            if listener.done():
                return
            ended = job.ended  # first: what comes after it is read is news of the next call
            if job.error is not None:
                raise job.error
            chunks = [
                chunk
                for place, delta in self._service.thread.take(job)
                for chunk in self._renderer.part(place, job.groups[place], delta)
            ]
            if chunks:
                await self._write(send, _events(chunks))
        await self._write(send, _events(self._renderer.last(job.groups)) + _DONE, end=True)

    async def _write(self, send: Send, data: bytes, *, end: bool = False) -> None:
        try:
            async with asyncio.timeout(self._service.settings.write_timeout_s) as limit:
                if not self._begun:
                    self._begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await send({"type": "http.response.body", "body": data, "more_body": not end})
        except TimeoutError:
            if limit.expired():
                raise _Unread from None
            raise


class _Unread(Exception):
    """The client has not read what it was sent."""


async def _gone(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _events(chunks: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks)
