"""Perplexity, and agreement with float32, of the types that a model can be run in.

    python benchmarks/quality.py --model gemma-3-270m --json quality.json

* perplexity: of a public-domain text (`data/alice.txt`, or `--text`) in windows of 1,024
  tokens, each token given the true ones before it;
* same token: share of those places where the likeliest token is that of float32;
* same continuation: tokens that greedy continuations have in common with those of float32
  before they part, on average over prompts from the text; of each prompt in the JSON;
* alike: share of all tokens of the continuations that are float32's in their place.

Exits with 1 if the perplexity of int8 is more than 1 % above that of float32.
`--windows FILE` writes the windows, for `peers/transformers_perplexity.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from oxidize_jax import LLM
from oxidize_jax.bench import environment, quality
from oxidize_jax.options import DTYPES

REFERENCE = "float32"
TEXT = Path(__file__).parent / "data" / "alice.txt"


def main() -> int:
    args = arguments()
    dtypes = list(dict.fromkeys([REFERENCE, *args.dtypes]))
    rows: list[dict[str, Any]] = []
    reference: tuple[quality.Scores, list[tuple[int, ...]]] | None = None
    for dtype in dtypes:
        start = time.perf_counter()
        scores, texts = measure(args, dtype)
        reference = reference or (scores, texts)
        rows.append(row(dtype, scores, texts, *reference))
        print(line(rows[-1], rows[0], args.new_tokens), flush=True)
        print(f"{dtype}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if args.json:
        about = {"environment": environment.describe(), "model": args.model, "rows": rows}
        sizes = {"window": args.window, "windows": args.num_windows, "prompts": args.prompts}
        text = json.dumps(about | sizes | {"new_tokens": args.new_tokens}, indent=2)
        args.json.write_text(text + "\n")
    worse = {one["dtype"]: one["perplexity"] / rows[0]["perplexity"] - 1 for one in rows}
    if worse.get("int8", 0.0) > args.limit / 100:
        print(f"int8 is {100 * worse['int8']:.2f} % above {REFERENCE}; the limit is {args.limit} %")
        return 1
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtypes", nargs="*", default=[name for name in DTYPES if name != "auto"])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--num-windows", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts to continue")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of each")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--limit", type=float, default=1.0, help="per cent, for int8 (default: 1)")
    parser.add_argument("--windows", type=Path, metavar="FILE", help="write the token ids there")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(args: argparse.Namespace, dtype: str) -> tuple[quality.Scores, list[tuple[int, ...]]]:
    """Scores of the windows and continuations of the prompts."""
    llm = LLM(
        args.model,
        dtype=dtype,
        max_num_seqs=args.prompts,
        max_model_len=args.prompt_len + args.new_tokens,
        max_logprobs=0,
        progress=False,
    )
    ids = llm.tokenizer.encode(args.text.read_text(encoding="utf-8"))
    windows = quality.cut_windows(ids, args.window, args.num_windows)
    if args.windows:
        args.windows.write_text(json.dumps(windows.tolist(), separators=(",", ":")))
    scores = quality.score(llm.engine.model, llm.engine.params, windows)
    starts = np.linspace(0, windows.size - args.prompt_len, args.prompts).astype(int)
    prompts = [windows.reshape(-1)[s : s + args.prompt_len].tolist() for s in starts]
    return scores, quality.greedy(llm, prompts, args.new_tokens)


def row(
    dtype: str,
    scores: quality.Scores,
    texts: list[tuple[int, ...]],
    reference: quality.Scores,
    reference_texts: list[tuple[int, ...]],
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "tokens": scores.num_tokens,
        "perplexity": scores.perplexity,
        "same_token": quality.agreement(scores, reference),
        "same_continuation": quality.mean_common_prefix(texts, reference_texts),
        "first_differences": [
            quality.common_prefix(a, b) for a, b in zip(texts, reference_texts, strict=True)
        ],
        "alike": float(np.mean(np.asarray(texts) == np.asarray(reference_texts))),
    }


def line(one: dict[str, Any], first: dict[str, Any], new_tokens: int) -> str:
    """A row of a Markdown table; the first brings the head along."""
    text = (
        f"| {one['dtype']} | {one['perplexity']:.4f} "
        f"| {100 * (one['perplexity'] / first['perplexity'] - 1):+.3f} % "
        f"| {100 * one['same_token']:.2f} % | {one['same_continuation']:.1f} of {new_tokens} "
        f"| {100 * one['alike']:.1f} % |"
    )
    if one is not first:
        return text
    head = f"| dtype | perplexity ({one['tokens']:,} tokens) | against {one['dtype']} "
    return f"{head}| same token | same continuation | alike |\n|---|---|---|---|---|---|\n{text}"


if __name__ == "__main__":
    sys.exit(main())
