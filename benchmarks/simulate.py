"""The scheduler without a model: scripted tokens, and the memory figures of every step.

A step is ``commit -> schedule -> figures`` in one jitted program whose state is donated; the
token that a row "samples" is a hash of its request and position. So a load of thousands of
steps runs in seconds on a CPU, through the very transitions that the engine runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.batch.build import sampling_rows
from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.fields import plain_sampling
from oxidize_jax.sampling.sampler import SampleOutput
from oxidize_jax.scheduler import submit as submission
from oxidize_jax.scheduler.commit import commit
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import (
    FINISHED,
    LENGTH,
    NO_TOKEN,
    SchedulerState,
    init_scheduler,
)
from oxidize_jax.types import state

VOCAB = 32_000
NOBODY = 2**31 - 1
"""``Figures.request`` of an idle row: no arrival number."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence of a load; it ends after exactly ``max_new_tokens`` tokens."""

    prompt: np.ndarray
    """i32[n]"""
    max_new_tokens: int
    fork_of: int | None = None
    """Place in the load of an earlier request with the same prompt, whose blocks to share."""

    @property
    def num_computed(self) -> int:
        """Tokens that get KV in its life: all but the last."""
        return len(self.prompt) + self.max_new_tokens - 1


@state
class Figures:
    """What is read after a step has been planned. Tokens include those of the plan."""

    live: jax.Array
    """i32[]: blocks that somebody holds (``ref_count > 0``)."""
    needed: jax.Array
    """i32[]: distinct blocks in which some row has a token."""
    held: jax.Array
    """i32[]: slots with a token, those of a shared block counted once."""
    request: jax.Array
    """i32[S]: arrival number of the row's request, ``NOBODY`` for an idle row."""
    blocks: jax.Array
    """i32[S]: length of the row's block table."""
    tokens: jax.Array
    """i32[S]: tokens with KV when the planned step is done."""
    scheduled: jax.Array
    """i32[S]: tokens of the planned step."""
    free: jax.Array
    """bool[R]: slots whose request has finished and holds nothing."""
    finish_reason: jax.Array
    """i32[R]"""
    num_tokens: jax.Array
    """i32[R]: prompt and output."""
    num_cached: jax.Array
    """i32[R]: prompt tokens from the prefix cache, at first admission."""
    preemptions: jax.Array
    """i32[]: so far."""
    copies: jax.Array
    """i32[]: blocks copied on write so far."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A load from start to end, n requests in W steps. numpy arrays."""

    config: EngineConfig
    requests: tuple[Request, ...]
    live: np.ndarray
    """i32[W], as in :class:`Figures`, and so on."""
    needed: np.ndarray
    held: np.ndarray
    request: np.ndarray
    """i32[W, S]"""
    blocks: np.ndarray
    tokens: np.ndarray
    scheduled: np.ndarray
    num_cached: np.ndarray
    """i32[n]"""
    preemptions: int
    copies: int

    @property
    def num_steps(self) -> int:
        return len(self.live)

    def by_request(self, values: np.ndarray, fill: int = 0) -> np.ndarray:
        """i32[W, n]: ``values i32[W, S]`` of the rows by request, ``fill`` without a row."""
        dense = np.full((self.num_steps, len(self.requests) + 1), fill, np.int32)
        column = np.minimum(self.request, len(self.requests))
        np.put_along_axis(dense, column, values, axis=1)
        return dense[:, :-1]

    def last_steps(self) -> np.ndarray:
        """i32[n]: the last step of each request."""
        present = self.by_request(np.ones_like(self.tokens)) > 0
        return self.num_steps - 1 - np.argmax(present[::-1], axis=0)


def run(config: EngineConfig, requests: Iterable[Request], max_steps: int = 200_000) -> Run:
    """Run a load that is all there at the start, first come first served, to its end.

    As in the engine, a host queue feeds the request slots as they become free.

    Raises:
      RuntimeError: if the load does not end within ``max_steps``, if the scheduler stands
        still with requests left, or if a request ended with another length than it asked.
    """
    load = tuple(requests)
    for request in load:
        submission.check_prompt(config, len(request.prompt))
    state, owners, sent = init_scheduler(config), [-1] * config.max_num_requests, 0
    free: Any = np.ones((config.max_num_requests,), bool)
    num_cached = np.full((len(load),), -1, np.int32)
    trace: list[Figures] = []
    for _ in range(max_steps):
        for slot in np.flatnonzero(free)[: len(load) - sent].tolist():
            of = load[sent].fork_of
            parent = owners.index(of) if of in owners else config.max_num_requests
            new = _new_request(config, load[sent], sent, parent)
            state = _submit(config)(state, np.int32(slot), new)
            owners[slot], sent = sent, sent + 1
        state, figures = _step(config)(state)
        figures = jax.device_get(figures)
        free = figures.free
        for slot in np.flatnonzero(free).tolist():
            owner, owners[slot] = owners[slot], -1
            if owner >= 0:
                _check_end(load[owner], figures, slot)
                num_cached[owner] = figures.num_cached[slot]
        if not figures.scheduled.any():
            break
        trace.append(figures)
    if (num_cached < 0).any():
        raise RuntimeError(f"{(num_cached < 0).sum()} requests left after {len(trace)} steps")
    return Run(
        config=config,
        requests=load,
        num_cached=num_cached,
        preemptions=int(figures.preemptions),
        copies=int(figures.copies),
        **{
            name: np.stack([getattr(step, name) for step in trace])
            for name in ("live", "needed", "held", "request", "blocks", "tokens", "scheduled")
        },
    )


def random_tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    """i32[count]"""
    return rng.integers(0, VOCAB, count, dtype=np.int32)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Right-aligned columns, the first one left-aligned."""
    lines = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = (f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        print("  ".join([f"{line[0]:<{widths[0]}}", *cells]))


def print_missed(missed: Sequence[str]) -> int:
    """Say which bounds were missed; the exit status."""
    for line in missed:
        print(f"MISSED: {line}")
    print("all bounds hold" if not missed else f"{len(missed)} bounds missed")
    return int(bool(missed))


def _check_end(request: Request, figures: Figures, slot: int) -> None:
    wanted = len(request.prompt) + request.max_new_tokens
    ended = int(figures.finish_reason[slot]), int(figures.num_tokens[slot])
    if ended != (LENGTH, wanted):
        raise RuntimeError(f"a request ended with (reason, tokens) {ended}, not {LENGTH, wanted}")


@functools.cache
def _step(config: EngineConfig) -> Any:
    """``state -> (state, Figures)``, jitted, the state donated."""

    def step(state: SchedulerState) -> tuple[SchedulerState, Figures]:
        row = jnp.arange(config.max_num_seqs, dtype=jnp.int32)
        sample_rows = jnp.where(sampling_rows(state), row, config.max_num_seqs)
        state = commit(config, state, sample_rows, _scripted(config, state))
        state = schedule(config, state)
        return state, _figures(config, state)

    return _jit(step)


@functools.cache
def _submit(config: EngineConfig) -> Any:
    return _jit(functools.partial(submission.submit, config))


def _jit(function: Callable[..., Any]) -> Any:
    """Jitted, the state donated, little optimised: small integer work, and soon compiled."""
    return jax.jit(function, donate_argnums=0, compiler_options=_known_options())


@functools.cache
def _known_options() -> dict[str, Any] | None:
    """The options that halve the compile time on CPUs; None where XLA does not know them."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    }
    try:
        jax.jit(lambda: jnp.int32(0), compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        return None
    return options


def _scripted(config: EngineConfig, state: SchedulerState) -> SampleOutput:
    """For each row a token that is a hash of its request and position."""
    requests, request = state.requests, state.rows.request
    arrival = requests.arrival.at[request].get(mode="fill", fill_value=0).astype(jnp.uint32)
    place = requests.num_tokens.at[request].get(mode="fill", fill_value=0).astype(jnp.uint32)
    mixed = arrival * jnp.uint32(0x9E3779B1) + place * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> jnp.uint32(15))) * jnp.uint32(0xC2B2AE35)
    s, a = config.max_num_seqs, config.max_logprobs
    return SampleOutput(
        tokens=((mixed >> jnp.uint32(8)) % jnp.uint32(VOCAB)).astype(jnp.int32),
        logprobs=jnp.zeros((s,), jnp.float32),
        top_ids=jnp.zeros((s, a), jnp.int32),
        top_logprobs=jnp.zeros((s, a), jnp.float32),
        ranks=jnp.zeros((s,), jnp.int32),
    )


def _figures(config: EngineConfig, state: SchedulerState) -> Figures:
    requests, rows, k = state.requests, state.rows, config.block_size

    def of_row(values: jax.Array, fill: int = 0) -> jax.Array:
        return values.at[rows.request].get(mode="fill", fill_value=fill)

    # A row that shares all its tokens has the KV of the one that it computes again.
    tokens = jnp.maximum(of_row(requests.num_computed) + state.plan.num_scheduled, rows.kv_len)
    column = jnp.arange(config.blocks_per_seq, dtype=jnp.int32)
    filled = jnp.clip(tokens[:, None] - column * k, 0, k)
    # The fullest holder says how full a shared block is; an unused entry is dropped.
    of_block = jnp.zeros((config.num_blocks,), jnp.int32)
    of_block = of_block.at[rows.block_table].max(filled, mode="drop")
    rowless = requests.row == config.max_num_seqs
    return Figures(
        live=jnp.sum(state.pool.ref_count > 0, dtype=jnp.int32),
        needed=jnp.sum(of_block > 0, dtype=jnp.int32),
        held=jnp.sum(of_block, dtype=jnp.int32),
        request=of_row(requests.arrival, NOBODY),
        blocks=rows.num_blocks,
        tokens=tokens,
        scheduled=state.plan.num_scheduled,
        free=(requests.status == FINISHED) & rowless,
        finish_reason=requests.finish_reason,
        num_tokens=requests.num_tokens,
        num_cached=requests.num_cached,
        preemptions=state.totals.preemptions,
        copies=state.totals.copies,
    )


def _new_request(
    config: EngineConfig, request: Request, arrival: int, parent: int
) -> submission.NewRequest:
    """``parent``: the slot of the request that it forks from, ``R`` for none."""
    tokens = np.zeros((config.max_model_len,), np.int32)
    tokens[: len(request.prompt)] = request.prompt
    return submission.NewRequest(
        tokens=tokens,
        prompt_len=np.int32(len(request.prompt)),
        max_new_tokens=np.int32(request.max_new_tokens),
        min_new_tokens=np.int32(0),
        arrival=np.int32(arrival),
        priority=np.int32(0),
        stop_ids=np.full((config.max_stop_token_ids,), NO_TOKEN, np.int32),
        salt=np.int32(0),
        use_cache=np.bool_(True),
        fork_of=np.int32(parent),
        **plain_sampling(config),
    )
