"""Which tensors of a file make up each parameter.

Parameters are those of :func:`oxidize_jax.model.transformer.parameter_shapes`: flat, with all
layers of a kind stacked under one name. The two file formats store a tensor per layer, under
the names that the model's family has there (:mod:`oxidize_jax.checkpoints.families`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from oxidize_jax.checkpoints.families import FAMILIES
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.quantize import is_matrix
from oxidize_jax.model.transformer import parameter_shapes

Naming = Literal["hf", "gguf"]


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a file holds a parameter."""

    names: tuple[str, ...]
    """A tensor for each layer, in layer order, or one; or one for each expert of each layer"""
    shape: tuple[int, ...]
    """Of what the parameter has of each"""
    start: int
    stop: int
    """Rows of each tensor, or numbers of a vector, that are this parameter's"""
    total: int
    """How many the tensor has, other parameters' too"""
    transposed: bool = False
    """Whether these are columns"""
    offset: float = 0.0
    """What is to be added to each number"""


def stored_names(config: ModelConfig, naming: Naming) -> dict[str, tuple[str, ...]]:
    """For every parameter of ``config``, the tensors that a file stores it in.

    A parameter of the layers has ``config.num_layers`` of them, in layer order, or one for each
    expert of each layer; any other has one. A name occurs twice only where a file fuses parameters.
    """
    return {name: stored.names for name, stored in stored_parameters(config, naming).items()}


def stored_parameters(config: ModelConfig, naming: Naming) -> dict[str, Stored]:
    """How a file of ``naming`` holds every parameter of ``config``.

    Raises ValueError if there are no such files of its family.
    """
    family = FAMILIES[config.architecture]
    layout = family.hf if naming == "hf" else family.gguf
    if layout is None:
        raise ValueError(f"architecture={config.architecture!r} has no names in a GGUF.")
    transposed = family.hf.transposed if naming == "hf" else frozenset()
    offset = family.hf.norm_offset if naming == "hf" else 0.0
    order = list(layout.names)
    shapes = parameter_shapes(config)
    ends: dict[str, int] = {}
    parts: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for parameter in sorted(shapes, key=lambda name: order.index(_stem(name))):
        stem, suffix = parameter.rsplit(".", 1)
        pattern = f"{layout.names[stem]}.{suffix}"
        # Axes that are a tensor for each: layers, and experts where they are not in one tensor.
        shape = shapes[parameter][pattern.count("{}") :]
        start = ends.get(pattern, 0)
        ends[pattern] = start + shape[0]
        parts[parameter] = (pattern, shape, start)
    stored = {}
    for parameter in shapes:
        pattern, shape, start = parts[parameter]
        stored[parameter] = Stored(
            names=_names_of(pattern, config),
            shape=shape,
            start=start,
            stop=start + shape[0],
            total=ends[pattern],
            transposed=_stem(parameter) in transposed and is_matrix(parameter),
            offset=offset if parameter.endswith("norm.weight") else 0.0,
        )
    return stored


def _names_of(pattern: str, config: ModelConfig) -> tuple[str, ...]:
    counts = (config.num_layers, config.num_experts)[: pattern.count("{}")]
    return tuple(pattern.format(*index) for index in itertools.product(*map(range, counts)))


def _stem(parameter: str) -> str:
    return parameter.rsplit(".", 1)[0]
