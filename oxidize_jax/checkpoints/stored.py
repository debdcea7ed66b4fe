"""What both file formats look like once opened: named tensors that are read by rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.mapping import Naming
from oxidize_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: where its bytes are and how they become numbers.

    Reading is plain file reads and never a memory map, so that a file that shrinks under
    us is an error and not a bus fault, and so that pages of the file do not count as ours.
    """

    name: str
    shape: tuple[int, ...]
    """Outermost axis first; the innermost is contiguous."""
    type_name: str
    """Storage type as its format spells it: ``F32``, ``BF16``, ``Q4_K``."""
    path: Path
    offset: int
    """Of the first byte, from the start of the file."""
    nbytes: int
    decode: Callable[[np.ndarray], np.ndarray] | None
    """u8[rows, bytes of a row] -> float[rows, columns]; None where the type has no reader."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, columns); a vector is one row."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows, self.size // rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """float[stop - start, columns]: rows of the matrix, in the file's own precision.

        Quantised rows come as f32. Raises :class:`CheckpointError` if the file is shorter
        than it was when it was opened, or if the type cannot be decoded.
        """
        if self.decode is None:
            raise CheckpointError(f"{self.path}: cannot decode {self.name!r} ({self.type_name}).")
        row_bytes = self.nbytes // self.matrix_shape[0]
        wanted = (stop - start) * row_bytes
        at = self.offset + start * row_bytes
        try:
            raw = np.fromfile(self.path, np.uint8, count=wanted, offset=at)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot read {self.name!r}: {error.strerror or error}."
            ) from None
        if raw.size != wanted:
            raise CheckpointError(f"{self.path}: truncated inside {self.name!r} while reading it.")
        # A NaN or an overflow in a scale is found by the caller, who can name it better.
        with np.errstate(all="ignore"):
            return self.decode(raw.reshape(stop - start, row_bytes))


@dataclasses.dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose headers are read and checked, and whose weights are not yet."""

    path: Path
    format: Literal["gguf", "safetensors"]
    naming: Naming
    architecture: str
    """``general.architecture`` of a GGUF, ``model_type`` of a config.json."""
    context_length: int | None
    file_bytes: int
    tensors: Mapping[str, StoredTensor]
    config: ModelConfig | None
    """None where the model cannot be run; then ``refusal`` says why."""
    refusal: CheckpointError | None = None
    harmless: frozenset[str] = frozenset()
    """Tensors that may be left unread where no parameter asks for them."""
    row_maps: Mapping[str, Callable[[], np.ndarray]] = dataclasses.field(default_factory=dict)
    """Parameter -> what makes i64[rows]: row of the parameter that each row in the file becomes.

    Made only after all shapes are checked: a damaged head count must not eat the memory."""
