"""KV waste: how much of the memory that sequences hold has no token in it.

A load of random prompts and outputs, once through a pool that holds all running rows and
once through one that is too small for them (so that sequences are preempted). Waste is
*internal*: slots of allocated blocks without a token. The tokens of the planned step count.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import numpy as np
import simulate

from oxidize_jax.config import EngineConfig

MAX_WASTE_AT_FINISH = 0.01
MAX_WASTE_AT_ANY_STEP = 0.04
MAX_BLOCKS_OF_NEEDED = 1.005
"""1.00 to two decimals, over the run."""
MAX_BLOCKS_OF_NEEDED_IN_A_STEP = 1.01
"""A decode whose turn a newly admitted prompt takes keeps the block that it was given, for
its next step: an early step, with few blocks in use, shows a few of these."""


@dataclasses.dataclass(frozen=True)
class Waste:
    """The figures of one run."""

    steps: int
    peak_blocks: int
    preemptions: int
    at_finish: float
    """Of each request's own blocks when it finished, all requests together."""
    largest: float
    """Of the blocks in use, in the worst step."""
    mean: float
    blocks_of_needed: float
    """Blocks in use over blocks with a token, over all steps."""
    blocks_of_needed_largest: float
    """The same in the worst step."""
    unexplained: int
    """Most blocks in use in a step that hold no token and are not a passed-over decode's."""

    def missed(self) -> list[str]:
        """The bounds that do not hold, in words."""
        bounds = {
            "waste at finish": (self.at_finish, MAX_WASTE_AT_FINISH),
            "waste in the worst step": (self.largest, MAX_WASTE_AT_ANY_STEP),
            "blocks in use / needed": (self.blocks_of_needed, MAX_BLOCKS_OF_NEEDED),
            "blocks in use / needed in the worst step": (
                self.blocks_of_needed_largest,
                MAX_BLOCKS_OF_NEEDED_IN_A_STEP,
            ),
            "blocks in use without a reason": (self.unexplained, 1),
        }
        return [f"{what}: {v:.4f}, not < {most}" for what, (v, most) in bounds.items() if v >= most]


def random_load(
    num_requests: int, shortest: int, longest: int, seed: int
) -> list[simulate.Request]:
    """Distinct prompts; prompt and output lengths uniform in ``[shortest, longest]``."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest, (num_requests, 2), endpoint=True).tolist()
    return [simulate.Request(simulate.random_tokens(rng, p), o) for p, o in lengths]


def measure(run: simulate.Run) -> Waste:
    """Waste over a run."""
    k = run.config.block_size
    last = run.last_steps(), np.arange(len(run.requests))
    slots_at_finish = run.by_request(run.blocks)[last].sum() * k
    waste = 1 - run.held / (run.live * k)
    # A row with tokens to compute that is not in the plan: prompts took the budget.
    passed_over = (run.scheduled == 0) & (run.blocks - -(-run.tokens // k) == 1)
    unexplained = run.live - run.needed - passed_over.sum(axis=1)
    return Waste(
        steps=run.num_steps,
        peak_blocks=int(run.live.max()),
        preemptions=run.preemptions,
        at_finish=float(1 - run.by_request(run.tokens)[last].sum() / slots_at_finish),
        largest=float(waste.max()),
        mean=float(waste.mean()),
        blocks_of_needed=float(run.live.sum() / run.needed.sum()),
        blocks_of_needed_largest=float((run.live / run.needed).max()),
        unexplained=int(unexplained.max()),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=100, help="prompt and output, in tokens")
    parser.add_argument("--longest", type=int, default=1024, help="prompt and output, in tokens")
    parser.add_argument("--rows", type=int, default=64, help="max_num_seqs")
    parser.add_argument("--budget", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--blocks", type=int, default=8192, help="of a pool that holds all rows")
    parser.add_argument("--tight-blocks", type=int, default=2048, help="of one that does not")
    args = parser.parse_args(argv)

    rows, missed = [], []
    for name, blocks in (("ample", args.blocks), ("tight", args.tight_blocks)):
        config = EngineConfig(
            max_num_seqs=args.rows,
            max_num_batched_tokens=args.budget,
            max_model_len=2 * args.longest,
            num_blocks=blocks,
            max_num_requests=2 * args.rows,
            max_logprobs=0,
            max_stop_token_ids=1,
        )
        load = random_load(args.requests, args.shortest, args.longest, args.seed)
        waste = measure(simulate.run(config, load))
        missed += [f"{name} pool, {line}" for line in waste.missed()]
        rows.append(
            [
                name,
                blocks,
                waste.steps,
                waste.peak_blocks,
                waste.preemptions,
                f"{waste.at_finish:.2%}",
                f"{waste.largest:.2%}",
                f"{waste.mean:.2%}",
                f"{waste.blocks_of_needed:.4f}",
                f"{waste.blocks_of_needed_largest:.4f}",
            ]
        )
    print(
        f"{args.requests} requests, prompts and outputs of {args.shortest}-{args.longest} tokens, "
        f"{args.rows} rows, blocks of {config.block_size}, seed {args.seed}"
    )
    simulate.print_table(
        [
            "pool",
            "blocks",
            "steps",
            "peak in use",
            "preemptions",
            "waste at finish",
            "worst step",
            "mean step",
            "in use / needed",
            "worst step",
        ],
        rows,
    )
    return simulate.print_missed(missed)


if __name__ == "__main__":
    sys.exit(main())
