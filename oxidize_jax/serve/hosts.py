"""CalledByName: by which names a server may be called, as the Host header tells.

A web page can make a browser speak to this machine under a name of the page's own site (DNS
rebinding), and is then of the server's own origin for the browser. The name is still its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from oxidize_jax.messages import short_repr
from oxidize_jax.serve.errors import ApiError
from oxidize_jax.serve.settings import LOCALHOST, is_address


class CalledByName:
    """Lets in who calls the server by an address, as localhost, or by one of ``names``."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {LOCALHOST, *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        given = [value.decode("latin-1") for name, value in scope.get("headers", ())
                 if name == b"host"]  # fmt: skip
        if scope["type"] != "http" or all(self._allowed(host_of(value)) for value in given):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403, f"this server is not called {short_repr(host_of(given[0]))}; call it by its "
            "address, or start it with --allowed-hosts NAME.",
            code="host_not_allowed",
        )  # fmt: skip
        await error.response()(scope, receive, send)

    def _allowed(self, host: str) -> bool:
        return host in self._names or host.endswith("." + LOCALHOST) or is_address(host)


def host_of(value: str) -> str:
    """The name or the address in a Host header, without its port."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].rstrip(".")
