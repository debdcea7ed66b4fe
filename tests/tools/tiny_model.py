"""A tiny Llama with a tokenizer, as a Hugging Face folder: real files, no real weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from write_checkpoints import random_params, write_hf_folder

from oxidize_jax.model.config import ModelConfig

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

SIZES = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "max_logprobs": 3,
    "progress": False,
    "warm_up": False,  # tests of it are in test_warmup.py: it takes a second for each size
}
"""Of an LLM, for all tests of it and of its server: they compile once."""


def write_tiny_model(folder: Path, *, seed: int = 0, max_position_embeddings: int = 128) -> Path:
    """Write it: 256 byte tokens and three special ones; ``<|im_end|>`` ends a generation."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    config = ModelConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_hf_folder(folder, config, random_params(config, seed))
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
