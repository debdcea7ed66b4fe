"""Models, tokens, embeddings, health, metrics and version."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from oxidize_jax import __version__
from oxidize_jax.prompts import Prompt
from oxidize_jax.serve.body import read_request
from oxidize_jax.serve.completions import several
from oxidize_jax.serve.errors import ApiError, json_response
from oxidize_jax.serve.protocol import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from oxidize_jax.serve.service import Service
from oxidize_jax.serve.tools import with_tool_calls

_STARTED = int(time.time())


async def models(service: Service, request: Request) -> Response:
    """``GET /v1/models`` and ``GET /v1/models/{name}``"""
    name = request.path_params.get("name")
    service.check_model(name)
    card = {
        "id": service.model_name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "oxidize_jax",
        "max_model_len": service.llm.config.max_model_len,
    }
    return json_response({"object": "list", "data": [card]} if name is None else card)


async def embeddings(service: Service, request: Request) -> Response:
    """``POST /v1/embeddings``: the mean of the last hidden states, of length 1.

    The pass runs beside the engine, one request at a time. It is not ended by a disconnect.
    """
    settings = service.settings
    asked = await read_request(request, EmbeddingRequest, settings)
    service.check_model(asked.model)
    given = several(asked.input, "input", settings.max_prompts)

    def encode() -> list[Prompt]:
        tokenizer = service.llm.tokenizer
        encoded: list[Prompt] = []
        for text in given:
            ids = tokenizer.encode(text) if isinstance(text, str) else text
            if not ids:
                raise ValueError("input: is empty; give at least one character of text.")
            encoded.append(ids)
        return encoded

    prompts = await service.encode(encode)
    vectors = await service.score(lambda: service.llm.embed(prompts, use_tqdm=False))
    data = [
        {"object": "embedding", "index": i, "embedding": _vector(row, asked.encoding_format)}
        for i, row in enumerate(vectors)
    ]
    count = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response(
        {"object": "list", "data": data, "model": service.model_name, "usage": usage}
    )


def _vector(row: np.ndarray, form: str) -> str | list[float]:
    if form == "float":
        return [float(value) for value in row]
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")


async def tokenize(service: Service, request: Request) -> Response:
    """``POST /tokenize``, as vLLM's"""
    asked = await read_request(request, TokenizeRequest, service.settings)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages.")
    only = "add_generation_prompt" if asked.messages is None else "add_special_tokens"
    if getattr(asked, only) is not None:
        raise ApiError(400, f"{only}: has no meaning here; leave it out.", param=only)

    def encode() -> list[int]:
        tokenizer = service.llm.tokenizer
        if asked.messages is None:
            return tokenizer.encode(asked.prompt or "", asked.add_special_tokens is not False)
        messages = with_tool_calls(asked.messages)
        return tokenizer.apply_chat_template(messages, asked.add_generation_prompt is not False)

    ids = await service.encode(encode)
    limit = service.llm.config.max_model_len
    return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids})


async def detokenize(service: Service, request: Request) -> Response:
    """``POST /detokenize``, as vLLM's"""
    asked = await read_request(request, DetokenizeRequest, service.settings)
    service.check_model(asked.model)
    size = service.llm.tokenizer.vocab_size
    for i, token in enumerate(asked.tokens):
        if not 0 <= token < size:
            raise ApiError(400, f"tokens[{i}]: must be from 0 to {size - 1}.", param="tokens")
    text = await service.encode(
        lambda: service.llm.tokenizer.decode(asked.tokens, skip_special_tokens=False)
    )
    return json_response({"prompt": text})


async def tokenizer_info(service: Service, request: Request) -> Response:
    """``GET /tokenizer_info``, as vLLM's: special tokens and chat template"""
    del request
    tokenizer = service.llm.tokenizer
    body = {
        "tokenizer_class": type(tokenizer).__name__,
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
    }
    return json_response(body)


async def health(service: Service, request: Request) -> Response:
    """``GET /health``: 200, or 503 with the reason."""
    del request
    trouble = service.thread.trouble()
    if trouble is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unhealthy", "reason": trouble}, 503)


async def metrics(service: Service, request: Request) -> Response:
    """``GET /metrics``"""
    del request
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(service: Service, request: Request) -> Response:
    """``GET /version``"""
    del service, request
    body: dict[str, Any] = {"version": __version__}
    return json_response(body)
