"""The jitted scheduler and its model side by side, and a long random run of the two.

``python tests/tools/run_machine.py --transitions 100000 --seed 0`` goes through the
configurations of the state machine in episodes, each from an idle scheduler to an idle one.
After every transition the states are compared and the invariants checked. A violation is
printed with the events that lead to it, as few as can be found.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fake_model import new_request, quick_jit
from scheduler_model import Request, SchedulerModel
from tqdm import tqdm

from oxidize_jax.batch.build import sampling_rows
from oxidize_jax.blocks.pool import NOT_IN_RING
from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.sampler import SampleOutput
from oxidize_jax.scheduler import fork as forks
from oxidize_jax.scheduler import invariants
from oxidize_jax.scheduler.commit import commit
from oxidize_jax.scheduler.pause import MaskUpdate, set_masks
from oxidize_jax.scheduler.reset import reset_prefix_cache
from oxidize_jax.scheduler.schedule import schedule
from oxidize_jax.scheduler.state import (
    FINISHED,
    NEVER,
    NO_TOKEN,
    UNUSED,
    SchedulerState,
    init_scheduler,
)
from oxidize_jax.scheduler.submit import abort, check_prompt, submit

WORDS = 3
"""Tokens of all prompts and outputs are 0 to WORDS - 1."""
STOP = 2
"""Stops the requests that have a stop id."""
BLOCKS = ((0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 1))
"""What prompts are made of."""
MAX_CHILDREN = 3
EPISODE = 400
"""Random events before an episode is run to its end."""


def _config(**sizes: Any) -> EngineConfig:
    return EngineConfig(block_size=4, max_logprobs=0, max_stop_token_ids=1, **sizes)


CONFIGS = {
    # Three blocks: one request at a time, most of the time, and some that outgrow the pool.
    "one sequence fills the pool": _config(
        max_num_seqs=2,
        max_num_requests=4,
        num_blocks=3,
        max_model_len=20,
        max_num_batched_tokens=5,
        prefill_tile=4,
    ),
    "tight": _config(
        max_num_seqs=3,
        max_num_requests=6,
        num_blocks=6,
        max_model_len=24,
        max_num_batched_tokens=3,
        prefill_tile=4,
        policy="decode_first",
    ),
    "no prefix cache": _config(
        max_num_seqs=4,
        max_num_requests=8,
        num_blocks=6,
        max_model_len=24,
        max_num_batched_tokens=8,
        prefill_tile=4,
        enable_prefix_caching=False,
    ),
    # Four tiles of 8 tokens: short chunks in many rows meet the limit of tiles.
    "many rows": _config(
        max_num_seqs=6,
        max_num_requests=8,
        num_blocks=12,
        max_model_len=28,
        max_num_batched_tokens=16,
        prefill_tile=8,
    ),
    # A step of 32 tokens, less than the budget: what fills it must not be told by the latter.
    "one shape": _config(
        max_num_seqs=6,
        max_num_requests=8,
        num_blocks=16,
        max_model_len=28,
        max_num_batched_tokens=64,
        prefill_tile=8,
        deterministic=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Submit:
    """A request into a free slot; ``fork_of`` has the same prompt, salt and use of the cache."""

    slot: int
    prompt: tuple[int, ...]
    max_tokens: int = 4
    min_tokens: int = 0
    priority: int = 0
    salt: int = 0
    use_cache: bool = True
    stops: bool = False
    pause_after: int = NEVER
    fork_of: int | None = None


@dataclasses.dataclass(frozen=True)
class Abort:
    slot: int


@dataclasses.dataclass(frozen=True)
class Fork:
    """Children of a request as it stands; a last token of None is kept."""

    parent: int
    children: tuple[int, ...]
    last_tokens: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Resume:
    """Requests may have ``more`` tokens each than they have; 0 pauses them."""

    slots: tuple[int, ...]
    more: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """Commit and plan; digit i of ``draw`` to the base WORDS is what row i samples."""

    draw: int


@dataclasses.dataclass(frozen=True)
class Reset:
    """Forget the prefix cache."""


Event = Submit | Abort | Fork | Resume | Step | Reset


class Violation(AssertionError):
    """Scheduler and model disagree, or an invariant does not hold."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """The transitions of one configuration, compiled once. Each also gives the packed state."""

    unpack: Callable[[jax.Array], SchedulerState]
    """The packed state on the host."""
    init: Any
    submit: Any
    abort: Any
    fork: Any
    resume: Any
    step: Any
    reset: Any


@functools.cache
def programs(config: EngineConfig) -> Programs:
    def step(state: SchedulerState, tokens: jax.Array, logprobs: jax.Array) -> SchedulerState:
        s = config.max_num_seqs
        rows = jnp.where(sampling_rows(state), jnp.arange(s, dtype=jnp.int32), s)
        top = jnp.zeros((s, 0), jnp.int32)
        sampled = SampleOutput(
            tokens, logprobs, top, top.astype(jnp.float32), jnp.zeros_like(tokens)
        )
        return schedule(config, commit(config, state, rows, sampled))

    def compiled(transition: Any) -> Any:
        def with_pack(*args: Any) -> Any:
            result = transition(*args)
            state, rest = result if isinstance(result, tuple) else (result, None)
            return state, pack(state), rest

        return quick_jit(with_pack)

    init = functools.partial(init_scheduler, config)
    return Programs(
        unpack=unpacker(jax.eval_shape(init)),
        init=compiled(init),
        submit=compiled(functools.partial(submit, config)),
        abort=compiled(abort),
        fork=compiled(functools.partial(forks.fork, config)),
        resume=compiled(functools.partial(set_masks, config)),
        step=compiled(step),
        reset=compiled(reset_prefix_cache),
    )


def pack(state: SchedulerState) -> jax.Array:
    """i32[n]: all of the state in one array, since each that is read costs the host the same."""
    leaves = [
        leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf.view(jnp.int32)
        for leaf in jax.tree.leaves(state)
    ]
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def unpacker(like: SchedulerState) -> Callable[[jax.Array], SchedulerState]:
    """A function that undoes :func:`pack` on the host; ``like`` has the shapes and types."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves]).tolist()
    parts = [
        (slice(end - leaf.size, end), leaf.shape, leaf.dtype)
        for leaf, end in zip(leaves, ends, strict=True)
    ]

    def unpack(packed: jax.Array) -> SchedulerState:
        words = np.asarray(packed)
        arrays = [
            words[part].astype(dtype) if dtype == np.bool_ else words[part].view(dtype)
            for part, _, dtype in parts
        ]
        shaped = [array.reshape(shape) for array, (_, shape, _) in zip(arrays, parts, strict=True)]
        return jax.tree.unflatten(structure, shaped)

    return unpack


class Twin:
    """Device state and model, moved by the same events and compared after each."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model = SchedulerModel(config)
        self.events: list[Event] = []
        self.seen: Counter[str] = Counter()
        self._run = programs(config)
        self._arrivals = 0
        self._names: dict[int, int] = {}
        self._set(*self._run.init())

    def can(self, event: Event) -> bool:
        """Whether the caller of the scheduler may make this event now."""
        if isinstance(event, Resume):
            return all(self.model.slots[slot] is not None for slot in event.slots)
        if not isinstance(event, Submit):
            return True
        if event.fork_of is None:
            return self.model.is_free(event.slot)
        parent = self.model.slots[event.fork_of]
        return (
            self.model.is_free(event.slot)
            and event.slot != event.fork_of
            and parent is not None
            and parent.tokens[: parent.prompt_len] == list(event.prompt)
            and (parent.salt, parent.use_cache) == (event.salt, event.use_cache)
        )

    def apply(self, event: Event) -> None:
        """Raises :class:`Violation` where the two differ afterwards."""
        self.events.append(event)
        try:
            getattr(self, f"_{type(event).__name__.lower()}")(event)
            self._compare()
        except AssertionError as error:
            raise Violation(f"after {event}: {error}") from error

    def is_idle(self) -> bool:
        """Nothing is planned, so nothing may be left to do."""
        if self.model.scheduled:
            return False
        return all(r is None or r.status == FINISHED for r in self.model.slots)

    def finish(self) -> None:
        """Without new events all requests end, and then no block is held."""
        bound = 50 + sum(60 * r.max_tokens for r in self.model.slots if r is not None and r.alive)
        for turn in range(bound):
            self.apply(Step(draw=turn * 2654435761 % WORDS**8))
            paused = [q.slot for q in self.model.slots if q is not None and q.alive and q.paused]
            if paused and not (self.model.scheduled and turn % 2):
                some = tuple(paused[:MAX_CHILDREN])
                self.apply(Resume(some, tuple(1 + (turn + slot) % 3 for slot in some)))
            if self.is_idle():
                break
        else:
            raise Violation(f"not idle after {bound} steps without new events")
        pool = self.host.pool
        held = int(pool.num_free) + int(pool.num_cached) != self.config.num_blocks
        if held or pool.ref_count.any():
            raise Violation(f"idle, but blocks are held: {pool.ref_count}")

    def _submit(self, event: Submit) -> None:
        count = len(event.prompt)
        try:
            check_prompt(self.config, count)
        except ValueError:
            assert not self.model.accepts(count), f"a prompt of {count} tokens was refused"
            self.seen["prompts refused"] += 1
            return
        assert self.model.accepts(count), f"a prompt of {count} tokens was not refused"
        arrival = self._next_arrival()
        options = {
            "max_tokens": event.max_tokens,
            "min_tokens": event.min_tokens,
            "stop_ids": (STOP,) if event.stops else (),
            "arrival": arrival,
            "priority": event.priority,
            "salt": event.salt,
            "use_cache": event.use_cache,
        }
        new = new_request(self.config, event.prompt, fork_of=event.fork_of, **options)
        new = dataclasses.replace(new, pause_after=np.int32(event.pause_after))
        parent = None if event.fork_of is None else self.model.slots[event.fork_of]
        self._set(*self._run.submit(self.state, np.int32(event.slot), new))
        self.model.submit(
            Request(
                slot=event.slot,
                tokens=list(event.prompt),
                prompt_len=count,
                fork_of=parent,
                fork_len=count,
                pause_at=event.pause_after,
                **options,
            )
        )

    def _abort(self, event: Abort) -> None:
        self._set(*self._run.abort(self.state, np.int32(event.slot)))
        self.model.abort(event.slot)

    def _fork(self, event: Fork) -> None:
        count, lanes = len(event.children), MAX_CHILDREN
        arrivals = [self._next_arrival() for _ in range(count)]
        keys = [(arrival, slot) for arrival, slot in zip(arrivals, event.children, strict=True)]
        logprobs = [-1.0 - i for i in range(count)]
        tokens = [NO_TOKEN if token is None else token for token in event.last_tokens]
        new = forks.Fork(
            parent=np.int32(event.parent),
            children=_pad(event.children, lanes, self.config.max_num_requests),
            keys=np.array(keys + [(0, 0)] * (lanes - count), np.uint32),
            arrivals=_pad(arrivals, lanes, 0),
            last_tokens=_pad(tokens, lanes, NO_TOKEN),
            last_logprobs=np.array(logprobs + [0.0] * (lanes - count), np.float32),
        )
        before = self._packed
        ok = self._set(*self._run.fork(self.state, new))
        done = self.model.fork(
            event.parent, event.children, arrivals, keys, event.last_tokens, logprobs
        )
        assert bool(ok) == done, f"fork gave ok={bool(ok)}"
        if not done:
            self.seen["forks refused"] += 1
            assert np.array_equal(before, self._packed), "a refused fork has changed the state"

    def _resume(self, event: Resume) -> None:
        lanes = MAX_CHILDREN
        pause_at = {
            slot: len(self.model.slots[slot].tokens) + more
            for slot, more in zip(event.slots, event.more, strict=True)
        }
        new = MaskUpdate(
            slots=_pad(event.slots, lanes, self.config.max_num_requests),
            masks=np.zeros((lanes, self.config.token_mask_words), np.uint32),
            pause_at=_pad(list(pause_at.values()), lanes, 0),
        )
        self._set(*self._run.resume(self.state, new))
        self.model.set_masks(pause_at)

    def _step(self, event: Step) -> None:
        rows = range(self.config.max_num_seqs)
        tokens = [event.draw // WORDS**row % WORDS for row in rows]
        logprobs = [-0.125 * (token + 1) for token in tokens]
        arrays = np.array(tokens, np.int32), np.array(logprobs, np.float32)
        self._set(*self._run.step(self.state, *arrays))
        self.model.step(tokens, logprobs)

    def _reset(self, event: Reset) -> None:
        self._set(*self._run.reset(self.state))
        self.model.reset_prefix_cache()
        self._names.clear()

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _set(self, state: SchedulerState, packed: jax.Array, rest: Any) -> Any:
        self.state = state
        self._packed = packed
        self.host = self._run.unpack(packed)
        return rest

    def _learn_names(self) -> None:
        """Serials name registrations. Which number is which does not matter, once it is given."""
        for block, serial in self.model.pool.serial.items():
            self._names.setdefault(int(self.host.pool.serial[block]), serial)

    def _compare(self) -> None:
        invariants.check(self.host)
        self._learn_names()
        device = device_view(self.config, self.host, self.model, self._names)
        model = model_view(self.model)
        if device != model:
            lines = [
                f"{name}: scheduler {device[name]}, model {model[name]}"
                for name in model
                if device[name] != model[name]
            ]
            raise AssertionError("\n  ".join(["scheduler and model differ in", *lines]))
        named = [*self._names.values()]
        assert len(set(named)) == len(named), f"a registration has two serials: {self._names}"


def model_view(model: SchedulerModel) -> dict[str, Any]:
    """All that is compared, from the model."""
    config, pool = model.config, model.pool
    s, r = config.max_num_seqs, config.max_num_requests
    view: dict[str, Any] = {
        "free": pool.free,
        "cached": list(pool.cached),
        "ref_count": pool.holders,
        "registered": {
            block: (pool.serial[block], chain.parent, chain.history[-1])
            for block, chain in pool.known.items()
        },
        "next_serial": pool.next_serial,
        "status": [UNUSED if q is None else q.status for q in model.slots],
        "row": [s if q is None or q.row is None else q.row.index for q in model.slots],
        "rows.request": [r if row is None else row.request.slot for row in model.rows],
        "rows.block_table": [[] if row is None else row.blocks for row in model.rows],
        "rows.kv_len": [0 if row is None else row.kv_len for row in model.rows],
        "rows.chain_parent": [
            row.chain.parent for row in model.rows if row is not None and _reads_chain(model, row)
        ],
        "num_scheduled": [model.scheduled.get(row, 0) for row in range(s)],
        "copies": model.copies,
        "decode_turn": model.decode_turn,
        "totals": {name: model.totals[name] for name in _TOTALS},
    }
    for slot, request in enumerate(model.slots):
        if request is None:
            continue
        parent = request.fork_of
        # A slot names its last request only.
        known = parent is not None and model.slots[parent.slot] is parent
        view[f"requests[{slot}]"] = [getattr(request, name) for name in _FIELDS] + [
            parent.slot if known else r,
            request.key,
            request.tokens,
            [0.0] * request.prompt_len + request.logprobs,
        ]
    return view


def device_view(
    config: EngineConfig, state: SchedulerState, model: SchedulerModel, names: dict[int, int]
) -> dict[str, Any]:
    """The same, from the device. ``names`` are the model's serials by the device's.

    The model says only what the state leaves undefined.
    """
    pool, rows, requests, plan = state.pool, state.rows, state.requests, state.plan
    cached = np.flatnonzero(pool.lru_pos != NOT_IN_RING)
    serial = [names.get(n, n) for n in pool.serial.tolist()]
    parent = [names.get(n, n) for n in pool.parent.tolist()]
    count = rows.num_blocks.tolist()
    copies = int(plan.num_copies)
    src, dst = plan.copy_src.tolist(), plan.copy_dst.tolist()
    assert set(src[copies:] + dst[copies:]) <= {config.num_blocks}, "a copy behind the list"
    chain_parent = [names.get(n, n) for n in rows.chain_parent.tolist()]
    view: dict[str, Any] = {
        "free": pool.free_stack[: int(pool.num_free)].tolist(),
        "cached": cached[np.argsort(pool.lru_pos[cached])].tolist(),
        "ref_count": pool.ref_count.tolist(),
        "registered": {
            block: (serial[block], parent[block], tuple(pool.block_tokens[block].tolist()))
            for block in np.flatnonzero(pool.hashed).tolist()
        },
        "next_serial": int(pool.next_serial),
        "status": requests.status.tolist(),
        "row": requests.row.tolist(),
        "rows.request": rows.request.tolist(),
        "rows.block_table": [
            table[:n] for table, n in zip(rows.block_table.tolist(), count, strict=True)
        ],
        "rows.kv_len": rows.kv_len.tolist(),
        "rows.chain_parent": [
            chain_parent[row.index]
            for row in model.rows
            if row is not None and _reads_chain(model, row)
        ],
        "num_scheduled": plan.num_scheduled.tolist(),
        "decode_turn": bool(plan.decode_turn),
        "copies": list(zip(src[:copies], dst[:copies], strict=True)),
        "totals": {name: int(getattr(state.totals, name)) for name in _TOTALS},
    }
    fields = [getattr(requests, name).tolist() for name in _FIELDS]
    for slot in np.flatnonzero(requests.status).tolist():
        n = int(requests.num_tokens[slot])
        view[f"requests[{slot}]"] = [field[slot] for field in fields] + [
            int(requests.fork_of[slot]),
            tuple(requests.key[slot].tolist()),
            requests.tokens[slot, :n].tolist(),
            requests.logprobs[slot, :n].tolist(),
        ]
    return view


_FIELDS = (
    "status",
    "finish_reason",
    "arrival",
    "priority",
    "prompt_len",
    "num_computed",
    "max_tokens",
    "min_tokens",
    "pause_at",
    "salt",
    "use_cache",
    "fork_len",
    "num_cached",
    "num_preemptions",
)
_TOTALS = (
    "steps",
    "scheduled_tokens",
    "generated_tokens",
    "cached_tokens",
    "forked_tokens",
    "preemptions",
    "copies",
)


def _reads_chain(model: SchedulerModel, row: Any) -> bool:
    """Whether the row's blocks are registered; otherwise its chain is nothing."""
    return model.config.enable_prefix_caching and row.request.use_cache


def _pad(values: Sequence[int], size: int, fill: int) -> np.ndarray:
    return np.array([*values, *[fill] * (size - len(values))], np.int32)


class Load:
    """Random events that suit the state, from a seed."""

    def __init__(self, twin: Twin, rng: random.Random) -> None:
        self.twin, self.rng = twin, rng

    def next(self) -> list[Event]:
        kinds = {
            self.step: 62,
            self.new: 14,
            self.again: 8,
            self.late: 3,
            self.fork: 6,
            self.abort: 6,
            self.resume: 8,
            self.reset: 3,
        }
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        return kind()

    def step(self) -> list[Event]:
        rows = range(self.twin.config.max_num_seqs)
        tokens = self.rng.choices(range(WORDS), (6, 3, 1), k=len(rows))
        return [Step(sum(token * WORDS**row for row, token in zip(rows, tokens, strict=True)))]

    def new(self) -> list[Event]:
        """A prompt of common blocks, most often one continuation, at times up to four."""
        blocks = self.rng.choices(BLOCKS, k=self.rng.randint(0, 5))
        prompt = [token for block in blocks for token in block]
        cut = self.rng.choice((0, 0, 1, 2, 3))
        return self.submit(prompt[: max(0, len(prompt) - cut)])

    def again(self) -> list[Event]:
        """What another request has said so far, or a part of it."""
        tokens = self.rng.choice([q.tokens for q in self.twin.model.slots if q] or [[0]])
        return self.submit(tokens[: self.rng.randint(1, len(tokens))])

    def submit(self, prompt: Sequence[int]) -> list[Event]:
        rng = self.rng
        free = free_slots(self.twin)
        count = min(rng.choice((1, 1, 1, 2, 3, 4)), len(free))
        slots = rng.sample(free, count)
        event = Submit(
            slot=-1,
            prompt=tuple(prompt),
            max_tokens=rng.choice((1, 2, 3, 4, 6, 8, 30)),
            min_tokens=rng.choice((0, 0, 2)),
            priority=rng.choice((0, 0, 0, -1, 1)),
            salt=rng.choice((0, 0, 0, 1)),
            use_cache=rng.random() < 0.85,
            stops=rng.random() < 0.5,
            pause_after=rng.choice((NEVER, NEVER, 0, 1, 2)),
        )
        # Without a parent the same prompts meet in the prefix cache only.
        return submit_all(event, slots, forks=rng.random() < 0.6)

    def late(self) -> list[Event]:
        """One more continuation of the prompt of any request."""
        free, others = free_slots(self.twin), [q for q in self.twin.model.slots if q]
        if not free or not others:
            return []
        slot, parent = self.rng.choice(free), self.rng.choice(others)
        return [] if slot == parent.slot else [continuation(slot, parent)]

    def fork(self) -> list[Event]:
        rng = self.rng
        anywhere = range(self.twin.config.max_num_requests)
        slots = free_slots(self.twin) if rng.random() < 0.9 else list(anywhere)
        count = min(rng.randint(1, MAX_CHILDREN), len(slots))
        words = (None, 0, 1, 2) if rng.random() < 0.5 else (None,)
        return [
            Fork(
                parent=rng.choice(anywhere),
                children=tuple(rng.sample(slots, count)),
                last_tokens=tuple(rng.choices(words, k=count)),
            )
        ]

    def abort(self) -> list[Event]:
        return [Abort(self.rng.randrange(self.twin.config.max_num_requests))]

    def resume(self) -> list[Event]:
        """Most often all that are paused go on; at times anyone is paused, or goes on."""
        slots = [q.slot for q in self.twin.model.slots if q is not None]
        if self.rng.random() < 0.8:
            slots = [slot for slot in slots if self.twin.model.slots[slot].paused]
        some = self.rng.sample(slots, min(len(slots), MAX_CHILDREN))
        return [Resume(tuple(some), tuple(self.rng.choices((0, 1, 1, 1, 2), k=len(some))))]

    def reset(self) -> list[Event]:
        return [Reset()]


def free_slots(twin: Twin) -> list[int]:
    return [s for s in range(twin.config.max_num_requests) if twin.model.is_free(s)]


def submit_all(event: Submit, slots: Sequence[int], forks: bool) -> list[Event]:
    """``event`` in each of ``slots``; forks of the first in the others, or one like another."""
    return [
        dataclasses.replace(event, slot=slot, fork_of=slots[0] if forks and i else None)
        for i, slot in enumerate(slots)
    ]


def continuation(slot: int, parent: Request) -> Submit:
    """A request for ``slot`` with the prompt of ``parent``, that shares its blocks."""
    return Submit(
        slot=slot,
        prompt=tuple(parent.tokens[: parent.prompt_len]),
        salt=parent.salt,
        use_cache=parent.use_cache,
        fork_of=parent.slot,
    )


def shrink(config: EngineConfig, events: Sequence[Event]) -> list[Event]:
    """Fewer of ``events`` that end in a violation too: parts are left out, ever smaller ones."""
    kept, before = list(events), len(events) + 1
    while len(kept) < before:
        size = before = len(kept)
        while size := size // 2:
            start = 0
            while start < len(kept):
                fewer = kept[:start] + kept[start + size :]
                if violation(config, fewer) is None:
                    start += size
                else:
                    kept = fewer
    return kept


def violation(config: EngineConfig, events: Sequence[Event]) -> Violation | None:
    """What goes wrong if ``events`` are made in order, without those that cannot be made."""
    twin = Twin(config)
    try:
        for event in events:
            if twin.can(event):
                twin.apply(event)
        twin.finish()
    except Violation as error:
        return error
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--transitions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    rng, seen, done, begin = random.Random(options.seed), Counter(), 0, time.perf_counter()
    bar = tqdm(total=options.transitions, unit=" transitions", mininterval=1)
    while done < options.transitions:
        for config in CONFIGS.values():
            twin = Twin(config)
            try:
                run_episode(twin, rng)
            except Violation as error:
                bar.close()
                print(f"violation in {config}\n{error}\nshrinking {len(twin.events)} events")
                events = shrink(config, twin.events)
                print(*events, violation(config, events), sep="\n")
                sys.exit(1)
            done += len(twin.events)
            bar.update(len(twin.events))
            seen += happened(twin)
    bar.close()
    print(f"seed {options.seed}: {done} transitions in {time.perf_counter() - begin:.0f} s")
    for name, count in sorted(seen.items()):
        print(f"  {name}: {count}")
    print("no violation")


def run_episode(twin: Twin, rng: random.Random) -> None:
    load = Load(twin, rng)
    while len(twin.events) < EPISODE:
        for event in load.next():
            twin.apply(event)
    twin.finish()


def happened(twin: Twin) -> Counter[str]:
    """What an episode has met: events by kind, and what came of them."""
    seen = Counter(f"event {type(event).__name__.lower()}" for event in twin.events)
    seen["episodes"] = 1
    return seen + twin.seen + twin.model.seen + twin.model.totals


if __name__ == "__main__":
    main()
