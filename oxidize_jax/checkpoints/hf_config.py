"""config.json of Hugging Face -> :class:`~oxidize_jax.model.config.ModelConfig`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.families import FAMILIES
from oxidize_jax.checkpoints.families.hf_fields import HFFields
from oxidize_jax.checkpoints.hf_limits import check_limits
from oxidize_jax.messages import reason, short_repr
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.rope import check_ropes

_MAX_JSON = 100_000_000
"""Bytes. The index of the largest models has some hundred thousand."""


def config_from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The model's shape from the fields of a config.json.

    ``model_type`` names the family; defaults are those of its class in transformers. Rotary
    settings are read as ``rope_theta`` and ``rope_scaling`` (transformers 4) or as
    ``rope_parameters`` (5). Raises :class:`UnsupportedModelError` naming the field that asks
    for something not built, and :class:`CheckpointError` for a missing or odd value.
    """
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"{source}: model_type={short_repr(model_type)} is not supported, only "
            f"{', '.join(map(repr, FAMILIES))} are."
        )
    wanted = [family.hf.model_class]
    classes = raw.get("architectures") or wanted
    if classes != wanted:
        raise UnsupportedModelError(
            f"{source}: architectures={short_repr(classes)} is not supported, only {wanted} is."
        )
    check_limits(raw, source)
    fields = HFFields(raw, source, family.hf.defaults)
    fields.check_neutral(family.hf.neutral)
    try:
        config = family.hf.config(fields)
        check_ropes(config)
        return config
    except CheckpointError:
        raise
    except (ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{source}: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or a :class:`CheckpointError` that names the file.

    Of keys that stand twice the last one counts, as in transformers.
    """
    # Looked at first: opening a pipe would wait for who writes to it.
    if not path.is_file():
        what = "is not a file" if path.exists() else "is not there"
        raise CheckpointError(f"{path.parent}: {path.name} {what}.")
    size = path.stat().st_size
    if size > _MAX_JSON:
        raise CheckpointError(f"{path}: has {size} bytes; at most {_MAX_JSON} are read.")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {reason(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, not {type(value).__name__}.")
    return value
