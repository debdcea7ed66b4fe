"""Compiled programs kept on disk between runs."""

from __future__ import annotations

import os
import zlib
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
    _drop_torn_entries(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The default keeps only what took a second; ours are many, and each costs every start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _drop_torn_entries(folder: Path) -> None:
    """Delete entries that a killed process left half written.

    JAX neither writes an entry in one piece nor replaces one it cannot read: it would warn
    and compile at every start. Only entries younger than the last check are read.
    """
    stamp = folder / ".checked"
    try:
        checked = stamp.stat().st_mtime if stamp.exists() else 0.0
        stamp.touch()
        for entry in folder.glob("*-cache"):
            if entry.stat().st_mtime >= checked and _is_torn(entry.read_bytes()):
                entry.unlink(missing_ok=True)
    except OSError:
        return  # Another process is at it, or the folder is no longer ours to change.


def _is_torn(entry: bytes) -> bool:
    """Whether a zlib entry (JAX's format without a zstd package) does not end as it should."""
    if not entry:
        return True
    if entry[:1] != b"\x78":
        return False
    stream = zlib.decompressobj()
    try:
        stream.decompress(entry)
    except zlib.error:
        return True
    return not stream.eof
