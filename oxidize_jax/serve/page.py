"""The page at ``/``, and ``GET /engine``, which it draws."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from oxidize_jax import __version__
from oxidize_jax.serve.errors import ApiError, json_response
from oxidize_jax.serve.job import now
from oxidize_jax.serve.service import Service

_FILE = "page.html"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


async def page(service: Service, request: Request) -> Response:
    """``GET /``: one file, which asks for nothing from elsewhere."""
    del service, request
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


@functools.cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets a browser run and load what is in it and no more."""
    html = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html.encode(), "; ".join(f"{name} {value}" for name, value in rules.items())


async def engine(service: Service, request: Request) -> Response:
    """``GET /engine``: rows, requests and blocks of about now."""
    del request
    picture = await service.picture()
    if picture is None:
        raise ApiError(503, "the engine has not been looked at yet; try again.")
    config = service.llm.config
    return json_response(
        {
            "version": __version__,
            "model": service.model_name,
            "time": picture.time,
            "age_s": max(0.0, now() - picture.time),
            "config": {
                "max_num_seqs": config.max_num_seqs,
                "max_num_requests": config.max_num_requests,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_model_len": config.max_model_len,
                "num_blocks": config.num_blocks,
                "block_size": config.block_size,
                "policy": config.policy,
            },
            **picture.body,
        },
        headers={"Cache-Control": "no-store"},
    )
