"""``LLM.save``: the model as it is in memory, in a folder that starts again quickly."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax
import numpy as np

from oxidize_jax.checkpoints.save import save_model
from oxidize_jax.checkpoints.saved import numpy_dtype
from oxidize_jax.model.functional import Decoder
from oxidize_jax.model.transformer import parameter_shapes

if TYPE_CHECKING:
    from oxidize_jax.engine.engine import Engine
    from oxidize_jax.model.config import ModelConfig


class Saves:
    """The saving method of :class:`~oxidize_jax.llm.LLM`."""

    if TYPE_CHECKING:
        engine: Engine
        model_config: ModelConfig
        _tokenizer_path: Path

    def save(self, folder: str | Path) -> Path:
        """Save weights, configuration, tokenizer and chat template to ``folder``; its path.

        Weights are saved as they are in memory (float32, bfloat16, or int8 with its scales), so
        ``LLM(folder)`` neither converts nor quantises anything, and gives the same tokens. The
        folder is for this package; it is not a Hugging Face checkpoint, though Orbax reads its
        ``params``. Options of the engine are not saved. Needs ``oxidize_jax[orbax]``.

        Other threads may use the LLM meanwhile.

        Raises:
          ValueError: the folder is not empty or cannot be written, or the files that the
            tokenizer came from are gone.
          ImportError: Orbax is not installed.
        """
        config = dataclasses.replace(self.model_config, longest_sequence=None)
        leaves = self.engine.params
        names = parameter_shapes(config, quantized=cast(Decoder, self.engine.model).quantized)
        params = {name: _as_loaded(leaves[name]) for name in names}
        tokenizer = self._tokenizer_path
        if not (tokenizer.is_file() or (tokenizer / "tokenizer.json").is_file()):
            raise ValueError(f"{tokenizer}: the files that the tokenizer came from are gone.")
        return save_model(folder, config, params, tokenizer)


def _as_loaded(leaf: jax.Array) -> np.ndarray:
    """On a CPU, where nothing is copied here, the bits of bfloat16 are held as uint16."""
    host = np.asarray(leaf)
    return host.view(numpy_dtype("bfloat16")) if host.dtype == np.uint16 else host
