"""The header of a GGUF file: metadata and where the tensors lie.

After the format's specification (ggml, ``docs/gguf.md``). The ``gguf`` package has a
reader too; this one exists because that reader makes an array object of each of a
vocabulary's strings (3.8 s for 49,152 tokens, here 0.05 s), and because every length is
checked against the file before it is used, so that a cut or damaged file is an error that
says where, whatever its bytes.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.messages import short_repr

MAGIC = b"GGUF"

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMS = 4
_MAX_ITEMS = 2**23
"""Of an array, whose items become Python objects of tens of bytes. The largest vocabularies
have some hundred thousand tokens and merges."""
_DEFAULT_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class GGUFTensorInfo:
    """A tensor as the header lists it."""

    name: str
    shape: tuple[int, ...]
    """Outermost axis first (the file stores the innermost first)."""
    type_id: int
    """``GGMLQuantizationType``."""
    offset: int
    """Of the first byte, from the start of the file."""


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """Everything in a GGUF file before its tensor data."""

    path: Path
    file_bytes: int
    version: int
    metadata: Mapping[str, Any]
    """Key -> int, float, bool, str, or a list of them."""
    tensors: tuple[GGUFTensorInfo, ...]


def check_is_gguf(path: Path) -> Path:
    """``path`` itself, or :class:`CheckpointError` if that file does not start like a GGUF."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return path
    raise CheckpointError(
        f"{path}: not a GGUF file (it does not start with 'GGUF'); for safetensors give the "
        "folder that has config.json too."
    )


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """Read metadata and the list of tensors of a GGUF file (version 2 or 3).

    Raises :class:`CheckpointError` if the file is not a GGUF, is cut off inside its header,
    or contradicts itself. Whether the tensors' data is all there is for the caller to check,
    who knows the sizes of the types.
    """
    path = check_is_gguf(Path(path))
    with open(path, "rb") as file:
        reader = _Reader(file, path)
        version = _read_version(reader)
        num_tensors = reader.count("number of tensors", least_bytes=24)
        num_entries = reader.count("number of metadata entries", least_bytes=13)
        metadata = _read_metadata(reader, num_entries)
        listed = [_read_tensor_info(reader) for _ in range(num_tensors)]
        start = _data_start(metadata, reader)
    _check_unique([info.name for info in listed], path)
    tensors = tuple(dataclasses.replace(i, offset=start + i.offset) for i in listed)
    return GGUFHeader(path, reader.size, version, metadata, tensors)


def write_gguf_metadata(source: Path, target: Path) -> None:
    """Write a GGUF with the metadata of ``source``, byte for byte, and no tensors."""
    with open(check_is_gguf(source), "rb") as file:
        reader = _Reader(file, source)
        version = _read_version(reader)
        reader.count("number of tensors", least_bytes=24)
        num_entries = reader.count("number of metadata entries", least_bytes=13)
        start = reader.position
        _read_metadata(reader, num_entries)
        file.seek(start)
        entries = file.read(reader.position - start)
    counts = _U32.pack(version) + _U64.pack(0) + _U64.pack(num_entries)
    target.write_bytes(MAGIC + counts + entries)


def _read_version(reader: _Reader) -> int:
    reader.bytes(len(MAGIC), "magic")
    version = reader.scalar(_U32, "version")
    if version and not version & 0xFFFF:
        raise UnsupportedModelError(f"{reader.path}: big-endian GGUF is not supported.")
    if version not in (2, 3):
        raise UnsupportedModelError(
            f"{reader.path}: GGUF version {version} is not supported, versions 2 and 3 are."
        )
    return version


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string("metadata key")
        if key in metadata:
            raise CheckpointError(f"{reader.path}: metadata key {key!r} occurs twice.")
        metadata[key] = _read_value(reader, key)
    return metadata


def _read_value(reader: _Reader, key: str) -> Any:
    type_id = reader.scalar(_U32, key)
    if type_id == _STRING:
        return reader.string(key)
    if type_id == _ARRAY:
        return _read_array(reader, key)
    if type_id in _SCALARS:
        return reader.scalar(_SCALARS[type_id], key)
    raise CheckpointError(f"{reader.path}: {key!r} has the unknown value type {type_id}.")


def _read_array(reader: _Reader, key: str) -> list[Any]:
    item_type = reader.scalar(_U32, key)
    if item_type == _STRING:
        length = _read_length(reader, key, _U64.size)
        return [reader.string(key) for _ in range(length)]
    if item_type not in _SCALARS:
        raise CheckpointError(
            f"{reader.path}: {key!r} is an array of value type {item_type}, which is not known "
            "(arrays of arrays are not supported)."
        )
    item = _SCALARS[item_type]
    length = _read_length(reader, key, item.size)
    return [value for (value,) in item.iter_unpack(reader.bytes(length * item.size, key))]


def _read_length(reader: _Reader, key: str, least_bytes: int) -> int:
    length = reader.count(key, least_bytes=least_bytes)
    if length > _MAX_ITEMS:
        raise CheckpointError(
            f"{reader.path}: {short_repr(key)} is an array of {length} items; at most "
            f"{_MAX_ITEMS} are read."
        )
    return length


def _read_tensor_info(reader: _Reader) -> GGUFTensorInfo:
    name = reader.string("tensor name")
    num_dims = reader.scalar(_U32, name)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise CheckpointError(f"{reader.path}: tensor {name!r} has {num_dims} dimensions.")
    dims = [reader.scalar(_U64, name) for _ in range(num_dims)]
    if 0 in dims or math.prod(dims) >= 2**63:
        raise CheckpointError(f"{reader.path}: tensor {name!r} has the impossible shape {dims}.")
    type_id = reader.scalar(_U32, name)
    return GGUFTensorInfo(name, tuple(reversed(dims)), type_id, reader.scalar(_U64, name))


def _data_start(metadata: dict[str, Any], reader: _Reader) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{reader.path}: general.alignment={alignment!r}: must be a power of two."
        )
    return -(-reader.position // alignment) * alignment


def _check_unique(names: list[str], path: Path) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CheckpointError(f"{path}: tensor {name!r} is listed twice.")
        seen.add(name)


class _Reader:
    """Reads forward and never past the end: a length is checked before it is believed."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.position = 0
        self._file = file

    def bytes(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            raise self._truncated(what)
        raw = self._file.read(count)
        if len(raw) < count:  # it has become shorter meanwhile
            raise self._truncated(what)
        self.position += count
        return raw

    def scalar(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack(self.bytes(kind.size, what))[0]

    def string(self, what: str) -> str:
        raw = self.bytes(self.scalar(_U64, what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what!r} is not UTF-8 text: {error}.") from None

    def count(self, what: str, least_bytes: int) -> int:
        """A number of items of at least ``least_bytes`` each, all of which must follow."""
        count = self.scalar(_U64, what)
        if count * least_bytes > self.size - self.position:
            raise self._truncated(what)
        return count

    def _truncated(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: truncated or damaged: {what!r} at byte {self.position} needs more "
            f"than the {self.size - self.position} bytes that are left; fetch the file again."
        )
