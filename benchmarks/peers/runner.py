"""What all runners share: arguments, the dialogue with compare.py, and the clock.

A runner lives in its engine's own environment, so this module needs the standard library
alone. It loads once and runs once to warm up, then waits:

    runner        {"event": "ready", "load_seconds": ..., "warm_up_seconds": ...}
    compare.py    go
    runner        {"event": "result", "seconds": ..., "output_tokens": ...}
    compare.py    quit, or the end of the stream

Each message is one line of JSON on the real standard output; whatever an engine prints there
goes to standard error instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

Prompt = list[int]
"""Token ids."""


class Peer(Protocol):
    """An engine that has loaded its model. Every request is greedy and ignores end-of-sequence."""

    def generate(self, requests: list[tuple[Prompt, int]]) -> list[int]:
        """Run all of ``(prompt, number of tokens)`` at once; the tokens that came of each."""
        ...

    def arrivals(self, prompt: Prompt, count: int) -> list[float]:
        """Run one request alone; ``time.perf_counter()`` as each token is there to be read."""
        ...


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--mode", choices=("throughput", "latency", "start"), required=True)
    parser.add_argument("--model", required=True, help="file or folder")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=64, help="sequences at the same time")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--cpus", type=int, default=len(cpus()), help="threads to use")
    return parser.parse_args()


def cpus() -> list[int]:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def serve(args: argparse.Namespace, load: Any) -> None:
    """Load the peer with ``load()`` and answer compare.py until it is done."""
    out = _take_stdout()
    requests = _read(args.workload)
    start = time.perf_counter()
    peer: Peer = load()
    loaded = time.perf_counter()
    if args.mode == "start":
        (prompt, _) = requests[0]
        first = peer.arrivals(prompt, 2)[0]
        _say(out, event="first_token", load_seconds=loaded - start, first_seconds=first - loaded)
        return
    turn = _throughput if args.mode == "throughput" else _latency
    turn(peer, requests)
    _say(
        out,
        event="ready",
        load_seconds=loaded - start,
        warm_up_seconds=time.perf_counter() - loaded,
    )
    for line in sys.stdin:
        if line.strip() != "go":
            return
        _say(out, event="result", **turn(peer, requests))


def _throughput(peer: Peer, requests: list[tuple[Prompt, int]]) -> dict[str, Any]:
    start = time.perf_counter()
    counts = peer.generate(requests)
    seconds = time.perf_counter() - start
    for index, (count, (_, wanted)) in enumerate(zip(counts, requests, strict=True)):
        if count != wanted:
            raise RuntimeError(f"request {index} gave {count} of {wanted} tokens")
    return {"seconds": seconds, "output_tokens": sum(counts)}


def _latency(peer: Peer, requests: list[tuple[Prompt, int]]) -> dict[str, Any]:
    """Each request by itself, one after another."""
    first, gaps, begin = [], [], time.perf_counter()
    for prompt, count in requests:
        start = time.perf_counter()
        times = peer.arrivals(prompt, count)
        if len(times) != count:
            raise RuntimeError(f"{len(times)} of {count} tokens came")
        first.append(times[0] - start)
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return {
        "seconds": time.perf_counter() - begin,
        "output_tokens": sum(count for _, count in requests),
        "first_token_seconds": first,
        "gap_seconds": gaps,
    }


def _read(path: Path) -> list[tuple[Prompt, int]]:
    entries = json.loads(path.read_text())
    return [(entry["prompt_token_ids"], entry["max_tokens"]) for entry in entries]


def _take_stdout() -> TextIO:
    """The real standard output; file descriptor 1 becomes standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, **message: Any) -> None:
    print(json.dumps(message), file=out, flush=True)
