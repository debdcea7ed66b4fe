"""What there is to see of an engine: which request has which row and which blocks.

Nobody needs it to run. It is read only for somebody who looks, beside the runs: the program
below waits on the device for the run before it, and the host for neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.scheduler.state import FINISHED, UNUSED, WAITING, SchedulerState, Totals
from oxidize_jax.types import state


@state
class Seen:
    """The part of a :class:`SchedulerState` that is shown."""

    status: jax.Array
    """i32[R]"""
    row: jax.Array
    """i32[R]: ``S`` for none."""
    prompt_len: jax.Array
    """i32[R]"""
    num_tokens: jax.Array
    """i32[R]"""
    num_computed: jax.Array
    """i32[R]"""
    max_tokens: jax.Array
    """i32[R]"""
    num_cached: jax.Array
    """i32[R]"""
    num_preemptions: jax.Array
    """i32[R]"""
    block_table: jax.Array
    """i32[S, M]"""
    num_blocks: jax.Array
    """i32[S]"""
    ref_count: jax.Array
    """i32[B]"""
    hashed: jax.Array
    """bool[B]"""
    totals: jax.Array
    """i32[7]: the fields of :class:`~oxidize_jax.scheduler.state.Totals`, in their order."""


@jax.jit
def look(scheduler: SchedulerState) -> Seen:
    """Copy it out, for the next run takes the state. Nothing is donated."""
    requests, rows, pool = scheduler.requests, scheduler.rows, scheduler.pool
    seen = Seen(
        status=requests.status,
        row=requests.row,
        prompt_len=requests.prompt_len,
        num_tokens=requests.num_tokens,
        num_computed=requests.num_computed,
        max_tokens=requests.max_tokens,
        num_cached=requests.num_cached,
        num_preemptions=requests.num_preemptions,
        block_table=rows.block_table,
        num_blocks=rows.num_blocks,
        ref_count=pool.ref_count,
        hashed=pool.hashed,
        totals=jnp.stack(jax.tree.leaves(scheduler.totals)),
    )
    return jax.tree.map(jnp.copy, seen)  # never the state's own buffers


@dataclasses.dataclass(frozen=True)
class SeenRequest:
    """One request on the device. Tokens count prompt and output together, as ``max_tokens``."""

    request_id: int
    state: str
    """``waiting``, ``prefill``, ``decode``, ``preempted`` or ``ending``"""
    slot: int
    row: int | None
    prompt_tokens: int
    tokens: int
    computed_tokens: int
    max_tokens: int
    cached_tokens: int
    preemptions: int
    blocks: tuple[int, ...]
    """Its block table, in the order of its tokens."""


class Observation:
    """A look that is on its way to the host.

    Args:
      owners: the request in each slot, None for a free one.
      num_queued: requests that wait on the host for a slot.
    """

    def __init__(self, seen: Seen, owners: Sequence[int | None], num_queued: int) -> None:
        for leaf in jax.tree.leaves(seen):
            leaf.copy_to_host_async()
        self._seen = seen
        self._owners = tuple(owners)
        self.num_queued = num_queued

    @property
    def is_ready(self) -> bool:
        """Whether it can be read without a wait for the device."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(self._seen))

    @cached_property
    def _host(self) -> Seen:
        return jax.device_get(self._seen)

    @property
    def ref_counts(self) -> np.ndarray:
        """i32[B]: block-table entries that hold each block."""
        return np.asarray(self._host.ref_count)

    @property
    def is_cached(self) -> np.ndarray:
        """bool[B]: nobody holds the block, and the prefix cache knows its tokens."""
        return np.asarray(self._host.hashed) & (self.ref_counts == 0)

    @property
    def totals(self) -> dict[str, int]:
        """Counters since the state was made; they begin anew after a step that failed."""
        names = [field.name for field in dataclasses.fields(Totals)]
        return dict(zip(names, np.asarray(self._host.totals).tolist(), strict=True))

    @cached_property
    def requests(self) -> list[SeenRequest]:
        """Those that have a slot, by their ids."""
        status = np.asarray(self._host.status)
        owned = [(slot, i) for slot, i in enumerate(self._owners) if i is not None]
        found = [self._request(slot, i) for slot, i in owned if status[slot] != UNUSED]
        return sorted(found, key=lambda one: one.request_id)

    def _request(self, slot: int, request_id: int) -> SeenRequest:
        seen = self._host
        row = int(seen.row[slot])
        has_row = row < seen.block_table.shape[0]
        blocks = seen.block_table[row, : int(seen.num_blocks[row])] if has_row else np.zeros(0)
        return SeenRequest(
            request_id=request_id,
            state=self._state(slot, has_row),
            slot=slot,
            row=row if has_row else None,
            prompt_tokens=int(seen.prompt_len[slot]),
            tokens=int(seen.num_tokens[slot]),
            computed_tokens=int(seen.num_computed[slot]),
            max_tokens=int(seen.max_tokens[slot]),
            cached_tokens=int(seen.num_cached[slot]),
            preemptions=int(seen.num_preemptions[slot]),
            blocks=tuple(np.asarray(blocks).astype(int).tolist()),
        )

    def _state(self, slot: int, has_row: bool) -> str:
        status = int(self._host.status[slot])
        if status == FINISHED:
            return "ending"
        if not has_row:
            return "waiting" if status == WAITING else "preempted"
        left = int(self._host.num_tokens[slot]) - int(self._host.num_computed[slot])
        return "prefill" if left > 1 else "decode"
