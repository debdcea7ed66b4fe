"""A scheduler under test: transitions one by one, with tokens given by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import new_request, quick_jit

from oxidize_jax.blocks import hashing
from oxidize_jax.blocks.pool import root_parent
from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.sampler import SampleOutput
from oxidize_jax.scheduler import admit as admission
from oxidize_jax.scheduler import grow as growth
from oxidize_jax.scheduler import invariants
from oxidize_jax.scheduler.budget import grant_running
from oxidize_jax.scheduler.commit import commit
from oxidize_jax.scheduler.pause import set_masks
from oxidize_jax.scheduler.rows import order_rows, preempt, retire
from oxidize_jax.scheduler.schedule import plan, schedule
from oxidize_jax.scheduler.state import RUNNING, SchedulerState, init_scheduler
from oxidize_jax.scheduler.submit import abort, submit
from oxidize_jax.types import replace

TINY = EngineConfig(
    max_num_seqs=3,
    max_num_batched_tokens=8,
    max_model_len=24,
    num_blocks=8,
    block_size=4,
    max_num_requests=6,
    prefill_tile=4,
    max_logprobs=0,
    max_stop_token_ids=2,
)


def make_room(config, state):
    state, _, preempted = growth.make_room(config, state)
    return state, preempted


def grow(config, state):
    state = order_rows(state)
    grants = grant_running(config, state, state.plan.order)
    return growth.grow(config, state, grants), grants


def admit(config, state, *args):
    running = jnp.zeros((config.max_num_seqs,), jnp.int32)
    state, _, granted = admission.admit(config, state, state.requests.tokens, *args, running)
    return state, granted


_OF_CONFIG = {
    function.__name__: function
    for function in (submit, make_room, grow, admit, plan, commit, schedule, set_masks)
}
_OF_STATE = {function.__name__: function for function in (retire, preempt, abort, order_rows)}


@functools.cache
def transition(name: str, config: EngineConfig) -> Any:
    """The jitted transition ``name``; the state comes first in its arguments."""
    if name in _OF_CONFIG:
        return quick_jit(functools.partial(_OF_CONFIG[name], config))
    return quick_jit(_OF_STATE[name])


class Hand:
    """A state that is moved by hand; the invariants are checked after every move."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.state: SchedulerState = jax.device_get(init_scheduler(config))
        self._arrivals = 0

    def __call__(self, name: str, *args: Any) -> Any:
        """Apply the transition ``name``; what it returns besides the state, if anything."""
        result = transition(name, self.config)(self.state, *args)
        state, rest = result if isinstance(result, tuple) else (result, None)
        self.set(state)
        return jax.device_get(rest)

    def set(self, state: SchedulerState) -> None:
        self.state = jax.device_get(state)
        invariants.check(self.state)

    def edit(self, **parts: dict[str, Any]) -> None:
        """Overwrite fields of parts of the state: ``edit(requests={"status": ...})``."""
        changed = {
            part: replace(
                getattr(self.state, part), **{k: np.asarray(v) for k, v in fields.items()}
            )
            for part, fields in parts.items()
        }
        # What was edited may be what the order of the rows hangs on.
        stale = np.full((self.config.max_num_seqs,), -1, np.int32)
        state = replace(self.state, **changed)
        self.set(replace(state, plan=replace(state.plan, ordered=stale)))

    def seat(self, *requests: tuple[Sequence[int], int, int]) -> None:
        """Let rows 0, 1, ... run requests 0, 1, ... of ``(tokens, computed, blocks)``.

        One that lacks its last token only is decoding, unless that is its first. Blocks are
        given in order from 0 on, none of them registered. Only for an idle state.
        """
        config, n = self.config, len(requests)
        state = jax.tree.map(np.array, self.state)
        rows, slots, pool = state.rows, state.requests, state.pool
        held = 0
        for i, (tokens, computed, blocks) in enumerate(requests):
            slots.tokens[i, : len(tokens)] = tokens
            slots.num_tokens[i] = len(tokens)
            slots.prompt_len[i] = computed if 0 < computed == len(tokens) - 1 else len(tokens)
            slots.num_computed[i] = computed
            rows.block_table[i, :blocks] = range(held, held + blocks)
            rows.num_blocks[i] = blocks
            rows.kv_len[i] = computed
            held += blocks
        slots.status[:n] = RUNNING
        slots.max_tokens[:n] = config.max_model_len
        slots.row[:n] = slots.arrival[:n] = rows.request[:n] = range(n)
        rows.chain_hash[:] = hashing.root_hash(np.zeros((), np.int32))
        rows.chain_parent[:] = root_parent(np.zeros((), np.int32))
        pool.ref_count[:held] = 1
        num_free = np.array(config.num_blocks - held, np.int32)
        self._arrivals = n
        self.set(replace(state, pool=replace(pool, num_free=num_free)))

    def submit(self, prompt: Sequence[int], slot: int | None = None, **options: Any) -> int:
        """Submit into the lowest unused slot (or ``slot``), in order of arrival."""
        slot = self._arrivals if slot is None else slot
        options.setdefault("arrival", self._arrivals)
        self._arrivals += 1
        self("submit", np.int32(slot), new_request(self.config, prompt, **options))
        return slot

    def admit(self, tokens: int, tiles: int = 99, allowed: bool = True) -> list[int]:
        args = np.int32(tokens), np.int32(tiles), np.bool_(allowed)
        return self("admit", *args).tolist()

    def commit(self, samples: dict[int, int] | None = None) -> None:
        """Commit the plan; ``samples`` gives the token of each row that sampled."""
        lanes, samples = self.config.max_num_seqs, samples or {}
        rows = np.full((lanes,), lanes, np.int32)
        tokens = np.zeros((lanes,), np.int32)
        rows[: len(samples)] = list(samples)
        tokens[: len(samples)] = list(samples.values())
        self("commit", rows, sample_output(tokens, self.config.max_logprobs))

    def step(self, token: int = 50) -> None:
        """Commit the plan, with ``token`` for every row that computed its last, and plan."""
        requests, rows, plan = self.state.requests, self.state.rows, self.state.plan
        samples = {}
        for row in np.flatnonzero(plan.num_scheduled):
            request = rows.request[row]
            computed = requests.num_computed[request] + plan.num_scheduled[row]
            if computed == requests.num_tokens[request]:
                samples[int(row)] = token
        self.commit(samples)
        self("schedule")

    @property
    def scheduled(self) -> list[int]:
        """Planned tokens of each row."""
        return self.state.plan.num_scheduled.tolist()

    @property
    def tables(self) -> list[list[int]]:
        rows = self.state.rows
        return [
            table[:count].tolist()
            for table, count in zip(rows.block_table, rows.num_blocks, strict=True)
        ]

    @property
    def in_rows(self) -> list[int | None]:
        """The request in each row."""
        none = self.config.max_num_requests
        return [None if r == none else r for r in self.state.rows.request.tolist()]

    def of(self, field: str) -> list[Any]:
        """A field of all requests."""
        return getattr(self.state.requests, field).tolist()

    def tokens(self, slot: int) -> list[int]:
        requests = self.state.requests
        return requests.tokens[slot, : requests.num_tokens[slot]].tolist()


def sample_output(tokens: np.ndarray, num_top: int) -> SampleOutput:
    """Sampled ``tokens i32[C]`` with logprob -0.5 each."""
    top = (len(tokens), num_top)
    return SampleOutput(
        tokens=tokens,
        logprobs=np.full(tokens.shape, -0.5, np.float32),
        top_ids=np.zeros(top, np.int32),
        top_logprobs=np.zeros(top, np.float32),
        ranks=np.zeros(top[:1], np.int32),
    )


@pytest.fixture
def make_hand() -> Callable[..., Hand]:
    """``make_hand(**changes)``: an idle scheduler of 3 rows, 8 blocks of 4, budget 8."""
    return lambda **changes: Hand(replace(TINY, **changes))


@pytest.fixture
def hand(make_hand: Callable[..., Hand]) -> Hand:
    return make_hand()
