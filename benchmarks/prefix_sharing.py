"""Prefix sharing: groups of prompts with one long prefix hold it once, and compute it once.

The prompts of a group share a prefix and have a short tail of their own. *Shareable* are the
full blocks of the prefix in every prompt but the first of its group. The *minimum* of blocks
in a step is one copy of each running group's prefix, as far as a row of it has got, and each
row's own blocks behind that.

A block can be hit once its KV has been written; a prompt whose next block another computes in
this very step waits for it. Two budgets, in order of groups, and shuffled.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys

import numpy as np
import simulate

from oxidize_jax.config import EngineConfig

MIN_HITS = 0.90
MAX_PEAK_OF_MINIMUM = 1.05


@dataclasses.dataclass(frozen=True)
class Load:
    """A load of groups."""

    requests: list[simulate.Request]
    group: np.ndarray
    """i32[n]"""
    prefix: int
    """Tokens, a multiple of the block size."""


@dataclasses.dataclass(frozen=True)
class Sharing:
    """The figures of one run."""

    steps: int
    preemptions: int
    hits: float
    """Share of the shareable tokens that was hit."""
    peak: int
    peak_minimum: int
    """The minimum in the step of the peak."""
    most_of_minimum: float
    """Blocks in use over the minimum, in the worst step."""
    times: float
    """How often a prefix was computed, on average."""
    scheduled: int
    """Prompt and output tokens computed, with what twins computed twice."""
    scheduled_minimum: int

    def missed(self) -> list[str]:
        """The bounds that do not hold, in words."""
        missed = []
        if self.hits < MIN_HITS:
            missed.append(f"hits: {self.hits:.1%}, not >= {MIN_HITS:.0%}")
        if self.peak > self.peak_minimum * MAX_PEAK_OF_MINIMUM:
            missed.append(
                f"peak: {self.peak} blocks, not <= {MAX_PEAK_OF_MINIMUM} x {self.peak_minimum}"
            )
        return missed


def grouped_load(
    groups: int,
    size: int,
    prefix: int,
    seed: int,
    *,
    tail: tuple[int, int] = (20, 100),
    output: tuple[int, int] = (16, 48),
    shuffled: bool = False,
) -> Load:
    """``groups * size`` requests, group after group or in random order."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), size)
    if shuffled:
        rng.shuffle(group)
    heads = [simulate.random_tokens(rng, prefix) for _ in range(groups)]
    requests = []
    for of in group.tolist():
        own = simulate.random_tokens(rng, int(rng.integers(*tail, endpoint=True)))
        count = int(rng.integers(*output, endpoint=True))
        requests.append(simulate.Request(np.concatenate([heads[of], own]), count))
    return Load(requests, group, prefix)


def measure(run: simulate.Run, load: Load) -> Sharing:
    """Hits and blocks over a run."""
    k = run.config.block_size
    tokens, prefix_blocks = run.by_request(run.tokens), load.prefix // k
    own = np.maximum(-(-tokens // k) - prefix_blocks, 0).sum(axis=1)
    head = np.minimum(-(-tokens // k), prefix_blocks)
    heads = np.zeros((int(load.group.max()) + 1, run.num_steps), np.int64)
    np.maximum.at(heads, load.group, head.T)
    minimum = own + heads.sum(axis=0)
    peak = int(run.live.argmax())
    shareable = load.prefix * (len(run.requests) - len(heads))
    hit = np.minimum(run.num_cached, load.prefix)
    total = sum(request.num_computed for request in run.requests)
    return Sharing(
        steps=run.num_steps,
        preemptions=run.preemptions,
        hits=float(hit.sum() / shareable),
        peak=int(run.live[peak]),
        peak_minimum=int(minimum[peak]),
        most_of_minimum=float((run.live / minimum).max()),
        times=float((load.prefix - hit).sum() / (load.prefix * len(heads))),
        scheduled=int(run.scheduled.sum()),
        scheduled_minimum=total - shareable,
    )


def config_for(
    *, rows: int, budget: int, prefix: int, blocks: int, longest_rest: int
) -> EngineConfig:
    """Request slots for twice the rows, room for a prefix and its rest."""
    return EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=prefix + longest_rest,
        num_blocks=blocks,
        max_num_requests=2 * rows,
        max_logprobs=0,
        max_stop_token_ids=1,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--size", type=int, default=16, help="prompts in a group")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens, whole blocks")
    parser.add_argument("--rows", type=int, default=64, help="max_num_seqs")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[2048, 8192], help="max_num_batched_tokens"
    )
    parser.add_argument("--blocks", type=int, default=12288, help="num_blocks")
    args = parser.parse_args(argv)

    rows, missed = [], []
    for order, budget in itertools.product(("grouped", "shuffled"), args.budgets):
        config = config_for(
            rows=args.rows,
            budget=budget,
            prefix=args.prefix,
            blocks=args.blocks,
            longest_rest=160,
        )
        load = grouped_load(
            args.groups, args.size, args.prefix, args.seed, shuffled=order == "shuffled"
        )
        sharing = measure(simulate.run(config, load.requests), load)
        missed += [f"{order}, budget {budget}, {line}" for line in sharing.missed()]
        rows.append(
            [
                order,
                budget,
                sharing.steps,
                f"{sharing.hits:.1%}",
                sharing.peak,
                sharing.peak_minimum,
                f"{sharing.peak / sharing.peak_minimum:.3f}",
                f"{sharing.most_of_minimum:.3f}",
                f"{sharing.times:.2f}",
                f"{sharing.scheduled / sharing.scheduled_minimum:.3f}",
            ]
        )
    print(
        f"{args.groups} groups of {args.size} prompts with one prefix of {args.prefix} tokens, "
        f"{args.rows} rows, {args.blocks} blocks of {config.block_size}, seed {args.seed}"
    )
    simulate.print_table(
        [
            "order",
            "budget",
            "steps",
            "hits",
            "peak in use",
            "minimum then",
            "ratio",
            "worst step",
            "times computed",
            "computed / minimum",
        ],
        rows,
    )
    return simulate.print_missed(missed)


if __name__ == "__main__":
    sys.exit(main())
