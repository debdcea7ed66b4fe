"""Load a checkpoint, or say what is in it without loading it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.checkpoints.fill import (
    Place,
    fill_parameters,
    parameter_bytes,
    place_on_default_device,
    plan_parameters,
)
from oxidize_jax.checkpoints.gguf import open_gguf
from oxidize_jax.checkpoints.safetensors import open_safetensors
from oxidize_jax.checkpoints.saved import is_saved, load_saved, read_manifest
from oxidize_jax.checkpoints.stored import OpenCheckpoint
from oxidize_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model ready to run."""

    config: ModelConfig
    params: dict[str, jax.Array]
    """Parameters by the names and shapes of ``parameter_shapes``."""
    source: str
    """Path that the parameters came from."""


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint holds, known from its headers alone."""

    path: Path
    format: Literal["gguf", "safetensors", "saved"]
    architecture: str
    supported: bool
    reason: str
    """Why the model cannot be loaded; empty where it can."""
    num_parameters: int
    """Values in the parameters that would be loaded; in all tensors if not supported."""
    file_bytes: int
    tensor_types: dict[str, int]
    """Storage type -> number of tensors, the most frequent first."""
    bytes_float32: int
    """Memory of the loaded parameters in f32."""
    bytes_bfloat16: int
    """Memory of the loaded parameters in bf16 (norms stay f32)."""
    bytes_int8: int
    """Memory of the loaded parameters in int8 (norms, biases and scales are f32)."""
    context_length: int | None
    config: ModelConfig | None
    """None where the model is not supported."""


def load_checkpoint(
    path: str | Path,
    dtype: Any = jnp.float32,
    *,
    progress: bool = False,
    place: Place = place_on_default_device,
) -> Checkpoint:
    """Load the GGUF file, the Hugging Face folder or the saved model at ``path``.

    Parameters come in ``dtype`` (f32, bf16 or int8), norms in f32 whatever it is; of int8
    matrices the scales are parameters too (:mod:`oxidize_jax.model.quantize`). Each is handed
    to ``place(name, host_array)`` when it is whole, by default to JAX's default device; give
    another to shard. Weights are streamed: on CPU the peak is the parameters and a few MB,
    on an accelerator the host holds one parameter at a time. ``progress`` shows a bar.

    Raises :class:`CheckpointError` in one line that names the file and the tensor or field:
    a tensor missing, left over, duplicated, of the wrong shape or not finite, a truncated
    file, a model that is not supported.
    """
    target = np.dtype(dtype)
    if target.name not in ("float32", "bfloat16", "int8"):
        raise ValueError(f"dtype={target}: parameters can be loaded as float32, bfloat16 or int8.")
    path = Path(path).expanduser()
    if is_saved(path):
        with _readable(path):
            config, params = load_saved(path, target, place, progress)
        return Checkpoint(config, params, str(path))
    opened = _open(path)
    params = fill_parameters(opened, target, place, progress)
    assert opened.config is not None  # or fill_parameters would have raised
    return Checkpoint(opened.config, params, str(opened.path))


def describe_checkpoint(path: str | Path) -> CheckpointInfo:
    """What is at ``path``, from its headers; takes milliseconds whatever its size.

    Raises :class:`CheckpointError` if the files are missing or damaged. A sound checkpoint
    of a model that cannot be run is described, with ``supported`` false and a ``reason``.
    """
    path = Path(path).expanduser()
    if is_saved(path):
        return _describe_saved(path)
    opened = _open(path)
    reason = ""
    try:
        plan_parameters(opened)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{opened.path}: ")
    config = None if reason else opened.config
    size = sum(t.size for t in opened.tensors.values())
    types = collections.Counter(tensor.type_name for tensor in opened.tensors.values())
    return CheckpointInfo(
        path=opened.path,
        format=opened.format,
        architecture=opened.architecture,
        supported=not reason,
        reason=reason,
        num_parameters=config.num_parameters if config else size,
        file_bytes=opened.file_bytes,
        tensor_types=dict(types.most_common()),
        bytes_float32=parameter_bytes(config, jnp.float32) if config else 4 * size,
        bytes_bfloat16=parameter_bytes(config, jnp.bfloat16) if config else 2 * size,
        bytes_int8=parameter_bytes(config, jnp.int8) if config else size,
        context_length=opened.context_length,
        config=config,
    )


def _describe_saved(path: Path) -> CheckpointInfo:
    with _readable(path):
        manifest = read_manifest(path)
    config = manifest.config
    types = collections.Counter(array.dtype for array in manifest.params.values())
    return CheckpointInfo(
        path=path,
        format="saved",
        architecture=config.architecture,
        supported=True,
        reason="",
        num_parameters=config.num_parameters,
        file_bytes=manifest.file_bytes,
        tensor_types=dict(types.most_common()),
        bytes_float32=parameter_bytes(config, jnp.float32),
        bytes_bfloat16=parameter_bytes(config, jnp.bfloat16),
        bytes_int8=parameter_bytes(config, jnp.int8),
        context_length=config.max_position_embeddings,
        config=config,
    )


def _open(path: Path) -> OpenCheckpoint:
    with _readable(path):
        if path.is_dir():
            return open_safetensors(path)
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such file or folder.")
        return open_gguf(path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """A file that may not be read, or that goes away meanwhile, is a CheckpointError too."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}.") from None
