"""Save a model as :mod:`oxidize_jax.checkpoints.saved` reads it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oxidize_jax import __version__
from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.gguf_header import write_gguf_metadata
from oxidize_jax.checkpoints.saved import (
    GGUF_TOKENIZER,
    MANIFEST,
    PARAMS,
    TOKENIZER,
    TOKENIZER_FILES,
    VERSION,
    array_checksum,
    manifest_checksum,
    tokenizer_of,
)
from oxidize_jax.messages import short_repr
from oxidize_jax.model.config import ModelConfig

_GB = 10**9


def save_model(
    folder: str | Path, config: ModelConfig, params: Mapping[str, Any], tokenizer: Path
) -> Path:
    """Save a model to ``folder``, which must be new or empty; its absolute path.

    Args:
      params: by the names, shapes and types that ``load_checkpoint`` gives them. JAX arrays on
        any device, or numpy's.
      tokenizer: GGUF file or Hugging Face folder with the tokenizer, and with config.json,
        generation_config.json and chat_template.jinja where they are.

    The model is written beside ``folder`` and gets its name when all is on disk. What is left
    if the process dies before that is a folder ``.NAME.saving-*``, which cannot be loaded; it
    may be deleted.

    Raises :class:`CheckpointError` if the folder is not empty or cannot be written, and
    ``ImportError`` if Orbax is not installed.
    """
    orbax = import_orbax()
    target = check_folder(folder)
    check_space(target, sum(values.nbytes for values in params.values()))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = _scratch(target, target.parent)
        try:
            _write(orbax, scratch, config, params, tokenizer)
            scratch.chmod(0o755)  # mkdtemp makes it the user's own
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{error.filename or target}: {reason}.") from None
    return target


def check_folder(folder: str | Path) -> Path:
    """The absolute path of a folder that :func:`save_model` can make.

    Raises :class:`CheckpointError` if it is there and not empty, or cannot be made: its parent
    is a file or may not be written, its name is too long.
    """
    try:
        target = Path(folder).expanduser().absolute()
        empty = target.is_dir() and not any(target.iterdir())
        taken = os.path.lexists(target) and not empty
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"folder={short_repr(str(folder), 200)}: {error}.") from None
    if taken:
        raise CheckpointError(
            f"folder={short_repr(str(folder), 200)}: is there already; name a new one, or "
            "delete it first."
        )
    try:
        _scratch(target, _existing_parent(target)).rmdir()
    except OSError as error:
        raise CheckpointError(
            f"folder={short_repr(str(folder), 200)}: cannot be made: {error.strerror or error}."
        ) from None
    return target


def check_space(target: Path, nbytes: int) -> None:
    """Raise :class:`CheckpointError` if ``nbytes`` are not free where ``target`` will be."""
    free = shutil.disk_usage(_existing_parent(target)).free
    if free < nbytes:
        raise CheckpointError(
            f"{target}: the model takes {nbytes / _GB:.3g} GB, but only {free / _GB:.3g} GB are "
            "free there."
        )


def _scratch(target: Path, parent: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=parent, prefix=f".{target.name}.saving-"))


def _existing_parent(target: Path) -> Path:
    return next(path for path in target.parents if os.path.lexists(path))


def _write(
    orbax: Any, folder: Path, config: ModelConfig, params: Mapping[str, Any], tokenizer: Path
) -> None:
    arrays = {name: np.asarray(values) for name, values in params.items()}
    _write_params(orbax, folder / PARAMS, arrays)
    _copy_tokenizer(tokenizer, folder / TOKENIZER)
    content = {
        "version": VERSION,
        "oxidize_jax": __version__,
        "dtype": _weight_dtype(arrays),
        "config": dataclasses.asdict(config),
        "parameters": {
            name: {
                "shape": list(array.shape),
                "dtype": array.dtype.name,
                "checksum": array_checksum(array),
            }
            for name, array in arrays.items()
        },
        "files": {
            f"{TOKENIZER}/{path.name}": {
                "size": path.stat().st_size,
                "checksum": zlib.crc32(path.read_bytes()),
            }
            for path in sorted((folder / TOKENIZER).iterdir())
        },
    }
    # As it will be read: tuples are lists in JSON.
    content = json.loads(json.dumps(content))
    content["checksum"] = manifest_checksum(content)
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _weight_dtype(arrays: Mapping[str, np.ndarray]) -> str:
    """The embedding is a matrix in every model."""
    return arrays["embed.weight"].dtype.name


def _write_params(orbax: Any, folder: Path, arrays: dict[str, np.ndarray]) -> None:
    largest = max(array.nbytes for array in arrays.values())
    # Zarr 2, uncompressed, one chunk each: what saved.py reads. Orbax keeps a copy of what it
    # writes at a time, so a limit, which must be above the largest array.
    handler = orbax.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_zarr3=False,
        use_compression=False,
        save_concurrent_gb=2 * (1 + largest // _GB),
    )
    # It warns of hosts that are not there.
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with orbax.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder, args=orbax.args.PyTreeSave(arrays))
    except (ValueError, RuntimeError) as error:  # TensorStore's, of files too
        said = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: cannot be written: {said}") from error
    finally:
        log.setLevel(level)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    folder.mkdir()
    source = tokenizer_of(source) if (source / MANIFEST).is_file() else source
    if source.is_file():
        write_gguf_metadata(source, folder / GGUF_TOKENIZER)
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def import_orbax() -> Any:
    """``orbax.checkpoint``, or ImportError saying what to install."""
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise ImportError(
            "Saving a model needs orbax-checkpoint: pip install 'oxidize_jax[orbax]'"
        ) from error
    return orbax
