"""Write a model that oxidize_jax can load as a Hugging Face folder, for engines that need one.

    python benchmarks/peers/make_hf_folder.py smollm2-135m-instruct FOLDER

config.json and model.safetensors, in float32: what a quantised GGUF decodes to, so that all
engines run the same weights. There is no tokenizer in it; the runners give token ids. Needs
``pip install safetensors``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from oxidize_jax.checkpoints.load import load_checkpoint
from oxidize_jax.checkpoints.mapping import stored_names
from oxidize_jax.checkpoints.resolve import resolve_model
from oxidize_jax.model.config import ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a built-in name, a .gguf file or a folder")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    make(args.model, args.folder)
    print(args.folder)


def make(model: str, folder: Path) -> None:
    """Write the folder; it is complete once config.json is there."""
    from safetensors.numpy import save_file

    checkpoint = load_checkpoint(resolve_model(model).path, np.float32)
    tensors = {}
    for parameter, names in stored_names(checkpoint.config, "hf").items():
        values = np.asarray(checkpoint.params[parameter])
        layers = values if parameter.startswith("layers.") else values[None]
        tensors |= {n: np.ascontiguousarray(v) for n, v in zip(names, layers, strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = config_json(checkpoint.config)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A LlamaConfig that transformers 4 and 5, and vLLM, read alike."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


if __name__ == "__main__":
    main()
