"""The decoder as pure functions: ``build`` once, then ``forward`` inside any transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.model import kv_cache
from oxidize_jax.model.attention import check_backend, make_attention
from oxidize_jax.model.attention_rows import AttentionSpec
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.experts import Step
from oxidize_jax.model.modules import Inputs, product
from oxidize_jax.model.quantize import is_matrix
from oxidize_jax.model.rope import RotationAt, rotations
from oxidize_jax.model.storage import (
    EMBED_BITS,
    Leaves,
    check_params,
    is_of_experts,
    is_of_trunk,
    layer_leaves,
    layer_views,
    stored,
    unpacked,
)
from oxidize_jax.model.transformer import (
    APART,
    LAYERS,
    Layer,
    Multiply,
    Projections,
    merge,
    split_modules,
)

_WEIGHT_FIRST = 16
"""Tokens up to which a product with the weight on the left is quicker on a CPU. 30 layers of
SmolLM2 in bfloat16: 2 tokens take 14 ms against 17, 16 take 18 against 20, 64 take 45 against
41."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model apart from its arrays: hashable, hence a static argument of a jitted step."""

    config: ModelConfig
    trunk: nnx.GraphDef
    layer: nnx.GraphDef
    platform: str
    """``cpu``, ``gpu`` or ``tpu``: chooses how numbers are stored and work is cut."""
    attention: str
    kv_dtype: str
    quantized: bool
    """Whether the weights are int8, as :func:`~oxidize_jax.model.quantize.quantize` makes them."""

    @property
    def vocab_size(self) -> int:
        """V"""
        return self.config.vocab_size

    def init_kv(self, num_blocks: int, block_size: int) -> jax.Array:
        """A zeroed cache; see :func:`oxidize_jax.model.kv_cache.init_kv`."""
        return kv_cache.init_kv(
            self.config, num_blocks, block_size, self.kv_dtype, platform=self.platform
        )

    def forward(
        self, params: Leaves, kv: jax.Array, batch: BatchDescriptor
    ) -> tuple[jax.Array, jax.Array]:
        """:func:`forward` with the block size that ``kv`` was made with."""
        block_size = kv_cache.block_size_of(self.config, kv)
        return forward(self, params, kv, batch, block_size=block_size)

    def hidden_states(
        self, params: Leaves, kv: jax.Array, batch: BatchDescriptor
    ) -> tuple[jax.Array, jax.Array]:
        """:func:`hidden_states` with the block size that ``kv`` was made with."""
        block_size = kv_cache.block_size_of(self.config, kv)
        return hidden_states(self, params, kv, batch, block_size=block_size)

    def final_norm(self, params: Leaves, hidden: jax.Array) -> jax.Array:
        """``f32[C, E] -> f32[C, E]``: what the head reads, and embeddings are made of."""
        return _trunk(self, params).final_norm(hidden)

    def logits(self, params: Leaves, hidden: jax.Array) -> jax.Array:
        """``f32[C, E] -> f32[C, V]``: final norm and head, for rows of :func:`hidden_states`."""
        return _trunk(self, params).logits(hidden)


def build(
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    platform: str | None = None,
    attention: str = "gather",
    kv_dtype: str = "float32",
) -> tuple[Decoder, Leaves]:
    """The static decoder and the leaves that :func:`forward` reads.

    ``params`` has every name of ``parameter_shapes(config)`` once, with that shape: norms in
    float32, the rest all in float32 or all in bfloat16. Or they come from
    :func:`~oxidize_jax.model.quantize.quantize`, with int8 matrices and their scales. Arrays
    may be jax.ShapeDtypeStruct, to compile without weights. The leaves are these same arrays,
    but for bfloat16 on a CPU, where those of the layers become uint16 views of the same bits.
    On a CPU each layer's are there once more by themselves, as views of the same memory.
    ``platform`` defaults to JAX's own.

    Raises ValueError naming a parameter that is missing, unknown, or of the wrong shape or
    type, an unknown attention backend, or a kv_dtype that is not supported.
    """
    check_backend(attention)
    platform = platform or jax.default_backend()
    kv_cache.storage_dtype(kv_dtype, platform)
    quantized = any(leaf.dtype == jnp.int8 for leaf in params.values())
    check_params(config, params, quantized)
    (trunk, layer), _ = split_modules(config, quantized)
    decoder = Decoder(config, trunk, layer, platform, attention, kv_dtype, quantized)
    leaves = {name: stored(name, leaf, platform) for name, leaf in params.items()}
    return decoder, leaves | layer_views(config, leaves, platform)


def forward(
    decoder: Decoder,
    leaves: Leaves,
    kv: jax.Array,
    batch: BatchDescriptor,
    *,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """One step: copy blocks, write the KV of ``batch``, attend; ``(logits f32[C, V], kv)``.

    Row c of the logits belongs to ``batch.logits_indices[c]``; padding rows hold numbers
    without meaning. ``leaves`` come from :func:`build`, or are the parameters of a trainer:
    a flat dict of the same names (for a decoder of int8 weights, through ``quantize``). Pure,
    so it can be jitted, scanned and looped; donate ``kv`` to have it updated in place.
    """
    x, kv = hidden_states(decoder, leaves, kv, batch, block_size=block_size)
    hidden = x.at[batch.logits_indices].get(mode="clip")
    return decoder.logits(leaves, hidden), kv


def hidden_states(
    decoder: Decoder,
    leaves: Leaves,
    kv: jax.Array,
    batch: BatchDescriptor,
    *,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """:func:`forward` up to the last layer: ``(x f32[T, E], kv)``, before the final norm.

    For whoever wants more rows than can have logits at the same time; ``logits_indices`` and
    ``sample_rows`` of ``batch`` are not read. Padding tokens hold numbers without meaning.
    """
    config = decoder.config
    _check_layout(decoder, leaves)
    spec = _spec(decoder, kv, block_size)
    kv = kv_cache.copy_blocks(
        kv, batch.copy_src, batch.copy_dst, batch.num_copies, num_layers=config.num_layers
    )
    attention = make_attention(decoder.attention, spec, batch, kv)
    write = kv_cache.make_write(batch, spec.num_blocks, block_size, decoder.platform)
    rotation_at = rotations(batch.positions, config)

    def mix(index: jax.Array, qkv: Projections, cache: Cache) -> tuple[jax.Array, Cache]:
        kv, scratch = cache
        q, k, v = qkv
        kv = write(kv, index, k, v)
        out, scratch = attention.attend(q, kv, index, scratch)
        return out, (kv, scratch)

    trunk = _trunk(decoder, leaves)
    if EMBED_BITS in leaves:
        bits = leaves[EMBED_BITS].at[batch.token_ids].get(mode="clip")
        x = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
    else:
        x = trunk.embed_tokens(batch.token_ids)
    x = trunk.placed(x, batch.positions)
    # In a step of few tokens cutting the weights out of their stack takes half of the time.
    apart = any(n.startswith(APART) for n in leaves) and not batch.tile_rows.size
    layers = _layers_apart if apart else _layers_stacked
    # Nobody but experts asks for it.
    live = batch.token_rows < batch.block_tables.shape[0] if config.num_experts else None

    def step_at(index: jax.Array) -> Step:
        return Step(live, index, decoder.platform)

    x, (kv, _) = layers(decoder, leaves, rotation_at, step_at, mix, x, (kv, attention.scratch))
    return x, kv


Cache = tuple[jax.Array, Any]
"""``(kv, scratch)``"""
_StepAt = Callable[[jax.Array], Step]
_Mix = Callable[[jax.Array, Projections, Cache], tuple[jax.Array, Cache]]


def _layers_stacked(
    decoder: Decoder,
    leaves: Leaves,
    rotation_at: RotationAt,
    step_at: _StepAt,
    mix: _Mix,
    x: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """All layers, their weights cut out of the stacks: one body, compiled once."""

    def layer(
        carry: tuple[jax.Array, Cache], inputs: tuple[jax.Array, Leaves]
    ) -> tuple[tuple[jax.Array, Cache], None]:
        index, weights = inputs
        weights = {n: unpacked(w) for n, w in weights.items()}
        module = merge(decoder.layer, whole | weights)

        def mix_here(q: jax.Array, k: jax.Array, v: jax.Array, c: Cache) -> tuple[jax.Array, Cache]:
            return mix(index, (q, k, v), c)

        return module(*carry, rotation_at(index), mix_here, step_at(index)), None

    whole = _experts_of_all_layers(decoder, leaves)
    stacked = {
        n.removeprefix(LAYERS): stored(n, leaf, decoder.platform)
        for n, leaf in leaves.items()
        if n.startswith(LAYERS) and n.removeprefix(LAYERS) not in whole
    }
    indices = jnp.arange(decoder.config.num_layers, dtype=jnp.int32)
    return lax.scan(layer, (x, cache), (indices, stacked))[0]


def _layers_apart(
    decoder: Decoder,
    leaves: Leaves,
    rotation_at: RotationAt,
    step_at: _StepAt,
    mix: _Mix,
    x: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """All layers, their matrices arguments by themselves, which XLA reads where they are.

    What multiplies is a branch for each layer, and nothing but that: what stands in a branch is
    compiled once for every layer. The cache never enters a branch, which would copy it.
    """
    last = decoder.config.num_layers - 1
    # Of their matrices only the type is looked at.
    like = layer_leaves(leaves, 0)
    small = {n: leaves[LAYERS + n] for n in like if not is_matrix(n)}
    like |= _experts_of_all_layers(decoder, leaves)

    def at(index: jax.Array) -> tuple[Layer, Multiply]:
        module = merge(
            decoder.layer, like | {n: unpacked(leaf[index]) for n, leaf in small.items()}
        )
        return module, partial(_multiply_layer, leaves, module, index)

    def layer(
        carry: tuple[jax.Array, Projections, Cache], index: jax.Array
    ) -> tuple[tuple[jax.Array, Projections, Cache], None]:
        x, qkv, cache = carry
        mixed, cache = mix(index, qkv, cache)
        module, multiply = at(index)
        x = module.finish(x, mixed, multiply, step_at(index))
        # Behind the last layer what is projected is of no use.
        index = jnp.minimum(index + 1, last)
        following, multiply = at(index)
        return (x, following.project(x, rotation_at(index), multiply), cache), None

    zero = jnp.zeros((), jnp.int32)
    first, multiply = at(zero)
    start = (x, first.project(x, rotation_at(zero), multiply), cache)
    x, _, cache = lax.scan(layer, start, jnp.arange(last + 1, dtype=jnp.int32))[0]
    return x, cache


def _multiply_layer(
    leaves: Leaves, module: Layer, index: jax.Array, names: tuple[str, ...], inputs: Inputs
) -> tuple[jax.Array, ...]:
    """A :data:`Multiply` of layer ``index i32[]``, whose small parameters are in ``module``."""
    x = inputs[0]
    # Queries, keys and values would not gain: they are narrow.
    weight_first = x.shape[0] <= _WEIGHT_FIRST and "q" not in names

    def branch(layer: int) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
        weights = [leaves[f"{APART}{layer}.{name}.weight"] for name in names]
        return lambda x: tuple(product(w, x, weight_first=weight_first) for w in weights)

    branches = [branch(layer) for layer in range(module.config.num_layers)]
    products = lax.switch(index, branches, x)
    if weight_first:
        products = tuple(y.T for y in products)
    return tuple(
        getattr(module, name).completed(y, inputs) for name, y in zip(names, products, strict=True)
    )


def _experts_of_all_layers(decoder: Decoder, leaves: Leaves) -> Leaves:
    """On a CPU the experts' parameters as :class:`.experts.Experts` reads them, by their names in
    a layer; else nothing."""
    if decoder.platform != "cpu":
        return {}
    return {
        n.removeprefix(LAYERS): stored(n, leaf, decoder.platform)
        for n, leaf in leaves.items()
        if is_of_experts(n)
    }


def _trunk(decoder: Decoder, leaves: Leaves) -> Any:
    return merge(decoder.trunk, {n: leaf for n, leaf in leaves.items() if is_of_trunk(n)})


def _spec(decoder: Decoder, kv: jax.Array, block_size: int) -> AttentionSpec:
    """Sizes of the pages in ``kv``. Raises ValueError if it is not a cache of this decoder."""
    config = decoder.config
    num_blocks = kv.shape[0] // config.num_layers
    shape = kv_cache.kv_shape(config, num_blocks, block_size, decoder.platform, decoder.kv_dtype)
    dtype = kv_cache.storage_dtype(decoder.kv_dtype, decoder.platform)
    if kv.shape != shape or kv.dtype != dtype:
        raise ValueError(
            f"kv is {kv.dtype}{list(kv.shape)}, but block_size={block_size} and this model "
            f"need {dtype}{list(shape)}: make it with the decoder's init_kv."
        )
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        platform=decoder.platform,
        scale=config.query_scale,
        softcap=config.attention_softcap,
        windows=config.layer_windows,
    )


def _check_layout(decoder: Decoder, leaves: Leaves) -> None:
    """Raises ValueError if only one of the two is quantised."""
    dtype = leaves["embed.weight"].dtype
    if (dtype == jnp.int8) != decoder.quantized:
        wanted, remedy = (
            ("int8", "quantize") if decoder.quantized else ("floating", "do not quantize")
        )
        raise ValueError(
            f"parameter 'embed.weight' is {dtype}, but this decoder was built for {wanted} "
            f"weights: {remedy} them, or build another decoder."
        )
