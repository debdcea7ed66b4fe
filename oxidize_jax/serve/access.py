"""Access: gives each request an id, and tells of the request when it has ended.

The id is the client's ``X-Request-Id`` where that is sane (vLLM takes it too), else a new one; it
is in the answer, in the log and in the trace. It is a name for people: requests with the same id
are different requests.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oxidize_jax.serve.job import Job, now

_log = logging.getLogger("oxidize_jax.serve.access")
_KEY = "oxidize_jax.seen"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
_LONGEST_PATH = 200


class Seen:
    """What there is to tell of a request. Nothing in it is of its prompt or of its text."""

    def __init__(self, scope: Scope) -> None:
        self.headers = Headers(scope=scope)
        given = self.headers.getlist("x-request-id")
        sane = len(given) == 1 and _SANE.fullmatch(given[0]) is not None
        self.request_id = given[0] if sane else uuid.uuid4().hex
        self.method: str = scope["method"]
        self.path: str = scope["path"][:_LONGEST_PATH]
        self.begun = now()
        self.ended: float | None = None
        self.status: int | None = None
        """None where nothing was answered: the client had gone."""
        self.job: Job | None = None

    @property
    def num_prompt_tokens(self) -> int | None:
        """Over all prompts of a request that generates."""
        if self.job is None:
            return None
        return sum(len(group.prompt_token_ids) for group in self.job.groups)

    @property
    def num_generated_tokens(self) -> int | None:
        """So far, over all completions."""
        return None if self.job is None else sum(group.num_tokens for group in self.job.groups)

    @property
    def finish_reasons(self) -> list[str] | None:
        """Of all completions; ``abort`` for one that did not come to its end."""
        if self.job is None:
            return None
        return [
            reason
            for group in self.job.groups
            for reason in (
                [c.finish_reason or "abort" for c in group.completions]
                or ["abort"] * len(group.keys)
            )
        ]

    def fields(self) -> dict[str, Any]:
        """For the log. What has no value is left out."""
        ended = now() if self.ended is None else self.ended
        fields = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "prompt_tokens": self.num_prompt_tokens,
            "generated_tokens": self.num_generated_tokens,
            "duration": round(ended - self.begun, 6),
            "finish_reasons": self.finish_reasons,
        }
        return {name: value for name, value in fields.items() if value is not None}


Observer = Callable[[Seen], None]


class Access:
    """The outermost middleware. Plain ASGI, like the other: Starlette's kind hides disconnects."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, and what the observers are told of it, whatever its end was."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = scope[_KEY] = Seen(scope)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = seen.request_id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            seen.status = seen.status or 500  # which is answered further out
            raise
        finally:
            seen.ended = now()
            for observer in self._observers:
                _tell(observer, seen)
            seen.job = None  # the connection may keep its last scope for as long as it stands


def note_job(scope: Scope, job: Job) -> None:
    """The request of ``scope`` runs as ``job``."""
    seen = scope.get(_KEY)
    if seen is not None:
        seen.job = job


def request_id_of(scope: Scope) -> str | None:
    """Id of the request of ``scope``, where :class:`Access` has seen it."""
    seen = scope.get(_KEY)
    return None if seen is None else seen.request_id


def log_access(seen: Seen) -> None:
    """One line for a request."""
    _log.info("request", extra={"fields": seen.fields()})


def _tell(observer: Observer, seen: Seen) -> None:
    try:
        observer(seen)
    except Exception:  # a log that cannot be written fails no request
        logging.getLogger(__name__).exception("a request could not be told of")
