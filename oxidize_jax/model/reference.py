"""The model without pages, batches or loops: the oracle that tests compare with.

Written from the definition of the architecture and apart from the paged path, it shares
none of its code. One sequence at a time, everything in float32, memory quadratic in the
length: for debugging, not for serving.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from oxidize_jax.model.config import ModelConfig


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of one sequence: ``q f32[N, H, D]``, ``k, v f32[N, G, D]`` to q's shape."""
    n, heads, head_dim = q.shape
    group = heads // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") / jnp.sqrt(jnp.float32(head_dim))
    causal = jnp.tril(jnp.ones((n, n), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest")


def reference_forward(
    config: ModelConfig, params: Mapping[str, jax.Array], token_ids: jax.Array
) -> jax.Array:
    """Logits ``f32[N, V]`` of every token of the sequence ``token_ids i32[N]``.

    ``params`` are as a checkpoint gives them (not the leaves of ``build``), of any floating
    type; they are used in float32.
    """
    weights = {name: jnp.asarray(p).astype(jnp.float32) for name, p in params.items()}
    x = weights["embed.weight"][token_ids]
    for index in range(config.num_layers):
        layer = {
            name.removeprefix("layers."): p[index]
            for name, p in weights.items()
            if name.startswith("layers.")
        }
        h = _norm(x, layer["input_norm.weight"], config.rms_norm_eps)
        x = x + _attention_block(config, layer, h)
        h = _norm(x, layer["post_norm.weight"], config.rms_norm_eps)
        gate = _linear(layer, "gate", h)
        x = x + _linear(layer, "down", gate / (1 + jnp.exp(-gate)) * _linear(layer, "up", h))
    x = _norm(x, weights["final_norm.weight"], config.rms_norm_eps)
    head = weights["embed.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return jnp.einsum("ne,ve->nv", x, head, precision="highest")


def _attention_block(config: ModelConfig, layer: dict[str, jax.Array], h: jax.Array) -> jax.Array:
    n = h.shape[0]
    q = _rope(config, _linear(layer, "q", h).reshape(n, config.num_heads, -1))
    k = _rope(config, _linear(layer, "k", h).reshape(n, config.num_kv_heads, -1))
    v = _linear(layer, "v", h).reshape(n, config.num_kv_heads, -1)
    return _linear(layer, "o", attention(q, k, v).reshape(n, -1))


def _linear(layer: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    y = jnp.einsum("ni,oi->no", x, layer[f"{name}.weight"], precision="highest")
    return y + layer[f"{name}.bias"] if f"{name}.bias" in layer else y


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    scale = jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(eps))
    return x / scale * weight


def _rope(config: ModelConfig, x: jax.Array) -> jax.Array:
    """Each pair (i, i + D/2) as a complex number, turned by position * theta^(-2i/D)."""
    half = config.head_dim // 2
    power = -jnp.arange(half, dtype=jnp.float32) / half
    position = jnp.arange(x.shape[0], dtype=jnp.float32)
    angle = position[:, None] * jnp.float32(config.rope_theta) ** power
    pairs = jax.lax.complex(x[..., :half], x[..., half:])
    turn = jax.lax.complex(jnp.cos(angle), jnp.sin(angle))[:, None, :]
    turned = pairs * turn
    return jnp.concatenate([turned.real, turned.imag], axis=-1)
