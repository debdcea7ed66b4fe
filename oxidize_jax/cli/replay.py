"""``oxidize-jax replay``: make a recorded run again, and cut down one that goes wrong."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oxidize_jax.cli.backend import start_backend
from oxidize_jax.cli.models import announce_fetch
from oxidize_jax.cli.parser import DTYPES, KV_DTYPES, Parser, UsageError, filled
from oxidize_jax.cli.terminal import Status

if TYPE_CHECKING:
    from oxidize_jax.engine.replay import Progress, Replay
    from oxidize_jax.engine.trace import Trace

_DESCRIPTION = """\
Make a run again from the trace that an engine wrote, and say whether it comes out the same.

Without --model only the scheduler runs, with the tokens on record: no weights are needed,
and every step is checked. A fault that shows there can be cut down to the events that
matter (--shrink) and written as a test (--test).

Exit status: 0 where all is as on record, 1 where something differs or fails, 2 where the
trace cannot be read or there is nothing to cut down."""
_EXAMPLES = """\
examples:
  oxidize-jax replay run.jsonl
  oxidize-jax replay run.jsonl --model smollm2-135m-instruct
  oxidize-jax replay run.jsonl --shrink small.jsonl --test test_small.py"""
_DIFFERS = 1
_BUILD = ("dtype", "kv_cache_dtype", "attention")
"""How a model is built, as the recorder was told and as the options are called."""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "replay",
        help="make a recorded run again, and cut down one that goes wrong",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("trace", type=filled, metavar="TRACE", help="the file, JSON lines")
    parser.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not check the state after every step (faster)",
    )
    model = parser.add_argument_group("with the model")
    model.add_argument(
        "--model",
        type=filled,
        metavar="MODEL",
        help="run this model too: a built-in name, a .gguf file, a Hugging Face folder or repo id",
    )
    same = "default: as in the trace"
    model.add_argument("--dtype", choices=DTYPES, help=f"of the weights ({same})")
    model.add_argument("--kv-cache-dtype", choices=KV_DTYPES, help=f"of the KV cache ({same})")
    model.add_argument("--attention", metavar="NAME", help=f"attention backend ({same})")
    small = parser.add_argument_group("cutting down")
    small.add_argument(
        "--shrink", type=filled, metavar="OUT", help="write the smallest trace that fails as well"
    )
    small.add_argument("--test", type=filled, metavar="OUT", help="write it as a pytest test")


def run(args: argparse.Namespace) -> int:
    """Replay and print. Raises UsageError where there is nothing to cut down."""
    cut_down = args.shrink or args.test
    if cut_down and args.model:
        raise UsageError("--model: a trace is cut down without the model; leave one of them out.")
    if cut_down and not args.check:
        raise UsageError("--no-check: what fails is found by the checks; leave it out.")
    if args.model is None and (given := [n for n in _BUILD if getattr(args, n) is not None]):
        option = given[0].replace("_", "-")
        raise UsageError(
            f"--{option}: no model is built without --model; add it, or leave this out."
        )
    for option in ("shrink", "test"):
        _check_output(option, getattr(args, option))
    from oxidize_jax.engine.tracefile import read_trace

    trace = read_trace(args.trace)
    _print_trace(trace)
    start_backend()
    from oxidize_jax.compile_cache import enable_compile_cache

    enable_compile_cache()
    if args.model is not None:
        return _report(_with_model(trace, args))
    error = _without_model(trace, check=args.check)
    if cut_down:
        _cut_down(trace, error, args)
    return 0 if error is None else _DIFFERS


def _check_output(option: str, given: str | None) -> None:
    """Refuse a file that cannot be written before the work for it is done."""
    if given is None:
        return
    path = Path(given).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--{option}: {given!r}: give a file in a folder that exists.")


def _print_trace(trace: Trace) -> None:
    where = f"jax {trace.jax_version} on {trace.backend}" if trace.backend else "no engine's own"
    events = f"{len(trace.events)} events, {trace.num_requests} requests"
    print(f"trace     {events}; {where}; model {trace.model.get('name', 'not named')}")
    if trace.torn:
        print("          the last line is torn and left out: the process ended there")
    if last := _unfinished(trace):
        print(f"          {last} has no outcome: it failed, or the process ended in it")


def _unfinished(trace: Trace) -> str | None:
    """The first run of a recorded trace that came to nothing."""
    from oxidize_jax.engine.replay import describe
    from oxidize_jax.engine.trace import Run

    recorded = any(isinstance(event, Run) and event.outcome for event in trace.events)
    for index, event in enumerate(trace.events):
        if recorded and isinstance(event, Run) and event.outcome is None:
            return describe(event, index)
    return None


def _without_model(trace: Trace, *, check: bool) -> Exception | Replay | None:
    """The fault or the difference of a replay, printed; None where there is none."""
    from oxidize_jax.engine.replay import TraceError, replay_scheduler

    try:
        with _bar(trace) as progress:
            result = replay_scheduler(trace, check=check, progress=progress)
    except TraceError:
        raise
    except Exception as error:
        print(f"fault     {_words(error)}")
        return error
    return result if _report(result) else None


def _words(error: Exception) -> str:
    """The error and where it happened, in one line."""
    where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}{where}"


def _with_model(trace: Trace, args: argparse.Namespace) -> Replay:
    import jax.numpy as jnp

    from oxidize_jax.checkpoints.load import load_checkpoint
    from oxidize_jax.checkpoints.resolve import resolve_model
    from oxidize_jax.engine.replay import replay
    from oxidize_jax.model.functional import build
    from oxidize_jax.options import Options, cache_dtype, weight_dtype

    chosen: dict[str, Any] = {name: trace.model[name] for name in _BUILD if name in trace.model}
    chosen |= {name: value for name in _BUILD if (value := getattr(args, name)) is not None}
    options = Options(model=args.model, **chosen)
    status = Status()
    announce_fetch(args.model, status)
    checkpoint = load_checkpoint(
        resolve_model(args.model).path, jnp.dtype(weight_dtype(options)), progress=status.watched
    )
    decoder, params = build(
        checkpoint.config,
        checkpoint.params,
        attention=options.attention,
        kv_dtype=cache_dtype(options),
    )
    with _bar(trace) as progress:
        return replay(trace, decoder, params, progress=progress)


@contextlib.contextmanager
def _bar(trace: Trace) -> Iterator[Progress]:
    """A bar over the events of a trace; the block gets what to call after each."""
    from oxidize_jax.progress import progress_bar

    with progress_bar(len(trace.events), shown=True, unit="event", label="replay") as bar:
        yield lambda event: bar.update()


def _report(result: Replay) -> int:
    """Print what a replay came to, and return the exit status."""
    from oxidize_jax.engine.replay import MODEL_LEAVES

    print(
        f"replayed  {result.num_events} events, {result.num_runs} runs, {result.num_steps} steps, "
        f"{result.num_tokens} tokens"
    )
    if result.difference is not None:
        print(f"differs   {result.difference.what}")
        if result.difference.leaves and set(result.difference.leaves) <= set(MODEL_LEAVES):
            print("          in logprobs alone: another processor or dtype rounds them otherwise")
        return _DIFFERS
    compared, runs = result.num_compared, result.num_runs
    if compared == 0:
        print("no fault  and no outcome on record to compare with")
    elif compared < runs:
        print(f"identical in the {compared} of {runs} runs whose outcome is on record")
    else:
        print("identical")
    return 0


def _cut_down(trace: Trace, error: Exception | Replay | None, args: argparse.Namespace) -> None:
    from oxidize_jax.engine.shrink import fails_like, shrink, to_test
    from oxidize_jax.engine.tracefile import write_trace

    if not isinstance(error, Exception):
        option = "--shrink" if args.shrink else "--test"
        what = (
            "differs, but no step of it fails" if error is not None else "replays without a fault"
        )
        raise UsageError(f"{option}: the trace {what}: there is nothing to cut down.")
    status = Status()
    status.show("cutting down ...")
    small = shrink(
        trace,
        fails_like(error),
        progress=lambda best: status.show(f"cutting down ... {len(best.events)} events left"),
    )
    status.clear()
    print(f"cut down  to {len(small.events)} events, {small.num_requests} requests")
    if args.shrink:
        write_trace(args.shrink, small)
        print(f"trace     {args.shrink}")
    if args.test:
        Path(args.test).expanduser().write_text(to_test(small), encoding="utf-8")
        print(f"test      {args.test}")
