"""The decoder's parameters and layers: one transformer for all families, in Flax NNX.

The modules say what the parameters are and what is computed with them; they hold no cache
and are never jitted. :mod:`oxidize_jax.model.functional` builds them without memory, splits
them once, and runs them as pure functions of a flat dict of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from oxidize_jax.model.attention_cpu import softcapped
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.experts import Experts, Step
from oxidize_jax.model.modules import (
    ACTIVATIONS,
    Inputs,
    Matrix,
    RMSNorm,
    make_norm,
    normed,
    product,
)
from oxidize_jax.model.rope import rotate

LAYERS = "layers."
"""Prefix of the parameters that are stacked over layers."""

APART = "layer."
"""Prefix of the parameters of one layer, followed by its number."""

Projections = tuple[jax.Array, jax.Array, jax.Array]
"""``(q f32[T, H, D], k f32[T, G, D], v f32[T, G, D])``, queries and keys rotated."""

Mix = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""``mix(q, k, v, kv) -> (f32[T, H, D], kv)``: put k and v in the cache, attend from q."""


Multiply = Callable[[tuple[str, ...], Inputs], tuple[jax.Array, ...]]
"""``multiply(names, inputs) -> f32[T, out] for each``: matrices of a layer, by their names."""


def parameter_shapes(config: ModelConfig, *, quantized: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of ``config``, as one flat tree.

    Matrices are ``[out, in]``, as Hugging Face stores them, so that loading is a stack
    and not a transpose. Parameters of the layers carry a leading axis ``L``: the
    forward pass scans over it. ``lm_head.weight`` exists only for an untied head. With
    ``quantized``, every matrix ``x.weight`` has a ``x.scale`` with one number for each of
    its rows, as :func:`~oxidize_jax.model.quantize.quantize` makes them.
    """
    trunk, layer = split_modules(config, quantized)[1]
    shapes = {name: tuple(leaf.shape) for name, leaf in flat(trunk).items()}
    for name, leaf in flat(layer).items():
        shapes[LAYERS + name] = (config.num_layers, *leaf.shape)
    return shapes


@cache
def split_modules(
    config: ModelConfig, quantized: bool = False
) -> tuple[tuple[nnx.GraphDef, nnx.GraphDef], tuple[nnx.State, nnx.State]]:
    """Structure and abstract parameters of the trunk and of one layer, each split once."""
    trunk = nnx.eval_shape(lambda: Trunk(config, quantized))
    layer = nnx.eval_shape(lambda: Layer(config, quantized))
    (trunk_graph, trunk_state), (layer_graph, layer_state) = nnx.split(trunk), nnx.split(layer)
    return (trunk_graph, layer_graph), (trunk_state, layer_state)


def flat(module_state: nnx.State) -> dict[str, jax.Array | jax.ShapeDtypeStruct]:
    """``{"q.weight": leaf, ...}``: a module's parameters by their path."""
    return {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(module_state)
    }


def merge(graph: nnx.GraphDef, leaves: dict[str, jax.Array]) -> Any:
    """The module of ``graph`` with the parameters ``leaves``, named by path."""
    nested: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nnx.merge(graph, nested)


class Trunk(nnx.Module):
    """What comes before and after the layers: embedding, final norm, head."""

    def __init__(self, config: ModelConfig, quantized: bool = False) -> None:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed = Matrix(*shape, quantized=quantized)
        positions = (config.max_position_embeddings, config.hidden_size)
        self.position_embed = (
            Matrix(*positions, quantized=quantized) if config.learned_positions else None
        )
        self.final_norm = make_norm(config, config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Matrix(*shape, quantized=quantized)

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        """``i32[T] -> f32[T, E]``"""
        return self.embed.rows(token_ids)

    def placed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """What the first layer reads of embeddings ``f32[T, E]`` at ``positions i32[T]``."""
        if self.config.embedding_scale != 1:
            x = x * jnp.float32(self.config.embedding_scale)
        return x if self.position_embed is None else x + self.position_embed.rows(positions)

    def logits(self, x: jax.Array) -> jax.Array:
        """``f32[C, E] -> f32[C, V]``"""
        head = self.embed if self.lm_head is None else self.lm_head
        return softcapped(head(self.final_norm(x)), self.config.final_softcap)


class Layer(nnx.Module):
    """Attention and an MLP, each added to the residual stream, with norms before or after."""

    def __init__(self, config: ModelConfig, quantized: bool = False) -> None:
        self.config = config
        e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_heads * d, config.num_kv_heads * d
        matrix = partial(Matrix, quantized=quantized)
        self.input_norm = make_norm(config, e) if config.pre_norms else None
        self.q = matrix(q, e, bias=config.attention_bias)
        self.k = matrix(kv, e, bias=config.attention_bias)
        self.v = matrix(kv, e, bias=config.attention_bias)
        sizes = {"none": None, "head": (d, d), "full": (q, kv)}[config.qk_norm]
        self.q_norm = RMSNorm(sizes[0], config.rms_norm_eps) if sizes else None
        self.k_norm = RMSNorm(sizes[1], config.rms_norm_eps) if sizes else None
        self.o = matrix(e, q, bias=config.has_output_bias)
        self.attention_out_norm = make_norm(config, e) if config.post_norms else None
        self.post_norm = make_norm(config, e) if config.pre_norms else None
        if config.num_experts:
            self.router = Matrix(config.num_experts, e)  # float32 with all types of weights
            self.experts = Experts(config, quantized)
        else:
            self.gate = matrix(f, e, bias=config.mlp_bias) if config.gated_mlp else None
            self.up = matrix(f, e, bias=config.mlp_bias)
            self.down = matrix(e, f, bias=config.mlp_bias)
        self.mlp_out_norm = make_norm(config, e) if config.post_norms else None

    def __call__(
        self, x: jax.Array, kv: Any, rotation: jax.Array | None, mix: Mix, step: Step
    ) -> tuple[jax.Array, Any]:
        """``x f32[T, E]`` and the cache, after this layer; ``rotation`` as :mod:`.rope` has it."""
        mixed, kv = mix(*self.project(x, rotation, self.multiply), kv)
        return self.finish(x, mixed, self.multiply, step), kv

    def project(self, x: jax.Array, rotation: jax.Array | None, multiply: Multiply) -> Projections:
        """Queries ``f32[T, H, D]``, keys and values ``f32[T, G, D]`` of the tokens."""
        heads = (x.shape[0], -1, self.config.head_dim)
        h = self.q.rounded(normed(self.input_norm, x))
        q, k, v = multiply(("q", "k", "v"), h)
        if self.config.qk_norm == "full":
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        q, k, v = (y.reshape(heads) for y in (q, k, v))
        if self.config.qk_norm == "head":
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        return rotate(q, rotation), rotate(k, rotation), v

    def finish(self, x: jax.Array, mixed: jax.Array, multiply: Multiply, step: Step) -> jax.Array:
        """``x f32[T, E]`` after this layer, ``mixed f32[T, H, D]`` being what attention gave."""
        (out,) = multiply(("o",), self.o.rounded(mixed.reshape(x.shape[0], -1)))
        x = x + normed(self.attention_out_norm, out)
        h = normed(self.post_norm, x)
        if self.config.num_experts:
            out = self.experts(h, self.router(h), step)
        else:
            out = self._mlp(h, multiply)
        return x + normed(self.mlp_out_norm, out)

    def _mlp(self, h: jax.Array, multiply: Multiply) -> jax.Array:
        inputs = self.up.rounded(h)
        activate = ACTIVATIONS[self.config.activation]
        if self.gate is None:
            (up,) = multiply(("up",), inputs)
            h = activate(up)
        else:
            gate, up = multiply(("gate", "up"), inputs)
            h = activate(gate) * up
        (out,) = multiply(("down",), self.down.rounded(h))
        return out

    def multiply(self, names: tuple[str, ...], inputs: Inputs) -> tuple[jax.Array, ...]:
        """A :data:`Multiply` with the weights of this module."""
        matrices = [getattr(self, name) for name in names]
        return tuple(
            matrix.completed(product(matrix.weight[...], inputs[0]), inputs) for matrix in matrices
        )
