"""Logs of a server, as text or as one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from typing import Any, TextIO

FORMATS = ("text", "json")
AS_INFO = ("oxidize_jax.serve.access", "oxidize_jax.serve.command")
"""Loggers whose news is no warning, and is written all the same."""


@contextlib.contextmanager
def logging_to(stream: TextIO, form: str) -> Iterator[None]:
    """Write what the process logs to ``stream``: warnings and errors, and each request.

    Meanwhile it takes the place of the root logger's handlers. ``form`` is of :data:`FORMATS`.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root, told = logging.getLogger(), [logging.getLogger(name) for name in AS_INFO]
    handlers, levels = root.handlers[:], [(one, one.level) for one in (root, *told)]
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for one in told:
        one.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for one, level in levels:
            one.setLevel(level)


class JsonLines(logging.Formatter):
    """``{"time", "level", "event", ...}``, with the fields of the record behind them."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in the record."""
        entry: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=True)


class TextLines(logging.Formatter):
    """``TIME LEVEL event name=value ...``"""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and those of an exception."""
        fields = " ".join(f"{name}={_plain(value)}" for name, value in _fields(record).items())
        line = f"{_utc(record.created)} {record.levelname} {record.getMessage()} {fields}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _plain(value: Any) -> str:
    """Text that a client chose cannot look like another field, or another line."""
    if isinstance(value, list):
        return ",".join(map(_plain, value))
    text = str(value)
    harmless = text.isascii() and text.isprintable() and not set(text) & set(' ="\\')
    return text if harmless else json.dumps(text)
