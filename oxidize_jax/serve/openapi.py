"""``GET /openapi.json``: what the server takes and answers, of the tables that it runs by.

Requests are those of :mod:`~oxidize_jax.serve.protocol`, with the limits of this server on top;
endpoints and their errors stand in the application's table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from oxidize_jax import __version__

if TYPE_CHECKING:
    from oxidize_jax.serve.service import Service

JSON = "application/json"
STREAM = "text/event-stream"
BODY = (400, 404, 408, 413, 415)
"""What may be wrong with a body, an unknown model included."""
BUSY = (429, 500, 503, 504)
"""What may come of the engine."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One line of the application's table."""

    method: str
    path: str
    handle: Callable[[Service, Request], Awaitable[Response]]
    summary: str
    request: type[BaseModel] | None = None
    response: str | None = None
    """Schema of the answer, see :data:`_ANSWERS`; None for what is no JSON."""
    media: str = JSON
    streams: bool = False
    errors: Sequence[int] = ()
    open: bool = False
    """Needs no key."""


def document(service: Service, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server."""
    models = [one.request for one in endpoints if one.request is not None]
    _, made = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Untitled,
    )
    schemas = made.get("$defs", {})
    for schema in schemas.values():
        schema.pop("title", None)
        _limit(service, schema)
    components: dict[str, Any] = {"schemas": {**schemas, **_ANSWERS}}
    keyed = service.settings.api_key is not None
    named = service.settings.checks_names
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for one in endpoints:
        path = one.path.replace(":path}", "}")
        paths.setdefault(path, {})[one.method.lower()] = _operation(
            one, keyed and not one.open, named
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "oxidize_jax", "version": __version__},
        "paths": paths,
        "components": components,
    }


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        """Titles would only repeat the names."""
        return False


def _limit(service: Service, schema: dict[str, Any]) -> None:
    """Put the limits of this server into the schema of a request."""
    for name, limits in _limits(service).items():
        field = schema.get("properties", {}).get(name, {})
        kinds = {part.get("type") for part in field.get("anyOf", [field])}
        for key, value in limits.items():
            if isinstance(value, dict):
                field[key] = {**field.get(key, {}), **value}
            elif key != "maximum" or "integer" in kinds:
                field[key] = value


def _limits(service: Service) -> dict[str, dict[str, Any]]:
    settings, config = service.settings, service.llm.config
    top = config.max_logprobs if settings.max_logprobs is None else settings.max_logprobs
    token = {"maximum": service.llm.model_config.vocab_size - 1}
    count = {} if settings.max_tokens is None else {"maximum": settings.max_tokens}
    return {
        "model": {"enum": [service.model_name, None]},
        "n": {"maximum": settings.max_n},
        "best_of": {"maximum": settings.max_n},
        "max_tokens": count,
        "max_completion_tokens": count,
        "logprobs": {"maximum": top},
        "top_logprobs": {"maximum": top},
        "stop": {"maxItems": settings.max_stop},
        "stop_token_ids": {"maxItems": config.max_stop_token_ids, "items": token},
        "allowed_token_ids": {"items": token},
        "logit_bias": {"maxProperties": config.max_logit_bias},
        "prompt": {"items": token},
        "input": {"items": token},
        "tokens": {"items": {"maximum": service.llm.tokenizer.vocab_size - 1}},
    }


def _operation(one: Endpoint, keyed: bool, named: bool) -> dict[str, Any]:
    content: dict[str, Any] = {one.media: {}}
    if one.response is not None:
        content = {JSON: {"schema": _ref(one.response)}}
    if one.streams:
        content[STREAM] = {}  # its chunks are no one schema's: the description tells of them
    told = _STREAMS if one.streams else "Answered."
    responses: dict[str, Any] = {"200": {"description": told, "content": content}}
    guards = [status for status, on in ((401, keyed), (403, named)) if on]
    for status in sorted({*one.errors, *guards}):
        kind = "Health" if one.response == "Health" and status == 503 else "Error"
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {JSON: {"schema": _ref(kind)}},
        }
    operation: dict[str, Any] = {
        "operationId": one.handle.__name__ + ("_of_name" if "{" in one.path else ""),
        "summary": one.summary,
        "responses": responses,
    }
    if one.request is not None:
        schema = _ref(one.request.__name__)
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if "{" in one.path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if keyed:
        operation["security"] = [{"key": []}]
    return operation


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_STREAMS = (
    "With stream=true: events of which each is `data: ` and a chunk in JSON, the last one "
    "`data: [DONE]`. An error in mid-stream is an event with the object of Error."
)
_ERRORS = {
    400: "The request cannot run.",
    401: "The API key is missing or wrong.",
    403: "The server is not called by that name.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not sent as JSON.",
    429: "The queue is full; Retry-After says when to come again.",
    500: "The server met an error.",
    503: "The server is not able to answer now.",
    504: "The request took too long and was aborted.",
}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], **limits: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT = {"type": "string"}
_WHOLE = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_USAGE = _object(
    {
        "prompt_tokens": _WHOLE,
        "completion_tokens": _WHOLE,
        "total_tokens": _WHOLE,
        "prompt_tokens_details": _object({"cached_tokens": _WHOLE}),
    }
)
_REASON = _or_null({"enum": ["stop", "length", "abort", "tool_calls"]})
_STOP_REASON = {"type": ["string", "integer", "null"]}
_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_or_null(_NUMBER)),
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _list(_WHOLE),
    }
)
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_WHOLE)}
_CHAT_LOGPROBS = _object(
    {
        "content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_CALL = _object(
    {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "arguments": _TEXT}),
    }
)
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _or_null(_TEXT), "refusal": {"type": "null"}},
    tool_calls=_list(_CALL),
)
_END = {"finish_reason": _REASON, "stop_reason": _STOP_REASON}
_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _WHOLE,
        "owned_by": _TEXT,
        "max_model_len": _WHOLE,
    }
)


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _WHOLE, "model": _TEXT}
    return _object(
        {**head, "choices": _list(_object({"index": _WHOLE, **choice})), "usage": _USAGE}
    )


_ANSWERS: dict[str, Any] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": _or_null(_TEXT),
                    "code": _or_null(_TEXT),
                }
            )
        }
    ),
    "Completion": _answer(
        "text_completion", {"text": _TEXT, "logprobs": _or_null(_LOGPROBS), **_END}
    ),
    "Chat": _answer(
        "chat.completion", {"message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS), **_END}
    ),
    "Embeddings": _object(
        {
            "object": {"const": "list"},
            "data": _list(
                _object(
                    {
                        "object": {"const": "embedding"},
                        "index": _WHOLE,
                        "embedding": {"anyOf": [_list(_NUMBER), _TEXT]},
                    }
                )
            ),
            "model": _TEXT,
            "usage": _object({"prompt_tokens": _WHOLE, "total_tokens": _WHOLE}),
        }
    ),
    "Model": _MODEL,
    "Models": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Tokens": _object({"count": _WHOLE, "max_model_len": _WHOLE, "tokens": _list(_WHOLE)}),
    "Text": _object({"prompt": _TEXT}),
    "TokenizerInfo": {
        "type": "object",
        "properties": {"tokenizer_class": _TEXT, "chat_template": _or_null(_TEXT)},
        "required": ["tokenizer_class", "chat_template"],
        "additionalProperties": _TEXT,
    },
    "Health": _object({"status": {"enum": ["ok", "unhealthy"]}}, reason=_TEXT),
    "Version": _object({"version": _TEXT}),
    "Engine": _object(
        {
            "version": _TEXT,
            "model": _TEXT,
            "time": _NUMBER,
            "age_s": {"type": "number", "minimum": 0},
            "config": {"type": "object"},
            "requests": _list({"type": "object"}),
            "num_queued": _WHOLE,
            "blocks": _object(
                {
                    "used": _WHOLE,
                    "cached": _WHOLE,
                    "free": _WHOLE,
                    "map": {"type": "string", "pattern": "^[.c1-9]*$"},
                }
            ),
            "totals": {"type": "object", "additionalProperties": {"type": "integer"}},
        }
    ),
    "Document": {"type": "object"},
}
"""Schemas of answers."""
