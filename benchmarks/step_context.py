"""Step time against context: what a decode step costs by live tokens and by capacity.

    python benchmarks/step_context.py --dtype bfloat16 --rows 4 --json out.json

Two engines take turns: their requests may grow to 512 and to 8,192 tokens (``max_model_len``),
and hold 256 now. A step must not cost more for what a request might hold: at most 1.05 x.
Then the larger engine alone with 256 to 4,096 tokens in each row: what is above the time at 256
is attention, and should grow with the tokens.

Times are medians of whole steps in dispatches of 16, scheduler and sampler included. Exits with
1 if the bound on capacity is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from oxidize_jax import LLM
from oxidize_jax.engine.engine import STEPS_PER_DISPATCH, Engine
from oxidize_jax.engine.request import EngineRequest

SMALL, LARGE = 512, 8192
LIVE = 256
CONTEXTS = (256, 512, 1024, 2048, 4096)
BOUND = 1.05
DISPATCHES = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS,
                        help="live tokens a row, at most 4,096; none: capacity alone")  # fmt: skip
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.contexts and not LIVE <= min(args.contexts) <= max(args.contexts) <= max(CONTEXTS):
        parser.error(f"--contexts: from {LIVE} to {max(CONTEXTS)}")
    small, large = (make_engine(args, capacity) for capacity in (SMALL, LARGE))
    for engine in (small, large):
        step_times(engine, args.rows, LIVE)
    by_capacity: dict[int, list[float]] = {SMALL: [], LARGE: []}
    for _ in range(args.rounds):
        by_capacity[SMALL] += step_times(small, args.rows, LIVE)
        by_capacity[LARGE] += step_times(large, args.rows, LIVE)
    by_context: dict[int, list[float]] = {context: [] for context in args.contexts}
    for _ in range(args.rounds):
        for context in args.contexts:
            by_context[context] += step_times(large, args.rows, context)
    result = report(args.rows, by_capacity, by_context)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["capacity_ratio"] <= BOUND else 1


def make_engine(args: argparse.Namespace, capacity: int) -> Engine:
    """An engine whose pool holds the largest context in every row, whatever the capacity."""
    longest = max(CONTEXTS) + STEPS_PER_DISPATCH * (DISPATCHES + 4)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=capacity,
        max_num_seqs=args.rows,
        num_blocks=args.rows * (longest // 16 + 1),
        enable_prefix_caching=False,
        progress=False,
    )
    return llm.engine


def step_times(engine: Engine, rows: int, context: int) -> list[float]:
    """Milliseconds per step of ``DISPATCHES`` dispatches around ``context`` tokens a row."""
    around = STEPS_PER_DISPATCH * (DISPATCHES + 2) // 2
    rng = np.random.default_rng(context)
    ids = []
    for _ in range(rows):
        prompt = tuple(rng.integers(0, 30_000, context - around).tolist())
        ids.append(engine.add(EngineRequest(prompt, 8 * around)))
    while not any(stats.decode_rows == rows for stats in engine.step_stats):
        engine.step(1)
    engine.step()
    times = []
    for _ in range(DISPATCHES):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) / STEPS_PER_DISPATCH * 1e3)
    for request_id in ids:
        engine.abort(request_id)
    engine.step()
    return times


def report(
    rows: int, by_capacity: dict[int, list[float]], by_context: dict[int, list[float]]
) -> dict:
    capacity = {size: statistics.median(times) for size, times in by_capacity.items()}
    context = {size: statistics.median(times) for size, times in by_context.items()}
    ratio = capacity[LARGE] / capacity[SMALL]
    print(f"{rows} rows of {LIVE} tokens, milliseconds a step by max_model_len:")
    for size, time_ in capacity.items():
        print(f"  {size:6,d}  {time_:7.1f}")
    print(f"  ratio {ratio:.3f}, at most {BOUND}")
    if not context:
        return {"rows": rows, "capacity": capacity, "capacity_ratio": ratio}
    print("live tokens a row, milliseconds a step, and for each 1,000 tokens above the first:")
    least = min(context)
    for size, time_ in context.items():
        more = rows * (size - least) / 1000
        print(f"  {size:6,d}  {time_:7.1f}  {(time_ - context[least]) / more if more else 0:7.2f}")
    return {"rows": rows, "capacity": capacity, "capacity_ratio": ratio, "context": context}


if __name__ == "__main__":
    sys.exit(main())
