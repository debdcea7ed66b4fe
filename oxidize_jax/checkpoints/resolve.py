"""From what a user calls a model to the files on this machine."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import Literal

from oxidize_jax.checkpoints.builtin import BUILTIN_MODELS, fetch_builtin
from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.gguf_header import check_is_gguf
from oxidize_jax.checkpoints.safetensors import CONFIG_FILE
from oxidize_jax.checkpoints.saved import is_saved

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_SUFFIXES = (".gguf", ".safetensors")

# All that is read of a repository; its other formats can be many times as large.
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
    """Files of a model on this machine."""

    kind: Literal["gguf", "folder", "saved"]
    """``gguf``: one file with everything; ``folder``: config.json, safetensors, tokenizer;
    ``saved``: see :mod:`~oxidize_jax.checkpoints.saved`."""
    path: Path


def resolve_model(model: str | Path, *, allow_download: bool = True) -> ResolvedModel:
    """Find ``model``: a built-in name, a folder, a ``.gguf`` file or a Hugging Face repo id.

    A string that looks like a path (it exists, ends in ``.gguf`` or ``.safetensors``, or
    starts with ``.``, ``/`` or ``~``) is never taken for a repo id ``org/name``. With
    ``allow_download`` false only what is already on this machine is found, caches included.

    Raises :class:`CheckpointError`, in one line with near matches, if there is no such
    model, and ``ImportError`` if a repo id is given and huggingface_hub is not installed.
    """
    if isinstance(model, str) and model in BUILTIN_MODELS:
        return ResolvedModel("gguf", fetch_builtin(model, allow_download=allow_download))
    if model == "":
        raise CheckpointError("model='': a model name is empty; give a name, a path or a repo id.")
    try:
        return _resolve_local(model) or _resolve_repo(str(model), allow_download)
    except OSError as error:  # a name too long, a folder that may not be read
        reason = error.strerror or type(error).__name__
        raise CheckpointError(f"model={_shown(model)}: {reason}.") from None


def saved_folder(model: str | Path) -> Path | None:
    """The folder of a saved model on this machine that :func:`resolve_model` finds for
    ``model``, sound or not; None where it finds something else. A built-in name is no folder."""
    if (isinstance(model, str) and model in BUILTIN_MODELS) or not is_saved(model):
        return None
    return Path(model).expanduser()


def _resolve_local(model: str | Path) -> ResolvedModel | None:
    """The folder or file at ``model``; None if there is none and it need not be a path."""
    path = _expanded(model)
    if path.is_dir():
        return _resolve_folder(path)
    if path.is_file():
        return ResolvedModel("gguf", check_is_gguf(path))
    if path.exists():
        raise CheckpointError(f"model={_shown(model)}: is not a regular file or a folder.")
    if isinstance(model, Path) or _looks_like_path(model):
        raise CheckpointError(
            f"model={_shown(model)}: there is no such file or folder.{_near(path)}"
        )
    return None


def _expanded(model: str | Path) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # "~name" of a user there is not
        raise CheckpointError(
            f"model={_shown(model)}: there is no such user's home folder."
        ) from None


def _resolve_repo(model: str, allow_download: bool) -> ResolvedModel:
    if _REPO_ID.fullmatch(model):
        return _resolve_folder(_fetch_repo(model, allow_download))
    raise CheckpointError(
        f"model={_shown(model)}: not a built-in model ({', '.join(sorted(BUILTIN_MODELS))}), a "
        f"folder, a .gguf file or a Hugging Face repo id such as 'org/name'.{_near(Path(model))}"
    )


def _shown(model: str | Path, limit: int = 200) -> str:
    """The name in quotes, cut where it is too long for a line."""
    name = str(model)
    return repr(name) if len(name) <= limit else f"{name[:limit]!r}... ({len(name)} characters)"


def _looks_like_path(model: str) -> bool:
    is_absolute = os.path.isabs(model) or "\\" in model
    return is_absolute or model.startswith((".", "~")) or model.endswith(_FILE_SUFFIXES)


def _resolve_folder(folder: Path) -> ResolvedModel:
    """A folder is a saved model, a Hugging Face checkpoint, or holds exactly one GGUF file."""
    if is_saved(folder):
        return ResolvedModel("saved", folder)
    if (folder / CONFIG_FILE).is_file():
        return ResolvedModel("folder", folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return ResolvedModel("gguf", files[0])
    listed = ", ".join(path.name for path in files[:3])
    found = f"{len(files)} .gguf files: name one ({listed})" if files else "no .gguf file"
    raise CheckpointError(f"model={str(folder)!r}: the folder has no {CONFIG_FILE} and {found}.")


def _near(path: Path) -> str:
    """A sentence with what the user may have meant; empty if nothing comes near."""
    parent = path.parent
    names = {p.name: str(p) for p in parent.iterdir()} if parent.is_dir() else {}
    names |= {name: name for name in BUILTIN_MODELS}
    matches = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    if not matches:
        return ""
    return f" Did you mean {' or '.join(repr(names[match]) for match in matches)}?"


def _fetch_repo(repo_id: str, allow_download: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"model={repo_id!r} is a Hugging Face repo id, which needs huggingface_hub: "
            "pip install 'oxidize_jax[hub]'"
        ) from error
    try:
        folder = snapshot_download(
            repo_id,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=not allow_download,
        )
    except Exception as error:
        if not allow_download:
            raise CheckpointError(
                f"model={repo_id!r}: not in the Hugging Face cache of this machine; "
                f"`hf download {repo_id}` or using the model fetches it."
            ) from error
        # The hub raises from several families (HTTP, offline, gated, not cached); to the
        # user they are one thing, and its first line says which.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"model={repo_id!r}: cannot be fetched from Hugging Face: {reason} "
            "(a local folder or .gguf file needs no network)"
        ) from error
    return Path(folder)
