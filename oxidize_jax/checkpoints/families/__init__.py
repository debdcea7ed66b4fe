"""The families of models that can be read, each one small description.

To add one see ``docs/adding_a_model.md``.
"""

from __future__ import annotations

from oxidize_jax.checkpoints.families.family import Family, GGUFFormat, HFFormat
from oxidize_jax.checkpoints.families.gemma import GEMMA2, GEMMA3
from oxidize_jax.checkpoints.families.gpt2 import GPT2
from oxidize_jax.checkpoints.families.llama import LLAMA, MISTRAL, MIXTRAL, SMOLLM3
from oxidize_jax.checkpoints.families.olmo import OLMO2
from oxidize_jax.checkpoints.families.phi import PHI3
from oxidize_jax.checkpoints.families.qwen import QWEN2, QWEN3, QWEN3_MOE

_ALL = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    SMOLLM3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    OLMO2,
    PHI3,
    GEMMA2,
    GEMMA3,
    GPT2,
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""By ``model_type``."""

GGUF_FAMILIES: dict[str, Family] = {
    family.gguf.architecture: family for family in _ALL if family.gguf is not None
}
"""By ``general.architecture``."""

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family", "GGUFFormat", "HFFormat"]
