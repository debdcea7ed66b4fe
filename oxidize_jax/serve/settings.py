"""ServeSettings: the limits of a server, checked before it can be started with them."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from typing import Any

from oxidize_jax.messages import short_repr
from oxidize_jax.sampling.params import MAX_N, MAX_STOP_STRINGS

MAX_STEPS = 16
"""The engine's ``STEPS_PER_DISPATCH``; not imported, for that imports jax. A test compares them."""
LOCALHOST = "localhost"
_INT32_MAX = 2**31 - 1
_LONGEST = 7 * 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class ServeSettings:
    """How a server listens, and what it lets one client ask for.

    Raises ValueError naming the field, the value, and what is allowed.
    """

    host: str = "127.0.0.1"
    """Address to listen at. The default can be reached from this machine alone."""
    port: int = 8000
    """0 lets the system choose one."""
    api_key: str | None = None
    """What clients must send as ``Authorization: Bearer``, except for ``/health``."""
    served_model_name: str | None = None
    """Name of the model for clients; default: that of its file, folder or repository."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names by which clients may call the server, beside addresses and ``localhost``. None: only
    these where it listens at a loopback address, so that no site can make its own name point
    here and speak to it from a browser (DNS rebinding); anything elsewhere."""
    max_body_bytes: int = 4 * 2**20
    """Longest request body."""
    max_queue: int = 256
    """Sequences that may wait beside the ``max_num_seqs`` that run; more get status 429."""
    max_prompts: int = 64
    """Most prompts, or texts to embed, in one request."""
    max_n: int = 16
    """Most completions of a prompt, ``best_of`` included."""
    max_tokens: int | None = None
    """Most new tokens of a completion; None: what the engine's ``max_model_len`` allows."""
    max_logprobs: int | None = None
    """Most alternatives per token; None: the engine's ``max_logprobs``."""
    max_stop: int = MAX_STOP_STRINGS
    """Most stop strings of a request."""
    max_connections: int = 1024
    """Connections at a time; more get status 503."""
    request_timeout_s: float = 600.0
    """How long a request may take from its body to its last token."""
    body_timeout_s: float = 30.0
    """How long a client may take to send its body."""
    write_timeout_s: float = 60.0
    """How long a client of a stream may leave what was sent unread."""
    drain_timeout_s: float = 30.0
    """How long requests may go on after SIGTERM."""
    stall_s: float = 120.0
    """``/health`` turns unhealthy when there is work and nothing has moved for so long."""
    steps_per_dispatch: int = 1
    """Steps that the device makes before the host looks, while no client streams. More cost the
    host less, and let an abort and a new request wait longer."""
    page: bool = True
    """Serve the page at ``/``, and ``/engine``, which it shows."""

    @property
    def checks_names(self) -> bool:
        """Whether a client must call the server by an address or a name that is allowed."""
        return self.allowed_hosts is not None or _is_loopback(self.host)

    def __post_init__(self) -> None:
        for name in ("host", "api_key", "served_model_name"):
            _check_text(name, getattr(self, name), optional=name != "host")
        if not isinstance(self.page, bool):
            raise ValueError(f"page={short_repr(self.page)}: must be true or false.")
        for name in self.allowed_hosts or ():
            _check_text("allowed_hosts", name, optional=False)
        for name, (low, high) in _WHOLE.items():
            _check_whole(name, getattr(self, name), low, high)
        for name in ("max_tokens", "max_logprobs"):
            if getattr(self, name) is not None:
                low = 1 if name == "max_tokens" else 0
                _check_whole(name, getattr(self, name), low, _INT32_MAX)
        for field in dataclasses.fields(self):
            if field.name.endswith("_s"):
                _check_seconds(field.name, getattr(self, field.name))


def is_address(host: str) -> bool:
    """Whether ``host`` is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == LOCALHOST or (is_address(host) and ipaddress.ip_address(host).is_loopback)


_WHOLE = {
    "port": (0, 65_535),
    "max_body_bytes": (1_024, 2**30),
    "max_queue": (0, 1_000_000),
    "max_prompts": (1, 4_096),
    "max_n": (1, MAX_N),
    "max_stop": (0, MAX_STOP_STRINGS),
    "max_connections": (1, 1_000_000),
    "steps_per_dispatch": (1, MAX_STEPS),
}


def _check_text(name: str, value: Any, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}={short_repr(value)}: must be text, not empty; give some.")
    if name == "api_key" and not (value.isascii() and value.isprintable()):
        raise ValueError("api_key: must be printable ASCII, as HTTP headers are; choose another.")


def _check_whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(
            f"{name}={short_repr(value)}: must be a whole number from {low} to {high}; use one."
        )


def _check_seconds(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 < value <= _LONGEST:
        raise ValueError(
            f"{name}={short_repr(value)}: must be seconds, above 0 and at most {_LONGEST:g}."
        )
