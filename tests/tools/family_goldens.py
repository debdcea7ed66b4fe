"""The recorded results of the tiny models of every family, and their checkpoints made anew."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from family_models import draw
from safetensors.numpy import save_file

FOLDER = Path(__file__).parents[1] / "goldens" / "families"


@dataclasses.dataclass(frozen=True)
class Golden:
    """What ``make_family_goldens.py`` recorded of one model."""

    name: str
    fields: dict[str, Any]
    """config.json"""
    tensors: dict[str, np.ndarray]
    """f32, by the names that Hugging Face stores them under"""
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    logits: np.ndarray
    """f32[prompt + outputs - 1, V]"""

    @property
    def token_ids(self) -> np.ndarray:
        """i32: the tokens that ``logits`` belong to."""
        return np.concatenate([self.prompt_ids, self.output_ids[:-1]])


def read_golden(name: str) -> Golden:
    """The record of the model ``name``."""
    with np.load(FOLDER / f"{name}.npz") as record:
        fields, shapes = (json.loads(str(record[key])) for key in ("config", "shapes"))
        tensors = draw(int(record["seed"]), fields, shapes)
        arrays = (record[key] for key in ("prompt_ids", "output_ids", "logits"))
        return Golden(name, fields, tensors, *arrays)


def write_golden_folder(folder: Path, golden: Golden, **changes: Any) -> Path:
    """The model as a Hugging Face folder; ``changes`` are laid over its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.fields | changes))
    save_file(golden.tensors, folder / "model.safetensors")
    return folder
