"""What must hold in every state: conservation of blocks, consistency of rows and requests."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np

from oxidize_jax.blocks.pool import NO_SERIAL, NOT_IN_RING, BlockPool
from oxidize_jax.blocks.prefix import PROBES
from oxidize_jax.scheduler.state import FINISHED, RUNNING, SchedulerState


class InvariantError(AssertionError):
    """A state that no sequence of correct transitions can reach."""


def check(state: SchedulerState) -> None:
    """Raise :class:`InvariantError` naming the first violation. Reads the state to the host."""
    state = jax.device_get(state)
    check_pool(state.pool)
    _check_rows(state)
    _check_hashed_tokens(state)


def check_pool(pool: BlockPool) -> None:
    """The part of :func:`check` that needs only the pool."""
    pool = jax.device_get(pool)
    b = pool.num_blocks
    _require(bool((pool.ref_count >= 0).all()), "a reference count is below 0", pool.ref_count)
    free = pool.free_stack[: int(pool.num_free)]
    cached = np.flatnonzero(pool.lru_pos != NOT_IN_RING)
    live = np.flatnonzero(pool.ref_count > 0)
    places = Counter([*free.tolist(), *cached.tolist(), *live.tolist()])
    _require(
        set(places) == set(range(b)) and set(places.values()) <= {1},
        "free + cached + live is not every block once",
        {"free": free, "cached": cached, "live": live},
    )
    _require(len(cached) == int(pool.num_cached), "num_cached is wrong", pool.num_cached)
    _require(not pool.hashed[free].any(), "a free block is still hashed", free)
    _require(bool(pool.hashed[cached].all()), "a cached block is not hashed", cached)
    _check_ring(pool, cached)
    _check_index(pool)


def _check_ring(pool: BlockPool, cached: np.ndarray) -> None:
    size = pool.ring.shape[0]
    head, tail = int(pool.ring_head), int(pool.ring_tail)
    _require(0 <= head <= tail <= head + size, "ring head and tail", (head, tail))
    for block in cached:
        position = int(pool.lru_pos[block])
        _require(head <= position < tail, "a cached block is outside the ring", block)
        _require(int(pool.ring[position % size]) == block, "ring entry of another block", block)


def _check_index(pool: BlockPool) -> None:
    hashed = np.flatnonzero(pool.hashed)
    slots = pool.index_slot[hashed]
    _require(bool((pool.index[slots] == hashed).all()), "index does not lead to a block", hashed)
    entries = int((pool.index < pool.num_blocks).sum())
    _require(entries == len(hashed), "the index names a block that is not hashed", entries)
    serials = pool.serial[hashed]
    _require(NO_SERIAL not in serials, "a hashed block has no serial", hashed)
    _require(len(set(serials.tolist())) == len(serials), "two blocks have one serial", serials)
    newest = max([NO_SERIAL, *serials.tolist()])
    _require(newest < int(pool.next_serial), "a serial is not given out yet", newest)
    size = pool.index.shape[0]
    probes = (slots - pool.block_hash[hashed, 0].astype(np.int64)) % size
    _require(bool((probes < PROBES).all()), "a hash does not lead to its block", hashed)
    rest = ~pool.hashed
    _require(bool((pool.serial[rest] == NO_SERIAL).all()), "a serial of no registration", rest)
    _require(bool((pool.index_slot[rest] == size).all()), "an index place of no entry", rest)


def _check_rows(state: SchedulerState) -> None:
    rows, requests, pool = state.rows, state.requests, state.pool
    s, r = rows.request.shape[0], requests.status.shape[0]
    held: Counter[int] = Counter()
    for row in range(s):
        count, table = int(rows.num_blocks[row]), rows.block_table[row]
        _require(bool((table[:count] < pool.num_blocks).all()), "an empty table entry", row)
        _require(bool((table[count:] == pool.num_blocks).all()), "an entry behind the table", row)
        held.update(table[:count].tolist())
        request = int(rows.request[row])
        if request == r:
            _require(count == 0, "an idle row holds blocks", row)
            _require(int(rows.kv_len[row]) == 0, "an idle row has KV", row)
            continue
        _require(int(requests.row[request]) == row, "row and request disagree", (row, request))
        computed = int(requests.num_computed[request])
        _require(computed <= int(requests.num_tokens[request]), "computed too much", request)
        written = int(rows.kv_len[row])
        _require(computed <= written, "computed tokens without KV", request)
        _require(written <= computed + 1, "KV of tokens that are not computed", row)
        _require(written <= count * pool.block_size, "KV without blocks", row)
        _require(requests.status[request] in (RUNNING, FINISHED), "a row for a waiting one", row)
    for block in range(pool.num_blocks):
        _require(
            held[block] == int(pool.ref_count[block]),
            "ref_count is not the number of table entries",
            (block, held[block], int(pool.ref_count[block])),
        )
    for request in np.flatnonzero(requests.row < s).tolist():
        row = int(requests.row[request])
        _require(int(rows.request[row]) == request, "a request names another's row", request)
    selves = requests.fork_of == np.arange(r)
    _require(not selves.any(), "a fork of itself", np.flatnonzero(selves))
    rowless = requests.row == s
    _require(bool((requests.num_computed[rowless] == 0).all()), "KV without a row", rowless)


def _check_hashed_tokens(state: SchedulerState) -> None:
    """A registered block that a row holds stands for exactly the row's tokens there."""
    rows, requests, pool = state.rows, state.requests, state.pool
    k = pool.block_size
    for row in range(rows.request.shape[0]):
        request = int(rows.request[row])
        for column in range(int(rows.num_blocks[row])):
            block = int(rows.block_table[row, column])
            if not pool.hashed[block]:
                continue
            tokens = requests.tokens[request, column * k : (column + 1) * k]
            _require(
                np.array_equal(tokens, pool.block_tokens[block])
                and int(rows.kv_len[row]) >= (column + 1) * k,
                "a registered block does not hold its tokens",
                (row, column, block),
            )


def _require(condition: bool, message: str, value: object) -> None:
    if not condition:
        raise InvariantError(f"{message}: {value}")
