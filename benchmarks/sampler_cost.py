"""What each sampling option costs: the sampler alone, in one program, plain greedy as 1.

``python benchmarks/sampler_cost.py [--rows 64] [--vocab 49152 152064] [--json FILE]``

Each line is the same compiled program on the same logits with other values. The order of the
lines changes from round to round; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.programs import COMPILER_OPTIONS
from oxidize_jax.sampling.edits import NO_TOKEN, Edits, Sequences
from oxidize_jax.sampling.sampler import SamplingArrays, sample

SIZES = EngineConfig()
PROMPT, HISTORY = 512, 1024

LINES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, rank (logprobs=0)": {"num_logprobs": 0},
    "greedy, 5 logprobs": {"num_logprobs": 5},
    "temperature": {"temperature": 0.8},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top_k 5000 (beyond the sorted)": {"temperature": 0.8, "top_k": 5000},
    "typical_p 0.9": {"temperature": 0.8, "typical_p": 0.9},
    "min_p, top_k, top_p, typical_p": {
        "temperature": 0.8, "min_p": 0.05, "top_k": 50, "top_p": 0.9, "typical_p": 0.9,
    },
    "greedy, min_tokens": {"suppress_ids": 7},
    "greedy, 300 biases, 32 bad words": {"listed": True},
    "greedy, token mask": {"masked": True},
    f"greedy, penalties ({HISTORY} tokens)": {
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    },
    "one row with penalties": {"repetition_penalty": 1.1, "rows": 1},
    "everything": {
        "temperature": 0.8, "min_p": 0.05, "top_k": 50, "top_p": 0.9, "typical_p": 0.9,
        "suppress_ids": 7, "listed": True, "masked": True, "num_logprobs": 5,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    },
}  # fmt: skip
"""What the rows of each line want; all rows, or the first ``rows``."""


def parameters(rows: int, wants: dict[str, Any]) -> SamplingArrays:
    """``rows`` rows that want it; greedy and nothing else otherwise."""
    wants = dict(wants)
    some = np.arange(rows) < wants.pop("rows", rows)

    def field(name: str, default: Any, dtype: Any, *shape: int) -> jax.Array:
        where = some.reshape(-1, *[1] * len(shape))
        values = np.where(where, wants.pop(name, default), default)
        return jnp.asarray(np.broadcast_to(values, (rows, *shape)).astype(dtype))

    edits = Edits(
        sequence=jnp.arange(rows, dtype=jnp.int32),
        prompt_len=jnp.full((rows,), PROMPT, jnp.int32),
        num_tokens=jnp.full((rows,), HISTORY, jnp.int32),
        suppress_ids=field("suppress_ids", NO_TOKEN, np.int32, SIZES.max_stop_token_ids),
        masked=field("masked", False, bool),
        listed=field("listed", False, bool),
        repetition_penalty=field("repetition_penalty", 1, np.float32),
        presence_penalty=field("presence_penalty", 0, np.float32),
        frequency_penalty=field("frequency_penalty", 0, np.float32),
    )
    params = SamplingArrays(
        temperature=field("temperature", 0, np.float32),
        top_k=field("top_k", 0, np.int32),
        top_p=field("top_p", 1, np.float32),
        min_p=field("min_p", 0, np.float32),
        typical_p=field("typical_p", 1, np.float32),
        key=jnp.stack([jnp.arange(rows, dtype=jnp.uint32)] * 2, axis=1),
        token_index=jnp.full((rows,), HISTORY - PROMPT, jnp.int32),
        edits=edits,
        num_logprobs=field("num_logprobs", -1, np.int32),
    )
    assert not wants, wants
    return params


def sequences(rows: int, vocab: int, rng: np.random.Generator) -> Sequences:
    """Tokens, biases, words and masks of random ids."""
    words = (rows, SIZES.max_bad_words, SIZES.max_bad_word_tokens)
    bias_ids = rng.permuted(np.tile(np.arange(vocab, dtype=np.int32), (rows, 1)), axis=1)
    return Sequences(
        tokens=jnp.asarray(rng.integers(0, vocab, (rows, 2048), dtype=np.int32)),
        bias_ids=jnp.asarray(bias_ids[:, : SIZES.max_logit_bias]),
        bias_values=jnp.asarray(rng.normal(size=(rows, SIZES.max_logit_bias)).astype(np.float32)),
        bad_words=jnp.asarray(rng.integers(0, vocab, words, dtype=np.int32)),
        token_mask=jnp.asarray(rng.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32)),
    )


def measure(rows: int, vocab: int, rounds: int) -> dict[str, float]:
    """Median seconds of each line."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(rows, vocab)).astype(np.float32) * 3)
    tables = sequences(rows, vocab, rng)
    options = COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
    program = jax.jit(sample, static_argnums=3, compiler_options=options)
    wants = {name: parameters(rows, line) for name, line in LINES.items()}
    times: dict[str, list[float]] = {name: [] for name in LINES}
    order = list(LINES)
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name in order:
            start = time.perf_counter()
            out = program(logits, wants[name], tables, SIZES.max_logprobs)
            jax.block_until_ready(out)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 152_064])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {vocab: measure(args.rows, vocab, args.rounds) for vocab in args.vocab}
    width = max(map(len, LINES))
    print(f"{args.rows} rows on {jax.default_backend()}: ms, and times plain greedy")
    print(" " * width + "".join(f"{f'V = {vocab:,}':>20}" for vocab in found))
    for name in LINES:
        cells = (f"{1e3 * t[name]:10.2f} {t[name] / t['greedy']:8.2f}x" for t in found.values())
        print(f"{name:{width}}" + "".join(cells))
    if args.json:
        args.json.write_text(json.dumps({"rows": args.rows, "seconds": found}))


if __name__ == "__main__":
    main()
