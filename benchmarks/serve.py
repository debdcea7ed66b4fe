"""OpenAI servers under load: ours, and any other that is given by its address.

    python benchmarks/serve.py throughput --rounds 3
    python benchmarks/serve.py poisson --rates 0.5 1 2 --peer vllm=http://127.0.0.1:8001
    python benchmarks/serve.py overlap \\
        --serve 'decode_first=--policy decode_first --max-num-batched-tokens 48' \\
        --serve 'prefill_first='

The client is the same for all: streams of ``/v1/completions`` with random token ids as prompts,
greedy, to a fixed length. It is a process beside the servers, on the same processors.

* throughput: a workload at once, by the server, streamed and whole, and by the engine without a
  server (`peers/oxidize_jax_runner.py`), in turns: output tokens per second.
* poisson: requests at random moments, at rising rates; the servers take turns at each rate. Time
  to the first token, and between two chunks of a stream.
* overlap: a long prompt arrives while short ones stream: the largest gap between two chunks of a
  stream meanwhile, beside the median gap before.

A server of ours is started for each `--serve NAME=OPTIONS` with these options of
`oxidize-jax serve` (default: one), and stopped (SIGSTOP) while another has its turn. One that
runs already is `--url URL`, or another engine's `--peer NAME=URL`; it should be idle otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from compare import PEERS, Process, note, print_table

from oxidize_jax.bench import environment
from oxidize_jax.bench.workload import Item, random_workload, read_workload, write_workload
from oxidize_jax.checkpoints.resolve import resolve_model

OURS = "oxidize_jax"


@dataclasses.dataclass
class Server:
    """A server to be measured. ``process`` is ours to stop and to end."""

    name: str
    url: str
    model: str = ""
    process: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Its turn: it runs, which at other times it does not."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)


@dataclasses.dataclass
class Reply:
    """What came of a request, in seconds of one clock."""

    sent: float
    chunks: list[float] = dataclasses.field(default_factory=list)
    """When text came; the first is the first token."""
    ended: float = 0.0
    tokens: int = 0

    @property
    def first(self) -> float:
        """From sending to the first text."""
        return (self.chunks[0] if self.chunks else self.ended) - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between two chunks, one after the other."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


def main() -> int:
    args = arguments()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(started(name, options, args, folder))
                   for name, options in ours(args)]  # fmt: skip
        servers += [Server(*given.partition("=")[::2]) for given in args.peer]
        if args.url:
            servers.append(Server("url", args.url))
        for server in servers:
            with server.going():
                models = httpx.get(f"{server.url}/v1/models", timeout=60).json()
            server.model = models["data"][0]["id"]
        measure = {"throughput": throughput, "poisson": poisson, "overlap": overlap}[args.mode]
        rows, results = measure(args, servers, stack, folder)
    print_table(rows)
    if args.json:
        record = {
            "mode": args.mode,
            "command": sys.argv[1:],
            "environment": environment.describe(),
            "summary": rows,
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("throughput", "poisson", "overlap"))
    parser.add_argument("--serve", action="append", default=[], metavar="NAME=OPTIONS")
    parser.add_argument("--url", help="a server that runs; none of ours is started unless asked")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=64, help="sequences at the same time")
    parser.add_argument("--max-model-len", type=int, help="default: what the requests need")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every reply to it")
    parser.add_argument("--workload", type=Path, help="throughput: JSON (64 random requests)")
    parser.add_argument("--num-prompts", type=int, help="throughput: only so many of them")
    parser.add_argument("--rounds", type=int, default=3, help="throughput, overlap")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 2], metavar="X",
                        help="poisson: requests a second")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=30, help="poisson: of each rate")
    parser.add_argument("--input-len", type=int, nargs=2, default=(32, 256), metavar="N",
                        help="poisson: least and most prompt tokens")  # fmt: skip
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 128), metavar="N",
                        help="poisson: least and most tokens to generate")  # fmt: skip
    parser.add_argument("--streams", type=int, default=16, help="overlap: that decode")
    parser.add_argument("--stream-len", type=int, default=320, help="overlap: tokens of each")
    parser.add_argument("--long-len", type=int, default=2000, help="overlap: of the long prompt")
    args = parser.parse_args()
    args.items = workload(args)
    if args.max_model_len is None:
        args.max_model_len = {
            "throughput": max(item.num_tokens for item in args.items) + 16,
            "poisson": args.input_len[1] + args.output_len[1] + 16,
            "overlap": max(args.long_len, args.stream_len) + 64,
        }[args.mode]
    return args


def workload(args: argparse.Namespace) -> Sequence[Item]:
    items = random_workload() if args.workload is None else read_workload(args.workload)
    return items[: args.num_prompts]


def ours(args: argparse.Namespace) -> list[tuple[str, str]]:
    if not args.serve:
        return [] if args.url else [(OURS, "")]
    return [given.partition("=")[::2] for given in args.serve]


@contextlib.contextmanager
def started(name: str, options: str, args: argparse.Namespace, folder: Path) -> Iterator[Server]:
    """A server of ours on a free port, until the end."""
    command = [sys.executable, "-m", "oxidize_jax", "serve", args.model, "--port", "0"]
    command += ["--dtype", args.dtype, "--max-num-seqs", str(args.rows), "--no-prefix-caching"]
    command += ["--max-model-len", str(args.max_model_len), "--max-logprobs", "0"]
    command += ["--max-queue", "4096", *shlex.split(options)]
    log = folder / f"{name}.log"
    note(f"starting {name}: {shlex.join(command[3:])}")
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stderr=errors, text=True)
    try:
        url = None
        while url is None:
            if process.poll() is not None:
                raise SystemExit(f"{log.read_text()}\n{name} ended with {process.returncode}")
            time.sleep(0.2)
            url = re.search(r"serving .* at (http://\S+)", log.read_text(errors="replace"))
        # It listens a moment later.
        server = Server(name, url.group(1), process=process)
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{server.url}/health", timeout=60)
        server._signal(signal.SIGSTOP)
        yield server
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ask(
    http: httpx.AsyncClient,
    server: Server,
    item: Item,
    *,
    stream: bool = True,
    reply: Reply | None = None,
) -> Reply:
    """One request, from now to its end; ``reply`` is filled as it comes."""
    body = {
        "model": server.model,
        "prompt": list(item.prompt_token_ids),
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    url = f"{server.url}/v1/completions"
    reply = reply or Reply(0.0)
    reply.sent = time.perf_counter()
    if not stream:
        answer = await http.post(url, json=body)
        answer.raise_for_status()
        reply.tokens = answer.json()["usage"]["completion_tokens"]
    else:
        body["stream_options"] = {"include_usage": True}
        async with http.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _take(json.loads(line[6:]), reply)
    reply.ended = time.perf_counter()
    if reply.tokens != item.max_tokens:
        raise SystemExit(f"{server.name} gave {reply.tokens} tokens for {item.max_tokens}")
    return reply


def _take(chunk: dict[str, Any], reply: Reply) -> None:
    if any(choice.get("text") for choice in chunk["choices"]):
        reply.chunks.append(time.perf_counter())
    if chunk.get("usage"):
        reply.tokens = chunk["usage"]["completion_tokens"]


def run(server: Server, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """``work`` with a client of its own, while it is ``server``'s turn."""

    async def with_client() -> Any:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as http:
            return await work(http)

    with server.going():
        return asyncio.run(with_client())


async def at_moments(
    http: httpx.AsyncClient,
    server: Server,
    moments: Sequence[float],
    items: Sequence[Item],
    *,
    stream: bool = True,
) -> list[Reply]:
    """Each request at its moment, in seconds from now."""

    async def one(moment: float, item: Item) -> Reply:
        await asyncio.sleep(moment)
        return await ask(http, server, item, stream=stream)

    return await asyncio.gather(*map(one, moments, items))


def throughput(
    args: argparse.Namespace,
    servers: Sequence[Server],
    stack: contextlib.ExitStack,
    folder: Path,
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The whole workload at once."""
    items, file = args.items, folder / "workload.json"
    write_workload(file, items)
    command = [sys.executable, str(PEERS / "oxidize_jax_runner.py"), "--mode", "throughput"]
    command += ["--model", str(resolve_model(args.model).path), "--dtype", args.dtype]
    command += ["--workload", str(file), "--rows", str(args.rows)]
    command += ["--max-model-len", str(args.max_model_len)]
    engine = stack.enter_context(Process("engine", command, folder / "engine.log"))
    engine.read("ready")
    engine.stop()

    def offline() -> float:
        with engine.going():
            engine.write("go")
            return float(engine.read("result")["seconds"])

    def online(server: Server, stream: bool) -> float:
        now = [0.0] * len(items)
        replies = run(
            server, partial(at_moments, server=server, moments=now, items=items, stream=stream)
        )
        return max(r.ended for r in replies) - min(r.sent for r in replies)

    turns: dict[str, Callable[[], float]] = {"the engine alone": offline}
    for server in servers:
        online(server, True)  # to warm up
        turns[f"{server.name}, streamed"] = partial(online, server, True)
        turns[f"{server.name}, whole"] = partial(online, server, False)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(args.rounds):
        for name in list(turns) if turn % 2 == 0 else list(turns)[::-1]:
            seconds[name].append(turns[name]())
            note(f"round {turn + 1} of {args.rounds}: {name} {seconds[name][-1]:.2f} s")
    total = sum(item.max_tokens for item in items)
    rows = []
    for name, times in seconds.items():
        shares = [a / b for a, b in zip(seconds["the engine alone"], times, strict=True)]
        rates = sorted(total / t for t in times)
        rows.append(
            {
                "who": name,
                "output tok/s": f"{statistics.median(rates):.1f}",
                "from - to": f"{rates[0]:.1f} - {rates[-1]:.1f}",
                "of the engine's": f"{statistics.median(shares):.1%}",
            }
        )
    return rows, {"output_tokens": total, "seconds": seconds}


def poisson(
    args: argparse.Namespace, servers: Sequence[Server], *_: Any
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Requests that come by chance, the same for all."""
    warm = random_workload(8, args.input_len, (8, 8), seed=1)
    for server in servers:
        run(server, partial(at_moments, server=server, moments=[0.0] * len(warm), items=warm))
    rows, results = [], []
    for rate in args.rates:
        moments = arrivals(rate, args.seconds)
        items = random_workload(len(moments), args.input_len, args.output_len, seed=2)
        for server in servers:
            replies = run(server, partial(at_moments, server=server, moments=moments, items=items))
            rows.append(_row(server.name, rate, replies))
            note(" ".join(f"{name} {value};" for name, value in rows[-1].items()))
            results.append(
                {
                    "server": server.name,
                    "rate": rate,
                    "replies": [dataclasses.asdict(reply) for reply in replies],
                }
            )
    return rows, {"turns": results}


def arrivals(rate: float, seconds: float) -> list[float]:
    """Moments of a Poisson process, the same for all."""
    rng = random.Random(0)
    moments = [rng.expovariate(rate)]
    while moments[-1] < seconds:
        moments.append(moments[-1] + rng.expovariate(rate))
    return moments[:-1] or moments


def _row(name: str, rate: float, replies: Sequence[Reply]) -> dict[str, str]:
    took = max(r.ended for r in replies) - min(r.sent for r in replies)
    return {
        "requests/s": f"{rate:g}",
        "server": name,
        "requests": str(len(replies)),
        "output tok/s": f"{sum(r.tokens for r in replies) / took:.0f}",
        "first token ms p50 / p90 / p99": _percentiles([r.first for r in replies]),
        "between ms p50 / p90 / p99": _percentiles([gap for r in replies for gap in r.gaps]),
    }


def _percentiles(seconds: Sequence[float]) -> str:
    ranked = sorted(seconds)
    shown = (ranked[min(len(ranked) - 1, int(len(ranked) * p))] for p in (0.5, 0.9, 0.99))
    return " / ".join(f"{1e3 * value:,.0f}" for value in shown)


def overlap(
    args: argparse.Namespace, servers: Sequence[Server], *_: Any
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """A long prompt among streams."""
    short = random_workload(args.streams, (32, 32), (args.stream_len,) * 2, seed=3)
    results: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for turn in range(args.rounds + 1):
        (long,) = random_workload(1, (args.long_len,) * 2, (8, 8), seed=4 + turn)
        for server in servers if turn % 2 == 0 else servers[::-1]:
            got = run(server, partial(_overlap, server=server, short=short, long=long))
            if turn:  # the first warms up
                results[server.name].append(got)
                note(f"{server.name}: " + ", ".join(f"{k} {v:.3f}" for k, v in got.items()))
    rows = []
    for name, runs in results.items():

        def middle(key: str, runs: Sequence[dict[str, float]] = runs) -> float:
            return statistics.median(run[key] for run in runs)

        rows.append(
            {
                "server": name,
                "gap before ms": f"{1e3 * middle('before'):.0f}",
                "meanwhile ms": f"{1e3 * middle('meanwhile'):.0f}",
                "largest ms": f"{1e3 * middle('largest'):.0f}",
                "largest / before": f"{middle('ratio'):.1f}",
                "largest / meanwhile": f"{middle('ratio meanwhile'):.1f}",
                "first token of the long prompt s": f"{middle('first'):.2f}",
                "streams ended by then": f"{middle('ended'):.0f}",
            }
        )
    return rows, results


async def _overlap(
    http: httpx.AsyncClient, server: Server, short: Sequence[Item], long: Item
) -> dict[str, float]:
    replies = [Reply(0.0) for _ in short]
    tasks = [
        asyncio.create_task(ask(http, server, item, reply=reply))
        for item, reply in zip(short, replies, strict=True)
    ]
    while min(len(reply.chunks) for reply in replies) < 40:
        await asyncio.sleep(0.01)
    new = await ask(http, server, long)
    await asyncio.gather(*tasks)
    first = new.chunks[0]
    before, meanwhile = [], []
    for reply in replies:
        for begin, end in zip(reply.chunks[8:], reply.chunks[9:], strict=False):
            if end <= new.sent:
                before.append(end - begin)
            elif begin <= first:
                meanwhile.append(end - begin)
    usual = statistics.median(before)
    return {
        "before": usual,
        "meanwhile": statistics.median(meanwhile),
        "largest": max(meanwhile),
        "ratio": max(meanwhile) / usual,
        "ratio meanwhile": max(meanwhile) / statistics.median(meanwhile),
        "first": new.first,
        "ended": float(sum(reply.ended < first for reply in replies)),
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the servers
    sys.exit(main())
