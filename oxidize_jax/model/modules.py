"""What layers are made of: matrices in any type of weights, norms and activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.quantize import dequantize_weight, quantize_inputs

_BY_ROWS = (((1,), (1,)), ((), ()))
"""Dimension numbers of ``x @ weight.T``."""

Inputs = tuple[jax.Array, jax.Array | None]
"""``[T, in]`` in the weights' type; if that is int8, with a scale for each row, ``f32[T]``."""


class Matrix(nnx.Module):
    """``x @ weight.T + bias`` with the weight as ``[out, in]``, summed in float32.

    Inputs are rounded to the weight's type: bfloat16 weights mean bfloat16 products with
    float32 sums, the fast path of every platform. Float32 weights mean exact float32, also
    where the default precision of a float32 product would be less (TPU, and GPU's tf32).

    ``quantized`` weights are int8 with a scale for each output, as
    :mod:`oxidize_jax.model.quantize` makes them. Inputs are then rounded to int8 with a scale
    for each token, found from that token alone: what a token gets does not depend on which
    others are in the batch. Products are summed in int32, hence exactly.
    """

    def __init__(
        self, out: int, inner: int, *, bias: bool = False, quantized: bool = False
    ) -> None:
        dtype = jnp.int8 if quantized else jnp.float32
        self.weight = nnx.Param(jnp.zeros((out, inner), dtype))
        self.scale = nnx.Param(jnp.zeros((out,), jnp.float32)) if quantized else None
        self.bias = nnx.Param(jnp.zeros((out,), jnp.float32)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``f32[T, in] -> f32[T, out]``"""
        inputs = self.rounded(x)
        return self.completed(product(self.weight[...], inputs[0]), inputs)

    def rounded(self, x: jax.Array) -> Inputs:
        """``f32[T, in]`` as this matrix is multiplied with it, and others of its type and width."""
        return (
            (x.astype(self.weight[...].dtype), None) if self.scale is None else quantize_inputs(x)
        )

    def completed(self, y: jax.Array, inputs: Inputs) -> jax.Array:
        """``f32[T, out]`` from the :func:`product` of the weight and what :meth:`rounded` gave."""
        row_scale = inputs[1]
        if row_scale is not None and self.scale is not None:
            y = y.astype(jnp.float32) * row_scale[:, None] * self.scale[...]
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)

    def rows(self, index: jax.Array) -> jax.Array:
        """Rows of the weight, ``i32[T] -> f32[T, in]``; an index past the end is the last."""
        weight = self.weight[...]
        if weight.dtype == jnp.bfloat16:
            # Bits, since XLA:CPU would make float32 of the whole matrix to take a few rows.
            bits = lax.bitcast_convert_type(weight, jnp.uint16).at[index].get(mode="clip")
            return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
        rows = weight.at[index].get(mode="clip")
        if self.scale is None:
            return rows.astype(jnp.float32)
        return dequantize_weight(rows, self.scale[...].at[index].get(mode="clip"))


def product(weight: jax.Array, x: jax.Array, *, weight_first: bool = False) -> jax.Array:
    """``x [T, in] @ (weight [out, in]).T``: ``f32[T, out]``, or ``i32`` if the weight is int8.

    ``weight_first`` gives ``[out, T]`` instead, the same numbers. XLA:CPU's library packs the
    right side of a product anew each time: for a few tokens that is most of the work if it is
    the weight, and next to nothing if it is ``x``.
    """
    left, right = (weight, x) if weight_first else (x, weight)
    exact = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    dtype = jnp.int32 if weight.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(left, right, _BY_ROWS, precision=exact, preferred_element_type=dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """``f32[T, E] -> f32[T, E]``"""
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * lax.rsqrt(mean_square + jnp.float32(self.eps)) * self.weight[...]


class LayerNorm(nnx.Module):
    """Layer norm with a bias (Ba et al., 2016), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """``f32[T, E] -> f32[T, E]``"""
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        scaled = centred * lax.rsqrt(variance + jnp.float32(self.eps)) * self.weight[...]
        return scaled + self.bias[...].astype(jnp.float32)


def make_norm(config: ModelConfig, size: int) -> RMSNorm | LayerNorm:
    """A norm of the kind that ``config`` has."""
    return (LayerNorm if config.layer_norm else RMSNorm)(size, config.rms_norm_eps)


def normed(norm: RMSNorm | LayerNorm | None, x: jax.Array) -> jax.Array:
    """``norm(x)``, or ``x`` where there is none."""
    return x if norm is None else norm(x)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}
"""By the names that a configuration has for them."""
