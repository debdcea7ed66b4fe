"""``oxidize-jax bench``: how fast a model runs on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oxidize_jax.cli.backend import start_backend
from oxidize_jax.cli.models import announce_fetch
from oxidize_jax.cli.parser import Parser, UsageError, add_engine_options, engine_options, filled
from oxidize_jax.cli.terminal import Status

if TYPE_CHECKING:
    from oxidize_jax.bench.workload import Item
    from oxidize_jax.llm import LLM

Measured = tuple[dict[str, Any], list[tuple[str, str]]]
"""What goes into the JSON, and the rows of the table."""


class _Loaded(NamedTuple):
    llm: LLM
    seconds: float
    compile_seconds: float
    """Of ``seconds``."""


_ROWS = 64
"""Most rows of an engine, unless the user says otherwise."""
_NOTE = """\
Each kind warms up with one run, in which everything is compiled; that time is told apart.
Machines differ, and so do moments of one machine: compare what was measured side by side.
Unless options say otherwise the engine is made for the workload, with up to 64 rows, the
shortest --max-model-len that holds it, and no room for logprobs."""
_EXAMPLES = """\
examples:
  oxidize-jax bench throughput
  oxidize-jax bench throughput --dtype bfloat16 --num-prompts 128 --json run.json
  oxidize-jax bench latency --input-len 512 --output-len 64
  oxidize-jax bench prefix --groups 4 --prompts-per-group 8
  oxidize-jax bench scheduler --no-model"""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommand and its kinds."""
    parser = commands.add_parser(
        "bench",
        help="measure throughput, latency, prefix caching and the scheduler",
        description=f"Measure how fast a model runs on this machine.\n\n{_NOTE}",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=_no_kind, parser=parser)
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", title="kinds")
    _add_throughput(kinds)
    _add_latency(kinds)
    _add_prefix(kinds)
    _add_scheduler(kinds)


def _add_throughput(kinds: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_kind(
        kinds,
        "throughput",
        _throughput,
        "a whole workload at once: tokens per second",
        "Submit a workload at once and take the time until its last token. Requests are greedy "
        "and ignore end-of-sequence. The default workload is random ids from a fixed seed.",
    )
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        type=filled,
        metavar="FILE",
        help='a JSON list of {"prompt_token_ids": [...], "max_tokens": n}',
    )
    group.add_argument("--num-prompts", type=_whole, metavar="N", help="requests (default: 64)")
    group.add_argument(
        "--input-len",
        type=_range,
        metavar="N|LOW:HIGH",
        help="tokens of each prompt (default: 32:256)",
    )
    group.add_argument(
        "--output-len",
        type=_range,
        metavar="N|LOW:HIGH",
        help="tokens to generate for each (default: 32:256)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the random ids (default: 0)")


def _add_latency(kinds: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_kind(
        kinds,
        "latency",
        _latency,
        "one request alone: time to first token, time per token",
        "Run one request at a time. The time per token is taken twice: with the host reading "
        "after every step, as a stream does, and after every 16, as a batch does.",
    )
    _add_sizes(
        parser,
        ("--input-len", 512, "tokens of the prompt"),
        ("--output-len", 128, "tokens to generate"),
    )


def _add_prefix(kinds: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_kind(
        kinds,
        "prefix",
        _prefix,
        "prompts that begin alike, with prefix caching and without",
        "Run groups of prompts with one prefix per group, in turn on an engine with prefix "
        "caching and on one without. Needs memory for two KV caches.",
    )
    _add_sizes(
        parser,
        ("--groups", 4, "prefixes"),
        ("--prompts-per-group", 8, "prompts with each prefix"),
        ("--prefix-len", 512, "tokens of a prefix"),
        ("--suffix-len", 32, "tokens after it, different for each prompt"),
        ("--output-len", 16, "tokens to generate for each prompt"),
    )


def _add_scheduler(kinds: argparse._SubParsersAction[Parser]) -> None:
    parser = _add_kind(
        kinds,
        "scheduler",
        _scheduler,
        "what the scheduler costs, alone and as a share of a decode step",
        "Time the scheduler alone, on synthetic states of a large engine. Then time decode "
        "steps of the model, and the same with next to no model in its place: what is left is "
        "the batch, the sampler, the scheduler and the host.",
    )
    _add_sizes(
        parser,
        ("--rows", 256, "rows of the scheduler alone"),
        ("--blocks", 16_384, "its KV blocks"),
        ("--requests", 4_096, "its request slots"),
        ("--context", 128, "tokens of each row before the timed decode steps of the model"),
    )
    group = parser.add_argument_group("decode steps")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="of the decode steps (default: 0)",
    )
    group.add_argument(
        "--no-model", dest="with_model", action="store_false", help="the scheduler alone"
    )


def _add_kind(
    kinds: argparse._SubParsersAction[Parser],
    name: str,
    measure: Callable[[argparse.Namespace, Status], Measured],
    short: str,
    description: str,
) -> Parser:
    parser: Parser = kinds.add_parser(name, help=short, description=description, epilog=_EXAMPLES)
    parser.set_defaults(run=lambda args: _run(args, measure), parser=parser)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--repeat", type=_whole, default=3, metavar="N", help="runs after the first (default: 3)"
    )
    group.add_argument(
        "--json",
        type=filled,
        metavar="FILE",
        help="write all figures as JSON; -: to standard output, and the table to standard error",
    )
    add_engine_options(parser)
    return parser


def _add_sizes(parser: Parser, *sizes: tuple[str, int, str]) -> None:
    group = parser.add_argument_group("sizes")
    for flag, default, text in sizes:
        group.add_argument(
            flag, type=_whole, default=default, metavar="N", help=f"{text} (default: {default})"
        )


def _no_kind(args: argparse.Namespace) -> int:
    raise UsageError("bench: name what to measure: throughput, latency, prefix or scheduler.")


def _run(args: argparse.Namespace, measure: Callable[..., Measured]) -> int:
    """Measure and print. What the arguments alone can show to be wrong is refused first."""
    if args.json not in (None, "-"):
        path = Path(args.json).expanduser()
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"--json: {args.json!r}: give a file in a folder that exists.")
    status = Status()
    try:
        result, rows = measure(args, status)
    finally:
        status.clear()
    from oxidize_jax.bench import environment, report

    about = environment.describe()
    result = {"benchmark": args.kind, "environment": about} | result
    text = json.dumps(result, indent=2, allow_nan=False)
    lines = report.table([*report.environment(about), *rows])
    if args.json == "-":
        print(lines, file=sys.stderr)
        print(text)
        return 0
    print(lines)
    if args.json is not None:
        path.write_text(text + "\n", encoding="utf-8")
    return 0


def _throughput(args: argparse.Namespace, status: Status) -> Measured:
    given = [name for name in ("num_prompts", "input_len", "output_len", "seed")
             if getattr(args, name) is not None]  # fmt: skip
    if args.workload and given:
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option}: the workload comes from --workload; leave one of them out.")
    from oxidize_jax.bench import report, throughput, workload

    if args.workload:
        items = workload.read_workload(args.workload)
        loaded = _load(args, items, status)
    else:
        items = _random_workload(args)
        loaded = _load(args, items, status)
        vocab = loaded.llm.model_config.vocab_size
        if vocab < workload.RANDOM_VOCAB:
            items = _random_workload(args, vocab_size=vocab)
    result = throughput.measure(loaded.llm, items, repeat=args.repeat, note=_note(status))
    return _settings(loaded) | result, [*_model(loaded), *report.throughput(result)]


def _random_workload(args: argparse.Namespace, **more: int) -> tuple[Item, ...]:
    from oxidize_jax.bench import workload

    default = (32, 256)
    return workload.random_workload(
        args.num_prompts or 64,
        args.input_len or default,
        args.output_len or default,
        seed=args.seed or 0,
        **more,
    )


def _latency(args: argparse.Namespace, status: Status) -> Measured:
    from oxidize_jax.bench import latency, report
    from oxidize_jax.bench.workload import Item

    loaded = _load(args, [Item((0,) * args.input_len, args.output_len)], status)
    lengths = (args.input_len, args.output_len)
    result = latency.measure(loaded.llm, *lengths, repeat=args.repeat, note=_note(status))
    return _settings(loaded) | result, [*_model(loaded), *report.latency(result)]


def _prefix(args: argparse.Namespace, status: Status) -> Measured:
    if args.enable_prefix_caching is False:
        raise UsageError("--no-prefix-caching: it is run with and without; leave it out.")
    from oxidize_jax.bench import prefix, report, workload

    sizes = (args.groups, args.prompts_per_group, args.prefix_len, args.suffix_len)
    items = workload.prefix_workload(*sizes, args.output_len)
    loaded = _load(args, items, status)
    llm = loaded.llm
    vocab = min(workload.RANDOM_VOCAB, llm.model_config.vocab_size)
    items = workload.prefix_workload(*sizes, args.output_len, vocab_size=vocab)
    shareable = prefix.shareable_tokens(*sizes, llm.config.block_size)
    result = prefix.measure(llm, items, shareable, repeat=args.repeat, note=_note(status))
    return _settings(loaded) | result, [*_model(loaded), *report.prefix(result)]


def _scheduler(args: argparse.Namespace, status: Status) -> Measured:
    start_backend()
    from oxidize_jax.bench import report, scheduler, step_share

    note = _note(status)
    config = scheduler.config_of(args.rows, args.blocks, args.requests)
    note("the scheduler alone")
    decode, one, eight, least = scheduler.measure(config, 4 * args.repeat)
    alone = {
        "rows": args.rows,
        "blocks": args.blocks,
        "requests": args.requests,
        "decode_us": decode,
        "decode_least_us": least,
        "admit_1_us": one,
        "admit_8_us": eight,
    }
    result: dict[str, Any] = {"scheduler": alone, "share": None}
    if not args.with_model:
        return result, report.scheduler(result)
    rows = args.max_num_seqs or _ROWS
    budget = args.max_num_batched_tokens or 512
    length = step_share.room_for_decodes(rows, args.context, budget, args.repeat)
    loaded = _load_sized(args, {"max_num_seqs": rows, "max_model_len": length}, status)
    result["share"] = step_share.measure(
        loaded.llm, args.context, temperature=args.temperature, dispatches=args.repeat, note=note
    )
    return _settings(loaded) | result, [*_model(loaded), *report.scheduler(result)]


def _load(
    args: argparse.Namespace, items: list[Item] | tuple[Item, ...], status: Status
) -> _Loaded:
    """An engine for ``items``, in what the user has not chosen."""
    longest = max(item.num_tokens for item in items)
    sizes = {"max_num_seqs": min(_ROWS, len(items)), "max_model_len": longest}
    return _load_sized(args, sizes, status)


def _load_sized(args: argparse.Namespace, sizes: dict[str, int], status: Status) -> _Loaded:
    options = {"max_logprobs": 0, **sizes} | engine_options(args)
    start_backend()
    from oxidize_jax.compile_clock import CompileClock
    from oxidize_jax.llm import LLM
    from oxidize_jax.options import Options

    announce_fetch(options.get("model", Options.model), status)
    status.show("loading ...")
    start = time.perf_counter()
    with CompileClock() as clock:
        llm = LLM(**options, progress=False)
    return _Loaded(llm, time.perf_counter() - start, clock.seconds)


def _settings(loaded: _Loaded) -> dict[str, Any]:
    """For JSON: what was chosen, and what the engine made of it."""
    import dataclasses

    return {
        "options": dataclasses.asdict(loaded.llm.options),
        "engine": dataclasses.asdict(loaded.llm.config),
        "load": {"seconds": loaded.seconds, "compile_seconds": loaded.compile_seconds},
    }


def _model(loaded: _Loaded) -> list[tuple[str, str]]:
    from oxidize_jax.options import cache_dtype, weight_dtype

    options, config = loaded.llm.options, loaded.llm.config
    dtypes = f"{weight_dtype(options)}, KV cache {cache_dtype(options)}"
    return [
        ("model", f"{options.model}, {dtypes}"),
        (
            "engine",
            f"{config.max_num_seqs} rows, {config.max_num_batched_tokens} tokens a step, "
            f"{config.num_blocks} blocks of {config.block_size}",
        ),
        ("loading", f"{loaded.seconds:.1f} s, {loaded.compile_seconds:.1f} s of it compiling"),
    ]


def _note(status: Status) -> Callable[[str], None]:
    return lambda text: status.show(f"{text} ...")


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 1 or more")
    return value


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        pair = (_whole(low), _whole(high or low))
    except argparse.ArgumentTypeError:
        pair = (1, 0)
    if pair[0] > pair[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a whole number, or LOW:HIGH with LOW at most HIGH"
        )
    return pair
