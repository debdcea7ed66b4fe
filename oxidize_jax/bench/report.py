"""Plain-text tables of what was measured, one row a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = list[tuple[str, str]]


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Names in one column, values in the next."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def environment(about: dict[str, Any]) -> Rows:
    """Of :func:`oxidize_jax.bench.environment.describe`."""
    device = f"{about['devices']} x {about['device']}"
    if about["platform"] == "cpu":
        device = f"{about['cpus']} CPUs, {about['cpu']}"
    return [
        ("machine", device),
        ("versions", f"oxidize-jax {about['oxidize_jax']}, jax {about['jax']}"),
    ]


def throughput(result: dict[str, Any]) -> Rows:
    """Of :func:`oxidize_jax.bench.throughput.measure`."""
    load, median = result["workload"], result["median"]
    return [
        (
            "workload",
            f"{load['requests']} requests, {load['prompt_tokens']} prompt tokens, "
            f"{load['output_tokens']} output tokens",
        ),
        ("compiling", f"{result['compile_seconds']:.1f} s of the warm-up run, left out below"),
        ("output", f"{median['output_tokens_per_second']:.1f} tokens/s"),
        ("prompt + output", f"{median['total_tokens_per_second']:.1f} tokens/s"),
        ("time", f"{median['seconds']:.2f} s, {spread(r['seconds'] for r in result['runs'])}"),
        ("steps", f"{median['steps']:.0f}"),
        ("prefix cache", f"{median['cached_tokens']:.0f} prompt tokens hit"),
        ("preemptions", f"{median['preemptions']:.0f}"),
        ("KV blocks", f"{median['peak_blocks']:.0f} of {result['num_blocks']} at peak"),
    ]


def latency(result: dict[str, Any]) -> Rows:
    """Of :func:`oxidize_jax.bench.latency.measure`."""
    first, streamed = result["time_to_first_token"], result["time_per_token_streamed"]
    batched = result["time_per_token_batched"]
    rows = [
        ("request", f"{result['input_len']} prompt tokens, {result['output_len']} output tokens"),
        ("compiling", f"{result['compile_seconds']:.1f} s of the warm-up run, left out below"),
        ("time to first token", f"{1e3 * first['median']:.1f} ms, {spread(first['runs'], 1e3)}"),
    ]
    if streamed["count"]:
        rows += [
            (
                "time per token",
                f"{1e3 * streamed['median']:.2f} ms, p99 {1e3 * streamed['p99']:.2f} ms, "
                "read after every step",
            ),
            (
                "",
                f"{1e3 * batched['median']:.2f} ms, read after every "
                f"{batched['steps_per_dispatch']} steps",
            ),
        ]
    return rows


def prefix(result: dict[str, Any]) -> Rows:
    """Of :func:`oxidize_jax.bench.prefix.measure`."""
    load, on, off = result["workload"], result["on"], result["off"]
    return [
        ("workload", f"{load['requests']} requests, {load['prompt_tokens']} prompt tokens"),
        (
            "prefix caching on",
            f"{on['median']['seconds']:.2f} s, {spread(r['seconds'] for r in on['runs'])}",
        ),
        (
            "prefix caching off",
            f"{off['median']['seconds']:.2f} s, {spread(r['seconds'] for r in off['runs'])}",
        ),
        ("time on / off", f"{result['time_ratio']:.3f}"),
        (
            "hit rate",
            f"{100 * result['hit_rate']:.1f} % of the prompt tokens; at best "
            f"{100 * result['shareable_rate']:.1f} %",
        ),
        (
            "KV blocks at peak",
            f"{on['median']['peak_blocks']:.0f} on, {off['median']['peak_blocks']:.0f} off",
        ),
    ]


def scheduler(result: dict[str, Any]) -> Rows:
    """Of ``oxidize-jax bench scheduler``."""
    alone, share = result["scheduler"], result["share"]
    rows = [
        (
            "scheduler alone",
            f"{alone['rows']} rows, {alone['blocks']} blocks, {alone['requests']} requests",
        ),
        ("  decode", f"{alone['decode_us']:.0f} us a step (least {alone['decode_least_us']:.0f})"),
        ("  admit 1", f"{alone['admit_1_us']:.0f} us a step"),
        ("  admit 8", f"{alone['admit_8_us']:.0f} us a step"),
    ]
    if share is not None:
        kind = "greedy" if share["temperature"] == 0 else f"temperature {share['temperature']:g}"
        rows += [
            ("decode step", f"{share['rows']} rows from {share['context']} tokens on, {kind}"),
            ("  with the model", f"{share['step_ms']:.2f} ms"),
            (
                "  without it",
                f"{share['without_model_ms']:.2f} ms: batch, sampler, scheduler, host",
            ),
            ("  share", f"{100 * share['share']:.1f} % at most"),
        ]
    return rows


def spread(values: Any, scale: float = 1.0) -> str:
    """Least and most, and of how many runs."""
    values = [scale * value for value in values]
    return f"median of {len(values)} ({min(values):.2f} to {max(values):.2f})"
