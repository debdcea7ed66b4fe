"""Pressure: loads whose running rows need more blocks than the pool has all finish.

The *demand* of a load is ``max_num_seqs`` times the mean number of blocks of a finished
sequence, over the blocks in the pool. What does not fit is preempted by recomputation: the
sequence gives its blocks back, and computes again what the prefix cache lost meanwhile.

Bounds:

* every request ends with all its tokens (else the simulation raises);
* the oldest unfinished request always has its row, and is never set back;
* it waits only in steps whose whole budget goes to prompts, and one step on end at most
  (``prefill_first``), since a decode that got nothing goes first in the next step. Under
  ``decode_first`` it does not wait at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import numpy as np
import simulate

from oxidize_jax.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class Pressure:
    """The figures of one run."""

    demand: float
    """Blocks that ``max_num_seqs`` sequences need at their ends, over blocks in the pool."""
    steps: int
    preemptions: int
    lost: float
    """Tokens with KV that a preemption gives up, on average."""
    recomputed: float
    """Tokens that are computed again for a preemption, on average: less, by cache hits."""
    extra: float
    """Tokens computed over the minimum, as a share of it."""
    unaccounted: int
    """Tokens computed over the minimum that no preemption explains."""
    setbacks: int
    """Times the oldest unfinished request had no row, or lost tokens."""
    idle_waits: int
    """Steps in which the oldest waited although the budget was not used up by others."""
    longest_wait: int
    """Steps on end without progress of the oldest unfinished request."""
    wait_bound: int
    longest_wait_of_any: int
    """Steps on end without progress of any request that had begun."""

    def missed(self) -> list[str]:
        """The bounds that do not hold, in words."""
        bounds = {
            "tokens computed again without a preemption": (self.unaccounted, 0),
            "setbacks of the oldest request": (self.setbacks, 0),
            "waits of the oldest in a step with budget left": (self.idle_waits, 0),
            "longest wait of the oldest": (self.longest_wait, self.wait_bound),
        }
        return [f"{what}: {v}, not <= {most}" for what, (v, most) in bounds.items() if v > most]


def load_of_demand(
    config: EngineConfig, demand: float, num_requests: int, seed: int
) -> list[simulate.Request]:
    """Distinct prompts whose ``max_num_seqs`` need ``demand`` times the pool.

    Lengths are uniform from half to one and a half times the mean; two thirds are prompt.
    """
    rng = np.random.default_rng(seed)
    slots = config.num_blocks * config.block_size
    # The last block of a sequence is half empty on average.
    mean = demand * slots / config.max_num_seqs - config.block_size / 2
    totals = rng.uniform(0.5 * mean, 1.5 * mean, num_requests)
    shares = rng.uniform(0.5, 0.8, num_requests)
    requests = []
    for total, share in zip(totals.tolist(), shares.tolist(), strict=True):
        prompt = max(1, round(total * share))
        requests.append(
            simulate.Request(simulate.random_tokens(rng, prompt), max(2, round(total) - prompt))
        )
    return requests


def measure(run: simulate.Run) -> Pressure:
    """Preemptions and waits over a run."""
    config, k = run.config, run.config.block_size
    tokens = run.by_request(run.tokens, fill=-1)
    scheduled = run.by_request(run.scheduled)
    lost, recomputed, setback = _preemptions(tokens, scheduled)
    minimum = sum(request.num_computed for request in run.requests)
    extra = int(run.scheduled.sum()) - minimum
    ends = run.last_steps()
    oldest = np.array([int(np.argmax(ends >= step)) for step in range(run.num_steps)])
    step = np.arange(run.num_steps)
    waits = scheduled[step, oldest] == 0
    used_up = run.scheduled.sum(axis=1) == config.max_num_batched_tokens
    demand = np.mean([-(-request.num_computed // k) for request in run.requests])
    return Pressure(
        demand=float(demand * config.max_num_seqs / config.num_blocks),
        steps=run.num_steps,
        preemptions=run.preemptions,
        lost=lost / max(run.preemptions, 1),
        recomputed=recomputed / max(run.preemptions, 1),
        extra=extra / minimum,
        unaccounted=extra - recomputed,
        setbacks=int((tokens[step, oldest] < 0).sum() + setback[step, oldest].sum()),
        idle_waits=int((waits & ~used_up).sum()),
        longest_wait=_longest(waits, oldest),
        wait_bound=1 if config.policy == "prefill_first" else 0,
        longest_wait_of_any=max(
            _longest(begun[first : last + 1] == 0)
            for begun, last in zip(scheduled.T, ends.tolist(), strict=True)
            for first in [int(np.argmax(begun > 0))]
        ),
    )


def _preemptions(tokens: np.ndarray, scheduled: np.ndarray) -> tuple[int, int, np.ndarray]:
    """``(tokens lost, tokens computed again, bool[W, n] where a request was set back)``.

    From ``i32[W, n]``: tokens with KV after each step (-1 without a row), and the planned.
    """
    lost = recomputed = 0
    setback = np.zeros(tokens.shape, bool)
    for request in range(tokens.shape[1]):
        steps = np.flatnonzero(tokens[:, request] >= 0)
        before = tokens[steps[:-1], request]
        start = tokens[steps[1:], request] - scheduled[steps[1:], request]
        out = (np.diff(steps) > 1) | (start < before)
        lost += int(before[out].sum())
        recomputed += int(np.maximum(before - start, 0).sum())
        setback[steps[:-1][out] + 1, request] = True
    return lost, recomputed, setback


def _longest(flags: np.ndarray, of: np.ndarray | None = None) -> int:
    """Longest run of true flags, of one and the same ``of`` where given."""
    longest = count = 0
    for i, flag in enumerate(flags.tolist()):
        same = of is None or i == 0 or of[i] == of[i - 1]
        count = (count + 1 if same else 1) if flag else 0
        longest = max(longest, count)
    return longest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--demands", type=float, nargs="+", default=[1.2, 2.0, 10.0])
    parser.add_argument("--rows", type=int, default=32, help="max_num_seqs")
    parser.add_argument("--budget", type=int, default=256, help="max_num_batched_tokens")
    parser.add_argument("--blocks", type=int, default=128, help="num_blocks")
    args = parser.parse_args(argv)

    rows, missed = [], []
    longest = 1.5 * max(args.demands) * args.blocks * 16 / args.rows
    for policy in ("prefill_first", "decode_first"):
        config = EngineConfig(
            max_num_seqs=args.rows,
            max_num_batched_tokens=args.budget,
            max_model_len=int(longest) + 3,
            num_blocks=args.blocks,
            max_num_requests=2 * args.rows,
            policy=policy,
            max_logprobs=0,
            max_stop_token_ids=1,
        )
        for demand in args.demands:
            load = load_of_demand(config, demand, args.requests, args.seed)
            pressure = measure(simulate.run(config, load))
            missed += [f"{policy}, demand {demand}, {line}" for line in pressure.missed()]
            rows.append(
                [
                    policy,
                    f"{pressure.demand:.2f}",
                    pressure.steps,
                    pressure.preemptions,
                    f"{pressure.lost:.0f}",
                    f"{pressure.recomputed:.0f}",
                    f"{pressure.extra:.2%}",
                    pressure.longest_wait,
                    pressure.wait_bound,
                    pressure.longest_wait_of_any,
                ]
            )
    print(
        f"{args.requests} requests, {args.rows} rows, {args.blocks} blocks of "
        f"{config.block_size}, budget {args.budget}, seed {args.seed}; all finished"
    )
    simulate.print_table(
        [
            "policy",
            "demand / pool",
            "steps",
            "preemptions",
            "lost each",
            "recomputed each",
            "extra tokens",
            "oldest waits",
            "bound",
            "any waits",
        ],
        rows,
    )
    return simulate.print_missed(missed)


if __name__ == "__main__":
    sys.exit(main())
