"""The requests of the API, as OpenAI's reference has them, with vLLM's extra parameters.

Unknown fields are refused, as OpenAI does: a misspelt one would otherwise change nothing
without a word. Types are strict: no number is made of a string. Ranges are judged by
:class:`~oxidize_jax.sampling.params.SamplingParams`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from oxidize_jax.sampling.params import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    SamplingParams,
)
from oxidize_jax.sampling.structured import StructuredOutputsParams, as_structured_outputs
from oxidize_jax.serve.errors import ApiError, bad_request
from oxidize_jax.serve.settings import ServeSettings

_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "stop",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields with the name and the meaning of one of SamplingParams."""


_INT32_MAX = 2**31 - 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _told(text: str = "", **limits: Any) -> Any:
    """A field, null by default, with its limits as JSON Schema has them. They are told here, for
    ``/openapi.json``, and judged by SamplingParams; a test compares the two."""
    return Field(default=None, description=text or None, json_schema_extra=limits or None)


class StreamOptions(_Strict):
    """``include_usage``: a last chunk with the token counts."""

    include_usage: bool = False


class ResponseFormat(_Strict):
    """``text``, ``json_object`` or ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = _told("``{name, description, schema, strict}``")


class Generation(_Strict):
    """What completions and chats have in common. Null is the default of every field."""

    model: str | None = _told("The one that is served.")
    stream: bool | None = _told("Answer by server-sent events.")
    stream_options: StreamOptions | None = _told("With a stream only.")
    n: int | None = _told("Completions of each prompt.", minimum=1, maximum=MAX_N)
    max_tokens: int | None = _told("Most new tokens.", minimum=1, maximum=_INT32_MAX)
    temperature: float | None = _told(
        "0 is greedy. Default: 1.", minimum=0, maximum=MAX_TEMPERATURE
    )
    top_p: float | None = _told(exclusiveMinimum=0, maximum=1)
    presence_penalty: float | None = _told(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)
    frequency_penalty: float | None = _told(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)
    logit_bias: dict[str, float] | None = _told(
        "By token id, -100 to 100.",
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    )
    seed: int | None = _told(minimum=0, maximum=2**64 - 1)
    stop: str | list[str] | None = _told(
        "The text ends before the first of them.",
        minLength=1,
        maxItems=MAX_STOP_STRINGS,
        items={"minLength": 1},
    )
    user: str | None = _told("Has no effect.")
    response_format: ResponseFormat | None = None
    # vLLM's:
    top_k: int | None = _told("0 and -1 keep all.", minimum=-1, maximum=_INT32_MAX)
    min_p: float | None = _told(minimum=0, maximum=1)
    typical_p: float | None = _told(exclusiveMinimum=0, maximum=1)
    repetition_penalty: float | None = _told(
        minimum=1 / MAX_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY
    )
    min_tokens: int | None = _told("At most max_tokens.", minimum=0, maximum=_INT32_MAX)
    stop_token_ids: list[int] | None = _told(items={"minimum": 0})
    allowed_token_ids: list[int] | None = _told(minItems=1, items={"minimum": 0})
    bad_words: list[str] | None = _told(
        "Are never spelled.", maxItems=MAX_BAD_WORDS, items={"pattern": "\\S"}
    )
    ignore_eos: bool | None = _told("Not with structured outputs.")
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = _told(
        "One of json, regex, choice and grammar.", minProperties=1, maxProperties=1
    )
    priority: int | None = _told(
        "Smaller goes first among those that wait.", minimum=-(2**31), maximum=2**31 - 2
    )
    cache_salt: str | None = _told("Requests share cached blocks with those of one salt alone.")

    def checked_params(
        self, settings: ServeSettings, *, max_tokens: int | None, logprobs: int | None, **more: Any
    ) -> SamplingParams:
        """SamplingParams within the limits of the server. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: is for stream=true only.", param="stream_options")
        _check_limit("n", self.n, settings.max_n)
        _check_limit("best_of", more.get("best_of"), settings.max_n)
        if isinstance(self.stop, list):
            _check_limit("stop", len(self.stop), settings.max_stop, "strings")
        _check_limit("max_tokens", max_tokens, settings.max_tokens)
        _check_limit("logprobs", logprobs, settings.max_logprobs)
        values = {name: getattr(self, name) for name in _SAME} | more
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return SamplingParams(
                **given,
                max_tokens=settings.max_tokens if max_tokens is None else max_tokens,
                logprobs=logprobs,
                structured_outputs=self._structured(),
            )
        except ValueError as error:
            raise bad_request(error) from None

    def _structured(self) -> StructuredOutputsParams | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return as_structured_outputs(self.structured_outputs)
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs: give it or response_format, not both.")
        if wanted.type == "json_object":
            return StructuredOutputsParams(json={"type": "object"})
        schema = wanted.json_schema or {}
        known = {"name", "description", "schema", "strict"}
        if unknown := sorted(set(schema) - known):
            raise ValueError(f"response_format: json_schema has no field {unknown[0][:40]!r}.")
        if not isinstance(schema.get("schema"), dict):
            raise ValueError("response_format: json_schema.schema is missing; give the schema.")
        return StructuredOutputsParams(json=schema["schema"])


def _texts(text: str) -> Any:
    least = {"minLength": 1, "minItems": 1}
    return Field(description=text, json_schema_extra={**least, "items": {**least, "minimum": 0}})


_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
_MESSAGES: dict[str, Any] = {
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
        },
        "required": ["role"],
    },
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}


class CompletionRequest(Generation):
    """``POST /v1/completions``"""

    prompt: str | list[int] | list[str] | list[list[int]] = _texts("Text or token ids, or a list.")
    best_of: int | None = _told("From n on; n in a stream.", minimum=1, maximum=MAX_N)
    logprobs: int | None = _told("Alternatives of each token.", minimum=0)
    echo: bool | None = _told("Begin with the prompt. Then max_tokens may be 0.")
    suffix: str | None = _told("Is not supported.", maxLength=0)

    def params(self, settings: ServeSettings) -> SamplingParams:
        """Its SamplingParams. Raises ApiError for what is not allowed, or not built."""
        if self.suffix:
            raise ApiError(400, "suffix: is not supported; leave it out.", param="suffix")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise ApiError(
                400, "best_of: with stream=true it must be n: the best are known at the end.",
                param="best_of",
            )  # fmt: skip
        default = SamplingParams.max_tokens
        if settings.max_tokens is not None and default is not None:
            default = min(default, settings.max_tokens)
        wanted = default if self.max_tokens is None else self.max_tokens
        return self.checked_params(
            settings,
            max_tokens=wanted if self.generates else 1,
            logprobs=self.logprobs,
            best_of=self.best_of,
            prompt_logprobs=self.logprobs if self.echo else None,
        )

    @property
    def generates(self) -> bool:
        """Whether there is more to do than to give the prompt back."""
        return not (self.echo and self.max_tokens == 0)


class ChatRequest(Generation):
    """``POST /v1/chat/completions``"""

    messages: list[dict[str, Any]] = Field(json_schema_extra=_MESSAGES)
    max_completion_tokens: int | None = _told(
        "The same as max_tokens.", minimum=1, maximum=_INT32_MAX
    )
    logprobs: bool | None = None
    top_logprobs: int | None = _told("With logprobs only.", minimum=0)
    tools: list[dict[str, Any]] | None = _told(
        "Functions, for models whose template takes tools.", items=_TOOL
    )
    tool_choice: str | dict[str, Any] | None = _told("auto, none, required, or a function by name.")
    parallel_tool_calls: bool | None = _told("False with a tool_choice that forces a call only.")
    chat_template_kwargs: dict[str, Any] | None = None

    def params(self, settings: ServeSettings) -> SamplingParams:
        """Its SamplingParams. Raises ApiError for what is not allowed."""
        limits = {v for v in (self.max_tokens, self.max_completion_tokens) if v is not None}
        if len(limits) > 1:
            raise ApiError(
                400, "max_tokens: differs from max_completion_tokens; give one of them.",
                param="max_tokens",
            )  # fmt: skip
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs=true.", param="top_logprobs")
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        try:
            return self.checked_params(
                settings, max_tokens=min(limits, default=None), logprobs=wanted
            )
        except ApiError as error:
            if error.param != "logprobs":
                raise
            message = error.message.replace("logprobs", "top_logprobs", 1)  # as it is named here
            raise ApiError(error.status, message, param="top_logprobs") from None


class EmbeddingRequest(_Strict):
    """``POST /v1/embeddings``"""

    model: str | None = _told("The one that is served.")
    input: str | list[int] | list[str] | list[list[int]] = _texts("Text or token ids, or a list.")
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = _told("Has no effect.")


class TokenizeRequest(_Strict):
    """``POST /tokenize``: of a text, or of a conversation."""

    model: str | None = _told("The one that is served.")
    prompt: str | None = _told("This, or messages.")
    messages: list[dict[str, Any]] | None = _told(**_MESSAGES)
    add_special_tokens: bool | None = _told("With prompt only. Default: true.")
    add_generation_prompt: bool | None = _told("With messages only. Default: true.")


class DetokenizeRequest(_Strict):
    """``POST /detokenize``"""

    model: str | None = _told("The one that is served.")
    tokens: list[int] = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})


def _check_limit(name: str, value: int | None, limit: int | None, unit: str = "") -> None:
    if value is not None and limit is not None and value > limit:
        said = f"{name}={value}" if not unit else f"{name} has {value} {unit}"
        raise ApiError(400, f"{said}: this server allows {limit}; ask for fewer.", param=name)
