"""The families of models that can be read, each one small description.

To add one see ``docs/adding_a_model.md``.
"""

from __future__ import annotations

from oxidize_jax.checkpoints.families.family import Family, GGUFFormat, HFFormat
from oxidize_jax.checkpoints.families.llama import LLAMA, MISTRAL

_ALL = (LLAMA, MISTRAL)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""By ``model_type``."""

GGUF_FAMILIES: dict[str, Family] = {
    family.gguf.architecture: family for family in _ALL if family.gguf is not None
}
"""By ``general.architecture``."""

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family", "GGUFFormat", "HFFormat"]
