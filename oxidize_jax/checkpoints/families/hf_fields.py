"""The fields of a config.json, with the errors that go with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.messages import short_repr
from oxidize_jax.model.config import ModelConfig, RopeScaling

_NEUTRAL: dict[str, tuple[Any, ...]] = {"quantization_config": (None,)}
"""Fields of any family that change what is computed, and the values that are run."""

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
FLOAT32_LIMITS = f"must fit float32: from {_SMALLEST:.4g} to {_LARGEST:.4g}."
"""What an error says of a number that does not."""

_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
_ROPE_TYPES = ("default", "linear", "dynamic", *_WITH_ORIGINAL)
_ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary settings as a config.json has them."""

    theta: float
    scaling: RopeScaling
    partial: float
    """Share of a head that rotates"""


class HFFields:
    """The fields of a config.json; those absent have the ``defaults`` of their family.

    A field that is null counts as absent, as in transformers, but for those that mean something
    by it: ``optional_count`` and ``optional_number``.
    """

    def __init__(
        self, raw: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self._raw = raw
        self._source = source
        self._defaults = defaults or {}

    def model_config(self, architecture: str, **features: Any) -> ModelConfig:
        """The sizes that all families name alike, and what this one does otherwise."""
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if "rope_theta" not in features:
            rope = self.rope()
            if rope.partial != 1:
                raise self.unsupported("partial_rotary_factor", rope.partial, (1.0,))
            features |= {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
        sizes = {
            "vocab_size": self.count("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.count("intermediate_size"),
            "num_layers": self.count("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.count("num_key_value_heads", default=heads),
            "head_dim": self.head_dim(),
            "rms_norm_eps": self.number("rms_norm_eps", default=1e-6),
            "max_position_embeddings": self.max_positions(),
            "tie_word_embeddings": self.flag("tie_word_embeddings"),
        }
        return ModelConfig(**(sizes | features), architecture=architecture)

    def head_dim(self) -> int:
        """Numbers of a head."""
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        return self.count("head_dim", default=max(1, hidden // heads))

    def max_positions(self) -> int:
        """Positions that the model was made for."""
        return self.count("max_position_embeddings", default=2048)

    def check_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse by name a field whose value is not one of those that are run."""
        for key, values in (_NEUTRAL | dict(neutral)).items():
            value = self._get(key, values[0])
            if value not in values:
                raise self.unsupported(key, value, values)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if value is None:
            raise CheckpointError(f"{self._source}: field {key!r} is missing.")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise CheckpointError(
                f"{self._source}: {key}={short_repr(value)}: must be a positive integer."
            )
        return value

    def optional_count(self, key: str) -> int | None:
        """A positive integer, or null; absent, the family's default."""
        value = self._raw.get(key, self._defaults.get(key))
        return None if value is None else self.count(key)

    def zero_or_count(self, key: str) -> int:
        """An integer that may be 0."""
        return 0 if self._get(key, None) in (0, None) else self.count(key)

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        return self._positive(key, self._get(key, default))

    def optional_number(self, key: str) -> float | None:
        """A positive number, or null; absent, the family's default."""
        value = self._raw.get(key, self._defaults.get(key))
        return None if value is None else self._positive(key, value)

    def flag(self, key: str) -> bool:
        """True or false; absent, the family's default or false."""
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{self._source}: {key}={short_repr(value)}: must be true or false."
            )
        return value

    def layer_flags(self, key: str, default: Callable[[int], bool]) -> list[bool]:
        """A list with a 0 or 1 for each layer; absent, ``default`` of the layer's number."""
        layers = self.count("num_hidden_layers")
        value = self._get(key, None)
        if value is None:
            return [default(layer) for layer in range(layers)]
        # "in" and not a set: there may be lists in it.
        is_list = isinstance(value, list) and len(value) >= layers
        if not is_list or any(flag not in (0, 1) for flag in value[:layers]):
            raise CheckpointError(
                f"{self._source}: {key}={short_repr(value)}: must be a list with 0 or 1 for "
                f"each of the {layers} layers."
            )
        return [bool(item) for item in value[:layers]]

    def sliding_layers(self, default: Callable[[int], bool]) -> list[bool]:
        """Which layers have a window: ``layer_types``, or ``default`` of the layer's number."""
        layers = self.count("num_hidden_layers")
        types = self._get("layer_types", None)
        if types is None:
            return [default(layer) for layer in range(layers)]
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != layers:
            raise CheckpointError(
                f"{self._source}: layer_types={short_repr(types)}: must be a list of one for "
                f"each of the {layers} layers."
            )
        for kind in types:
            if kind not in known:
                raise self.unsupported("layer_types", kind, known)
        return [kind == known[0] for kind in types]

    def windows(self, window: int | None, sliding: list[bool]) -> tuple[int, ...]:
        """``layer_windows`` of a ModelConfig; a window that nothing is outside of is none."""
        return layer_windows(window, sliding, self.max_positions())

    def rope(self, section: str | None = None) -> Rope:
        """From ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5).

        ``section`` is the key of the layer type where the latter has one for each.
        """
        rope: dict[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):  # as in transformers the latter wins
            rope |= self._rope_fields(key, section)
        theta = self._positive(
            "rope_theta", rope.get("rope_theta", self._get("rope_theta", 10_000.0))
        )
        partial = rope.get("partial_rotary_factor", self._get("partial_rotary_factor", 1.0))
        partial = self._positive("partial_rotary_factor", partial)
        return Rope(theta, self._scaling(rope), partial)

    def local_rope(self, section: str) -> float:
        """The base of layers of another rope, without scaling (Gemma 3)."""
        rope = self._rope_fields("rope_parameters", section)
        if section not in (self._get("rope_parameters", {})):
            rope = {}
        if rope.get("rope_type", "default") != "default":
            raise self.unsupported(f"{section}.rope_type", rope["rope_type"], ("default",))
        default = self._get("rope_local_base_freq", 10_000.0)
        return self._positive("rope_theta", rope.get("rope_theta", default))

    def _rope_fields(self, key: str, section: str | None) -> dict[str, Any]:
        rope = self._get(key, {})
        if not isinstance(rope, dict):
            raise CheckpointError(
                f"{self._source}: {key}={short_repr(rope)}: must be an object or null."
            )
        if section in rope:
            key, rope = f"{key}.{section}", rope[section]
        for name in rope:
            if name not in _ROPE_KEYS:
                raise UnsupportedModelError(
                    f"{self._source}: {key}.{name}={short_repr(rope[name])} is not supported."
                )
        rope = {name: value for name, value in rope.items() if value is not None}
        # The older name of it, which some files have beside the newer one.
        return {"rope_type": rope["type"]} | rope if "type" in rope else rope

    def _scaling(self, rope: dict[str, Any]) -> RopeScaling:
        kind = rope.get("rope_type", "default")
        if kind == "su" or (kind == "yarn" and "short_factor" in rope):  # as the first Phi-3 had it
            kind = "longrope"
        if kind not in _ROPE_TYPES:
            raise self.unsupported("rope_type", kind, _ROPE_TYPES)
        if kind == "default":
            return RopeScaling()
        inner = HFFields(rope, f"{self._source}: rope")
        original = 0
        if kind in _WITH_ORIGINAL:
            inside = rope.get("original_max_position_embeddings", self.max_positions())
            original = self.count("original_max_position_embeddings", default=inside)
        if kind == "llama3":
            return RopeScaling(
                kind,
                factor=inner.number("factor", 8.0),
                original_max_position_embeddings=original,
                low_freq_factor=inner.number("low_freq_factor", 1.0),
                high_freq_factor=inner.number("high_freq_factor", 4.0),
            )
        if kind == "longrope":
            return self._longrope(inner, original)
        if "factor" not in rope:
            raise CheckpointError(f"{self._source}: rope field 'factor' is missing.")
        factor = inner.number("factor", 1.0)
        if kind != "yarn":
            return RopeScaling(kind, factor=factor)
        return RopeScaling(
            kind,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=inner.number("attention_factor", _mscale(inner, factor)),
            beta_fast=inner.number("beta_fast", 32.0),
            beta_slow=inner.number("beta_slow", 1.0),
            truncate="truncate" not in rope or inner.flag("truncate"),
        )

    def _longrope(self, inner: HFFields, original: int) -> RopeScaling:
        factor = inner.number("factor", self.max_positions() / original)
        attention = 1.0
        if factor > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeScaling(
            "longrope",
            original_max_position_embeddings=original,
            attention_factor=inner.number("attention_factor", attention),
            factors=inner._numbers("short_factor"),
            long_factors=inner._numbers("long_factor"),
        )

    def _numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, None)
        if not isinstance(value, list):
            raise CheckpointError(
                f"{self._source}: {key}={short_repr(value)}: must be a list of numbers."
            )
        return tuple(self._positive(key, item) for item in value)

    def unsupported(self, key: str, value: Any, values: tuple[Any, ...]) -> UnsupportedModelError:
        """The error for a value that is none of those that are run."""
        shown = short_repr(value if isinstance(value, str | float | bool) else "...")
        return UnsupportedModelError(
            f"{self._source}: {key}={shown} is not supported, only "
            f"{', '.join(map(repr, values))} is."
        )

    def _positive(self, key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise CheckpointError(
                f"{self._source}: {key}={short_repr(value)}: must be a positive number."
            )
        if not fits_float32(value):
            raise CheckpointError(f"{self._source}: {key}={short_repr(value)}: {FLOAT32_LIMITS}")
        return float(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is None:
            value = self._defaults.get(key)
        return default if value is None else value


def fits_float32(value: float) -> bool:
    """Whether a positive number is neither 0 nor infinity in float32, in which it is used.

    Those below the smallest normal one count as 0: XLA flushes them.
    """
    return _SMALLEST <= value <= _LARGEST


def layer_windows(window: int | None, sliding: list[bool], max_positions: int) -> tuple[int, ...]:
    """``layer_windows`` of a ModelConfig; a window that nothing is outside of is none."""
    if window is None or window >= max_positions or not any(sliding):
        return ()
    return tuple(window if slides else 0 for slides in sliding)


def _mscale(rope: HFFields, factor: float) -> float:
    """YaRN's factor of cosine and sine, as DeepSeek and transformers have it."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weights = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    if weights[0] and weights[1]:
        return scale(weights[0]) / scale(weights[1])
    return scale(1.0)
