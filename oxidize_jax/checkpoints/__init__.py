"""Checkpoints: GGUF files and Hugging Face folders, found, described and loaded.

The optional packages they need (gguf, tqdm, huggingface_hub) are imported where a file of
that kind is met, not here.
"""

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.load import (
    Checkpoint,
    CheckpointInfo,
    describe_checkpoint,
    load_checkpoint,
)
from oxidize_jax.checkpoints.resolve import ResolvedModel, resolve_model

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointInfo",
    "ResolvedModel",
    "UnsupportedModelError",
    "describe_checkpoint",
    "load_checkpoint",
    "resolve_model",
]
