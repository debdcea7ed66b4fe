"""GGUF files: configuration, tensors, and the row order undone.

llama.cpp's converter reorders the rows of the query and key projections of ``llama``
models (and of a few others, never of most): within a head, the two halves that Hugging Face's
rotary embedding pairs up are interleaved. :func:`rotary_row_map` undoes that, with each
projection's own head count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.families import FAMILIES, GGUF_FAMILIES, GGUFFormat
from oxidize_jax.checkpoints.families.gguf_fields import (
    FACTORS,
    GGUFFields,
)
from oxidize_jax.checkpoints.gguf_header import GGUFHeader, GGUFTensorInfo, read_gguf_header
from oxidize_jax.checkpoints.stored import OpenCheckpoint, StoredTensor
from oxidize_jax.messages import short_repr
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.rope import check_ropes


def open_gguf(path: str | Path) -> OpenCheckpoint:
    """Read and check the header of a GGUF file; no weights are read.

    Raises :class:`CheckpointError` if the file is damaged. A model that cannot be run is
    no error here: ``config`` is then None and ``refusal`` says why.
    """
    header = read_gguf_header(path)
    architecture = str(header.metadata.get("general.architecture", "unknown"))
    tensors = {info.name: _stored_tensor(info, header) for info in header.tensors}
    _check_extents(header, tensors)
    config, refusal, row_maps = None, None, {}
    try:
        config = config_from_gguf(header)
        row_maps = _row_maps(config)
    except CheckpointError as error:
        config, refusal = None, error
    context = header.metadata.get(f"{architecture}.context_length")
    return OpenCheckpoint(
        path=header.path,
        format="gguf",
        naming="gguf",
        architecture=architecture,
        context_length=context if isinstance(context, int) else None,
        file_bytes=header.file_bytes,
        tensors=tensors,
        config=config,
        refusal=refusal,
        harmless=frozenset(FACTORS),
        row_maps=row_maps,
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    """The model's shape from the metadata, and from which tensors there are.

    Of the tensors only factors of rotary frequencies are read. Raises
    :class:`UnsupportedModelError` naming the key that asks for something not built, and
    :class:`CheckpointError` for a missing or odd value.
    """
    layout = _layout(header)
    tensors = {info.name: info for info in header.tensors if info.name in FACTORS}

    def read(name: str) -> np.ndarray | None:
        if name not in tensors:
            return None
        tensor = _stored_tensor(tensors[name], header)
        return tensor.read_rows(0, tensor.matrix_shape[0]).reshape(-1)

    try:
        config = layout.config(GGUFFields(header, read, layout.architecture))
        check_ropes(config)
        return config
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{header.path}: {error}") from None


def _layout(header: GGUFHeader) -> GGUFFormat:
    """The format of the file's architecture, once it is known to be a whole model of it."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or family.gguf is None:
        raise UnsupportedModelError(
            f"{header.path}: general.architecture={short_repr(architecture)} is not supported, "
            f"only {', '.join(map(repr, GGUF_FAMILIES))} are."
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(
            f"{header.path}: general.type={short_repr(kind)} is not supported, only "
            "whole models are."
        )
    if metadata.get("split.count", 1) != 1:
        raise UnsupportedModelError(
            f"{header.path}: split.count={short_repr(metadata['split.count'])}: a GGUF in "
            "several files is not supported; join them with llama.cpp's `llama-gguf-split --merge`."
        )
    return family.gguf


def rotary_row_map(num_heads: int, head_dim: int) -> np.ndarray:
    """i64[num_heads * head_dim]: row in Hugging Face's order of each row in the file.

    With ``head_dim`` 8, rows 0 to 7 of a head go to 0, 4, 1, 5, 2, 6, 3, 7: the file
    alternates between the first and the second half of the head.
    """
    halves = np.arange(head_dim).reshape(2, head_dim // 2)
    within_head = halves.T.reshape(-1)
    return (np.arange(num_heads)[:, None] * head_dim + within_head).reshape(-1)


def _row_maps(config: ModelConfig) -> dict[str, Callable[[], np.ndarray]]:
    layout = FAMILIES[config.architecture].gguf
    if layout is None or not layout.interleaved:
        return {}
    queries = functools.partial(rotary_row_map, config.num_heads, config.head_dim)
    keys = functools.partial(rotary_row_map, config.num_kv_heads, config.head_dim)
    return {
        "layers.q.weight": queries,
        "layers.q.bias": queries,
        "layers.k.weight": keys,
        "layers.k.bias": keys,
    }


def _stored_tensor(info: GGUFTensorInfo, header: GGUFHeader) -> StoredTensor:
    gguf = _import_gguf()
    try:
        kind = gguf.GGMLQuantizationType(info.type_id)
    except ValueError:
        raise CheckpointError(
            f"{header.path}: tensor {info.name!r} has the unknown type {info.type_id}; "
            "a newer gguf package may know it: pip install -U gguf"
        ) from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    *outer, inner = info.shape
    if inner % block:
        raise CheckpointError(
            f"{header.path}: tensor {info.name!r} has rows of {inner} values, which is not a "
            f"multiple of the {block} in a {kind.name} block."
        )
    nbytes = math.prod(outer) * (inner // block) * block_bytes
    return StoredTensor(
        name=info.name,
        shape=info.shape,
        type_name=kind.name,
        path=header.path,
        offset=info.offset,
        nbytes=nbytes,
        decode=_decoder(kind, block_bytes),
    )


@functools.cache
def _decoder(kind: Any, block_bytes: int) -> Callable[[np.ndarray], np.ndarray] | None:
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return None
    return lambda raw: dequantize(raw, kind)


def _check_extents(header: GGUFHeader, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse a file that ends before its tensors do, or in which two tensors overlap."""
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            raise CheckpointError(
                f"{header.path}: tensors {before!r} and {tensor.name!r} overlap in the file."
            )
        end, before = tensor.offset + tensor.nbytes, tensor.name
        if end > header.file_bytes:
            raise CheckpointError(
                f"{header.path}: truncated: tensor {tensor.name!r} ends at byte {end}, the file "
                f"at {header.file_bytes}; fetch it again."
            )


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("Reading a GGUF file needs gguf: pip install gguf") from error
    return gguf
