"""Names of the Llama family's tensors: ours, Hugging Face's and GGUF's, in one table.

Ours are those of :func:`oxidize_jax.model.transformer.parameter_shapes`: flat, with all
layers of a kind stacked under one name. The two file formats store a tensor per layer.
"""

from __future__ import annotations

from typing import Literal

from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.transformer import parameter_shapes

Naming = Literal["hf", "gguf"]

# Ours -> (Hugging Face, GGUF); "{}" stands for the layer. The last part of a name,
# ".weight" or ".bias", is the same in all three.
_STEMS: dict[str, tuple[str, str]] = {
    "embed": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "lm_head": ("lm_head", "output"),
    "layers.input_norm": ("model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    "layers.post_norm": ("model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    "layers.q": ("model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    "layers.k": ("model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    "layers.v": ("model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    "layers.o": ("model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    "layers.gate": ("model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    "layers.up": ("model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    "layers.down": ("model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
}


def stored_names(config: ModelConfig, naming: Naming) -> dict[str, tuple[str, ...]]:
    """For every parameter of ``config``, the tensors that a file stores it in.

    A parameter of the layers has ``config.num_layers`` of them, in layer order; any other
    has one. No name occurs twice.
    """
    return {
        parameter: _names_of(parameter, config.num_layers, naming)
        for parameter in parameter_shapes(config)
    }


def _names_of(parameter: str, num_layers: int, naming: Naming) -> tuple[str, ...]:
    stem, suffix = parameter.rsplit(".", 1)
    pattern = f"{_STEMS[stem][0 if naming == 'hf' else 1]}.{suffix}"
    if "{}" not in pattern:
        return (pattern,)
    return tuple(pattern.format(layer) for layer in range(num_layers))
