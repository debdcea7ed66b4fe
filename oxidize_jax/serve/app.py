"""The application: endpoints, who may call them, and errors in one shape."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

try:
    import uvicorn
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from oxidize_jax.serve import chat, completions, info, page
    from oxidize_jax.serve.access import Access, Observer, log_access, request_id_of
    from oxidize_jax.serve.hosts import CalledByName
except ImportError as error:
    raise ImportError(
        f"{error.name} is not installed: pip install 'oxidize-jax[serve]'", name=error.name
    ) from None

from oxidize_jax import __version__
from oxidize_jax.llm import LLM
from oxidize_jax.serve.errors import ApiError, json_response
from oxidize_jax.serve.openapi import BODY, BUSY, Endpoint, document
from oxidize_jax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from oxidize_jax.serve.service import Service
from oxidize_jax.serve.settings import ServeSettings

_log = logging.getLogger(__name__)
_LAST_STEP_S = 5
"""How long a step may take in which requests that are cut off end."""
_Handle = Callable[[Service, Request], Awaitable[Response]]
_POST, _GET = "POST", "GET"
_ENDPOINTS = [
    Endpoint(
        _POST, "/v1/completions", completions.completions, "Complete one prompt, or several.",
        CompletionRequest, "Completion", streams=True, errors=(*BODY, *BUSY),
    ),
    Endpoint(
        _POST, "/v1/chat/completions", chat.chat, "Answer a conversation.",
        ChatRequest, "Chat", streams=True, errors=(*BODY, *BUSY),
    ),
    Endpoint(
        _POST, "/v1/embeddings", info.embeddings, "Embed texts.",
        EmbeddingRequest, "Embeddings", errors=(*BODY, 429, 500),
    ),
    Endpoint(_GET, "/v1/models", info.models, "The model, in a list.", None, "Models"),
    Endpoint(
        _GET, "/v1/models/{name:path}", info.models, "The model.", None, "Model", errors=(404,)
    ),
    Endpoint(
        _POST, "/tokenize", info.tokenize, "Token ids of a text or a conversation.",
        TokenizeRequest, "Tokens", errors=BODY,
    ),
    Endpoint(
        _POST, "/detokenize", info.detokenize, "The text of token ids.",
        DetokenizeRequest, "Text", errors=BODY,
    ),
    Endpoint(
        _GET, "/tokenizer_info", info.tokenizer_info, "Special tokens and chat template.",
        None, "TokenizerInfo",
    ),
    Endpoint(_GET, "/health", info.health, "Whether all is well.", None, "Health",
             errors=(503,), open=True),
    Endpoint(_GET, "/metrics", info.metrics, "Metrics for Prometheus.", media="text/plain"),
    Endpoint(_GET, "/version", info.version, "The version of this package.", None, "Version"),
]  # fmt: skip
_PAGE = [
    Endpoint(_GET, "/", page.page, "A page for people.", media="text/html", open=True),
    Endpoint(
        _GET, "/engine", page.engine, "Rows, requests and blocks, as the page shows them.",
        None, "Engine", errors=(503,),
    ),
]  # fmt: skip


def create_app(
    llm: LLM, settings: ServeSettings | None = None, *, tracer_provider: Any = None
) -> FastAPI:
    """The ASGI application that serves ``llm``. Its lifespan runs the engine thread.

    ``tracer_provider``, of OpenTelemetry's SDK, gets a span for each request that generates.

    Raises ValueError for limits that the engine does not have.
    """
    settings = settings or ServeSettings()
    limit = llm.config.max_logprobs
    if settings.max_logprobs is not None and settings.max_logprobs > limit:
        raise ValueError(
            f"max_logprobs={settings.max_logprobs}: the engine was made for {limit}; lower it, or "
            "raise that of the LLM."
        )
    service = Service(llm, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="oxidize_jax", version=__version__, openapi_url=None, lifespan=lifespan)
    app.state.service = service
    endpoints = _ENDPOINTS + (_PAGE if settings.page else [])
    for one in [*endpoints, _description(endpoints)]:
        handle = _bound(service, one.handle)
        app.add_api_route(one.path, handle, methods=[one.method], response_model=None)
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    if settings.api_key is not None:
        paths = [one.path for one in endpoints if one.open]
        app.add_middleware(_Keyed, key=settings.api_key, open_paths=paths)
    if settings.checks_names:
        app.add_middleware(CalledByName, names=settings.allowed_hosts or ())
    observers: list[Observer] = [log_access]
    if tracer_provider is not None:
        from oxidize_jax.serve.tracing import Tracing

        observers.append(Tracing(tracer_provider, service.model_name))
    app.add_middleware(Access, observers=observers)  # the last is the outermost
    return app


def make_server(app: FastAPI) -> uvicorn.Server:
    """A uvicorn server for what :func:`create_app` made.

    On SIGTERM it takes nothing new, and lets what runs end for ``drain_timeout_s``.
    """
    settings: ServeSettings = app.state.service.settings
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="asyncio",
        lifespan="on",
        ws="none",
        access_log=False,
        log_level="warning",
        log_config=None,  # its handlers would write in another format than the process's
        server_header=False,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s) + _LAST_STEP_S,
    )
    return _Server(config, app.state.service)


class _Server(uvicorn.Server):
    """Tells those who still wait when the time to end is over; uvicorn would just cancel them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which waits for all that runs."""
        loop, settings = asyncio.get_running_loop(), self._service.settings
        timer = loop.call_later(settings.drain_timeout_s, self._service.thread.cut)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _description(endpoints: list[Endpoint]) -> Endpoint:
    """``GET /openapi.json``: of ``endpoints`` and of itself."""

    async def openapi(service: Service, request: Request) -> Response:
        del request
        return json_response(document(service, [*endpoints, own]))

    own = Endpoint(_GET, "/openapi.json", openapi, "This description.", None, "Document")
    return own


def _bound(service: Service, endpoint: _Handle) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await endpoint(service, request)

    # FastAPI reads annotations: text, under `from __future__ import annotations`.
    handle.__annotations__ = {"request": Request, "return": Response}
    return handle


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: "there is no such endpoint.", 405: "the endpoint has no such method."}
    told = ApiError(
        error.status_code,
        message.get(error.status_code, str(error.detail)),
        headers=error.headers,
    )
    return told.response()


async def _unforeseen(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request.scope) or ""
    _log.error("a request failed", exc_info=error, extra={"fields": {"request_id": request_id}})
    told = ApiError(
        500, "the server met an error; it has been logged.", headers={"X-Request-Id": request_id}
    )
    return told.response()


class _Keyed:
    """Lets in who sends the key. Plain ASGI: a middleware of Starlette's kind hides disconnects."""

    def __init__(self, app: ASGIApp, key: str, open_paths: Sequence[str]) -> None:
        self._app = app
        self._open = open_paths
        self._wanted = f"Bearer {key}".encode("latin-1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "the API key is missing or wrong; send it as Authorization: Bearer KEY.",
            code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
        await error.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)
