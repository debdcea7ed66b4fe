"""Make the tiny Llama checkpoints and the logits that the model tests compare with.

Run once, where torch and transformers are installed (neither is needed by the tests)::

    python tests/tools/make_llama_goldens.py [folder, default tests/goldens/llama_tiny]

For each configuration below a folder is written with ``config.json`` and
``model.safetensors`` (float32, as Hugging Face saves them) and ``golden.npz``:

- ``prompt_ids`` i32[13]: a random prompt,
- ``output_ids`` i32[8]: what greedy decoding adds to it,
- ``logits`` f32[20, V]: logits of the prompt and the first 7 outputs in one pass, so that
  row ``12 + i`` chose ``output_ids[i]``,
- ``smallest_gap`` f32[]: least distance between the best and the second logit of these 8 rows.

Weights are drawn wide (norms round 1, biases not zero, embeddings small enough that a tied
head does not just repeat its input), so that a head order, a bias or a norm that is wrong
moves the logits far beyond rounding.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

PROMPT_LENGTH = 13
NUM_OUTPUTS = 8
# Chosen so that every greedy choice is clear by a margin of 0.1 or more.
FIRST_SEED = 30

CONFIGS: dict[str, dict] = {
    # Grouped heads whose size is not hidden_size / num_attention_heads (24 / 4 = 6).
    "gqa_wide_heads": {
        "vocab_size": 128,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
    # A kv head for each query head, biases everywhere, a vocabulary that no tile divides.
    "mha_biased": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    # Three query heads a kv head, a tied head, slow rotations.
    "gqa_tied": {
        "vocab_size": 144,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}


def main(folder: pathlib.Path) -> None:
    for seed, (name, options) in enumerate(CONFIGS.items(), start=FIRST_SEED):
        make_golden(folder / name, options, seed)


def make_golden(folder: pathlib.Path, options: dict, seed: int) -> None:
    """Draw one model, save it, and record what Hugging Face computes with it."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**options, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        draw_weights(model)
        tokens = torch.randint(0, config.vocab_size, (1, PROMPT_LENGTH))
        prompt = tokens[0].tolist()
        for _ in range(NUM_OUTPUTS):
            following = model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        logits = model(tokens[:, :-1], use_cache=False).logits[0].numpy()
    best = np.sort(logits[PROMPT_LENGTH - 1 :], axis=-1)
    gap = np.float32((best[:, -1] - best[:, -2]).min())
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    np.savez(
        folder / "golden.npz",
        prompt_ids=np.asarray(prompt, np.int32),
        output_ids=tokens[0, PROMPT_LENGTH:].numpy().astype(np.int32),
        logits=logits.astype(np.float32),
        smallest_gap=gap,
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(json.dumps({"folder": folder.name, "bytes": size, "smallest_gap": float(gap)}))


def draw_weights(model: transformers.LlamaForCausalLM) -> None:
    """Fill every parameter: matrices with unit gain, norms round 1, biases round 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
        elif name.endswith(("bias", "embed_tokens.weight")):
            parameter.copy_(0.3 * torch.randn_like(parameter))
        else:
            parameter.copy_(1.2 * torch.randn_like(parameter) / parameter.shape[1] ** 0.5)


if __name__ == "__main__":
    default = pathlib.Path(__file__).parents[1] / "goldens" / "llama_tiny"
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default)
