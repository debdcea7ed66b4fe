"""Mixtures of experts: each token goes through the few MLPs that a router chooses for it.

After Shazeer et al. (*Outrageously large neural networks*, 2017) as Mixtral has it (Jiang et
al., 2024): no token is dropped and no expert has a capacity. A token and an expert chosen for
it are a *pair*; the ``P = T * k`` pairs of a step are sorted by expert, so that the rows of an
expert are together (MegaBlocks, Gale et al., 2022), and come back to their tokens by the
inverse order. A token's outputs are summed in the order of its choice, whoever else is there.

Pairs of padding tokens stand behind all experts and are multiplied with none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.modules import ACTIVATIONS, Inputs, product
from oxidize_jax.model.quantize import quantize_inputs
from oxidize_jax.types import state

PREFIX = "experts."
"""Beginning of the names of the experts' parameters in a layer."""

_TILE_BYTES = 2**20
"""What of a matrix a CPU cuts out and multiplies at a time: a copy of that size stays in a core's
cache. Of a whole matrix the copy goes through memory, which costs two fifths more (float32,
1792 x 1024; benchmarks/experts.py)."""

_MOST_ROWS = 64
"""Rows that a CPU multiplies with an expert at a time, at most."""

_WEIGHT_FIRST = 16
"""Rows up to which the weight stands on the left, as in :func:`.modules.product`."""

_BY_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
"""``x [P, in]``, sorted by expert, times ``weight [X, out, in]``."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What a layer of experts must know of the step that it runs in."""

    live: jax.Array | None
    """bool[T]: which tokens are no padding; None: all"""
    layer: jax.Array
    """i32[]"""
    platform: str


@state
class _Pairs:
    """The pairs of a step in the order of their experts."""

    tokens: jax.Array
    """i32[P]: the token of each"""
    experts: jax.Array
    """i32[P]: its expert, ascending; ``X`` at padding"""
    places: jax.Array
    """i32[T, k]: where the pairs of a token are"""
    weights: jax.Array
    """f32[T, k]: what their outputs are multiplied by"""
    sizes: jax.Array
    """i32[X]: pairs of each expert"""


class ExpertMatrices(nnx.Module):
    """A matrix ``[out, in]`` for each of X experts; in int8 with a scale for each output."""

    def __init__(self, experts: int, out: int, inner: int, *, quantized: bool) -> None:
        dtype = jnp.int8 if quantized else jnp.float32
        self.weight = nnx.Param(jnp.zeros((experts, out, inner), dtype))
        self.scale = nnx.Param(jnp.zeros((experts, out), jnp.float32)) if quantized else None


class Experts(nnx.Module):
    """X gated MLPs without biases.

    Where a step runs on a CPU the parameters are those of all layers, ``[L, X, ...]``, and
    bfloat16 comes as uint16: what is needed is cut out of them where they lie.
    """

    def __init__(self, config: ModelConfig, quantized: bool = False) -> None:
        self.config = config
        x, e, f = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate = ExpertMatrices(x, f, e, quantized=quantized)
        self.up = ExpertMatrices(x, f, e, quantized=quantized)
        self.down = ExpertMatrices(x, e, f, quantized=quantized)

    def __call__(self, h: jax.Array, scores: jax.Array, step: Step) -> jax.Array:
        """``h f32[T, E]``, and what the router says of it, ``f32[T, X]``, to ``f32[T, E]``.

        A token's numbers depend on that token and the shape of the step alone.
        """
        pairs = _route(self.config, scores, step.live)
        run = _on_cpu if step.platform == "cpu" else _on_accelerator
        out = run(self, h, pairs, step)[pairs.places]
        return jnp.sum(out * pairs.weights[..., None], axis=1)


def choose(config: ModelConfig, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``f32[T, X]`` to the weights ``f32[T, k]`` and numbers ``i32[T, k]`` of chosen experts."""
    weights, experts = lax.top_k(jax.nn.softmax(scores, axis=-1), config.num_experts_per_token)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


def _route(config: ModelConfig, scores: jax.Array, live: jax.Array | None) -> _Pairs:
    weights, chosen = choose(config, scores)
    k = config.num_experts_per_token
    if live is not None:
        chosen = jnp.where(live[:, None], chosen, config.num_experts)
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    return _Pairs(
        tokens=order // k,
        experts=experts[order],
        places=places.reshape(-1, k),
        weights=weights,
        sizes=jnp.zeros((config.num_experts,), jnp.int32).at[experts].add(1, mode="drop"),
    )


def _on_accelerator(experts: Experts, h: jax.Array, pairs: _Pairs, step: Step) -> jax.Array:
    """Outputs of the pairs ``f32[P, E]`` by grouped products, zeros at padding."""
    del step
    gate, up = experts.gate, experts.up
    inputs = _rounded(gate, h)
    inputs = jax.tree.map(lambda leaf: leaf[pairs.tokens], inputs)
    activate = ACTIVATIONS[experts.config.activation]
    hidden = activate(_grouped(gate, inputs, pairs)) * _grouped(up, inputs, pairs)
    out = _grouped(experts.down, _rounded(experts.down, hidden), pairs)
    # What a grouped product gives behind its last group is not said.
    return jnp.where(pairs.experts[:, None] < experts.config.num_experts, out, 0)


def _grouped(matrices: ExpertMatrices, inputs: Inputs, pairs: _Pairs) -> jax.Array:
    """``f32[P, out]``: each pair's row of ``inputs`` times the matrix of its expert."""
    x, row_scale = inputs
    weight = matrices.weight[...]
    y = lax.ragged_dot_general(
        x,
        weight,
        pairs.sizes,
        _BY_EXPERT,
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if weight.dtype == jnp.int8 else jnp.float32,
    )
    if row_scale is None or matrices.scale is None:
        return y
    scale = matrices.scale[...].at[pairs.experts].get(mode="clip")
    return y.astype(jnp.float32) * row_scale[:, None] * scale


def _on_cpu(experts: Experts, h: jax.Array, pairs: _Pairs, step: Step) -> jax.Array:
    """Outputs of the pairs ``f32[P + A, E]``: a loop over tiles of up to A pairs of one expert.

    XLA:CPU lowers a grouped product to one over all experts, of rows that are mostly zeros. Here
    only experts that have pairs are read, each once where A is enough for all of them. Rows of
    a tile behind its expert's last are of the next expert, whose own tile comes later and
    overwrites them; behind the last expert they are without meaning.
    """
    config = experts.config
    size, activate = tile_rows(config, h.shape[0]), ACTIVATIONS[config.activation]
    expert_at, start_at, count = _tiles(pairs.sizes, size, pairs.tokens.size)
    inputs = _rounded(experts.gate, h)
    tokens = jnp.pad(pairs.tokens, (0, size))
    inputs = jax.tree.map(lambda leaf: leaf[tokens], inputs)

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        which, start = step.layer * config.num_experts + expert_at[i], start_at[i]
        rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), inputs)
        gate, up = (_by_rows(m, which, rows) for m in (experts.gate, experts.up))
        hidden = _rounded(experts.down, activate(gate) * up)
        y = _by_rows(experts.down, which, hidden)
        return lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

    out = jnp.zeros((tokens.size, config.hidden_size), jnp.float32)
    return lax.fori_loop(0, count, tile, out)


def tile_rows(config: ModelConfig, tokens: int) -> int:
    """A: twice what an expert has on average of ``tokens``, a power of two; no more than all."""
    mean = -(-tokens * config.num_experts_per_token // config.num_experts)
    rows = min(2 * mean, tokens, _MOST_ROWS)
    return max(2, 1 << (rows - 1).bit_length())  # of one row XLA:CPU makes a slow product


def _tiles(sizes: jax.Array, size: int, num_pairs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Expert and first pair of each tile, and how many there are."""
    tiles = -(-sizes // size)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(min(len(sizes), num_pairs) + num_pairs // size, dtype=jnp.int32)
    expert = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, len(sizes) - 1)
    first = (jnp.cumsum(sizes, dtype=jnp.int32) - sizes)[expert]
    return expert, first + (index - (ends - tiles)[expert]) * size, ends[-1]


def _by_rows(matrices: ExpertMatrices, which: jax.Array, inputs: Inputs) -> jax.Array:
    """``f32[A, out]``: the product with matrix ``which i32[]`` of all, some of its rows at a time.

    The last of them are cut so that they end with the matrix, hence some may come twice.
    """
    x, row_scale = inputs
    stack = matrices.weight[...]
    out, inner = stack.shape[-2:]
    stack = stack.reshape(-1, out, inner)
    height = min(out, max(1, _TILE_BYTES // (inner * stack.dtype.itemsize)))
    weight_first = x.shape[0] <= _WEIGHT_FIRST
    axis = 0 if weight_first else 1

    def some(i: jax.Array, y: jax.Array) -> jax.Array:
        start = jnp.minimum(i * height, out - height)
        zero = jnp.zeros((), start.dtype)
        weight = lax.dynamic_slice(stack, (which, start, zero), (1, height, inner))[0]
        part = product(_numbers(weight), x, weight_first=weight_first)
        return lax.dynamic_update_slice_in_dim(y, part, start, axis)

    shape = (out, x.shape[0]) if weight_first else (x.shape[0], out)
    dtype = jnp.int32 if stack.dtype == jnp.int8 else jnp.float32
    y = lax.fori_loop(0, -(-out // height), some, jnp.zeros(shape, dtype))
    y = y.T if weight_first else y
    if row_scale is None or matrices.scale is None:
        return y
    scale = matrices.scale[...].reshape(-1, out)[which]
    return y.astype(jnp.float32) * row_scale[:, None] * scale


def _rounded(matrices: ExpertMatrices, x: jax.Array) -> Inputs:
    """``f32[T, in]`` as these matrices are multiplied with it; see :class:`.modules.Matrix`."""
    if matrices.scale is not None:
        return quantize_inputs(x)
    dtype = matrices.weight[...].dtype
    return x.astype(jnp.bfloat16 if dtype == jnp.uint16 else dtype), None


def _numbers(weight: Any) -> Any:
    """Bits as what they stand for."""
    return lax.bitcast_convert_type(weight, jnp.bfloat16) if weight.dtype == jnp.uint16 else weight
