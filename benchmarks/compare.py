"""oxidize_jax beside other engines, in one run on one machine.

    python benchmarks/compare.py throughput --rounds 3 --json out.json \\
        --peer vllm:/path/to/venv/bin/python \\
        --peer llama.cpp:/path/to/venv/bin/python:/path/to/model.gguf \\
        --peer transformers:/path/to/venv/bin/python

Every engine is a process in its own environment (`benchmarks/peers/`). It loads once and runs
once to warm up; then the engines take turns, round after round, so that what the machine does
meanwhile meets all of them. All others are stopped (SIGSTOP) while one computes.

* throughput: a workload at once; output tokens per second.
* latency: one request alone; seconds to its first token and from each token to the next.
* start: from the start of a process to its first token, with empty caches of compiled
  programs (cold) and with those that the first start left (warm). The files of the model and
  of Python are in the system's memory in either.

A peer is NAME[@DTYPE]:PYTHON[:MODEL]. Where no model is given, vllm and transformers run
--model as a Hugging Face folder in float32, which is made with `make_hf_folder.py` if need
be; llama.cpp runs --model itself if it is a GGUF file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oxidize_jax.bench import environment
from oxidize_jax.bench.workload import Item, random_workload, read_workload, write_workload
from oxidize_jax.checkpoints.resolve import resolve_model

PEERS = Path(__file__).parent / "peers"
OURS = "oxidize_jax"
RUNNERS = {
    OURS: "oxidize_jax_runner.py",
    "vllm": "vllm_cpu_runner.py",
    "llama.cpp": "llama_cpp_runner.py",
    "transformers": "transformers_runner.py",
}
NEED_FOLDER = ("vllm", "transformers")


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine to run, as it was named on the command line."""

    name: str
    dtype: str
    python: str
    model: str

    @property
    def label(self) -> str:
        kind = self.dtype
        if self.name == "llama.cpp":
            # As it is in the file: its name ends so by custom.
            kind = Path(self.model).stem.rpartition(".")[2].rpartition("-")[2]
        return f"{self.name} {kind}"

    def command(self, mode: str, workload: Path, sizes: dict[str, int]) -> list[str]:
        command = [self.python, str(PEERS / RUNNERS[self.name]), "--mode", mode]
        command += ["--model", self.model, "--dtype", self.dtype, "--workload", str(workload)]
        for name, value in sizes.items():
            command += [f"--{name}", str(value)]
        return command


def main() -> int:
    args = arguments()
    engines = engines_of(args)
    items = workload_of(args)
    longest = max(item.num_tokens for item in items)
    # Room for engines whose last token needs a place of its own.
    sizes = {"rows": args.rows, "max-model-len": args.max_model_len or longest + 16}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        write_workload(file, items)
        if args.mode == "start":
            results = starts(engines, file, sizes, args.rounds, Path(folder))
        else:
            results = rounds(engines, args.mode, file, sizes, args.rounds, Path(folder))
    summary = {"throughput": throughput, "latency": latency, "start": start}[args.mode]
    rows = [summary(label, results[label], results[engines[0].label]) for label in results]
    print_table(rows)
    if args.json:
        text = json.dumps(
            {
                "mode": args.mode,
                "environment": environment.describe(),
                "engines": [dataclasses.asdict(engine) for engine in engines],
                "sizes": sizes,
                "requests": len(items),
                "results": results,
                "summary": rows,
            },
            indent=2,
        )
        args.json.write_text(text + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("throughput", "latency", "start"))
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME[@DTYPE]:PYTHON[:MODEL]"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="of all engines that are not @DTYPE")
    parser.add_argument("--ours", action="append", default=[], metavar="DTYPE",
                        help="run oxidize_jax with these instead of --dtype; the first is what "
                        "others are compared with")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="sequences at the same time (64; latency: 1)")
    parser.add_argument("--max-model-len", type=int, help="default: what the workload needs")
    parser.add_argument("--workload", type=Path, help="JSON; default: 64 random requests")
    parser.add_argument("--num-prompts", type=int, help="only so many of the workload")
    parser.add_argument("--input-len", type=int, default=512, help="latency: tokens of the prompt")
    parser.add_argument("--output-len", type=int, default=64, help="latency: tokens to generate")
    parser.add_argument("--hf-folder", type=Path, help="where the folder is, or is made")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rows is None:
        args.rows = 64 if args.mode == "throughput" else 1
    return args


def engines_of(args: argparse.Namespace) -> list[Engine]:
    """Ours first, then the peers in their order."""
    model = str(resolve_model(args.model).path)
    engines = [Engine(OURS, dtype, sys.executable, model) for dtype in args.ours or [args.dtype]]
    for given in args.peer:
        name, _, rest = given.partition(":")
        name, _, dtype = name.partition("@")
        python, _, own_model = rest.partition(":")
        if name not in RUNNERS or not python:
            raise SystemExit(
                f"--peer {given!r}: must be NAME[@DTYPE]:PYTHON[:MODEL] with a NAME of "
                f"{', '.join(RUNNERS)}"
            )
        if not own_model:
            own_model = hf_folder(args, model) if name in NEED_FOLDER else model
        engines.append(Engine(name, dtype or args.dtype, python, own_model))
    labels = [engine.label for engine in engines]
    if len(set(labels)) < len(labels):
        raise SystemExit(f"two engines are called alike: {', '.join(labels)}")
    return engines


def hf_folder(args: argparse.Namespace, model: str) -> str:
    """The folder that has the model for engines that read no GGUF, made where it is missing."""
    if Path(model).is_dir():
        return model
    folder = args.hf_folder or Path("~/.cache/oxidize_jax/hf").expanduser() / Path(model).stem
    if not (folder / "config.json").exists():
        sys.path.insert(0, str(PEERS))
        import make_hf_folder

        make_hf_folder.make(model, folder)
    return str(folder)


def workload_of(args: argparse.Namespace) -> Sequence[Item]:
    if args.workload is not None:
        items = read_workload(args.workload)
    elif args.mode == "throughput":
        items = random_workload()
    else:
        items = random_workload(1, (args.input_len,) * 2, (args.output_len,) * 2)
    return items[: args.num_prompts]


def rounds(
    engines: Sequence[Engine],
    mode: str,
    workload: Path,
    sizes: dict[str, int],
    count: int,
    folder: Path,
) -> dict[str, list[dict[str, Any]]]:
    """Results of each engine by label, one a round."""
    results: dict[str, list[dict[str, Any]]] = {engine.label: [] for engine in engines}
    with contextlib.ExitStack() as stack:
        processes = []
        for number, engine in enumerate(engines):
            note(f"loading {engine.label}")
            command = engine.command(mode, workload, sizes)
            process = stack.enter_context(Process(engine.label, command, folder / f"{number}.log"))
            ready = process.read("ready")
            process.stop()
            note(
                f"{engine.label}: loaded in {ready['load_seconds']:.1f} s, first run "
                f"{ready['warm_up_seconds']:.1f} s"
            )
            processes.append(process)
        for turn in range(count):
            # Each round the other way round: what changes steadily meets all alike.
            for process in processes if turn % 2 == 0 else processes[::-1]:
                for other in processes:
                    other.stop()  # again: whoever tends this machine may have let it go on
                with process.going():
                    process.write("go")
                    result = process.read("result")
                results[process.label].append(result)
                note(f"round {turn + 1} of {count}: {process.label} {result['seconds']:.2f} s")
    return results


def starts(
    engines: Sequence[Engine], workload: Path, sizes: dict[str, int], count: int, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Seconds of a cold and a warm start of each engine by label, one pair a round."""
    results: dict[str, list[dict[str, Any]]] = {engine.label: [] for engine in engines}
    for turn in range(count):
        for number, engine in enumerate(engines):
            caches = folder / f"caches{turn}-{number}"
            result = {}
            for kind in ("cold", "warm"):
                begin = time.perf_counter()
                command = engine.command("start", workload, sizes)
                log = folder / f"{number}.log"
                with Process(engine.label, command, log, caches=caches) as process:
                    process.read("first_token")
                    result[kind] = time.perf_counter() - begin
                note(f"round {turn + 1} of {count}: {engine.label} {kind} {result[kind]:.1f} s")
            results[engine.label].append(result)
    return results


class Process:
    """A runner, with the processes that it starts, in a session of its own."""

    def __init__(
        self, label: str, command: list[str], log: Path, *, caches: Path | None = None
    ) -> None:
        self.label = label
        self._log = log
        self._errors = open(log, "w", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env=own_caches(caches) if caches else None,
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def read(self, event: str) -> dict[str, Any]:
        """The next message. Ends the comparison with the runner's last words if it is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"{last}\n\n{self.label} ended with status {status}; see above")
        message: dict[str, Any] = json.loads(line)
        if message.pop("event") != event:
            raise SystemExit(f"{self.label} said {line!r} where {event!r} was due")
        return message

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.stop()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def own_caches(folder: Path) -> dict[str, str]:
    """An environment in which compiled programs are kept in ``folder``."""
    folder.mkdir(exist_ok=True)
    own = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    own.pop("JAX_COMPILATION_CACHE_DIR", None)
    for name in ("OXIDIZE_JAX_CACHE", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        own[name] = str(folder / name.lower())
    return own


def throughput(label: str, runs: Sequence[dict], ours: Sequence[dict]) -> dict[str, str]:
    rates = [run["output_tokens"] / run["seconds"] for run in runs]
    ratios = [other["seconds"] / run["seconds"] for other, run in zip(runs, ours, strict=True)]
    return {
        "engine": label,
        "output tok/s": f"{statistics.median(rates):.1f}",
        "from - to": f"{min(rates):.1f} - {max(rates):.1f}",
        "ours / it": f"{statistics.median(ratios):.2f}",
    }


def latency(label: str, runs: Sequence[dict], ours: Sequence[dict]) -> dict[str, str]:
    first, gap = first_and_gap(runs)
    our_first, our_gap = first_and_gap(ours)
    return {
        "engine": label,
        "first token ms": f"{1e3 * statistics.median(first):.1f}",
        "per token ms": f"{1e3 * statistics.median(gap):.2f}",
        "its / our first": f"{statistics.median(map(ratio, first, our_first)):.2f}",
        "its / our per token": f"{statistics.median(map(ratio, gap, our_gap)):.2f}",
    }


def first_and_gap(runs: Sequence[dict]) -> tuple[list[float], list[float]]:
    """Medians of each round, in seconds."""
    first = [statistics.median(run["first_token_seconds"]) for run in runs]
    gap = [statistics.median(run["gap_seconds"]) for run in runs]
    return first, gap


def start(label: str, runs: Sequence[dict], ours: Sequence[dict]) -> dict[str, str]:
    row = {"engine": label}
    for kind in ("cold", "warm"):
        row[f"{kind} s"] = f"{statistics.median(run[kind] for run in runs):.1f}"
        ratios = [it[kind] / we[kind] for it, we in zip(runs, ours, strict=True)]
        row[f"its / our {kind}"] = f"{statistics.median(ratios):.2f}"
    return row


def ratio(one: float, other: float) -> float:
    return one / other


def print_table(rows: Sequence[dict[str, str]]) -> None:
    """As Markdown, for README.md."""
    names = list(rows[0])
    print(f"| {' | '.join(names)} |")
    print(f"|{'---|' * len(names)}")
    for row in rows:
        print(f"| {' | '.join(row[name] for name in names)} |")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
