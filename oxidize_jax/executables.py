"""Executables kept on disk under a name that is known before anything is traced.

JAX's own cache is asked for a program once that has been traced and lowered, which takes
longer than to read it back. So the largest program is kept a second time, under the hash of
all that it can depend on: the sources of this package among it.

That is right only where nobody changes the package's functions after they were imported, so
it is off until :func:`enable_executables` says so, as the command line does.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import threading
import time
import zlib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from oxidize_jax.compile_cache import cache_folder

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX tells its listeners of each program that it compiles or takes from its disk cache."""
HIT_EVENT = "/jax/compilation_cache/cache_hits"
"""What it tells besides of one that it takes from there."""
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_KEPT = 32
"""Most executables in the folder: each change of a size or of the package makes another."""


_enabled = False
_counts = threading.local()


def enable_executables() -> None:
    """Keep executables from now on, in a process that runs this package as it is on disk."""
    global _enabled
    _enabled = True


def compiles() -> int:
    """Programs that XLA compiled for this thread, taken from no cache."""
    return getattr(_counts, "programs", 0) - getattr(_counts, "hits", 0)


def _count_hits(event: str, **_: object) -> None:
    if event == HIT_EVENT:
        _counts.hits = getattr(_counts, "hits", 0) + 1


def _count_programs(event: str, duration_secs: float, **_: object) -> None:
    if event == COMPILE_EVENT:
        _counts.programs = getattr(_counts, "programs", 0) + 1


jax.monitoring.register_event_listener(_count_hits)
jax.monitoring.register_event_duration_secs_listener(_count_programs)


class StoredExecutable:
    """The place on disk of one program's executable, for JAX's first device.

    There is none (``load`` gives None, ``store`` does nothing) unless
    :func:`enable_executables` and :func:`~oxidize_jax.compile_cache.enable_compile_cache` have
    been called.

    Args:
      name: of the program.
      static: what it is compiled for besides its shapes. ``repr`` must tell all of it, and the
        sources of this package must be all the code that it runs.
      arguments: tuple of pytrees of jax.ShapeDtypeStruct, what it is called with. Nothing is
        kept for arrays in their places, which have a device of their own.
      result: pytree of them, what it returns.
    """

    def __init__(
        self, name: str, static: tuple[Any, ...], arguments: tuple[Any, ...], result: Any
    ) -> None:
        self._trees = (jax.tree.structure((arguments, {})), jax.tree.structure(result))
        self._path: Path | None = None
        leaves = jax.tree.leaves((arguments, result))
        shapes = [(x.shape, str(x.dtype)) for x in leaves]
        known = repr((static, self._trees, shapes, jax.config.values))
        # An address tells nothing of what is there in another process.
        is_known = " at 0x" not in known and all(x.sharding is None for x in leaves)
        if is_known and _is_cache_on() and (outside := _outside()):
            digest = hashlib.sha256(f"{outside}{known}".encode()).hexdigest()
            self._path = cache_folder() / "executables" / f"{name}-{digest}"

    def load(self) -> jax.stages.Compiled | None:
        """The executable, or None where there is none that can be used."""
        if self._path is None or not self._path.exists():
            return None
        begun = time.time()
        try:
            content = zlib.decompress(self._path.read_bytes())
            self._path.touch()  # the last that goes
            loaded = serialize_executable.deserialize_and_load(
                content, *self._trees, execution_devices=jax.local_devices()[:1]
            )
        # Damaged, or written by a JAX that differs where it says it does not.
        except Exception:
            return None
        jax.monitoring.record_event(HIT_EVENT)
        jax.monitoring.record_event_duration_secs(COMPILE_EVENT, time.time() - begun)
        return loaded

    def compile_and_store(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile ``lowered``, and keep the executable if the compiler has made it just now.

        What XLA:CPU serialises of an executable that JAX took from its cache on disk lacks some
        of its functions. JAX hands the same one out again without a word to whoever compiles
        the program a second time, so that nothing was taken from there is not enough.
        """
        before = compiles()
        compiled = lowered.compile()
        if compiles() > before:
            self._store(compiled)
        return compiled

    def _store(self, compiled: jax.stages.Compiled) -> None:
        """Keep ``compiled``, or do nothing where that cannot be."""
        if self._path is None:
            return
        try:
            content, *trees = serialize_executable.serialize(compiled)
            if tuple(trees) == self._trees:
                _write(self._path, zlib.compress(content, 1))
                _drop_oldest(self._path.parent)
        # Not every backend serialises (XLA:CPU no sort that has run), and a disk may be full.
        except Exception:
            return

    def discard(self) -> None:
        """Forget what is kept: it does not work."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _is_cache_on() -> bool:
    """Whether programs are kept in the cache folder, and go to the first device."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    device = getattr(jax.config, "jax_default_device", None)
    return _enabled and folder == str(cache_folder() / "xla") and device is None


def _write(path: Path, content: bytes) -> None:
    """In one piece: no other process sees half of it, and a killed one leaves no half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _drop_oldest(folder: Path) -> None:
    """Delete what was not used for longest, but for :data:`_KEPT`."""
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in files[:-_KEPT]:
        path.unlink(missing_ok=True)


@cache
def _outside() -> str:
    """What all executables depend on; nothing where that cannot be known."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    if not sources:  # the package is in an archive
        return ""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    device = jax.local_devices()[0]
    device_kind = (device.platform, device.device_kind, device.client.platform_version)
    versions = [metadata.version(name) for name in _PACKAGES]
    variables = [os.environ.get(name) for name in _VARIABLES]
    return repr((digest.hexdigest(), device_kind, _processor(), versions, variables))


def _processor() -> tuple[str, ...]:
    """This machine's processor with its features, where Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return (platform.machine(), platform.processor(), *features[:1])
