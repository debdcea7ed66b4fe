"""What goes wrong with a checkpoint: always a ``ValueError`` that names the culprit."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is missing, broken, or not what its configuration says."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint is sound, but the model in it needs something that is not built here."""
