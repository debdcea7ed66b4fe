"""Forks: n samples of one prompt hold its blocks once, and copy only what they write into.

The *minimum* in a step is, for each prompt: its full blocks once, as far as they are
computed; the partly filled block behind them once while nobody has written into it; and the
blocks that each sample has of its own from its first write on. Not sharing at all would take
n times the prompt.

A sample that finds no row before its parent has filled the partly filled block shares the
full blocks only, and computes the few tokens behind them: fewer copies, a little more work.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import numpy as np
import simulate

from oxidize_jax.config import EngineConfig

MAX_OF_MINIMUM = 1.02
MAX_PROMPT_COMPUTED = 1.02


@dataclasses.dataclass(frozen=True)
class Forks:
    """The figures of one run."""

    steps: int
    peak: int
    peak_minimum: int
    """The minimum in the step of the peak."""
    of_minimum: float
    """Blocks in use over the minimum, over all steps."""
    most_of_minimum: float
    """The same in the worst step."""
    unshared: int
    """Table entries in the step of the peak: blocks in use if nothing were shared."""
    copies: int
    copies_minimum: int
    """All but one of the samples that write into a shared, partly filled block."""
    prompt_computed: float
    """How often a prompt token was computed, on average, without the last of each sample."""

    def missed(self) -> list[str]:
        """The bounds that do not hold, in words."""
        bounds = {
            "peak / minimum": (self.peak / self.peak_minimum, MAX_OF_MINIMUM),
            "blocks in use / minimum over the run": (self.of_minimum, MAX_OF_MINIMUM),
            "copies": (self.copies, self.copies_minimum),
            "times that a prompt was computed": (self.prompt_computed, MAX_PROMPT_COMPUTED),
        }
        return [f"{what}: {v}, not <= {most}" for what, (v, most) in bounds.items() if v > most]


def family_load(
    families: int, n: int, prompt: int, output: tuple[int, int], seed: int
) -> list[simulate.Request]:
    """``families`` prompts with ``n`` samples each: a request, and forks of it."""
    rng = np.random.default_rng(seed)
    requests: list[simulate.Request] = []
    for _ in range(families):
        parent, tokens = len(requests), simulate.random_tokens(rng, prompt)
        for i in range(n):
            count = int(rng.integers(*output, endpoint=True))
            requests.append(simulate.Request(tokens, count, parent if i else None))
    return requests


def measure(run: simulate.Run, n: int) -> Forks:
    """Blocks over a run of :func:`family_load` with ``n`` samples of each prompt."""
    k, prompt = run.config.block_size, len(run.requests[0].prompt)
    tokens = run.by_request(run.tokens).reshape(run.num_steps, -1, n)
    blocks, full = -(-tokens // k), prompt // k
    own = np.where(tokens > prompt, blocks - full, 0).sum(axis=2)
    unwritten = ((tokens > full * k) & (tokens <= prompt)).any(axis=2)
    heads = np.minimum(blocks.max(axis=2), full)
    minimum = (own + unwritten + heads).sum(axis=1)
    peak = int(run.live.argmax())
    outputs = sum(request.max_new_tokens for request in run.requests)
    families = len(run.requests) // n
    return Forks(
        steps=run.num_steps,
        peak=int(run.live[peak]),
        peak_minimum=int(minimum[peak]),
        of_minimum=float(run.live.sum() / minimum.sum()),
        most_of_minimum=float((run.live / minimum).max()),
        unshared=int(run.blocks[peak].sum()),
        copies=run.copies,
        copies_minimum=families * (n - 1) * (prompt % k > 0),
        # Each sample computes the last token of its prompt, and its outputs but the last.
        prompt_computed=float((run.scheduled.sum() - outputs) / (families * (prompt - 1))),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", type=int, nargs="+", default=[1, 32], help="prompts")
    parser.add_argument("--n", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--shortest", type=int, default=64, help="output, in tokens")
    parser.add_argument("--longest", type=int, default=256, help="output, in tokens")
    parser.add_argument("--rows", type=int, default=32, help="max_num_seqs")
    parser.add_argument("--budget", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--blocks", type=int, default=2048, help="num_blocks")
    args = parser.parse_args(argv)

    config = EngineConfig(
        max_num_seqs=args.rows,
        max_num_batched_tokens=args.budget,
        max_model_len=args.prompt + args.longest,
        num_blocks=args.blocks,
        max_num_requests=2 * args.rows,
        max_logprobs=0,
        max_stop_token_ids=1,
    )
    rows, missed = [], []
    for families in args.families:
        load = family_load(families, args.n, args.prompt, (args.shortest, args.longest), args.seed)
        forks = measure(simulate.run(config, load), args.n)
        missed += [f"{families} prompts, {line}" for line in forks.missed()]
        rows.append(
            [
                families,
                forks.steps,
                forks.peak,
                forks.peak_minimum,
                f"{forks.peak / forks.peak_minimum:.3f}",
                f"{forks.of_minimum:.3f}",
                f"{forks.most_of_minimum:.3f}",
                forks.unshared,
                forks.copies,
                f"{forks.prompt_computed:.3f}",
            ]
        )
    print(
        f"n = {args.n} samples of prompts of {args.prompt} tokens, {args.rows} rows, "
        f"blocks of {config.block_size}, seed {args.seed}"
    )
    simulate.print_table(
        [
            "prompts",
            "steps",
            "peak in use",
            "minimum then",
            "ratio",
            "over the run",
            "worst step",
            "unshared",
            "copies",
            "prompt computed",
        ],
        rows,
    )
    return simulate.print_missed(missed)


if __name__ == "__main__":
    sys.exit(main())
