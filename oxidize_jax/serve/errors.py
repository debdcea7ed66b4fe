"""Errors in OpenAI's shape, and JSON that can always be written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_LONGEST_MESSAGE = 2_000
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


class ApiError(Exception):
    """What is told to a client: a status with a body in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:_LONGEST_MESSAGE]
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``"""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """As an HTTP response."""
        return json_response(self.body, self.status, self.headers)


def bad_request(error: Exception) -> ApiError:
    """Status 400 of a ValueError, whose message begins with the name of a field as a rule."""
    message = str(error)
    name = message.partition("=")[0].partition(":")[0].strip()
    return ApiError(400, message, param=name if name.isidentifier() else None)


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8. Halves of characters, which a client may have sent, become ``?``.

    Clients that read a stream line by line may take Unicode's line ends for some, as httpx does:
    they are escaped.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escaped in _LINE_ENDS:
        text = text.replace(character, escaped)
    return text.encode("utf-8", "replace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response with ``value`` as JSON."""
    kept = dict(headers or {})
    return Response(json_bytes(value), status, kept, media_type="application/json")
