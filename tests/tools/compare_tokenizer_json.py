"""A real tokenizer.json against the same tokenizer from GGUF, on awkward strings.

    python tests/tools/compare_tokenizer_json.py tokenizer.json --pre llama-bpe
    python tests/tools/compare_tokenizer_json.py tokenizer.json --gguf MODEL.gguf

With `--pre` the vocabulary is written as GGUF metadata here, as llama.cpp's converter writes
it; with `--gguf` the tokenizer is the one in that file. Run by hand: the real files are too
large to keep. Exits with 1 if ids differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import compare_llama_cpp
import tokenizers

from oxidize_jax.text.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer_json", type=Path)
    parser.add_argument("--pre", help="tokenizer.ggml.pre")
    parser.add_argument("--gguf", type=Path)
    args = parser.parse_args()
    text = args.tokenizer_json.read_text(encoding="utf-8")
    theirs = tokenizers.Tokenizer.from_str(text)
    ours = Tokenizer.from_gguf(args.gguf or metadata(json.loads(text), args.pre))
    added = list(theirs.get_added_tokens_decoder().values())
    marks = [token.content for token in [*added[:3], *added[-3:]]]
    texts = [*compare_llama_cpp.TEXTS, *marks, *(f"x {mark} G\n{mark}y" for mark in marks)]
    texts.append(compare_llama_cpp.__doc__ or "")
    wrong = 0
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False).ids
        got = ours.encode(text, add_special_tokens=False)
        if got != expected:
            wrong += 1
            print(f"{text!r}: tokenizer.json {expected}, GGUF {got}")
    print(f"{len(texts) - wrong} of {len(texts)} texts: same ids")
    sys.exit(bool(wrong))


def metadata(content: dict[str, Any], pre: str) -> dict[str, Any]:
    """A byte-level tokenizer.json as GGUF metadata."""
    kinds = {token["id"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    names = {i: token for token, i in content["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in content["added_tokens"]}
    size = max(names) + 1
    merges = content["model"]["merges"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [names.get(i, f"[PAD{i}]") for i in range(size)],
        "token_type": [kinds.get(i, 1 if i in names else 5) for i in range(size)],
        "merges": [line if isinstance(line, str) else " ".join(line) for line in merges],
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


if __name__ == "__main__":
    main()
