"""Perplexity of the windows that `quality.py --windows` wrote, with Hugging Face transformers.

PYTHON_WITH_TRANSFORMERS benchmarks/peers/transformers_perplexity.py FOLDER WINDOWS.json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="as make_hf_folder.py writes it")
    parser.add_argument("windows", type=Path)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=getattr(torch, args.dtype), local_files_only=True
    ).eval()
    total, count = 0.0, 0
    for window in json.loads(args.windows.read_text()):
        ids = torch.tensor([window])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += len(window) - 1
    print(f"{args.dtype}: perplexity {math.exp(total / count):.4f} of {count} tokens")


if __name__ == "__main__":
    main()
