"""The first use of JAX's devices, with one line where they cannot be used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from oxidize_jax.cli.parser import UsageError

if TYPE_CHECKING:
    import jax


def start_backend() -> list[jax.Device]:
    """JAX's devices. Raises UsageError naming the backend that does not start."""
    import jax

    try:
        return jax.devices()
    # JAX has no error of its own for it: RuntimeError, AssertionError and others come.
    except Exception as error:
        wanted = os.environ.get("JAX_PLATFORMS")
        message = f"JAX could not start the backend {wanted or 'of this machine'}"
        # JAX's own message ends with advice in brackets, which ours replaces.
        if reason := str(error).partition(" (set JAX_PLATFORMS=")[0]:
            message += f": {reason.rstrip('.')}"
        unset = "unset JAX_PLATFORMS or " if wanted else ""
        raise UsageError(f"{message}; {unset}set JAX_PLATFORMS=cpu.") from error
