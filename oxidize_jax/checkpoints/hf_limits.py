"""What a config.json may say at all, of whichever family it is.

Checked before a family reads it: sizes here become lists and tables, and the files they come
from may be damaged or made to harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from oxidize_jax.checkpoints.errors import CheckpointError
from oxidize_jax.messages import short_repr

MAX_LAYERS = 10_000
"""The deepest models have a few hundred."""
_ROPES = ("rope_parameters", "rope_scaling")
_SECTION = "_attention"
"""End of the keys of a ``rope_parameters`` with one object for each type of layer."""


def check_limits(raw: Mapping[str, Any], source: str) -> None:
    """Raise :class:`CheckpointError` naming a field whose value no family can have.

    Types are the families' to check: a value of another type than a limit is for is let
    through.
    """
    for path, value in _walk(raw):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise CheckpointError(f"{source}: {path}={short_repr(value)}: must be below 2**63.")
    for key in ("num_hidden_layers", "n_layer"):
        layers = raw.get(key)
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise CheckpointError(f"{source}: {key}={layers}: must be at most {MAX_LAYERS}.")
    for path, rope in _ropes(raw, source):
        _check_rope(path, rope, source)
    for key in ("bos_token_id", "eos_token_id"):
        _check_ids(key, raw, source)


def _walk(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value that is no object and no list, with where it stands.

    Not recursive: JSON may be nested as deep as Python's own stack.
    """
    stack: list[tuple[str, Any]] = [(str(key), value) for key, value in raw.items()]
    while stack:
        path, value = stack.pop()
        if isinstance(value, Mapping):
            stack += [(f"{path}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        else:
            yield path, value


def _ropes(raw: Mapping[str, Any], source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config.json itself, which may have the same fields, and all objects about ropes."""
    yield "", raw
    for key in _ROPES:
        rope = raw.get(key)
        if not isinstance(rope, dict):
            continue  # a family's to refuse
        yield f"{key}.", rope
        for name, section in rope.items():
            if not name.endswith(_SECTION):
                continue
            if not isinstance(section, dict):
                raise CheckpointError(
                    f"{source}: {key}.{name}={short_repr(section)}: must be an object."
                )
            yield f"{key}.{name}.", section


def _check_rope(path: str, rope: Mapping[str, Any], source: str) -> None:
    partial = rope.get("partial_rotary_factor")
    if isinstance(partial, int | float) and partial > 1:
        raise CheckpointError(
            f"{source}: {path}partial_rotary_factor={short_repr(partial)}: must be at most 1."
        )
    original = rope.get("original_max_position_embeddings")
    if isinstance(original, int) and original < 2:
        raise CheckpointError(
            f"{source}: {path}original_max_position_embeddings={original}: must be at least 2."
        )


def _check_ids(key: str, raw: Mapping[str, Any], source: str) -> None:
    """An id or a list of them, null or absent."""
    value, size = raw.get(key), raw.get("vocab_size")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise CheckpointError(
                f"{source}: {key}={short_repr(value)}: must be an id of 0 or more, or a list of "
                "them."
            )
        if type(size) is int and 0 < size <= token_id:
            raise CheckpointError(
                f"{source}: {key}={short_repr(value)} is outside the vocabulary: vocab_size={size}."
            )
