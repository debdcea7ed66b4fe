"""A request body: read within its limits, and made into a checked request."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from oxidize_jax.serve.errors import ApiError
from oxidize_jax.serve.settings import ServeSettings

_Model = TypeVar("_Model", bound=BaseModel)


async def read_request(request: Request, model: type[_Model], settings: ServeSettings) -> _Model:
    """The body of ``request`` as ``model``.

    Raises ApiError: 415 for what is not sent as JSON, which a web page could send across
    origins without being asked; 413 for a body that is too long, as soon as that is known; 408
    for one that does not come; 400 for what is not JSON, or not what ``model`` allows. No error
    repeats the body.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json.")
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, "the body did not come in time.") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended before its end.") from None
    value = parse_json(body)
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object.")
    try:
        # Parsed once more: for values of Python, strict means instances of nested models.
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


async def _read(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > limit):
        _too_long(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            _too_long(limit)
    return bytes(body)


def _too_long(limit: int) -> NoReturn:
    # What is still under way is not read: the connection ends with the answer.
    raise ApiError(
        413, f"the body is longer than {limit} bytes; send less.", headers={"Connection": "close"}
    )


def parse_json(body: bytes) -> Any:
    """JSON in UTF-8, without NaN and infinities. Raises ApiError 400."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}.") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; make it flatter.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ApiError(400, f"the body is not JSON: {error.msg} at {where}.") from None
    except ValueError:  # a number of very many digits
        raise ApiError(400, "the body is not JSON: a number has too many digits.") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not JSON: {name} is not a number there.")


def _refusal(error: ValidationError) -> ApiError:
    """The first fault that pydantic found, in its words, without the value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = [str(part)[:60] for part in first["loc"]]
    field = place[0] if place else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{'.'.join(place)}: is not a field of this request.", param=field)
    # Of a union of types pydantic names each that did not fit: the field alone says enough.
    name = field if len(place) > 1 and "[" in place[1] else ".".join(place)
    return ApiError(400, f"{name or 'the body'}: {first['msg']}.", param=field)
