"""The decoder's parameters and layers: a pre-norm Llama-family transformer."""

from __future__ import annotations

from oxidize_jax.model.config import ModelConfig


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of ``config``, as one flat tree.

    Matrices are ``[out, in]``, as Hugging Face stores them, so that loading is a stack
    and not a transpose. Parameters of the layers carry a leading axis ``L``: the
    forward pass scans over it. ``lm_head.weight`` exists only for an untied head.
    """
    v, e, f, n = (
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
    )
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (v, e), "final_norm.weight": (e,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (v, e)
    matrices = {
        "q": (q, e),
        "k": (kv, e),
        "v": (kv, e),
        "o": (e, q),
        "gate": (f, e),
        "up": (f, e),
        "down": (e, f),
    }
    attention = ("q", "k", "v", "o")
    for name, (out, inner) in matrices.items():
        shapes[f"layers.{name}.weight"] = (n, out, inner)
        if config.attention_bias if name in attention else config.mlp_bias:
            shapes[f"layers.{name}.bias"] = (n, out)
    shapes["layers.input_norm.weight"] = (n, e)
    shapes["layers.post_norm.weight"] = (n, e)
    return shapes
