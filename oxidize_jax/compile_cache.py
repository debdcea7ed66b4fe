"""Compiled programs kept on disk between runs."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def cache_folder() -> Path:
    """``$OXIDIZE_JAX_CACHE``, or ``~/.cache/oxidize_jax``."""
    return Path(os.environ.get("OXIDIZE_JAX_CACHE") or "~/.cache/oxidize_jax").expanduser()


def enable_compile_cache() -> None:
    """Keep compiled programs in the cache folder, unless JAX is configured with one already.

    JAX itself drops entries that another version, device or processor cannot use. A folder
    that cannot be written leaves the cache off: it saves time and is no reason to fail.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    folder = cache_folder() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The default keeps only what took a second; ours are many, and each costs every start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
