"""config.json of Hugging Face -> :class:`~oxidize_jax.model.config.ModelConfig`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.model.config import ModelConfig

# Fields that change what the model computes, and the one value with which they do not.
_NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
# The same within rope_scaling and rope_parameters.
_NEUTRAL_ROPE: dict[str, tuple[Any, str]] = {
    "rope_type": ("default", "no rope scaling"),
    "type": ("default", "no rope scaling"),
    "partial_rotary_factor": (1.0, "the whole head rotates"),
}


def config_from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The model's shape from the fields of a config.json; defaults are ``LlamaConfig``'s.

    Rotary settings are read as ``rope_theta`` and ``rope_scaling`` (transformers 4) or as
    ``rope_parameters`` (5). Raises :class:`UnsupportedModelError` naming the field that asks
    for something not built, and :class:`CheckpointError` for a missing or odd value.
    """
    fields = _Fields(raw, source)
    fields.check_supported()
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    try:
        return ModelConfig(
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=fields.count("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.count("num_key_value_heads", default=heads),
            head_dim=fields.count("head_dim", default=max(1, hidden // heads)),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            rope_theta=fields.rope_theta(),
            max_position_embeddings=fields.count("max_position_embeddings", default=2048),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or a :class:`CheckpointError` that names the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is not there.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, not {type(value).__name__}.")
    return value


class _Fields:
    """The fields of a config.json, with the errors that go with them.

    A field that is null counts as absent, as in transformers.
    """

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw = raw
        self._source = source

    def check_supported(self) -> None:
        model_type = self._raw.get("model_type")
        if model_type != "llama":
            raise UnsupportedModelError(
                f"{self._source}: model_type={model_type!r} is not supported, only 'llama' is."
            )
        classes = self._raw.get("architectures") or ["LlamaForCausalLM"]
        if classes != ["LlamaForCausalLM"]:
            raise UnsupportedModelError(
                f"{self._source}: architectures={classes!r} is not supported, only "
                "['LlamaForCausalLM'] is."
            )
        for key, neutral in _NEUTRAL.items():
            value = self._get(key, neutral)
            if value != neutral:
                shown = value if isinstance(value, str | float) else "..."
                raise UnsupportedModelError(
                    f"{self._source}: {key}={shown!r} is not supported, only {neutral!r} is."
                )

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if value is None:
            raise CheckpointError(f"{self._source}: field {key!r} is missing.")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise CheckpointError(f"{self._source}: {key}={value!r}: must be a positive integer.")
        return value

    def number(self, key: str, default: float) -> float:
        return self._positive(key, self._get(key, default))

    def flag(self, key: str) -> bool:
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._source}: {key}={value!r}: must be true or false.")
        return value

    def rope_theta(self) -> float:
        theta = self._get("rope_theta", 10_000.0)
        for key in ("rope_scaling", "rope_parameters"):
            rope = self._get(key, {})
            if not isinstance(rope, dict):
                raise CheckpointError(f"{self._source}: {key}={rope!r}: must be an object or null.")
            for name, (neutral, meaning) in _NEUTRAL_ROPE.items():
                if rope.get(name, neutral) != neutral:
                    raise UnsupportedModelError(
                        f"{self._source}: {key}.{name}={rope[name]!r} is not supported, only "
                        f"{neutral!r} ({meaning}) is."
                    )
            theta = rope.get("rope_theta", theta)
        return self._positive("rope_theta", theta)

    def _positive(self, key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise CheckpointError(f"{self._source}: {key}={value!r}: must be a positive number.")
        return float(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        return default if value is None else value
