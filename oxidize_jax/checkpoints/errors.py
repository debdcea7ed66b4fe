"""What goes wrong with a checkpoint: always a ``ValueError`` that names the culprit."""

from __future__ import annotations

_LONGEST = 600
"""Characters of a message. A damaged file can have a name or a value of many megabytes."""


class CheckpointError(ValueError):
    """A checkpoint is missing, broken, or not what its configuration says."""

    def __init__(self, message: str) -> None:
        if len(message) > _LONGEST:
            half = _LONGEST // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)


class UnsupportedModelError(CheckpointError):
    """A checkpoint is sound, but the model in it needs something that is not built here."""
