"""What a Decoder is handed to read: its own leaves or a trainer's parameters, checked by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from oxidize_jax.model.functional import Decoder, build
from oxidize_jax.model.storage import EMBED_BITS, Leaves, parameter_dtype
from oxidize_jax.model.transformer import APART, LAYERS, parameter_shapes


def leaves_of(decoder: Decoder, params: Any) -> Leaves:
    """The leaves that ``forward`` reads, from any form in which ``params`` may come.

    That is what :func:`~oxidize_jax.model.functional.build` returned, or what it takes: a flat
    dict of a trainer's parameters, or of quantised ones. Nothing is computed, so it may be
    called under ``jit``. Raises ValueError naming a parameter that is missing, unknown, or of
    the wrong shape or type.
    """
    if not isinstance(params, Mapping):
        raise ValueError(
            f"params is {type(params).__name__}: must be the leaves that build returned, or a "
            "flat dict of parameters by name."
        )
    if _is_built(params):
        _check_built(decoder, params)
        return dict(params)
    if not decoder.quantized:
        _check_floats(params)
    return build(
        decoder.config,
        params,
        platform=decoder.platform,
        attention=decoder.attention,
        kv_dtype=decoder.kv_dtype,
    )[1]


def _is_built(params: Mapping[str, Any]) -> bool:
    """Whether it is in a form that only ``build`` makes."""
    return any(
        _is_view(name) or (name.startswith(LAYERS) and leaf.dtype == jnp.uint16)
        for name, leaf in params.items()
    )


def _is_view(name: str) -> bool:
    return name.startswith(APART) or name == EMBED_BITS


def _check_floats(params: Mapping[str, Any]) -> None:
    # Of one int8 matrix ``build`` would conclude that all of them are, and miss their scales.
    for name, leaf in params.items():
        if leaf.dtype == jnp.int8:
            raise ValueError(
                f"parameter {name!r} is int8, but this decoder was built for floating weights: "
                "do not quantize them, or build another decoder."
            )


def _check_built(decoder: Decoder, leaves: Mapping[str, Any]) -> None:
    wanted = _built(decoder, leaves)
    if not any(_is_view(name) for name in leaves):  # built from tracers
        wanted = {name: leaf for name, leaf in wanted.items() if not _is_view(name)}
    for name in leaves:
        if name not in wanted:
            raise ValueError(f"parameter {name!r} is none that build returned; remove it.")
    for name, want in wanted.items():
        if name not in leaves:
            raise ValueError(
                f"parameter {name!r} {list(want.shape)} is missing: hand on all that build "
                "returned, or a trainer's own parameters."
            )
        leaf = leaves[name]
        if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
            raise ValueError(
                f"parameter {name!r} is {leaf.dtype}{list(leaf.shape)}, but build returned "
                f"{want.dtype}{list(want.shape)}: hand on what it returned, or a trainer's own "
                "parameters."
            )


def _built(decoder: Decoder, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes and types of what ``build`` returns for weights of the type that these have."""
    shapes = parameter_shapes(decoder.config, quantized=decoder.quantized)
    if "embed.weight" not in leaves:
        raise ValueError(f"parameter 'embed.weight' {list(shapes['embed.weight'])} is missing.")
    weights = jnp.dtype(jnp.int8) if decoder.quantized else leaves["embed.weight"].dtype
    abstract = {
        name: jax.ShapeDtypeStruct(shape, parameter_dtype(name, weights))
        for name, shape in shapes.items()
    }
    return build(decoder.config, abstract, platform=decoder.platform)[1]
