"""The metadata of a GGUF below the architecture's name, with the errors that go with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.families.hf_fields import (
    FLOAT32_LIMITS,
    fits_float32,
    layer_windows,
)
from oxidize_jax.checkpoints.gguf_header import GGUFHeader
from oxidize_jax.messages import short_repr
from oxidize_jax.model.config import ModelConfig, RopeScaling

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS = "rope_factors_short.weight"
LONG_FACTORS = "rope_factors_long.weight"
FACTORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
"""Tensors that are no parameters: what each rotary frequency is divided by."""

# Keys that change what any model computes, and the values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "use_parallel_residual": (False,),
}


# Of experts; 1 is the softmax among gating functions.
_NEUTRAL_OF_EXPERTS: dict[str, tuple[Any, ...]] = {
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_gating_func": (1, 0),
    "expert_weights_scale": (1.0, 0.0),
    "expert_weights_norm": (True,),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (1, 0),
}


class GGUFFields:
    """The metadata of one file, and the names of its tensors.

    ``read(name)`` gives the numbers of a vector, None where there is no such tensor.
    """

    def __init__(
        self, header: GGUFHeader, read: Callable[[str], np.ndarray | None], architecture: str
    ) -> None:
        self.names = {info.name for info in header.tensors}
        self._sizes = {
            info.name: math.prod(info.shape) for info in header.tensors if info.name in FACTORS
        }
        self._path = header.path
        self._metadata: Mapping[str, Any] = header.metadata
        self._read = read
        self._prefix = architecture

    def model_config(self, architecture: str, **features: Any) -> ModelConfig:
        """The sizes that all architectures name alike, and what this one does otherwise.

        A file without ``output.weight`` has a tied head; one with a query or gate bias has
        biases in attention or MLP.
        """
        self.check_neutral(_NEUTRAL)
        if "num_experts" not in features:
            self.check_neutral({"expert_count": (0,)})
        if "layer_windows" not in features:
            self.check_neutral({"attention.sliding_window": (0,)})
        hidden, heads = self.count("embedding_length"), self.count("attention.head_count")
        head_dim = self.head_dim()
        self._check_equal("attention.value_length", head_dim)
        if "rotary_dim" not in features:
            self._check_equal("rope.dimension_count", head_dim)
        if "rms_norm_eps" not in features:
            features["rms_norm_eps"] = self.number("attention.layer_norm_rms_epsilon")
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        vocab = len(tokens) if isinstance(tokens, list) else None
        attention_bias = "blk.0.attn_q.bias" in self.names or "blk.0.attn_qkv.bias" in self.names
        output_bias = "blk.0.attn_output.bias" in self.names
        read: dict[str, Any] = {
            "vocab_size": self.count("vocab_size", default=vocab),
            "hidden_size": hidden,
            "intermediate_size": self.count("feed_forward_length"),
            "num_layers": self.count("block_count"),
            "num_heads": heads,
            "num_kv_heads": self.count("attention.head_count_kv", default=heads),
            "head_dim": head_dim,
            "rope_theta": self.number("rope.freq_base", default=10_000.0),
            "rope_scaling": self.rope_scaling(),
            "max_position_embeddings": self.count("context_length"),
            "tie_word_embeddings": "output.weight" not in self.names,
            "attention_bias": attention_bias,
            "output_bias": None if output_bias == attention_bias else output_bias,
            "mlp_bias": bool({"blk.0.ffn_gate.bias", "blk.0.ffn_up.bias"} & self.names),
        }
        return ModelConfig(**(read | features), architecture=architecture)

    def head_dim(self) -> int:
        """Numbers of a head."""
        hidden, heads = self.count("embedding_length"), self.count("attention.head_count")
        return self.count("attention.key_length", default=max(1, hidden // heads))

    def experts(self) -> dict[str, Any]:
        """What a ModelConfig says of experts, all layers being alike; the weights of those that
        are chosen add up to one."""
        self.check_neutral(_NEUTRAL_OF_EXPERTS)
        width = self.count("feed_forward_length")
        return {
            "num_experts": self.count("expert_count"),
            "num_experts_per_token": self.count("expert_used_count"),
            "intermediate_size": self.count("expert_feed_forward_length", default=width),
        }

    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return self._metadata.get(f"{self._prefix}.expert_count", 0) != 0

    def check_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse by name a key whose value is not one of those that are run."""
        for key, values in neutral.items():
            value = self._metadata.get(f"{self._prefix}.{key}", values[0])
            if value not in values:
                raise self.unsupported(key, value, values)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer, or a list of equal ones."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise CheckpointError(
                f"{self._path}: {self._prefix}.{key}={short_repr(value)}: must be a positive "
                "integer, the same in all layers."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        shown = f"{self._path}: {self._prefix}.{key}={short_repr(value)}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise CheckpointError(f"{shown}: must be a positive number.")
        if not fits_float32(value):
            raise CheckpointError(f"{shown}: {FLOAT32_LIMITS}")
        # Stored in f32: take the decimal that was meant, 1e-05 and not 9.99999974e-06.
        return float(str(np.float32(value)))

    def softcap(self, key: str, default: float = 0.0) -> float:
        """A bound of scores or logits; 0 or absent: ``default``."""
        return self.number(key) if self._metadata.get(f"{self._prefix}.{key}") else default

    def windows(self, sliding: list[bool]) -> tuple[int, ...]:
        """``layer_windows`` of a ModelConfig; without a key, or where it is 0, none."""
        key = "attention.sliding_window"
        if not self._metadata.get(f"{self._prefix}.{key}"):
            return ()
        return layer_windows(self.count(key), sliding, self.count("context_length"))

    def sliding_layers(self, every: int) -> list[bool]:
        """Which layers have a window: all but each ``every``-th, or as the file says."""
        key = "attention.sliding_window_pattern"
        pattern = self._metadata.get(f"{self._prefix}.{key}")
        if isinstance(pattern, list):
            if len(pattern) != self.count("block_count"):
                raise CheckpointError(
                    f"{self._path}: {self._prefix}.{key} names {len(pattern)} layers, but there "
                    f"are {self.count('block_count')}."
                )
            return [bool(slides) for slides in pattern]
        every = every if pattern is None else self.count(key)
        return self.layer_list(lambda layer: (layer + 1) % every != 0)

    def every_layer(self) -> list[bool]:
        """True for each layer."""
        return self.layer_list(lambda layer: True)

    def layer_list(self, of_layer: Callable[[int], bool]) -> list[bool]:
        """``of_layer`` of every layer's number."""
        layers = self.count("block_count")
        # Before any list is made: a corrupt count must not eat the memory.
        if layers > len(self.names):
            raise CheckpointError(
                f"{self._path}: num_layers={layers}, but there are only {len(self.names)} tensors."
            )
        return [of_layer(layer) for layer in range(layers)]

    def rope_scaling(self) -> RopeScaling:
        """From the keys below ``rope.scaling`` or the tensors with factors."""
        factors = self._factors(ROPE_FACTORS)
        kind = self._metadata.get(f"{self._prefix}.rope.scaling.type", "none")
        if SHORT_FACTORS in self.names or LONG_FACTORS in self.names:
            return self._longrope()
        if factors is not None and any(factor != 1 for factor in factors):
            if kind != "none":
                raise UnsupportedModelError(
                    f"{self._path}: tensor {ROPE_FACTORS!r} together with {self._prefix}."
                    f"rope.scaling.type={short_repr(kind)} is not supported."
                )
            return RopeScaling("factors", factors=factors)
        if kind not in ("none", "linear", "yarn"):
            raise self.unsupported("rope.scaling.type", kind, ("none", "linear", "yarn"))
        factor = self._metadata.get(f"{self._prefix}.rope.scaling.factor") or 1.0
        legacy = self._metadata.get(f"{self._prefix}.rope.scale_linear", 1.0)
        if kind == "none" and legacy not in (0.0, 1.0):
            return RopeScaling("linear", factor=self.number("rope.scale_linear"))
        if kind == "none" and factor != 1:
            raise self.unsupported("rope.scaling.factor", factor, (1.0,))
        if kind == "none" or factor == 1:
            return RopeScaling()
        if kind == "linear":
            return RopeScaling(kind, factor=self.number("rope.scaling.factor"))
        return self._yarn()

    def _yarn(self) -> RopeScaling:
        self.check_neutral({"rope.scaling.yarn_ext_factor": (1.0,)})
        factor = self.number("rope.scaling.factor")
        attention = self.number("rope.scaling.attn_factor", default=1.0)
        return RopeScaling(
            "yarn",
            factor=factor,
            original_max_position_embeddings=self.count(
                "rope.scaling.original_context_length", default=self.count("context_length")
            ),
            attention_factor=attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", default=1.0),
        )

    def _longrope(self) -> RopeScaling:
        short, long = self._factors(SHORT_FACTORS), self._factors(LONG_FACTORS)
        if short is None or long is None:
            name = SHORT_FACTORS if short is None else LONG_FACTORS
            raise CheckpointError(f"{self._path}: tensor {name!r} missing from the file.")
        return RopeScaling(
            "longrope",
            original_max_position_embeddings=self.count("rope.scaling.original_context_length"),
            attention_factor=self.number("rope.scaling.attn_factor", default=1.0),
            factors=short,
            long_factors=long,
        )

    def _factors(self, name: str) -> tuple[float, ...] | None:
        size, head_dim = self._sizes.get(name, 0), self.head_dim()
        if 2 * size > head_dim:  # before it is read and becomes a tuple
            raise CheckpointError(
                f"{self._path}: tensor {name!r} has {size} numbers, but there are {head_dim // 2} "
                f"pairs in a head of {head_dim}."
            )
        values = self._read(name)
        if values is None:
            return None
        if not np.all(np.isfinite(values)) or not np.all(values > 0):
            raise CheckpointError(f"{self._path}: tensor {name!r}: must be positive numbers.")
        return tuple(float(value) for value in values)

    def unsupported(self, key: str, value: Any, values: tuple[Any, ...]) -> UnsupportedModelError:
        """The error for a value that is none of those that are run."""
        return UnsupportedModelError(
            f"{self._path}: {self._prefix}.{key}={short_repr(value)} is not supported, "
            f"only {', '.join(map(repr, values))} is."
        )

    def _check_equal(self, key: str, expected: int) -> None:
        value = self.count(key, default=expected)
        if value != expected:
            raise UnsupportedModelError(
                f"{self._path}: {self._prefix}.{key}={value} is not supported where the head size "
                f"is {expected}: they must be equal."
            )

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self._path}: metadata key '{self._prefix}.{key}' is missing.")
        return value
