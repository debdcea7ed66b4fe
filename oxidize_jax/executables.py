"""Executables kept on disk under a name that is known before anything is traced.

JAX's own cache is asked for a program once that has been traced and lowered, which takes
longer than to read it back. So the largest program is kept a second time, under the hash of
what it was lowered to; and beside it a note of which that is, under the hash of all that it can
depend on: the code of this package among it, as it stands in memory, so that nothing is taken
for a function that somebody has changed. A change of the code that changes no operation costs
one start its tracing, and no compilation.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
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
from oxidize_jax.fingerprint import fingerprint

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX tells its listeners of each program that it compiles or takes from its disk cache."""
HIT_EVENT = "/jax/compilation_cache/cache_hits"
"""What it tells besides of one that it takes from there."""
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_KEPT = 32
"""Most executables in the folder: each change of a size or of the package makes another."""
_NOTE = ".note"


_counts = threading.local()


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

    There is none (``load`` gives None, nothing is stored) unless
    :func:`~oxidize_jax.compile_cache.enable_compile_cache` has been called.

    Args:
      name: of the program.
      modules: names of those that hold all code of this package that is traced for it.
      static: what it is compiled for besides its shapes. ``repr`` must tell all of it.
      arguments: tuple of pytrees of jax.ShapeDtypeStruct, what it is called with. Nothing is
        kept for arrays in their places, which have a device of their own.
      result: pytree of them, what it returns.
    """

    def __init__(
        self,
        name: str,
        modules: tuple[str, ...],
        static: tuple[Any, ...],
        arguments: tuple[Any, ...],
        result: Any,
    ) -> None:
        self._trees = (jax.tree.structure((arguments, {})), jax.tree.structure(result))
        self._name = name
        self._note: Path | None = None
        self._loaded: Path | None = None
        leaves = jax.tree.leaves((arguments, result))
        shapes = [(x.shape, str(x.dtype)) for x in leaves]
        known = repr((static, self._trees, shapes, jax.config.values))
        # An address tells nothing of what is there in another process.
        is_known = " at 0x" not in known and all(x.sharding is None for x in leaves)
        if is_known and _is_cache_on() and (code := fingerprint(modules)):
            self._note = _folder() / f"{name}-{_digest(code, known)}{_NOTE}"

    def load(self) -> jax.stages.Compiled | None:
        """The executable, or None where there is none that can be used."""
        path = self._noted()
        return None if path is None else self._load(path)

    def compile(self, lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
        """Of what it is lowered to, the executable that is kept, or a new one that is kept then.

        Returns ``(executable, whether it was there)``. What XLA:CPU serialises of an executable
        that JAX took from its cache on disk lacks some of its functions, and JAX hands the same
        one out again without a word to whoever compiles the program a second time. So only what
        the compiler has made just now is kept.
        """
        if self._note is None:
            return lowered.compile(), False
        path = _folder() / f"{self._name}-{_digest(lowered.as_text(), repr(jax.config.values))}"
        if path.exists() and (loaded := self._load(path)) is not None:
            self._take_note(path)
            return loaded, True
        before = compiles()
        compiled = lowered.compile()
        if compiles() > before:
            self._store(path, compiled)
        return compiled, False

    def _noted(self) -> Path | None:
        if self._note is None:
            return None
        try:
            return self._note.with_name(self._note.read_text())
        except (OSError, ValueError):
            return None

    def _take_note(self, path: Path) -> None:
        assert self._note is not None
        with contextlib.suppress(OSError):
            _write(self._note, path.name.encode())

    def _load(self, path: Path) -> jax.stages.Compiled | None:
        begun = time.time()
        try:
            content = zlib.decompress(path.read_bytes())
            path.touch()  # the last that goes
            loaded = serialize_executable.deserialize_and_load(
                content, *self._trees, execution_devices=jax.local_devices()[:1]
            )
        # Damaged, or written by a JAX that differs where it says it does not.
        except Exception:
            return None
        self._loaded = path
        jax.monitoring.record_event(HIT_EVENT)
        jax.monitoring.record_event_duration_secs(COMPILE_EVENT, time.time() - begun)
        return loaded

    def _store(self, path: Path, compiled: jax.stages.Compiled) -> None:
        """Keep ``compiled``, or do nothing where that cannot be."""
        try:
            content, *trees = serialize_executable.serialize(compiled)
            if tuple(trees) == self._trees:
                _write(path, zlib.compress(content, 1))
                self._take_note(path)
                _drop_oldest(path.parent)
        # Not every backend serialises (XLA:CPU no sort that has run), and a disk may be full.
        except Exception:
            return

    def discard(self) -> None:
        """Forget what was loaded: it does not work."""
        if self._loaded is not None:
            self._loaded.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_folder() / "executables"


def _digest(*parts: str) -> str:
    return hashlib.sha256("".join((_outside(), *parts)).encode()).hexdigest()


def _is_cache_on() -> bool:
    """Whether programs are kept in the cache folder, and go to the first device."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    device = getattr(jax.config, "jax_default_device", None)
    return folder == str(cache_folder() / "xla") and device is None


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
    """Delete what was not used for longest, but for :data:`_KEPT`, and notes of what is gone."""
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    notes = [path for path in files if path.suffix == _NOTE]
    executables = [path for path in files if path.suffix != _NOTE]
    for path in executables[:-_KEPT]:
        path.unlink(missing_ok=True)
    for note in notes:
        if not note.with_name(note.read_text()).exists():
            note.unlink(missing_ok=True)


@cache
def _outside() -> str:
    """What all executables depend on besides the code of this package."""
    device = jax.local_devices()[0]
    device_kind = (device.platform, device.device_kind, device.client.platform_version)
    versions = [metadata.version(name) for name in _PACKAGES]
    variables = [os.environ.get(name) for name in _VARIABLES]
    return repr((device_kind, _processor(), sys.version, versions, variables))


def _processor() -> tuple[str, ...]:
    """This machine's processor with its features, where Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return (platform.machine(), platform.processor(), *features[:1])
