"""Hugging Face checkpoints: config.json and safetensors, in one file or in shards.

A safetensors file is eight bytes of header length, a JSON header and raw little-endian
arrays; reading it here takes no package, is checked against the file's size before any
array is touched, and goes straight into the parameters (bf16, which numpy lacks, included).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.families import FAMILIES
from oxidize_jax.checkpoints.hf_config import config_from_hf, read_json_object
from oxidize_jax.checkpoints.stored import OpenCheckpoint, StoredTensor
from oxidize_jax.messages import reason

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

# As the safetensors package: a longer header is damage, or an attempt on our memory.
_MAX_HEADER = 100_000_000
_MAX_DIMS = 16

_FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_OTHER_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32}
_OTHER_BITS |= {"U64": 64, "I64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}

# Buffers that old versions of transformers saved along with the weights. What they hold
# follows from the configuration.
_HARMLESS = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.bias",
    ".attn.masked_bias",
)


def open_safetensors(folder: str | Path) -> OpenCheckpoint:
    """Read and check config.json and the headers of all shards; no weights are read.

    Raises :class:`CheckpointError` if a file is missing or damaged. A model that cannot be
    run is no error here: ``config`` is then None and ``refusal`` says why.
    """
    folder = Path(folder)
    raw = read_json_object(folder / CONFIG_FILE)
    tensors, files = _open_tensors(folder)
    config, refusal = None, None
    try:
        config = config_from_hf(raw, source=str(folder / CONFIG_FILE))
        tensors = _with_prefix(tensors, FAMILIES[config.architecture].hf.prefix)
    except CheckpointError as error:
        refusal = error
    context = config.max_position_embeddings if config else raw.get("max_position_embeddings")
    return OpenCheckpoint(
        path=folder,
        format="safetensors",
        naming="hf",
        architecture=str(raw.get("model_type", "unknown")),
        context_length=context if isinstance(context, int) else None,
        file_bytes=sum(file.stat().st_size for file in files),
        tensors=tensors,
        config=config,
        refusal=refusal,
        # Some tied checkpoints save the head as well; as in transformers, the embedding is used.
        harmless=frozenset(n for n in tensors if n.endswith(_HARMLESS) or n == "lm_head.weight"),
    )


def _with_prefix(tensors: dict[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """``tensors`` by names with ``prefix``, which some files leave out everywhere."""
    if not prefix or any(name.startswith(prefix) for name in tensors):
        return tensors
    return {n if n == "lm_head.weight" else prefix + n: t for n, t in tensors.items()}


def _open_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[Path]]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return _read_header(single), [single]
    if index.is_file():
        return _open_shards(folder, index)
    there = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth", ".pt"))
    hint = f" ({there[0]} is a pickle: convert it to safetensors)" if there else ""
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there{hint}.")


def _open_shards(folder: Path, index: Path) -> tuple[dict[str, StoredTensor], list[Path]]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no 'weight_map' of tensor names to files.")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted({_shard_name(value, index) for value in weight_map.values()}):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index}: names the shard {shard!r}, which is not there.")
        for name, tensor in _read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is both in {tensors[name].path.name!r} and in "
                    f"{shard!r}; each must be in one shard."
                )
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(f"{index}: says that {name!r} is in {shard!r}; it is not.")
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{tensor.path}: tensor {name!r} is not in {INDEX_FILE}.")
    return tensors, [folder / shard for shard in sorted(set(weight_map.values()))]


def _shard_name(value: Any, index: Path) -> str:
    if not isinstance(value, str) or Path(value).name != value or "\\" in value:
        raise CheckpointError(f"{index}: {value!r} is not the name of a file in the same folder.")
    return value


def _read_header(path: Path) -> dict[str, StoredTensor]:
    file_bytes = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(file_bytes - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{path}: truncated, or not a safetensors file: its header should have "
                f"{length} bytes, the file has {file_bytes}."
            )
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged header: {reason(error)}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: damaged header: not a JSON object.")
    entries.pop("__metadata__", None)
    tensors = {
        name: _stored_tensor(name, entry, path, data_start=8 + length)
        for name, entry in entries.items()
    }
    _check_layout(path, tensors, 8 + length, file_bytes)
    return tensors


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name!r} occurs twice")
        entries[name] = value
    return entries


def _stored_tensor(name: str, entry: Any, path: Path, data_start: int) -> StoredTensor:
    parsed = _parse_entry(entry)
    if parsed is None:
        raise CheckpointError(f"{path}: damaged header: entry of tensor {name!r} is malformed.")
    kind, shape, begin, end = parsed
    bits = _FLOATS[kind].itemsize * 8 if kind in _FLOATS else _OTHER_BITS.get(kind)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} in {kind} cannot be "
            f"{end - begin} bytes long."
        )
    if 0 in shape or begin > end:
        raise CheckpointError(f"{path}: tensor {name!r} of shape {list(shape)} holds no values.")
    return StoredTensor(
        name=name,
        shape=shape or (1,),
        type_name=kind,
        path=path,
        offset=data_start + begin,
        nbytes=end - begin,
        decode=_decoder(_FLOATS[kind]) if kind in _FLOATS else None,
    )


def _parse_entry(entry: Any) -> tuple[str, tuple[int, ...], int, int] | None:
    """(dtype, shape, begin, end), or None if ``entry`` is anything else."""
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        return None
    if len(shape) > _MAX_DIMS or not all(
        type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)
    ):
        return None
    return (kind, shape, begin, end) if isinstance(kind, str) else None


def _decoder(dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    return lambda raw: raw.view(dtype)


def _check_layout(
    path: Path, tensors: Mapping[str, StoredTensor], start: int, file_bytes: int
) -> None:
    """The arrays follow each other without gap or overlap and fill the file."""
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset != end:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} starts at byte {tensor.offset}, the one before "
                f"it ends at {end}: the header is damaged."
            )
        end += tensor.nbytes
    if end != file_bytes:
        what = "truncated" if end > file_bytes else "damaged"
        raise CheckpointError(
            f"{path}: {what}: its tensors end at byte {end}, the file at {file_bytes}; "
            "fetch it again."
        )
