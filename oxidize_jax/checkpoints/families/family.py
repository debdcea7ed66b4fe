"""What a family is: how its files are read, as data over the layers that all families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from oxidize_jax.checkpoints.families.gguf_fields import GGUFFields
from oxidize_jax.checkpoints.families.hf_fields import HFFields
from oxidize_jax.model.config import ModelConfig

HF_NAMES: dict[str, str] = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "layers.input_norm": "model.layers.{}.input_layernorm",
    "layers.post_norm": "model.layers.{}.post_attention_layernorm",
    "layers.q": "model.layers.{}.self_attn.q_proj",
    "layers.k": "model.layers.{}.self_attn.k_proj",
    "layers.v": "model.layers.{}.self_attn.v_proj",
    "layers.o": "model.layers.{}.self_attn.o_proj",
    "layers.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.gate": "model.layers.{}.mlp.gate_proj",
    "layers.up": "model.layers.{}.mlp.up_proj",
    "layers.down": "model.layers.{}.mlp.down_proj",
}
"""Names in safetensors, as most families have them; "{}" stands for the layer, a second one
for the expert."""

GGUF_NAMES: dict[str, str] = {
    "embed": "token_embd",
    "position_embed": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "layers.input_norm": "blk.{}.attn_norm",
    "layers.post_norm": "blk.{}.ffn_norm",
    "layers.q": "blk.{}.attn_q",
    "layers.k": "blk.{}.attn_k",
    "layers.v": "blk.{}.attn_v",
    "layers.o": "blk.{}.attn_output",
    "layers.q_norm": "blk.{}.attn_q_norm",
    "layers.k_norm": "blk.{}.attn_k_norm",
    "layers.attention_out_norm": "blk.{}.post_attention_norm",
    "layers.gate": "blk.{}.ffn_gate",
    "layers.up": "blk.{}.ffn_up",
    "layers.down": "blk.{}.ffn_down",
    "layers.mlp_out_norm": "blk.{}.post_ffw_norm",
    "layers.router": "blk.{}.ffn_gate_inp",
    "layers.experts.gate": "blk.{}.ffn_gate_exps",
    "layers.experts.up": "blk.{}.ffn_up_exps",
    "layers.experts.down": "blk.{}.ffn_down_exps",
}
"""Names in a GGUF; llama.cpp gives a thing one name in all architectures."""


@dataclasses.dataclass(frozen=True)
class HFFormat:
    """How Hugging Face writes the models of a family.

    In ``names``, ours to theirs, parameters that have the same name are one tensor, fused in the
    order of this table. The last part of a name, ``.weight`` or ``.bias``, is the same in both.
    """

    model_class: str
    """The one entry of ``architectures``"""
    config: Callable[[HFFields], ModelConfig]
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: HF_NAMES)
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(
        default_factory=lambda: {"hidden_act": ("silu",)}
    )
    """Fields that change what is computed, and the values that are run; others are refused."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of fields that are not in config.json: those of the class in transformers, where they are
    not Llama's."""
    prefix: str = ""
    """Beginning of the names that a file may leave out"""
    transposed: frozenset[str] = frozenset()
    """Parameters that are stored ``[in, out]``"""
    norm_offset: float = 0.0
    """What norms are multiplied by, less what is stored"""


@dataclasses.dataclass(frozen=True)
class GGUFFormat:
    """How llama.cpp's converter writes them; ``names`` as in :class:`HFFormat`."""

    architecture: str
    """``general.architecture``"""
    config: Callable[[GGUFFields], ModelConfig]
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: GGUF_NAMES)
    interleaved: bool = False
    """Whether rows of queries and keys are put in another order; see
    :func:`~oxidize_jax.checkpoints.gguf.rotary_row_map`."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, one ``model_type`` of Hugging Face's."""

    name: str
    """``model_type``, and ``architecture`` of its configurations"""
    models: str
    """Which ones these are, as people call them"""
    hf: HFFormat
    gguf: GGUFFormat | None
    """None where llama.cpp has no architecture of its own for it"""

    @property
    def summary(self) -> str:
        """One line for a list."""
        gguf = f", in GGUF {self.gguf.architecture!r}" if self.gguf else ""
        return f"{self.models}: {self.hf.model_class}{gguf}"
