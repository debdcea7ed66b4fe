"""``oxidize-jax serve``: an OpenAI-compatible server of one model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oxidize_jax.cli.allocator import keep_freed_memory, use_one_arena
from oxidize_jax.cli.backend import start_backend
from oxidize_jax.cli.models import announce_fetch
from oxidize_jax.cli.parser import (
    Parser,
    UsageError,
    add_engine_options,
    engine_options,
    filled,
    positive,
    whole,
)
from oxidize_jax.cli.terminal import Status
from oxidize_jax.serve.logs import logging_to

if TYPE_CHECKING:
    from oxidize_jax.serve.settings import ServeSettings

_DESCRIPTION = """\
Serve a model to OpenAI clients: completions, chats, streams, embeddings, metrics.
It listens at this machine's own address unless --host says otherwise. SIGTERM lets requests
that run come to their end."""
_EXAMPLES = """\
examples:
  oxidize-jax serve
  oxidize-jax serve ~/models/some.gguf --port 8080 --max-num-seqs 32
  oxidize-jax serve --host 0.0.0.0 --api-key-env MY_KEY
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Name three seas."}]}'"""
_log = logging.getLogger("oxidize_jax.serve.command")
_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


def names(text: str) -> tuple[str, ...]:
    """An argparse type: names with commas between them."""
    return tuple(filled(name).strip() for name in text.split(","))


_SERVER = {
    "port": (whole(0), "N", "port; 0: any that is free (default: 8000)"),
    "served_model_name": (filled, "NAME", "name of the model for clients (default: of its file)"),
    "allowed_hosts": (names, "NAME,..", "names by which clients may call it, beside addresses and "
                      "localhost (default: none at a loopback address, else any)"),
    "max_body_bytes": (whole(1), "N", "longest request body (default: 4194304)"),
    "max_queue": (whole(0), "N", "sequences that may wait; more get status 429 (default: 256)"),
    "max_prompts": (whole(1), "N", "most prompts in a request (default: 64)"),
    "max_n": (whole(1), "N", "most completions of a prompt (default: 16)"),
    "max_tokens": (whole(1), "N", "most new tokens (default: what --max-model-len allows)"),
    "max_connections": (whole(1), "N", "connections at a time (default: 1024)"),
    "request_timeout_s": (positive, "X", "longest time of a request (default: 600)"),
    "body_timeout_s": (positive, "X", "longest time to send a body (default: 30)"),
    "write_timeout_s": (positive, "X", "abort a stream that is not read so long (default: 60)"),
    "drain_timeout_s": (positive, "X", "time to finish after SIGTERM (default: 30)"),
    "stall_s": (positive, "X", "without progress so long: unhealthy (default: 120)"),
    "steps_per_dispatch": (whole(1), "N", "steps between looks of the host while nobody "
                           "streams: more cost less, and let an abort wait (default: 1)"),
}  # fmt: skip


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        usage="%(prog)s [options] [MODEL]",
        help="an OpenAI-compatible server",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("words", nargs="*", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server", "With pip install 'oxidize-jax[serve]'.")
    group.add_argument(
        "--host", type=filled, metavar="ADDRESS", help="address to listen at (default: 127.0.0.1)"
    )
    group.add_argument(
        "--api-key-env",
        type=filled,
        metavar="NAME",
        help="the key that clients must send is in this environment variable",
    )
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="of the lines on stderr, "
        "one for each request (default: text)",
    )  # fmt: skip
    group.add_argument(
        "--otlp-endpoint", type=filled, metavar="URL", help="send a trace of each request to the "
        "OpenTelemetry collector there; needs oxidize-jax[otel]",
    )  # fmt: skip
    group.add_argument(
        "--no-page",
        dest="page",
        action="store_false",
        default=None,
        help="no web page at /, and no /engine",
    )
    for name, (convert, metavar, text) in _SERVER.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=convert, metavar=metavar, help=text)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Load and serve until a signal. What the arguments alone show to be wrong comes first."""
    if len(args.words) > 1 or (args.words and args.model is not None):
        raise UsageError("MODEL: give one model, as an argument or by --model.")
    if args.words:
        args.model = filled(args.words[0])
    for package in _NEEDS:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{package} is not installed: pip install 'oxidize-jax[serve]'")
    settings = _settings(args)
    use_one_arena()
    status = _Lines() if args.log_format == "json" else Status()
    # Before minutes of loading: the port may be taken.
    with (
        logging_to(sys.stderr, args.log_format),
        _traced(args.otlp_endpoint) as provider,
        _listening(settings) as sock,
    ):
        _serve(engine_options(args), settings, sock, status, provider)
    return 0


class _Lines(Status):
    """Nothing but lines of JSON on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = False

    def note(self, text: str) -> None:
        """A line like the others."""
        _log.info(text)


@contextlib.contextmanager
def _traced(endpoint: str | None) -> Iterator[Any]:
    """What sends traces to ``endpoint``; at the end it sends those that are left."""
    if endpoint is None:
        yield None
        return
    try:
        from oxidize_jax.serve.tracing import otlp_provider

        provider = otlp_provider(endpoint)
    except (ImportError, ValueError) as error:
        raise UsageError(f"--otlp-endpoint: {error}") from None
    try:
        yield provider
    finally:
        provider.shutdown()


def _settings(args: argparse.Namespace) -> ServeSettings:
    from oxidize_jax.serve.settings import ServeSettings

    given = {field.name: getattr(args, field.name, None) for field in _fields(ServeSettings)}
    # --max-logprobs is the engine's: the server's limit is the same.
    given["max_logprobs"] = None
    if args.api_key_env is not None:
        given["api_key"] = os.environ.get(args.api_key_env)
        if not given["api_key"]:
            raise UsageError(f"--api-key-env: {args.api_key_env} is not set, or empty.")
    return ServeSettings(**{name: value for name, value in given.items() if value is not None})


def _fields(of: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(of)


@contextlib.contextmanager
def _listening(settings: ServeSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((settings.host, settings.port))
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            raise UsageError(f"cannot listen at {where}: {error.strerror or error}.") from None
        yield sock


def _serve(
    options: dict[str, Any],
    settings: ServeSettings,
    sock: socket.socket,
    status: Status,
    provider: Any,
) -> None:
    start_backend()
    from oxidize_jax.llm import LLM
    from oxidize_jax.options import Options
    from oxidize_jax.serve.app import create_app, make_server

    announce_fetch(options.get("model", Options.model), status)
    status.show("preparing ... (the first run compiles for this machine, later ones reuse it)")
    llm = LLM(**options, progress=status.watched)
    status.clear()
    keep_freed_memory()
    app = create_app(llm, settings, tracer_provider=provider)
    server = make_server(app)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    status.note(f"serving {app.state.service.model_name} at http://{shown}:{port}")
    with _drains():
        server.run(sockets=[sock])
    if not server.started:
        raise RuntimeError("the server did not start.")


@contextlib.contextmanager
def _drains() -> Iterator[None]:
    """uvicorn has the signals: Ctrl-C does not end the process after a second.

    When it has drained, it raises them once more: SIGTERM is then the end of a good run.
    """
    wakeup = signal.set_wakeup_fd(-1)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
