"""Cost of `commit + schedule` on this machine, and how it grows with its sizes.

No model runs: every row that may sample is given a token, so the scheduler is timed alone, on
states that a busy engine passes through. Steps run within one program, as the engine runs
them (one dispatch of a program costs more than such a step), and a time is that of a dispatch
over its steps: the median of many dispatches, in microseconds.

* decode: every row decodes and nobody is admitted; one row in 16 fills a block, which is
  registered, and takes another;
* admit 1, admit 8: so many rows finish in each step, and as many requests are admitted.

    python benchmarks/scheduler_cost.py --growth

`oxidize-jax bench scheduler` measures the same at one size, and its share in a model's step.
"""

from __future__ import annotations

import argparse

from oxidize_jax.bench.scheduler import SIZES, config_of, measure, scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=16_384)
    parser.add_argument("--requests", type=int, default=4_096)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--dispatches", type=int, default=12)
    parser.add_argument("--growth", action="store_true", help="also each size times four, and all")
    args = parser.parse_args()
    base = config_of(args.rows, args.blocks, args.requests, args.max_model_len)
    variants = {"base": base}
    if args.growth:
        for name in SIZES:
            variants[f"4x {name}"] = scaled(base, name)
        variants["4x all three"] = scaled(base, *SIZES)
    print(f"{'':20} rows  blocks requests  decode  admit 1  admit 8   us each (decode's minimum)")
    for name, config in variants.items():
        decode, one, eight, least = measure(config, args.dispatches)
        print(
            f"{name:20} {config.max_num_seqs:4} {config.num_blocks:7} {config.max_num_requests:8}"
            f" {decode:7.0f} {one:8.0f} {eight:8.0f}   ({least:.0f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
