"""``oxidize-jax score``: how likely a model finds a text."""

from __future__ import annotations

import argparse
import json
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from oxidize_jax.cli.backend import start_backend
from oxidize_jax.cli.models import announce_fetch
from oxidize_jax.cli.parser import (
    Parser,
    UsageError,
    add_engine_options,
    engine_options,
    filled,
    whole,
)
from oxidize_jax.cli.prompts import read_texts
from oxidize_jax.cli.terminal import Status

if TYPE_CHECKING:
    from oxidize_jax.llm import LLM
    from oxidize_jax.score_outputs import Perplexity

_DESCRIPTION = """\
Say how likely the model finds each text: its tokens, their mean log probability (natural) and
the perplexity. A text longer than --window is taken in windows that slide over it by --stride
tokens; each scores what the one before did not."""
_EXAMPLES = """\
examples:
  oxidize-jax score "The capital of France is Paris."
  oxidize-jax score --file book.txt --window 1024 --stride 512
  oxidize-jax score --json --dtype float32 --file a.txt --file b.txt
  cat letter.txt | oxidize-jax score"""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "score",
        usage="%(prog)s [options] [TEXT ...]",
        help="log probability and perplexity of a text",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run, parser=parser)
    texts = parser.add_argument_group("texts")
    texts.add_argument("words", nargs="*", metavar="TEXT", help="a text; quote it")
    texts.add_argument(
        "--file",
        type=filled,
        action="append",
        default=[],
        metavar="FILE",
        help="a text file, taken whole; - is standard input, as is no text at all",
    )
    texts.add_argument(
        "--window",
        type=whole(2),
        metavar="N",
        help="tokens of a window (default: --max-model-len)",
    )
    texts.add_argument(
        "--stride",
        type=whole(1),
        metavar="N",
        help="tokens from one window to the next (default: half of a window)",
    )
    texts.add_argument("--json", action="store_true", help="one JSON object a line per text")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Score and print. What the arguments alone can show to be wrong is refused first."""
    if args.window is not None and args.stride is not None and args.stride > args.window:
        raise UsageError(
            f"--stride {args.stride}: is more than --window {args.window}, and would leave tokens "
            "out; use at most that."
        )
    texts = read_texts(args.words, args.file)
    status = Status()
    with ExitStack() as stack:
        stack.callback(status.clear)
        status.show("starting ...")
        options = engine_options(args)
        # No request is run: the engine needs no room for more than one, and is not compiled.
        options.setdefault("max_num_seqs", 1)
        llm = _load(options, status)
        for index, (name, text) in enumerate(texts):
            result = llm.perplexity(text, window=args.window, stride=args.stride)
            status.clear()
            one = record(index, name, result)
            if args.json:
                print(json.dumps(one, ensure_ascii=False, allow_nan=False), flush=True)
            else:
                print(line(one, named=len(texts) > 1), flush=True)
    return 0


def _load(options: dict[str, Any], status: Status) -> LLM:
    start_backend()
    from oxidize_jax.llm import LLM
    from oxidize_jax.options import Options

    announce_fetch(options.get("model", Options.model), status)
    status.show("loading ...")
    llm = LLM(**options, progress=status.watched, warm_up=False)
    status.clear()
    return llm


def record(index: int, name: str, result: Perplexity) -> dict[str, Any]:
    """One line of ``--json``. ``tokens`` are those scored: all but the first of the text."""
    mean = -result.nll / result.num_tokens if result.num_tokens else math.nan
    return {
        "index": index,
        "text": name,
        "tokens": result.num_tokens,
        "windows": result.num_windows,
        "mean_logprob": _finite(mean),
        "perplexity": _finite(result.perplexity),
    }


def line(one: dict[str, Any], *, named: bool) -> str:
    """The same for a person."""
    if not one["tokens"]:
        numbers = "no tokens to score: the first of a text has nothing before it"
    else:
        numbers = (
            f"{one['tokens']} tokens, mean log probability {_number(one['mean_logprob'])}, "
            f"perplexity {_number(one['perplexity'])}"
        )
    return f"{one['text']}: {numbers}" if named else numbers


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4f}"


def _finite(value: float) -> float | None:
    """JSON has neither infinity nor NaN: null."""
    return value if math.isfinite(value) else None
