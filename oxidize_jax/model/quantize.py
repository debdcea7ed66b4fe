"""Matrices in int8, one scale for each row (W8A8).

Weights are rounded once, with a scale for each output (a row of ``[out, in]``); inputs of a
matrix inside the step, with a scale for each token. Both are symmetric, so that a product
is one int8 dot and two factors: ``(x_i8 . w_i8) * x_scale * w_scale`` (Dettmers et al.,
*LLM.int8()*, 2022, call it vector-wise quantisation). Norms and biases stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INT8_MAX = 127
"""The largest magnitude in use: -128 is left out, so that the range is symmetric."""


def quantize(params: Mapping[str, Any]) -> dict[str, Any]:
    """``params`` with every matrix ``x.weight [.., out, in]`` in int8, and its scales.

    ``params`` are a flat dict of float32 or bfloat16 by the names of
    :func:`~oxidize_jax.model.transformer.parameter_shapes`; the result has those of
    ``parameter_shapes(config, quantized=True)``, ``x.scale f32[.., out]`` among them, and is
    what ``build`` takes for a decoder of int8 weights. Norms and biases are float32.

    Works on arrays one layer at a time, on jax.ShapeDtypeStruct, and inside ``jit``.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in params.values()):
        return jax.eval_shape(quantize, dict(params))
    quantized: dict[str, Any] = {}
    for name, leaf in params.items():
        if is_matrix(name):
            rows, scale = _quantize_stack(leaf)
            quantized |= {name: rows, scale_name(name): scale}
        else:
            quantized[name] = leaf.astype(jnp.float32)
    return quantized


def is_matrix(name: str) -> bool:
    """Whether the parameter ``name`` is a matrix, hence stored in the type of the weights."""
    return name.endswith(".weight") and not name.endswith("norm.weight")


def scale_name(name: str) -> str:
    """Name of the scales of the matrix ``name``."""
    return name.removesuffix("weight") + "scale"


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``f32[N, in] -> (i8[N, in], f32[N])`` with ``x`` about ``i8 * scale``, each row for itself.

    The scale is the row's largest magnitude / 127, so no number is off by more than half of
    it. A row of zeros has scale 0. A row with NaN or infinity has that as its scale: all of
    its products are then NaN, and no other row's.
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # Of the smallest subnormals the inverse is infinite: they count as zero.
    inverse = jnp.float32(INT8_MAX) / largest
    inverse = jnp.where(jnp.isfinite(inverse), inverse, jnp.float32(0))
    rows = jnp.round(x * inverse).astype(jnp.int8)
    return rows, largest[..., 0] * jnp.float32(1 / INT8_MAX)


def quantize_rows_on_host(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """:func:`quantize_rows` of finite numbers, in numpy, to load a checkpoint by rows."""
    largest = np.maximum(x.max(axis=-1), -x.min(axis=-1))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(INT8_MAX) / largest
    inverse = np.where(np.isfinite(inverse), inverse, np.float32(0))
    rows = np.rint(x * inverse[:, None]).astype(np.int8)
    return rows, largest * np.float32(1 / INT8_MAX)


def dequantize_rows(rows: jax.Array, scale: jax.Array) -> jax.Array:
    """``i8[N, in], f32[N] -> f32[N, in]``"""
    return rows.astype(jnp.float32) * scale[:, None]


@jax.jit
def _quantize_stack(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of ``[out, in]`` or ``[L, out, in]``; a loop over L, so one layer at a time is float32."""

    def layer(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        return quantize_rows(matrix.astype(jnp.float32))

    return layer(weight) if weight.ndim == 2 else lax.map(layer, weight)
