"""Greedy tokens and token ids of llama.cpp, recorded; and ours held against them.

    python tests/tools/compare_llama_cpp.py record MODEL.gguf GOLDEN.json   # needs llama-cpp-python
    python tests/tools/compare_llama_cpp.py compare MODEL GOLDEN.json       # needs oxidize_jax

Run by hand; the tests read the golden file and need no llama.cpp. llama.cpp multiplies with
activations quantised to eight bits, so its logits differ from float32 ones by rounding and a
near-tie may fall the other way. `compare` shows of each prompt the first place where the
continuations part, with the margin that each side gives its own token over the other's: the
difference of their logits. Where llama.cpp's AMX kernels end in an illegal instruction (some
virtual machines), set LLAMA_EXTRA_BUFFERS=0: weights then stay as they are in the file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

NEW_TOKENS = 20
TOP = 5
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, there was a",
    "Question: What is 12 + 30?\nAnswer:",
    "The first president of the United States was",
    "Die Hauptstadt von Deutschland ist",
    "日本の首都は",
    "The planets of the solar system are:\n1. Mercury\n2. Venus\n3.",
    "Dear Sir or Madam,\n\nI am writing to",
]
TEXTS = [
    "",
    " ",
    "  ",
    "   a    b",
    "\n",
    "\n\n\n\n",
    "\t \t\n \r\n x",
    "line\r\nline\r\n\r\nend",
    "G",
    " G",
    "  G ",
    "Hello, world! The quick brown fox.",
    "1, 1, 2, 3, 5, 8, 13 and 1234567 or ½ ² \uff13 Ⅷ",
    "I'm, it's, THEY'RE, we'Ll 'tis 'S don't",
    "café cafe\u0301 naïve Ångström",
    "日本の首都は東京です",
    "القاهرة هي عاصمة مصر",
    "Москва — столица России",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽",
    "𝔘𐍈ꙮ\u1234\U0002f800",
    "\x01\x07\x1b[0m \x7f \u200b\u00a0\u3000end",
    "def f(x):\n    return x**2  # square\n\n\nprint(f(3))\n",
    "a" * 40 + " " * 40 + "\n" * 12 + "9" * 10,
    "=" * 70 + "-" * 33 + "." * 17,
    "price: $3.50+20% <= €7 ~ £2 ^ `x` |y|",
    "▁ ▁x <0x0A> <0x41>",
    "<h1>Title</h1><table><tr><td>x</td></tr></table>",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<bos>G<bos> G<eos>  G",
    "<unused7> <unused99>x[multimodal]<mask><pad><unk>",
    "<end_of_tur",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record")
    record.add_argument("model", type=Path)
    record.add_argument("golden", type=Path)
    record.add_argument("--threads", type=int, default=1)
    record.set_defaults(run=lambda args: run_record(args.model, args.golden, args.threads))
    compare = commands.add_parser("compare")
    compare.add_argument("model")
    compare.add_argument("golden", type=Path)
    compare.set_defaults(run=lambda args: run_compare(args.model, args.golden))
    args = parser.parse_args()
    args.run(args)


def run_record(model: Path, golden: Path, threads: int) -> None:
    """Write what llama.cpp says of ``PROMPTS`` and ``TEXTS``."""
    import llama_cpp

    llama = LlamaCpp(llama_cpp, model, threads)
    cases = []
    for prompt in PROMPTS:
        ids = llama.encode(prompt)
        cases.append({"prompt": prompt, "prompt_ids": ids, **llama.greedy(ids)})
        print(repr(prompt), repr(llama.decode(cases[-1]["output_ids"])), flush=True)
    content = {
        "reference": f"llama-cpp-python {llama_cpp.__version__}",
        "model": model.name,
        "cases": cases,
        "encoded": [[text, llama.encode(text)] for text in TEXTS],
    }
    golden.write_text(json.dumps(content, indent=0) + "\n", encoding="ascii")


class LlamaCpp:
    """A model in llama.cpp, through the C interface."""

    def __init__(self, library: Any, path: Path, threads: int) -> None:
        self._lib = library
        library.llama_backend_init()
        how = library.llama_model_default_params()
        how.use_extra_bufts = os.environ.get("LLAMA_EXTRA_BUFFERS", "1") != "0"
        self._model = library.llama_model_load_from_file(str(path).encode(), how)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, params)
        self._vocab = library.llama_model_get_vocab(self._model)
        self._size = library.llama_vocab_n_tokens(self._vocab)

    def encode(self, text: str) -> list[int]:
        """Ids with what the tokenizer adds; special tokens in the text are recognised."""
        raw = text.encode()
        room = (library := self._lib).llama_token * (len(raw) + 8)
        ids = room()
        count = library.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), True, True)
        return list(ids[:count])

    def decode(self, ids: list[int]) -> str:
        buffer = ctypes.create_string_buffer(512)
        parts = []
        for token in ids:
            size = self._lib.llama_token_to_piece(self._vocab, token, buffer, 512, 0, True)
            parts.append(buffer.raw[:size])
        return b"".join(parts).decode(errors="replace")

    def greedy(self, prompt: list[int]) -> dict[str, Any]:
        """``NEW_TOKENS`` likeliest tokens, each with the ``TOP`` and their log probabilities."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        ids, top, fed = list[int](), [], prompt
        for _ in range(NEW_TOKENS):
            logits = self._logits(fed)
            best = np.argsort(-logits, kind="stable")[:TOP]
            logprobs = logits - np.logaddexp.reduce(logits)
            top.append([[int(i), round(float(logprobs[i]), 4)] for i in best])
            ids.append(int(best[0]))
            fed = ids[-1:]
        return {"output_ids": ids, "top": top}

    def _logits(self, ids: list[int]) -> np.ndarray:
        tokens = (self._lib.llama_token * len(ids))(*ids)
        if self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama.cpp cannot decode")
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(self._size,)).astype(np.float64)


def run_compare(model: str, golden: Path) -> None:
    """Print where ours and llama.cpp's part; exits with 1 if token ids of a text differ."""
    llm, content = load(model), json.loads(golden.read_text())
    wrong = [
        (text, ids, ours)
        for text, ids in content["encoded"]
        if (ours := llm.tokenizer.encode(text)) != ids
    ]
    for text, ids, ours in wrong:
        print(f"{text!r}: llama.cpp {ids}, ours {ours}")
    print(f"{len(content['encoded']) - len(wrong)} of {len(content['encoded'])} texts: same ids")
    same = 0
    for case, parted in zip(content["cases"], first_partings(llm, content["cases"]), strict=True):
        if parted is None:
            same += 1
            continue
        print(f"{case['prompt']!r}: at token {parted['place']} of {NEW_TOKENS}")
        for who in ("ours", "theirs"):
            token = parted[who]
            print(f"  {who}: {token} {llm.tokenizer.decode([token])!r}, before the other by")
            print(f"    {parted[f'{who}_margin']:.3f} (logits)")
    print(f"{same} of {len(content['cases'])} continuations: the same {NEW_TOKENS} tokens")
    agree, places, difference = along_theirs(llm, content["cases"])
    print(
        f"along llama.cpp's tokens: the same likeliest token in {agree} of {places} places; its "
        f"log probability differs by {difference:.3f} on average"
    )
    sys.exit(bool(wrong))


def load(model: str) -> Any:
    from oxidize_jax import LLM

    return LLM(
        model,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_logprobs=TOP,
        warm_up=False,
        progress=False,
    )


def first_partings(llm: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Of each case the place where greedy tokens differ first, with both sides' margins."""
    from oxidize_jax import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=TOP, ignore_eos=True)
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in cases]
    outputs = llm.generate(prompts, params)
    return [_parting(output.outputs[0], case) for output, case in zip(outputs, cases, strict=True)]


def _parting(completion: Any, case: dict[str, Any]) -> dict[str, Any] | None:
    for place, (ours, theirs) in enumerate(
        zip(completion.token_ids, case["output_ids"], strict=True)
    ):
        if ours != theirs:
            mine = {token: entry.logprob for token, entry in completion.logprobs[place].items()}
            other = dict(case["top"][place])
            return {
                "place": place,
                "ours": ours,
                "theirs": theirs,
                "ours_margin": mine[ours] - mine.get(theirs, -np.inf),
                "theirs_margin": other[theirs] - other.get(ours, -np.inf),
            }
    return None


def along_theirs(llm: Any, cases: list[dict[str, Any]]) -> tuple[int, int, float]:
    """Places of llama.cpp's continuations where ours would go on alike; all; mean difference."""
    prompts = [{"prompt_token_ids": case["prompt_ids"] + case["output_ids"]} for case in cases]
    agree, differences = 0, []
    for output, case in zip(llm.score(prompts), cases, strict=True):
        start = len(case["prompt_ids"])
        agree += sum(rank == 1 for rank in output.token_ranks[start:])
        theirs = [top[0][1] for top in case["top"]]
        differences += [
            abs(a - b) for a, b in zip(output.token_logprobs[start:], theirs, strict=True)
        ]
    return agree, len(differences), float(np.mean(differences))


if __name__ == "__main__":
    main()
