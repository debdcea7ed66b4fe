"""Rotary embedding: frequencies with every kind of scaling, angles, and the turn itself.

Frequencies are worked out on the host in float32, step by step as Hugging Face does
(``transformers/modeling_rope_utils.py``), since at position 8,000 one last bit of a
frequency is a visible angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.model.config import ModelConfig, RopeScaling

RotationAt = Callable[[jax.Array], "jax.Array | None"]
"""``rotation_at(layer i32[]) -> f32[2, T, d / 2]``: cosines and sines; None: nothing turns."""


def rotations(positions: jax.Array, config: ModelConfig) -> RotationAt:
    """The rotation of every layer for ``positions i32[T]``.

    Worked out once a step for each kind of layer there is. Where all layers are alike it is
    one array, else the layer's is cut out of a stack of them. A layer without positions among
    others (NoPE) turns by zero.
    """
    kinds = sorted(set(config.ropes))
    if kinds == ["none"]:
        return lambda layer: None
    turns = [_angles(positions, config, kind) for kind in kinds]
    if len(turns) == 1:
        return lambda layer: turns[0]
    stack = jnp.stack(turns)
    which = jnp.asarray([kinds.index(kind) for kind in config.ropes], jnp.int32)
    return lambda layer: stack[which[layer]]


def check_ropes(config: ModelConfig) -> None:
    """Raise ValueError for settings of which no frequencies come.

    Called when a checkpoint is read: programs are built later, and in another thread.
    """
    scaling = config.rope_scaling
    bases = {"global": ("rope_theta", config.rope_theta)}
    bases["local"] = ("local_rope_theta", config.local_rope_theta)
    # Not ``ropes``, a list of any length: the number of layers may be damaged.
    kinds = set() if config.learned_positions else set(config.layer_ropes or ["global"])
    for name, theta in (bases[kind] for kind in sorted(kinds - {"none"})):
        if theta < 1:
            raise ValueError(f"{name}={theta}: must be at least 1.")
    if scaling.kind == "yarn" and config.rope_theta <= 1:
        raise ValueError(f"rope_theta={config.rope_theta}: must be above 1 with rope_type='yarn'.")
    if scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError(
            f"low_freq_factor={scaling.low_freq_factor}: must be below high_freq_factor="
            f"{scaling.high_freq_factor}."
        )


def rotate(x: jax.Array, rotation: jax.Array | None) -> jax.Array:
    """Rotary embedding (Su et al., 2021) of ``x f32[T, heads, D]``.

    Of the first ``d`` numbers of a head, number i turns with i + d/2; the rest stay.
    """
    if rotation is None:
        return x
    half = rotation.shape[-1]
    ends = [half] if 2 * half == x.shape[-1] else [half, 2 * half]
    first, second, *rest = jnp.split(x, ends, axis=-1)
    cos, sin = rotation[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, *rest], axis=-1)


def _angles(positions: jax.Array, config: ModelConfig, kind: str) -> jax.Array:
    """Cosines and sines ``f32[2, T, d / 2]`` of the layers of one kind."""
    inverse, factor = layer_frequencies(config, kind, config.longest)
    theta = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse)
    turn = jnp.stack([jnp.cos(theta), jnp.sin(theta)])
    return turn if factor == 1 else turn * jnp.float32(factor)


def layer_frequencies(config: ModelConfig, kind: str, length: int) -> tuple[np.ndarray, float]:
    """Radians a position ``f32[d / 2]`` and the factor of cosine and sine, for layers of a
    ``kind`` and sequences of up to ``length`` tokens."""
    dim = config.rotated_dim
    if kind == "none":
        return np.zeros(dim // 2, np.float32), 1.0
    if kind == "local":
        return frequencies(config.local_rope_theta, dim, RopeScaling(), length), 1.0
    scaling = config.rope_scaling
    return frequencies(config.rope_theta, dim, scaling, length), scaling.attention_factor


def frequencies(theta: float, dim: int, scaling: RopeScaling, length: int) -> np.ndarray:
    """``f32[dim / 2]``: radians that each pair of numbers turns by from one position to the next.

    ``length`` is that of the longest sequence: only ``longrope`` asks.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    wide = np.power(np.float32(theta), exponents)
    kind = scaling.kind
    if kind == "longrope":
        long = length > scaling.original_max_position_embeddings
        factors = scaling.long_factors if long else scaling.factors
        return np.float32(1) / (np.asarray(factors, np.float32) * wide)
    plain = np.float32(1) / wide
    if kind == "factors":
        return plain / np.asarray(scaling.factors, np.float32)
    if kind == "linear":
        return plain / np.float32(scaling.factor)
    if kind == "llama3":
        return _llama3(plain, scaling)
    if kind == "yarn":
        return _yarn(wide, theta, dim, scaling)
    # "dynamic" changes nothing up to the length the model was made for, and none is longer.
    return plain


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's: slow pairs are slowed by ``factor``, quick ones not, between them a ramp."""
    length = np.float32(scaling.original_max_position_embeddings)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    factor = np.float32(scaling.factor)
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (length / wavelength - low) / (high - low)
    ramp = (np.float32(1) - smooth) * plain / factor + smooth * plain
    slowed = np.where(wavelength > length / low, plain / factor, ramp)
    return np.where(wavelength < length / high, plain, slowed)


def _yarn(wide: np.ndarray, theta: float, dim: int, scaling: RopeScaling) -> np.ndarray:
    """YaRN (Peng et al., 2023): a ramp between kept and slowed pairs, by turns in the context."""

    def pair(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, 0, 1)
    slowed = np.float32(1) / (np.float32(scaling.factor) * wide)
    return slowed * (np.float32(1) - kept) + np.float32(1) / wide * kept
