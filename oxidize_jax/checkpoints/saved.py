"""Saved models: a folder with the parameters as they are in memory, to start again quickly.

A GGUF is decoded and a checkpoint in another type is converted or quantised whenever it is
loaded. A saved model is read: no number is computed. The folder has

* ``oxidize_jax.json``, the manifest: version, type of the weights, the model's configuration,
  and of all that belongs to it the size and a checksum. It is written last;
* ``params/``, an Orbax checkpoint (a PyTree of one array for each parameter, uncompressed
  Zarr 2), which ``orbax.checkpoint`` restores too;
* ``tokenizer/``, the files of the tokenizer, ``generation_config.json`` and the chat template
  among them; of a GGUF its metadata.

Reading takes neither Orbax, whose import costs seconds, nor TensorStore, which holds what it
reads twice: an uncompressed Zarr array of one chunk is a small JSON file and a file of numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.fill import Place, aligned_empty, stored_dtype
from oxidize_jax.checkpoints.hf_config import read_json_object
from oxidize_jax.messages import short_repr
from oxidize_jax.model.config import ModelConfig, RopeScaling
from oxidize_jax.model.transformer import parameter_shapes
from oxidize_jax.progress import progress_bar

MANIFEST = "oxidize_jax.json"
PARAMS = "params"
TOKENIZER = "tokenizer"
GGUF_TOKENIZER = "tokenizer.gguf"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
"""What a folder with a tokenizer may have of use"""
VERSION = 1
"""Of the manifest. A reader takes its own version only."""
DTYPES = ("float32", "bfloat16", "int8")

_ZARR_DTYPES = {"float32": "<f4", "bfloat16": "bfloat16", "int8": "|i1"}
_SUM_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """A parameter in a saved model."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    """:func:`array_checksum`"""

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class SavedFile:
    """A file of the tokenizer."""

    size: int
    checksum: int
    """CRC-32"""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a saved model says of itself."""

    path: Path
    """The folder"""
    dtype: str
    """Of the weights: one of :data:`DTYPES`"""
    config: ModelConfig
    params: Mapping[str, SavedArray]
    files: Mapping[str, SavedFile]
    """By their path in the folder"""

    @property
    def file_bytes(self) -> int:
        """Bytes of parameters and tokenizer on disk."""
        return sum(a.nbytes for a in self.params.values()) + sum(
            file.size for file in self.files.values()
        )


def is_saved(path: str | Path) -> bool:
    """Whether ``path`` is the folder of a saved model, sound or not."""
    try:
        folder = Path(path).expanduser()
        return (folder / MANIFEST).is_file() or (folder / PARAMS / "_METADATA").is_file()
    except (OSError, RuntimeError):
        return False


def tokenizer_of(folder: Path) -> Path:
    """Where the tokenizer of a saved model is: a GGUF without tensors, or a folder.

    Raises :class:`CheckpointError` if it is not as it was saved. That holds for a file too that
    was not saved but would be read, such as a chat template that came into the folder later.
    """
    files = read_manifest(folder).files
    for name in (GGUF_TOKENIZER, *TOKENIZER_FILES):
        path = folder / TOKENIZER / name
        listed = files.get(f"{TOKENIZER}/{name}")
        if listed is not None:
            _check_file(path, listed)
        elif path.exists():
            raise CheckpointError(
                f"{path}: was not saved with the model ({MANIFEST} does not list it): delete it, "
                "or save the model again with the tokenizer it is to have."
            )
    return folder / TOKENIZER / (GGUF_TOKENIZER if f"{TOKENIZER}/{GGUF_TOKENIZER}" in files else "")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a saved model. Raises :class:`CheckpointError` for one that is not sound."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: {MANIFEST} is not there: the model was not saved to its end; save it again."
        )
    content = read_json_object(path)
    version = content.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"{path}: version={short_repr(version)}: this package reads version {VERSION}; save "
            "the model again with it."
        )
    if content.pop("checksum", None) != manifest_checksum(content):
        raise CheckpointError(f"{path}: damaged: its checksum is another; save the model again.")
    try:
        manifest = _parse(folder, content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: written by a version of oxidize_jax that this one cannot read "
            f"({error}); save the model again."
        ) from None
    _check_parameters(manifest)
    return manifest


def load_saved(
    folder: Path, dtype: np.dtype, place: Place, progress: bool = False
) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """Read the parameters of a saved model and hand each to ``place`` as soon as it is whole.

    One parameter (all its layers) is on the host at a time, beside what ``place`` keeps there.
    Raises :class:`CheckpointError` naming the file that is missing, cut off or damaged, or the
    type of the weights where it is not ``dtype``: nothing is converted.
    """
    manifest = read_manifest(folder)
    if dtype.name != manifest.dtype:
        raise CheckpointError(
            f"{folder}: was saved with weights in {manifest.dtype}, but dtype={dtype.name}: it is "
            f"not converted. Leave dtype out, or save the model in {dtype.name}."
        )
    for name, file in manifest.files.items():
        _check_file(folder / name, file)
    params = {}
    with progress_bar(len(manifest.params), shown=progress, unit="array", label="loading") as bar:
        for name, array in manifest.params.items():
            params[name] = place(name, _read_array(folder / PARAMS / name, array))
            bar.update()
    return manifest.config, params


def numpy_dtype(name: str) -> np.dtype:
    """float32, bfloat16 or int8, as numpy has it."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def array_checksum(array: np.ndarray) -> int:
    """CRC-32 of the sums of each 64 KiB, as little-endian words of 64 bits.

    It finds what happens to files (a flipped bit, a hole of zeros, blocks of another file or in
    another order) at the speed of memory, three times that of a CRC of all bytes.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = raw.size - raw.size % _SUM_BYTES
    sums = raw[:whole].view("<u8").reshape(-1, _SUM_BYTES // 8).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(raw[whole:].tobytes(), zlib.crc32(sums.astype("<u8").tobytes()))


def manifest_checksum(content: Mapping[str, Any]) -> int:
    """CRC-32 of the manifest without its checksum."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _parse(folder: Path, content: Mapping[str, Any]) -> Manifest:
    params = {
        name: SavedArray(tuple(entry["shape"]), entry["dtype"], entry["checksum"])
        for name, entry in content["parameters"].items()
    }
    files = {name: SavedFile(**entry) for name, entry in content["files"].items()}
    for name in files:
        if name != f"{TOKENIZER}/{Path(name).name}":
            raise ValueError(f"{name!r} is not a file in {TOKENIZER}")
    return Manifest(folder, content["dtype"], _config(content["config"]), params, files)


def _config(fields: Mapping[str, Any]) -> ModelConfig:
    scaling = RopeScaling(**_tuples(fields["rope_scaling"]))
    return ModelConfig(**(_tuples(fields) | {"rope_scaling": scaling}))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}


def _check_parameters(manifest: Manifest) -> None:
    path = manifest.path / MANIFEST
    if manifest.dtype not in DTYPES:
        raise CheckpointError(f"{path}: dtype={manifest.dtype!r}: must be {', '.join(DTYPES)}.")
    target = numpy_dtype(manifest.dtype)
    shapes = parameter_shapes(manifest.config, quantized=manifest.dtype == "int8")
    wanted = {name: (shape, stored_dtype(name, target).name) for name, shape in shapes.items()}
    there = {name: (array.shape, array.dtype) for name, array in manifest.params.items()}
    for name in dict.fromkeys([*wanted, *there]):
        if wanted.get(name) != there.get(name):
            raise CheckpointError(
                f"{path}: parameter {name!r} is {_spelled(there.get(name))}, the model asks for "
                f"{_spelled(wanted.get(name))}: written by another version; save the model again."
            )


def _spelled(array: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if array is None else f"{array[1]}{list(array[0])}"


def _check_file(path: Path, file: SavedFile) -> None:
    _check_size(path, file.size)
    if zlib.crc32(path.read_bytes()) != file.checksum:
        raise _damaged(path)


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: is not there; save the model again.")
    there = path.stat().st_size
    if there != size:
        raise CheckpointError(
            f"{path}: has {there} bytes and should have {size}; save the model again."
        )


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: its checksum is another; save the model again.")


def _read_array(folder: Path, array: SavedArray) -> np.ndarray:
    """The numbers of a parameter, in memory that XLA:CPU takes as it is."""
    path = folder / ".".join("0" * len(array.shape))
    _check_size(path, array.nbytes)
    header = read_json_object(folder / ".zarray")
    wanted = {
        "zarr_format": 2,
        "shape": list(array.shape),
        "chunks": list(array.shape),
        "dtype": _ZARR_DTYPES[array.dtype],
        "compressor": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }
    for key, value in wanted.items():
        if header.get(key, value) != value:
            raise CheckpointError(
                f"{folder / '.zarray'}: {key}={short_repr(header[key])}, but {short_repr(value)} "
                "was saved; save the model again."
            )
    values = aligned_empty(array.shape, numpy_dtype(array.dtype))
    with open(path, "rb") as file:
        if file.readinto(values.reshape(-1).view(np.uint8).data) != array.nbytes:
            raise CheckpointError(f"{path}: became shorter while it was read.")
    if array_checksum(values) != array.checksum:
        raise _damaged(path)
    return values
