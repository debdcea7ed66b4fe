"""The command ``oxidize-jax``: a thin shell round :class:`~oxidize_jax.llm.LLM`.

Text goes to standard output and everything else to standard error, so that the output can
be piped. Nothing here imports jax before the arguments are known to be good.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from oxidize_jax.cli import bench, generate, models, replay, save, score, serve
from oxidize_jax.cli.backend import start_backend
from oxidize_jax.cli.interrupt import INTERRUPTED, end_line, interruptible
from oxidize_jax.cli.parser import Parser, parse

FAILED_RUN = 1
BAD_INPUT = 2
BROKEN_PIPE = 141
"""As a shell reports a process that ended on SIGPIPE."""

_LESS_MEMORY = (
    "a smaller --max-model-len, --max-num-seqs, --num-blocks or --kv-cache-gib takes less memory"
)
_COMMANDS = (generate, serve, score, models, save, replay, bench)
_EXAMPLES = """\
examples:
  oxidize-jax generate "What is the capital of France?"
  echo "Name three seas." | oxidize-jax generate
  oxidize-jax generate --file prompts.txt --json > answers.jsonl
  oxidize-jax serve                      an OpenAI-compatible server
  oxidize-jax score --file book.txt      log probability and perplexity of a text
  oxidize-jax models                     what can be run, and what is here already
  oxidize-jax models some/model.gguf     what is in a file, and how much memory it takes
  oxidize-jax save MODEL FOLDER          keep a model as it is in memory, to start quickly
  oxidize-jax replay run.jsonl           make a recorded run again, without its model
  oxidize-jax bench throughput           how fast it runs on this machine

Text goes to standard output, all else to standard error. OXIDIZE_JAX_TRACEBACK=1 shows
where an error comes from."""


def run_process() -> NoReturn:
    """Run the command as the whole of this process, and end it.

    After Ctrl-C the interpreter is not shut down: that waits for XLA's threads, which may
    compile on for a minute, and they crash once what they use is gone.
    """
    status = main()
    if status == INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0; 1 for a run that failed; 2 for arguments, prompts or a model that cannot be used; 130
    after Ctrl-C; 141 if the reader of the output went away. Errors are one line on standard
    error, with the traceback before it if ``OXIDIZE_JAX_TRACEBACK=1``. A programming error
    keeps its traceback, and ``--help`` raises SystemExit as argparse does.
    """
    # XLA writes machine details and slow compilations to stderr as errors ("3" hides these);
    # what is wrong with a run comes as an exception all the same. Read when jax is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    _open_closed_streams()
    # A console that lacks a character of the text shows a question mark and not an error.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        with interruptible():
            status = _run(argv)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        end_line()
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return BROKEN_PIPE
    except (ValueError, ImportError, OSError) as error:
        return _report(error, BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        return _report(error, FAILED_RUN)


def _open_closed_streams() -> None:
    """Connect streams that the shell has closed (``>&-``), None in Python, to nowhere.

    In the order of their numbers, which are also the next free ones: no file or socket that
    is opened later takes the place of one, to be written to by a library in C.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parse(parser, argv)
    if args.version:
        return _print_version()
    if args.command is None:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    return args.run(args)


def _parser() -> Parser:
    parser = Parser(
        prog="oxidize-jax",
        description="Run a large language model with JAX, on a CPU, GPU or TPU.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--version", action="store_true", help="print the versions and the device, and exit"
    )
    commands = parser.add_subparsers(
        dest="command",
        metavar="COMMAND",
        title="commands",
        description="`oxidize-jax COMMAND --help` says more.",
    )
    for command in _COMMANDS:
        command.add_parsers(commands)
    return parser


def _print_version() -> int:
    import jax

    from oxidize_jax import __version__

    devices = start_backend()
    print(f"oxidize-jax {__version__}")
    print(f"jax {jax.__version__}")
    kind, platform = devices[0].device_kind, devices[0].platform
    print(f"device {len(devices)} x {kind}" + (f" ({platform})" if platform != kind else ""))
    return 0


def _report(error: BaseException, status: int) -> int:
    """Say in one line what went wrong."""
    if os.environ.get("OXIDIZE_JAX_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    print(f"oxidize-jax: error: {_one_line(error)}", file=sys.stderr)
    return status


def _one_line(error: BaseException) -> str:
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    message = " ".join(message.split()) or type(error).__name__
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in message:
        message += f" ({_LESS_MEMORY})"
    return message


def _abandon_stdout() -> None:
    """Nobody reads it any more: let the interpreter's last flush go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
