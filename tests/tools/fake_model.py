"""A scripted model whose every token depends on all the KV read for it, and a driver.

The KV of a token is a chain value: a function of the token, its position and the KV of the
position before it, which is read *through the block table*. The next token is a function
of the sum of all KV of the sequence. So one wrong block, slot, length, position or chunk
border, a block shared with the wrong prefix, or KV read before it was written, changes
the tokens; and :func:`solo` says in plain Python what they must be.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.batch.buckets import buckets
from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.blocks import hashing
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.step import EngineState, engine_step, init_state
from oxidize_jax.sampling.fields import plain_sampling
from oxidize_jax.scheduler import invariants
from oxidize_jax.scheduler.rows import preempt
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import FINISHED, NO_TOKEN, RUNNING, UNUSED, WAITING, SchedulerState
from oxidize_jax.scheduler.submit import NewRequest, abort, submit

VOCAB = 97
_MASK = 0xFFFFFFFF

_QUICK_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options that halve the compile time of these small integer programs on the CPU."""


def quick_jit(function: Callable[..., Any], **options: Any) -> Any:
    """``jax.jit`` for programs that run a few times only: little optimised, soon compiled."""
    return jax.jit(function, compiler_options=_known_options(), **options)


@functools.cache
def _known_options() -> dict[str, Any] | None:
    """The options above, or None where this version of XLA does not know them all."""
    try:
        jax.jit(lambda: jnp.int32(0), compiler_options=_QUICK_COMPILE)()
    except jax.errors.JaxRuntimeError:
        return None
    return _QUICK_COMPILE


def make_hashes_constant(monkeypatch: Any) -> None:
    """Give every block one hash, in functions that are traced from now on."""

    def constant(parents: Any, tokens: jax.Array, *_: Any) -> jax.Array:
        return jnp.full((*tokens.shape[:-1], 2), 5, jnp.uint32)

    monkeypatch.setattr(hashing, "chain_hash", constant)
    monkeypatch.setattr(hashing, "run_hashes", constant)


@dataclasses.dataclass(frozen=True)
class FakeModel:
    """Implements ``oxidize_jax.engine.step.Model``; KV is ``u32[B, K]``."""

    vocab_size: int = VOCAB

    def init_kv(self, num_blocks: int, block_size: int) -> jax.Array:
        """Garbage, a different one in every slot: nothing may read what it did not write."""
        slot = np.arange(num_blocks * block_size, dtype=np.uint32).reshape(num_blocks, block_size)
        return jnp.asarray(slot * np.uint32(0x9E3779B1) + np.uint32(0xDEADBEEF))

    def forward(
        self, params: None, kv: jax.Array, batch: BatchDescriptor
    ) -> tuple[jax.Array, jax.Array]:
        """``(logits f32[C, V], kv)``: copies, then the decode part, then the tiles."""
        num_blocks, k = kv.shape
        no_token = batch.token_ids.shape[0]

        def copy(i: jax.Array, kv: jax.Array) -> jax.Array:
            return kv.at[batch.copy_dst[i]].set(kv[batch.copy_src[i]])

        lane = jnp.arange(batch.decode_rows.shape[0], dtype=jnp.int32)
        decodes = jnp.where(batch.decode_rows < batch.kv_lens.shape[0], lane, no_token)
        tokens = jnp.concatenate([decodes, batch.tile_tokens.reshape(-1)])
        tile_rows = jnp.repeat(batch.tile_rows, batch.tile_tokens.shape[1])
        rows = jnp.concatenate([batch.decode_rows, tile_rows])

        def entry(row: jax.Array, position: jax.Array, kv: jax.Array) -> jax.Array:
            block = batch.block_tables.at[row, position // k].get(
                mode="fill", fill_value=num_blocks
            )
            return kv.at[block, position % k].get(mode="fill", fill_value=0)

        def write(i: jax.Array, kv: jax.Array) -> jax.Array:
            token = tokens[i]
            position = batch.positions.at[token].get(mode="fill", fill_value=0)
            before = entry(rows[i], jnp.maximum(position - 1, 0), kv)
            before = jnp.where(position > 0, before, jnp.uint32(0))
            word = batch.token_ids.at[token].get(mode="fill", fill_value=0)
            slot = batch.slot_mapping.at[token].get(mode="fill", fill_value=num_blocks * k)
            value = _chain(before, word.astype(jnp.uint32), position.astype(jnp.uint32))
            return kv.at[slot // k, slot % k].set(value, mode="drop")

        kv = jax.lax.fori_loop(0, batch.num_copies, copy, kv)
        kv = jax.lax.fori_loop(0, tokens.shape[0], write, kv)

        row = batch.token_rows.at[batch.logits_indices].get(
            mode="fill", fill_value=batch.kv_lens.shape[0]
        )
        length = 1 + batch.positions.at[batch.logits_indices].get(mode="fill", fill_value=-1)
        place = jnp.arange(batch.block_tables.shape[1] * k, dtype=jnp.int32)
        read = jax.vmap(lambda r: entry(r, place, kv))(row)
        read = jnp.where(place < length[:, None], read, jnp.uint32(0))
        total = _mix(jnp.sum(read, axis=1, dtype=jnp.uint32))
        best = (total % jnp.uint32(self.vocab_size)).astype(jnp.int32)
        word = jnp.arange(self.vocab_size, dtype=jnp.int32)
        # The likeliest is `best`, then `best + 1` and so on, all round the vocabulary.
        return -((word - best[:, None]) % self.vocab_size).astype(jnp.float32), kv


def solo(
    prompt: Sequence[int],
    count: int,
    *,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    vocab: int = VOCAB,
) -> list[int]:
    """Prompt and the ``count`` tokens after it (fewer with a stop id), computed alone."""
    tokens, chain, total = list(prompt), 0, 0
    for position, token in enumerate(tokens):
        chain = int(_chain(chain, token, position)) & _MASK
        total += chain
    for index in range(count):
        best = int(_mix(total & _MASK)) % vocab
        while index < min_tokens and best in stop_ids:
            best = (best + 1) % vocab
        chain = int(_chain(chain, best, len(tokens))) & _MASK
        total += chain
        tokens.append(best)
        if best in stop_ids:
            break
    return tokens


def _chain(before: Any, token: Any, position: Any) -> Any:
    """u32: KV of ``token`` at ``position`` behind KV ``before`` (arrays, or Python ints)."""
    if isinstance(before, int):
        return _mix((before * 0x85EBCA6B + token * 0x9E3779B1 + position * 0xC2B2AE35 + 1) & _MASK)
    u32 = jnp.uint32
    return _mix(
        before * u32(0x85EBCA6B) + token * u32(0x9E3779B1) + position * u32(0xC2B2AE35) + u32(1)
    )


def _mix(x: Any) -> Any:
    """u32: a bijection that spreads every bit (arrays, or Python ints)."""
    if isinstance(x, int):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
        return x ^ (x >> 16)
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def new_request(
    config: EngineConfig,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    arrival: int = 0,
    priority: int = 0,
    salt: int = 0,
    use_cache: bool = True,
    fork_of: int | None = None,
) -> NewRequest:
    """A greedy request; what stands behind the prompt in ``tokens`` is garbage."""
    tokens = np.full((config.max_model_len,), 88, np.int32)
    tokens[: len(prompt)] = prompt
    stops = np.full((config.max_stop_token_ids,), NO_TOKEN, np.int32)
    stops[: len(stop_ids)] = stop_ids
    return NewRequest(
        tokens=tokens,
        prompt_len=np.int32(len(prompt)),
        max_new_tokens=np.int32(max_tokens),
        min_new_tokens=np.int32(min_tokens),
        arrival=np.int32(arrival),
        priority=np.int32(priority),
        stop_ids=stops,
        salt=np.int32(salt),
        use_cache=np.bool_(use_cache),
        fork_of=np.int32(config.max_num_requests if fork_of is None else fork_of),
        **plain_sampling(config),
    )


@functools.cache
def jitted_step(config: EngineConfig) -> Any:
    """``engine_step`` in the largest bucket, which holds every plan."""
    return quick_jit(
        functools.partial(engine_step, config, FakeModel(), None, shapes=buckets(config)[-1:])
    )


@functools.cache
def jitted_schedule(config: EngineConfig) -> Any:
    return quick_jit(functools.partial(schedule, config))


@functools.cache
def jitted_submit(config: EngineConfig) -> Any:
    return quick_jit(functools.partial(submit, config))


jitted_abort = quick_jit(abort)
jitted_preempt = quick_jit(preempt)


def small_config(**changes: Any) -> EngineConfig:
    """Blocks of 4 tokens, tiles of 4; 4 rows, 8 slots, 40 tokens at most."""
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 40,
        "num_blocks": 40,
        "block_size": 4,
        "max_num_requests": 8,
        "prefill_tile": 4,
        "max_logprobs": 0,
        "max_stop_token_ids": 2,
        "max_logit_bias": 0,
        "max_bad_words": 0,
    }
    return EngineConfig(**(sizes | changes))


class Driver:
    """Runs an engine of the fake model step by step and checks every state it passes.

    A step with nothing planned only plans, so the same compiled program starts the engine.
    """

    def __init__(self, config: EngineConfig, *, seed: int | None = None, step: Any = None) -> None:
        """``seed`` shuffles the physical blocks; ``step`` replaces :func:`jitted_step`."""
        self.config = config
        self.state: EngineState = init_state(config, FakeModel())
        if seed is not None:
            self._shuffle_blocks(seed)
        self.host: SchedulerState = jax.device_get(self.state.scheduler)
        self.scheduled: list[list[int]] = []
        """Tokens of each row, for every step that was made."""
        self._step = step or jitted_step(config)
        self._arrivals = 0

    def submit(self, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> int:
        """Put a request into the lowest free slot and return the slot."""
        slot = self.free_slots()[0]
        options.setdefault("arrival", self._arrivals)
        self._arrivals += 1
        new = new_request(self.config, prompt, max_tokens=max_tokens, **options)
        scheduler = jitted_submit(self.config)(self.state.scheduler, np.int32(slot), new)
        self._set_scheduler(scheduler, renewed=slot)
        return slot

    def abort(self, slot: int) -> None:
        self._set_scheduler(jitted_abort(self.state.scheduler, np.int32(slot)))

    def preempt(self, row: int) -> None:
        """Preempt the request in ``row`` now, and plan again. No copy may be planned."""
        assert self.host.plan.num_copies == 0, "a plan with copies cannot be dropped"
        self._set_scheduler(jitted_preempt(self.state.scheduler, np.int32(row), np.bool_(False)))
        self._set_scheduler(jitted_schedule(self.config)(self.state.scheduler))

    def step(self) -> None:
        """Make the planned step, and plan the next."""
        self._check_plan()
        self.scheduled.append(self.host.plan.num_scheduled.tolist())
        before = self.host
        self.state = self._step(self.state)
        self._set_scheduler(self.state.scheduler)
        self._check_admissions(before, self.host)

    def run(self, max_steps: int = 500) -> None:
        """Step until nothing is left to do; AssertionError after ``max_steps`` steps."""
        for _ in range(max_steps):
            self.step()
            if not self.busy():
                return
        raise AssertionError(f"still busy after {max_steps} steps: {self.host.requests.status}")

    def busy(self) -> bool:
        """Whether something is planned. If not, every request must have finished."""
        if self.host.plan.num_scheduled.any():
            return True
        status = self.host.requests.status
        assert np.isin(status, (UNUSED, FINISHED)).all(), f"the engine stands still: {status}"
        return False

    def free_slots(self) -> list[int]:
        requests = self.host.requests
        rowless = requests.row == self.config.max_num_seqs
        free = (requests.status == UNUSED) | ((requests.status == FINISHED) & rowless)
        return np.flatnonzero(free).tolist()

    def tokens(self, slot: int) -> list[int]:
        """Prompt and output so far."""
        requests = self.host.requests
        return requests.tokens[slot, : requests.num_tokens[slot]].tolist()

    def reason(self, slot: int) -> int:
        return int(self.host.requests.finish_reason[slot])

    def status(self, slot: int) -> int:
        return int(self.host.requests.status[slot])

    def num_cached(self, slot: int) -> int:
        return int(self.host.requests.num_cached[slot])

    def assert_clean(self) -> None:
        """Idle: no block is held, every block is free or cached, no row is taken."""
        pool, rows = self.host.pool, self.host.rows
        assert not pool.ref_count.any(), pool.ref_count
        assert int(pool.num_free) + int(pool.num_cached) == self.config.num_blocks
        assert (rows.request == self.config.max_num_requests).all(), rows.request

    def _shuffle_blocks(self, seed: int) -> None:
        ids = list(range(self.config.num_blocks))
        random.Random(seed).shuffle(ids)
        pool = dataclasses.replace(self.state.scheduler.pool, free_stack=jnp.array(ids, jnp.int32))
        scheduler = dataclasses.replace(self.state.scheduler, pool=pool)
        self.state = dataclasses.replace(self.state, scheduler=scheduler)

    def _set_scheduler(self, scheduler: SchedulerState, renewed: int | None = None) -> None:
        self.state = dataclasses.replace(self.state, scheduler=scheduler)
        before, self.host = self.host, jax.device_get(scheduler)
        invariants.check(self.host)
        self._check_life(before, renewed)

    def _check_life(self, before: SchedulerState, renewed: int | None) -> None:
        """Status goes forward only; what was generated or decided stays as it was."""
        old, new = before.requests, self.host.requests
        for slot in np.flatnonzero(old.status != UNUSED):
            if slot == renewed:
                continue
            assert new.status[slot] >= old.status[slot], (slot, old.status, new.status)
            count = old.num_tokens[slot]
            assert new.num_tokens[slot] in (count, count + 1)
            assert (new.tokens[slot, :count] == old.tokens[slot, :count]).all()
            if old.status[slot] == FINISHED:
                assert new.finish_reason[slot] == old.finish_reason[slot]
                assert new.num_tokens[slot] == count

    def _check_plan(self) -> None:
        """Within budget and tiles; every token has a block that its row alone holds."""
        config, state = self.config, self.host
        plan, rows, requests = state.plan, state.rows, state.requests
        assert plan.num_scheduled.sum() <= config.token_budget
        chunks = [n for n in plan.num_scheduled.tolist() if n > 1]
        assert sum(-(-n // config.prefill_tile) for n in chunks) <= config.max_prefill_tiles
        for row in np.flatnonzero(plan.num_scheduled):
            request = rows.request[row]
            start = int(requests.num_computed[request])
            end = start + int(plan.num_scheduled[row])
            assert end <= requests.num_tokens[request]
            k = config.block_size
            # Tokens whose KV came with shared blocks are computed again, but not written.
            start = max(start, int(rows.kv_len[row]))
            if start >= end:
                continue
            written = rows.block_table[row, start // k : -(-end // k)]
            assert (written < config.num_blocks).all(), (row, start, end, written)
            assert (state.pool.ref_count[written] == 1).all(), (row, written)

    def _check_admissions(self, before: SchedulerState, after: SchedulerState) -> None:
        """Preempted first, then by priority and arrival; none in a step that preempted."""
        no_row = self.config.max_num_seqs
        old, new = before.requests, after.requests
        preempted = new.num_preemptions > old.num_preemptions
        waited = (old.status == WAITING) | ((old.status == RUNNING) & (old.row == no_row))
        admitted = waited & (new.row < no_row)
        left = waited & (new.row == no_row) & (new.status != FINISHED)
        parent = np.append(new.status, FINISHED)[new.fork_of]
        left &= (new.status == RUNNING) | (parent == FINISHED)  # a fork waits for its parent
        kept = (old.row < no_row) & (new.row < no_row)
        if preempted.any() and kept.any():
            assert not admitted.any(), "admitted in a step that preempted"

        def keys(which: np.ndarray) -> list[tuple[bool, int, int]]:
            return [
                (bool(old.status[i] == WAITING), int(new.priority[i]), int(new.arrival[i]))
                for i in np.flatnonzero(which)
            ]

        if admitted.any() and left.any():
            assert max(keys(admitted)) < min(keys(left)), (keys(admitted), keys(left))
