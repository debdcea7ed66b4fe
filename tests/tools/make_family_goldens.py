"""Record what transformers computes with the tiny models of ``family_models.py``.

Run once, where torch and transformers are installed (neither is needed by the tests)::

    python tests/tools/make_family_goldens.py [names of models, default all]

For each a file ``tests/goldens/families/<name>.npz`` is written:

- ``seed`` i32[], ``config`` (JSON), ``shapes`` (JSON: tensor name -> shape): what the weights
  are drawn from,
- ``prompt_ids`` i32[21], ``output_ids`` i32[32]: greedy decoding, every token computed anew
  from the whole sequence,
- ``logits`` f32[52, V]: logits of all but the last output in one pass,
- ``smallest_gap`` f32[]: least distance between the best and the second logit of the outputs.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import transformers
from family_models import MODELS, NUM_OUTPUTS, PROMPT_LENGTH, draw, prompt
from safetensors.numpy import load_file

CLEAR = 0.02
"""Every greedy choice is clear by that much: far more than float32 loses, see the tests."""


def main(names: list[str]) -> None:
    folder = pathlib.Path(__file__).parents[1] / "goldens" / "families"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        record = next(filter(None, (make_golden(MODELS[name], seed) for seed in range(500))))
        np.savez_compressed(folder / f"{name}.npz", **record)
        size = (folder / f"{name}.npz").stat().st_size
        print(name, f"seed {record['seed']}, gap {record['smallest_gap']:.4f}, {size} bytes")


def make_golden(fields: dict[str, Any], seed: int) -> dict[str, Any] | None:
    """The record of one model, or None where a choice is not clear."""
    options = {key: value for key, value in fields.items() if key != "architectures"}
    # from_dict changes what it is given.
    options = json.loads(json.dumps(options))
    config_class = transformers.CONFIG_MAPPING[options.pop("model_type")]
    config = config_class(**options, attn_implementation="eager")
    config._experts_implementation = "eager"  # others ask for sizes that are multiples of 16 bytes
    model = getattr(transformers, fields["architectures"][0])(config).float().eval()
    shapes = stored_shapes(model)
    weights = draw(seed, fields, shapes)
    fused = {n: torch.from_numpy(w) for n, w in fuse_experts(weights).items()}
    problem = model.load_state_dict(fused, strict=False)
    assert not problem.unexpected_keys, problem
    assert set(problem.missing_keys) <= {"lm_head.weight"}, problem
    model.tie_weights()
    tokens = torch.from_numpy(prompt(seed, fields, PROMPT_LENGTH))[None].long()
    with torch.no_grad():
        for _ in range(NUM_OUTPUTS):
            logits = model(tokens, use_cache=False).logits[0]
            best = logits[-1].topk(2).values
            if best[0] - best[1] < CLEAR:
                return None
            tokens = torch.cat([tokens, logits[-1].argmax()[None, None]], dim=1)
        logits = model(tokens[:, :-1], use_cache=False).logits[0].numpy()
    top = np.sort(logits[PROMPT_LENGTH - 1 :], axis=-1)
    return {
        "seed": np.int32(seed),
        "config": np.array(json.dumps(fields)),
        "shapes": np.array(json.dumps(shapes)),
        "prompt_ids": tokens[0, :PROMPT_LENGTH].numpy().astype(np.int32),
        "output_ids": tokens[0, PROMPT_LENGTH:].numpy().astype(np.int32),
        "logits": logits.astype(np.float32),
        "smallest_gap": np.float32((top[:, -1] - top[:, -2]).min()),
    }


def stored_shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Tensors that save_pretrained would write: a tied head is not among them.

    Of experts it writes each by itself, other than they are in memory.
    """
    tied = model.config.tie_word_embeddings
    if not any(".experts." in name for name in model.state_dict()):
        return {
            name: list(values.shape)
            for name, values in model.state_dict().items()
            if not (tied and name == "lm_head.weight")
        }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(pathlib.Path(folder) / "model.safetensors")
    return {name: list(values.shape) for name, values in saved.items()}


GATE_UP_DOWN = {"mixtral": ("w1", "w3", "w2"), "qwen3": ("gate_proj", "up_proj", "down_proj")}


def fuse_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights by the names of the modules in memory."""
    fused, experts = {}, {}
    for name, values in weights.items():
        before, is_expert, after = name.partition(".experts.")
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if not is_expert:
            fused[name] = values
            continue
        index, kind, _ = after.split(".")
        layer = experts.setdefault(before.replace(".block_sparse_moe", ".mlp"), {})
        layer[int(index), kind] = values
    for before, layer in experts.items():
        count = 1 + max(index for index, _ in layer)
        kinds = next(k for k in GATE_UP_DOWN.values() if (0, k[0]) in layer)
        gate, up, down = (np.stack([layer[i, kind] for i in range(count)]) for kind in kinds)
        fused[f"{before}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"{before}.experts.down_proj"] = down
    return fused


if __name__ == "__main__":
    main(sys.argv[1:])
