"""The model without pages, batches or loops: the oracle that tests compare with.

Written from the definition of the architectures and apart from the paged path, it shares
none of its code but the table of rotary frequencies. One sequence at a time, everything in
float32, memory quadratic in the length: for debugging, not for serving.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.rope import layer_frequencies


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> jax.Array:
    """Causal attention of one sequence: ``q f32[N, H, D]``, ``k, v f32[N, G, D]`` to q's shape."""
    n, heads, head_dim = q.shape
    group = heads // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest")
    scores = scores * jnp.float32(head_dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    behind = np.arange(n)[:, None] - np.arange(n)
    seen = (behind >= 0) & (behind < (window or n))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest")


def reference_forward(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    token_ids: jax.Array,
    *,
    length: int | None = None,
) -> jax.Array:
    """Logits ``f32[N, V]`` of every token of the sequence ``token_ids i32[N]``.

    ``params`` are as a checkpoint gives them (not the leaves of ``build``), of any floating
    type; they are used in float32. ``length`` chooses the factors of a ``longrope``; it is the
    configuration's by default.
    """
    weights = {name: jnp.asarray(p).astype(jnp.float32) for name, p in params.items()}
    x = weights["embed.weight"][token_ids] * jnp.float32(config.embedding_scale)
    if config.learned_positions:
        x = x + weights["position_embed.weight"][: len(token_ids)]
    for index in range(config.num_layers):
        layer = {
            name.removeprefix("layers."): p[index]
            for name, p in weights.items()
            if name.startswith("layers.")
        }
        h = _attention_block(config, layer, index, _norm(config, layer, "input_norm", x), length)
        x = x + _norm(config, layer, "attention_out_norm", h)
        h = _mlp_block(config, layer, _norm(config, layer, "post_norm", x))
        x = x + _norm(config, layer, "mlp_out_norm", h)
    x = _norm(config, weights, "final_norm", x)
    head = weights["embed.weight" if config.tie_word_embeddings else "lm_head.weight"]
    logits = jnp.einsum("ne,ve->nv", x, head, precision="highest")
    cap = config.final_softcap
    return cap * jnp.tanh(logits / cap) if cap else logits


def _attention_block(
    config: ModelConfig,
    layer: Mapping[str, jax.Array],
    index: int,
    h: jax.Array,
    length: int | None,
) -> jax.Array:
    n = h.shape[0]
    q, k, v = (_linear(layer, name, h) for name in "qkv")
    if config.qk_norm == "full":
        q, k = _rms(config, layer, "q_norm", q), _rms(config, layer, "k_norm", k)
    q, k = q.reshape(n, config.num_heads, -1), k.reshape(n, config.num_kv_heads, -1)
    if config.qk_norm == "head":
        q, k = _rms(config, layer, "q_norm", q), _rms(config, layer, "k_norm", k)
    mixed = attention(
        _rope(config, index, q, length),
        _rope(config, index, k, length),
        v.reshape(n, config.num_kv_heads, -1),
        window=config.layer_windows[index] if config.layer_windows else 0,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
    )
    return _linear(layer, "o", mixed.reshape(n, -1))


def _mlp_block(config: ModelConfig, layer: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    if config.num_experts:
        return _experts_block(config, layer, h)
    up = _linear(layer, "up", h)
    if not config.gated_mlp:
        return _linear(layer, "down", _activate(config, up))
    return _linear(layer, "down", _activate(config, _linear(layer, "gate", h)) * up)


def _experts_block(config: ModelConfig, layer: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """Every expert of every token, and the sum of those of the largest probabilities."""
    odds = jnp.exp(_linear(layer, "router", h))
    weights = odds / odds.sum(axis=-1, keepdims=True)
    rank = jnp.argsort(jnp.argsort(-weights, axis=-1), axis=-1)
    weights = jnp.where(rank < config.num_experts_per_token, weights, 0)
    if config.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    gate, up = (
        jnp.einsum("ni,xoi->xno", h, layer[f"experts.{name}.weight"], precision="highest")
        for name in ("gate", "up")
    )
    hidden, down = _activate(config, gate) * up, layer["experts.down.weight"]
    return jnp.einsum("xni,xoi,nx->no", hidden, down, weights, precision="highest")


def _activate(config: ModelConfig, x: jax.Array) -> jax.Array:
    if config.activation == "silu":
        return x / (1 + jnp.exp(-x))
    if config.activation == "gelu":
        return x * (1 + jax.lax.erf(x / np.sqrt(2).astype(np.float32))) / 2
    inner = np.sqrt(2 / np.pi).astype(np.float32) * (x + jnp.float32(0.044715) * x**3)
    return x * (1 + jnp.tanh(inner)) / 2


def _linear(layer: Mapping[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    y = jnp.einsum("ni,oi->no", x, layer[f"{name}.weight"], precision="highest")
    return y + layer[f"{name}.bias"] if f"{name}.bias" in layer else y


def _norm(
    config: ModelConfig, leaves: Mapping[str, jax.Array], name: str, x: jax.Array
) -> jax.Array:
    """The norm ``name``, if there is one."""
    if f"{name}.weight" not in leaves:
        return x
    if not config.layer_norm:
        return _rms(config, leaves, name, x)
    spread = jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + jnp.float32(config.rms_norm_eps))
    centred = (x - jnp.mean(x, axis=-1, keepdims=True)) / spread
    return centred * leaves[f"{name}.weight"] + leaves[f"{name}.bias"]


def _rms(
    config: ModelConfig, leaves: Mapping[str, jax.Array], name: str, x: jax.Array
) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x / jnp.sqrt(mean_square + jnp.float32(config.rms_norm_eps)) * leaves[f"{name}.weight"]


def _rope(config: ModelConfig, index: int, x: jax.Array, length: int | None) -> jax.Array:
    """Each pair (i, i + d/2) as a complex number, turned by position * frequency."""
    kind = config.ropes[index]
    if kind == "none":
        return x
    frequencies, factor = layer_frequencies(config, kind, length or config.longest)
    half = len(frequencies)
    angle = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None] * jnp.asarray(frequencies)
    pairs = jax.lax.complex(x[..., :half], x[..., half : 2 * half])
    cos, sin = (part(angle) * jnp.float32(factor) for part in (jnp.cos, jnp.sin))
    turned = pairs * jax.lax.complex(cos, sin)[:, None, :]
    return jnp.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)
