"""How parameters lie in memory for a step, and what ``build`` asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.experts import PREFIX
from oxidize_jax.model.quantize import is_matrix, stays_float32
from oxidize_jax.model.transformer import APART, LAYERS, parameter_shapes

Leaves = dict[str, jax.Array]
"""Parameters by name, as :func:`~oxidize_jax.model.transformer.parameter_shapes` lists them; those
that ``build`` made for a CPU also have each layer's by themselves."""

EMBED_BITS = "embed.bits"
"""On a CPU a bfloat16 embedding once more as uint16, to take rows of: XLA:CPU would make a
float32 copy of the whole matrix first, in every run of a loop."""
_WEIGHT_DTYPES = ("float32", "bfloat16", "int8")


def stored(name: str, leaf: Any, platform: str) -> Any:
    """``leaf`` as the scan over layers wants it.

    XLA:CPU converts a whole bfloat16 array to float32 to slice a layer out of it (30 layers
    of 576 x 1536, 16 rows: 93 ms against 11). As uint16 it slices what is there.
    """
    packed = platform == "cpu" and name.startswith(LAYERS) and leaf.dtype == jnp.bfloat16
    return _bits(leaf) if packed else leaf


def layer_views(config: ModelConfig, leaves: Leaves, platform: str) -> Leaves:
    """On a CPU, every layer's parameters by themselves, without a copy; else nothing.

    XLA:CPU can multiply with a matrix that is an argument as it lies there. One that is cut out
    of a stack by a running index is copied first, in every layer of every step. Experts are not
    among them: which are read is known in the step alone (:mod:`.experts`).
    """
    if platform != "cpu" or any(isinstance(leaf, Tracer) for leaf in leaves.values()):
        return {}
    views = {
        f"{APART}{index}.{name.removeprefix(LAYERS)}": _view(leaf, index)
        for name, leaf in leaves.items()
        if name.startswith(LAYERS) and not is_of_experts(name)
        for index in range(config.num_layers)
    }
    if leaves["embed.weight"].dtype == jnp.bfloat16:
        views[EMBED_BITS] = _bits(leaves["embed.weight"])
    return views


def _view(leaf: Any, index: int) -> Any:
    """``leaf[index]`` in the same memory, of the type it stands for."""
    dtype = jnp.dtype(jnp.bfloat16 if leaf.dtype == jnp.uint16 else leaf.dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], dtype)
    return jax.device_put(np.asarray(leaf)[index].view(dtype), may_alias=True)


def _bits(leaf: Any) -> Any:
    """A bfloat16 ``leaf`` as uint16 in the same memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.uint16)
    if isinstance(leaf, Tracer):
        return lax.bitcast_convert_type(leaf, jnp.uint16)
    return jax.device_put(np.asarray(leaf).view(np.uint16), may_alias=True)


def unpacked(leaf: jax.Array) -> jax.Array:
    """A layer's weights as numbers again, once they are cut out of the stack."""
    return lax.bitcast_convert_type(leaf, jnp.bfloat16) if leaf.dtype == jnp.uint16 else leaf


def is_of_trunk(name: str) -> bool:
    """Whether the leaf ``name`` is the trunk's, and no layer's."""
    return not name.startswith((LAYERS, APART)) and name != EMBED_BITS


def is_of_experts(name: str) -> bool:
    """Whether the parameter ``name`` is one of the experts of all layers."""
    return name.startswith(LAYERS + PREFIX)


def layer_leaves(leaves: Leaves, index: int) -> Leaves:
    """The parameters of layer ``index`` by themselves, by their names in the layer."""
    prefix = f"{APART}{index}."
    return {n.removeprefix(prefix): leaf for n, leaf in leaves.items() if n.startswith(prefix)}


def check_params(config: ModelConfig, params: Mapping[str, Any], quantized: bool) -> None:
    """Raise ValueError naming a parameter that is missing, unknown, or of wrong shape or type."""
    shapes = parameter_shapes(config, quantized=quantized)
    for name in params:
        if name not in shapes:
            raise ValueError(f"parameter {name!r} is not one of this model; remove it.")
    for name, shape in shapes.items():
        if name not in params:
            raise ValueError(f"parameter {name!r} {list(shape)} is missing; add it.")
        if tuple(params[name].shape) != shape:
            raise ValueError(
                f"parameter {name!r} has shape {list(params[name].shape)}, but the model "
                f"configuration needs {list(shape)}: is this the checkpoint of that model?"
            )
    _check_dtypes(params)


def _check_dtypes(params: Mapping[str, Any]) -> None:
    weights = jnp.dtype(params["embed.weight"].dtype)
    if weights.name not in _WEIGHT_DTYPES:
        raise ValueError(
            f"parameter 'embed.weight' is {weights}: weights must be {', '.join(_WEIGHT_DTYPES)}."
        )
    for name, leaf in params.items():
        needed = parameter_dtype(name, weights)
        if leaf.dtype != needed:
            raise ValueError(
                f"parameter {name!r} is {leaf.dtype}, but must be {needed}: norms and routers are "
                f"float32, matrices have the type of 'embed.weight', and so have biases, but for "
                f"int8, where biases and scales are float32; cast it."
            )


def parameter_dtype(name: str, weights: jnp.dtype) -> jnp.dtype:
    """Type of the parameter ``name`` of a model whose matrices are ``weights``."""
    is_float32 = stays_float32(name) or (weights == jnp.int8 and not is_matrix(name))
    return jnp.dtype(jnp.float32) if is_float32 else weights
