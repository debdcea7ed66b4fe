"""From stored tensors to parameters: every tensor used exactly once, streamed by rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.mapping import Stored, stored_parameters
from oxidize_jax.checkpoints.stored import OpenCheckpoint, StoredTensor
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.quantize import is_matrix, quantize_weight_on_host, scale_name, stays_float32
from oxidize_jax.model.transformer import parameter_shapes
from oxidize_jax.progress import progress_bar

Place = Callable[[str, np.ndarray], jax.Array]
"""Hands a finished parameter (its name and host array) to a device."""

# Elements decoded at a time. Temporaries of this size stay in cache (Q4_1: 3.3 ns a value,
# 6.2 with 4 Mi elements at a time) and do not show in the peak of a load.
_CHUNK = 1 << 18

# XLA:CPU takes a host array as it is when it starts on such a boundary.
_ALIGNMENT = 64


def fill_parameters(
    opened: OpenCheckpoint, dtype: np.dtype, place: Place, progress: bool = False
) -> dict[str, jax.Array]:
    """Read every parameter of ``opened`` and hand each to ``place`` as soon as it is whole.

    Matrices and biases come in ``dtype`` (f32 or bf16), norms in f32. For int8, matrices
    are rounded row by row as they are read, as :mod:`oxidize_jax.model.quantize` says, and
    their scales are parameters too; norms and biases are f32. One parameter (all its layers)
    is on the host at a time, so on an accelerator the host never holds the model, and on
    CPU, where the arrays are not copied, it holds it once, in its final type.

    Raises :class:`CheckpointError` naming the tensor that is missing, left over, of the
    wrong shape, not finite, or cut off.
    """
    plan = plan_parameters(opened)
    shapes = parameter_shapes(_supported_config(opened))
    parameters = {}
    total = sum(map(len, plan.values()))
    with progress_bar(total, shown=progress, unit="tensor", label="loading") as bar:
        for name, pieces in plan.items():
            whole = _Parameter(name, shapes[name], dtype, pieces)
            row_map = opened.row_maps[name]() if name in opened.row_maps else None
            for index, piece in enumerate(pieces):
                _fill(whole.part(index), piece, row_map)
                bar.update()
            for part, array in whole.arrays.items():
                parameters[part] = place(part, array)
    return parameters


def place_on_default_device(name: str, array: np.ndarray) -> jax.Array:
    """Put ``array`` on JAX's default device; on CPU that is the same memory, not a copy."""
    del name
    return jax.device_put(array, may_alias=True)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What of a tensor makes up one layer of a parameter, or one expert of a layer."""

    tensor: StoredTensor
    stored: Stored

    def rows(self) -> Iterator[tuple[int, np.ndarray]]:
        """Row of the parameter and float[some, columns] from there on; a vector is one row."""
        part, tensor = slice(self.stored.start, self.stored.stop), self.tensor
        if len(tensor.shape) == 3:  # all experts of a layer, one below the other
            rows = tensor.shape[0] * tensor.shape[1]
            part = slice(0, rows)
            tensor = dataclasses.replace(tensor, shape=(rows, tensor.shape[2]))
        if len(self.tensor.shape) == 1:
            yield 0, self._shifted(self.tensor.read_rows(0, 1)[:, part])
            return
        if self.stored.transposed:
            yield 0, np.ascontiguousarray(self.tensor.read_rows(0, self.tensor.shape[0]).T[part])
            return
        step = max(1, _CHUNK // tensor.matrix_shape[1])
        for start in range(part.start, part.stop, step):
            chunk = tensor.read_rows(start, min(start + step, part.stop))
            yield start - part.start, self._shifted(chunk)

    def _shifted(self, values: np.ndarray) -> np.ndarray:
        offset = self.stored.offset
        return values.astype(np.float32) + np.float32(offset) if offset else values


def plan_parameters(opened: OpenCheckpoint) -> dict[str, tuple[Piece, ...]]:
    """Which tensors make up each parameter, after checking names, shapes and types."""
    config = _supported_config(opened)
    _check_layer_count(opened, config)
    stored = stored_parameters(config, opened.naming)
    wanted = list(dict.fromkeys(name for one in stored.values() for name in one.names))
    _check_missing(opened, wanted)
    known = opened.harmless.union(wanted)
    surplus = [name for name in opened.tensors if name not in known]
    if surplus:
        raise CheckpointError(
            f"{opened.path}: {_listed(surplus)} in the file, but the configuration has no such "
            "parameter: it describes another model, or part of it would be lost."
        )
    plan = {}
    for parameter, one in stored.items():
        pieces = tuple(Piece(opened.tensors[name], one) for name in one.names)
        for piece in pieces:
            _check_tensor(piece.tensor, _stored_shape(one))
        plan[parameter] = pieces
    return plan


def _stored_shape(stored: Stored) -> tuple[int, ...]:
    whole = (stored.total, *stored.shape[1:])
    return whole[::-1] if stored.transposed else whole


def parameter_bytes(config: ModelConfig, dtype: Any) -> int:
    """Bytes of all parameters in ``dtype``, with norms in f32 as the loader makes them."""
    target = np.dtype(dtype)
    return sum(
        int(np.prod(shape)) * stored_dtype(name, target).itemsize
        for name, shape in parameter_shapes(config, quantized=target == np.int8).items()
    )


def stored_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Type of the parameter ``name`` where weights are ``dtype``."""
    is_float32 = stays_float32(name) or (dtype == np.int8 and not is_matrix(name))
    return np.dtype(np.float32) if is_float32 else dtype


def _supported_config(opened: OpenCheckpoint) -> ModelConfig:
    if opened.refusal is not None:
        raise opened.refusal
    assert opened.config is not None  # one of the two is there
    return opened.config


def _check_layer_count(opened: OpenCheckpoint, config: ModelConfig) -> None:
    # Before any list of names is made: a corrupt count must not eat the memory.
    if config.num_layers > len(opened.tensors):
        raise CheckpointError(
            f"{opened.path}: num_layers={config.num_layers}, but there are only "
            f"{len(opened.tensors)} tensors."
        )
    if opened.naming == "hf" and config.num_experts > len(opened.tensors):
        raise CheckpointError(
            f"{opened.path}: num_experts={config.num_experts}, but there are only "
            f"{len(opened.tensors)} tensors."
        )


def _check_missing(opened: OpenCheckpoint, wanted: list[str]) -> None:
    missing = [name for name in wanted if name not in opened.tensors]
    if not missing:
        return
    hint = ""
    if missing == ["lm_head.weight"]:
        hint = " (tie_word_embeddings is false, so the head needs weights of its own)"
    raise CheckpointError(f"{opened.path}: {_listed(missing)} missing from the file{hint}.")


def _check_tensor(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}, the "
            f"configuration asks for {list(shape)}."
        )
    if tensor.decode is None:
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {tensor.name!r} is stored as {tensor.type_name}, which "
            "cannot be decoded here; use a checkpoint with another weight type."
        )


def _listed(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that XLA:CPU takes without a copy."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class _Parameter:
    """A parameter while it is filled: one array, or int8 rows and their scales."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, pieces: tuple[Piece, ...]
    ) -> None:
        target = stored_dtype(name, dtype)
        self.arrays = {name: aligned_empty(shape, target)}
        if target == np.int8:
            self.arrays[scale_name(name)] = aligned_empty(shape[:-1], np.dtype(np.float32))
        self._pieces = len(pieces)
        self._is_matrix = len(pieces[0].stored.shape) > 1

    def part(self, index: int) -> list[np.ndarray]:
        """Views of what piece ``index`` makes up: a matrix and its scales, or a vector."""
        array, *scales = self.arrays.values()
        tail = (-1, array.shape[-1]) if self._is_matrix else (-1,)
        views = [array.reshape(self._pieces, *tail)[index]]
        return views + [scale.reshape(self._pieces, -1)[index] for scale in scales]


def _fill(views: list[np.ndarray], piece: Piece, row_map: np.ndarray | None) -> None:
    """Write ``piece`` to ``views``, a chunk at a time, checked for NaN."""
    vector = views[0].ndim == 1
    for start, chunk in piece.rows():
        values = _finite(piece.tensor, chunk, views[0].dtype)
        parts = quantize_weight_on_host(values) if views[0].dtype == np.int8 else (values,)
        for out, part in zip(views, parts, strict=True):
            if vector:
                out[slice(None) if row_map is None else row_map] = part[0]
                continue
            rows = slice(start, start + len(part))
            out[rows if row_map is None else row_map[rows]] = part


def _finite(tensor: StoredTensor, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``values`` in ``dtype``, or in f32 where they are to be int8."""
    dtype = np.dtype(np.float32) if dtype == np.int8 else dtype
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(dtype, copy=False)
    if not _all_finite(values):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} holds NaN or infinite values"
            f" (as {dtype}); the file is damaged."
        )
    return values


def _all_finite(values: np.ndarray) -> bool:
    if values.dtype == np.float32:
        # One pass each and no array of flags; NaN wins both.
        return bool(np.isfinite(values.max()) and np.isfinite(values.min()))
    # bf16 has no fast arithmetic in numpy; its exponent is all ones for NaN and infinity.
    return int((values.view(np.uint16) & np.uint16(0x7FFF)).max()) < 0x7F80
