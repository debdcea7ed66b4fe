"""Decode attention for XLA:CPU: splits of a context, each by whole-vector multiply-adds.

A query of one token against its context is two matrix-vector products. XLA:CPU calls a
library for those, which packs the context first: more work than the product. Written out
as one multiply-add for each number of a head (scores) and each slot of a block (output), they
compile to plain vector code over the pages as they lie in the cache.

The contexts of all rows are cut into splits of a few blocks, and the splits form one list
(flash-decoding; Dao et al., 2023). A loop takes as many of them at a time as stay in a core's
cache, for as many turns as there are live splits: cost follows the tokens that are there, not
the longest row or the width of the tables. What a row's splits give is combined in their
order, so a row's result does not depend on the rows beside it, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.arrays import prefix_sum, segments
from oxidize_jax.model import cpu_pages
from oxidize_jax.types import replace, state

SPLIT_BLOCKS = 2
"""Blocks of a split. Fewer make more partial results, more leave more of the last one empty."""
_BYTES = 3 * 2**19
"""Of pages gathered at a time. XLA:CPU copies less than about a megabyte on one core only, and
much more falls out of the cores' own caches (2 MiB each, where this was measured)."""
_SPLITS_PER_ROW = 8
"""In a turn at most, on average: what a turn takes in vain, a few rows would feel."""
_CHAINS = 4
"""Sums that a core works on side by side: one alone would wait for each of its additions."""
_COMBINED = 4
"""Splits of a row that are combined at a time."""
_LOWEST = -1e30
"""A finite score for what is not seen; its weight is exp(-1e30 - top) = 0."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes: heads, slots, and how the list of splits is cut."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    lanes: int
    """Splits in a turn"""
    turns: int
    """Turns that the longest list takes"""
    scale: float
    """What scores are multiplied by"""
    softcap: float
    """Bound of the scores, by tanh; 0: none"""

    @property
    def group(self) -> int:
        """Query heads of a kv head"""
        return self.num_heads // self.num_kv_heads

    @property
    def keys(self) -> int:
        """Keys in a split"""
        return SPLIT_BLOCKS * self.block_size


@state
class Splits:
    """The list of splits of one step, N long. Those past the end repeat live pages."""

    row: jax.Array
    """i32[N]: which decode row"""
    blocks: jax.Array
    """i32[N, C]: its blocks; the row's first block where it sees no more"""
    keys: jax.Array
    """i32[N]: keys of the split that the row sees, a prefix of it"""
    unseen: jax.Array | None
    """i32[N]: how many of these are before the window; None without one"""
    first: jax.Array
    """i32[n]: place of each row's first split in the list"""
    count: jax.Array
    """i32[n]: splits of each row; 0 for padding"""


@state
class Scratch:
    """Partial results of all splits, kept from layer to layer so that nothing is cleared.

    In the loop a stage writes into what it wrote in the turn before.
    """

    top: jax.Array
    """f32[N, G, H']: largest score"""
    total: jax.Array
    """f32[N, G, H']: sum of weights"""
    out: tuple[jax.Array, ...]
    """f32[N, G, H', D] or two halves of it: weighted sums of values"""
    scores: jax.Array
    """f32[lanes, C, G, H', K]"""
    sums: tuple[jax.Array, ...]
    """``out`` of one turn"""


def plan_sizes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_blocks: int,
    block_size: int,
    rows: int,
    table_width: int,
    kv: jax.ShapeDtypeStruct,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Sizes:
    """How to cut the work of ``rows`` decode rows whose tables are ``table_width`` wide."""
    longest = rows * -(-table_width // SPLIT_BLOCKS)
    page = kv.shape[1] * kv.dtype.itemsize
    lanes = max(1, min(longest, rows * _SPLITS_PER_ROW, -(-_BYTES // (SPLIT_BLOCKS * page))))
    return Sizes(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        lanes=lanes,
        turns=-(-longest // lanes),
        scale=scale,
        softcap=softcap,
    )


def splits_by_layer(
    sizes: Sizes, lengths: jax.Array, tables: jax.Array, windows: tuple[int, ...]
) -> Callable[[jax.Array], Splits]:
    """The list of splits of each layer ``i32[]``: one for each window that there is.

    ``windows`` as in :class:`~oxidize_jax.model.attention.AttentionSpec`.
    """
    different = sorted(set(windows)) or [0]
    lists = [make_splits(sizes, lengths, tables, window) for window in different]
    if len(lists) == 1:
        return lambda layer: lists[0]
    # The same fields in all of them.
    lists = [
        splits if splits.unseen is not None else replace(splits, unseen=jnp.zeros_like(splits.keys))
        for splits in lists
    ]
    stack = jax.tree.map(lambda *fields: jnp.stack(fields), *lists)
    which = jnp.asarray([different.index(window) for window in windows], jnp.int32)
    return lambda layer: jax.tree.map(lambda field: field[which[layer]], stack)


def make_splits(sizes: Sizes, lengths: jax.Array, tables: jax.Array, window: int = 0) -> Splits:
    """``lengths i32[n]`` keys up to each row's token, 0 for padding; ``tables i32[n, M]``.

    With a ``window`` a row sees the last that many of them, and its list begins there.
    """
    n = tables.shape[0]
    count = -(-lengths // sizes.keys)
    begin = None
    if window:
        begin = jnp.maximum(lengths - window, 0) // sizes.keys
        count = count - begin
    ends = prefix_sum(count)
    first = ends - count
    lane = jnp.arange(sizes.lanes * sizes.turns, dtype=jnp.int32)
    row = jnp.minimum(segments(ends, lane.size), n - 1)
    nth = lane - first[row]
    if begin is not None:
        nth = nth + begin[row]
    column = nth[:, None] * SPLIT_BLOCKS + jnp.arange(SPLIT_BLOCKS, dtype=jnp.int32)
    # A row may hold blocks that nobody has written yet.
    column = jnp.where(column * sizes.block_size < lengths[row, None], column, 0)
    block = tables[row[:, None], column]
    before = lengths[row] - window - nth * sizes.keys
    return Splits(
        row=row,
        blocks=jnp.where(block < sizes.num_blocks, block, 0),
        keys=jnp.clip(lengths[row] - nth * sizes.keys, 0, sizes.keys),
        unseen=jnp.clip(before, 0, sizes.keys) if window else None,
        first=first,
        count=count,
    )


def make_scratch(sizes: Sizes, kv: jax.ShapeDtypeStruct) -> Scratch:
    """Room for the longest list of splits."""
    heads, k = (sizes.num_kv_heads, sizes.group), sizes.block_size
    halves = 2 if kv.dtype == jnp.uint32 else 1
    numbers = sizes.head_dim // halves
    longest = sizes.lanes * sizes.turns

    def room(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    return Scratch(
        top=room(longest, *heads),
        total=room(longest, *heads),
        out=tuple(room(longest, *heads, numbers) for _ in range(halves)),
        scores=room(sizes.lanes, SPLIT_BLOCKS, *heads, k),
        sums=tuple(room(sizes.lanes, *heads, numbers) for _ in range(halves)),
    )


def attend(
    sizes: Sizes, splits: Splits, scratch: Scratch, q: jax.Array, kv: jax.Array, offset: jax.Array
) -> tuple[jax.Array, Scratch]:
    """``f32[n, H, D]`` for ``q f32[n, H, D]``; ``offset i32[]`` is the layer's first page."""
    q = (q * jnp.float32(sizes.scale)).reshape(
        q.shape[0], sizes.num_kv_heads, sizes.group, sizes.head_dim
    )
    live = jnp.sum(splits.count, dtype=jnp.int32)
    turns = (live + sizes.lanes - 1) // sizes.lanes

    def turn(i: jax.Array, scratch: Scratch) -> Scratch:
        return _turn(sizes, splits, scratch, q, kv, offset, i, i < turns)

    scratch = lax.fori_loop(0, turns, turn, scratch)
    return _combine(splits, scratch).reshape(q.shape[0], -1, sizes.head_dim), scratch


def _turn(
    sizes: Sizes,
    splits: Splits,
    scratch: Scratch,
    q: jax.Array,
    kv: jax.Array,
    offset: jax.Array,
    i: jax.Array,
    go: jax.Array,
) -> Scratch:
    """Scores, weights and sums of the splits of turn ``i``. ``go`` is true, but XLA cannot know.

    Stages are kept apart by :func:`_stage`. Fused into what reads them, the multiply-adds would
    be done again for each reader, and not in vectors.
    """
    start = i * sizes.lanes

    def now(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, start, sizes.lanes)

    pages = cpu_pages.gather_rows(kv, now(splits.blocks) + offset)
    # Cut up within the stages: a stage gets its own copy of whatever it is handed in a new shape.
    queries = q[now(splits.row)]
    scores = _stage(go, lambda: _scores(sizes, queries, pages), scratch.scores)
    flat = scores.transpose(0, 2, 3, 1, 4).reshape(*queries.shape[:3], sizes.keys)
    flat = softcapped(flat, sizes.softcap)
    key = jnp.arange(sizes.keys, dtype=jnp.int32)
    seen = key < now(splits.keys)[:, None]
    if splits.unseen is not None:
        seen = seen & (key >= now(splits.unseen)[:, None])
    flat = jnp.where(seen[:, None, None], flat, _LOWEST)
    top = flat.max(axis=-1)
    weights = jnp.exp(flat - top[..., None])
    sums = _stage(go, lambda: _sums(sizes, weights, pages), scratch.sums)

    def put(room: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(room, x, start, axis=0)

    return Scratch(
        top=put(scratch.top, top),
        total=put(scratch.total, weights.sum(axis=-1)),
        out=tuple(put(room, x) for room, x in zip(scratch.out, sums, strict=True)),
        scores=scores,
        sums=sums,
    )


def softcapped(x: jax.Array, cap: float) -> jax.Array:
    """``cap * tanh(x / cap)`` (Bello et al., 2016); with a cap of 0, ``x``."""
    return jnp.tanh(x * jnp.float32(1 / cap)) * jnp.float32(cap) if cap else x


def _stage(go: jax.Array, work: Callable[[], Any], before: Any) -> Any:
    """``work()`` as a program of its own, written where ``before`` is: a loop that runs once."""
    done = jnp.zeros((), jnp.bool_)
    return lax.while_loop(lambda carry: carry[0], lambda _: (done, work()), (go, before))[1]


def _scores(sizes: Sizes, q: jax.Array, pages: jax.Array) -> jax.Array:
    """``f32[lanes, C, G, H', K]``: sums over the numbers of a head, slots side by side."""
    keys, _ = cpu_pages.views(pages, sizes.num_kv_heads, sizes.block_size)
    numbers = keys.shape[4]
    terms = []
    for i in range(numbers):
        for half, k in enumerate(cpu_pages.parts(keys[:, :, 0, :, i])):
            query = q[..., i + half * numbers]
            terms.append(query[:, None, :, :, None] * k[:, :, :, None, :])
    return _sum(terms)


def _sums(sizes: Sizes, weights: jax.Array, pages: jax.Array) -> tuple[jax.Array, ...]:
    """``f32[lanes, G, H', N]``, one or two of them: sums over slots, numbers side by side."""
    _, values = cpu_pages.views(pages, sizes.num_kv_heads, sizes.block_size)
    _, blocks, _, _, slots, _ = values.shape
    terms = []
    for block in range(blocks):
        for slot in range(slots):
            weight = weights[..., block * slots + slot, None]
            halves = cpu_pages.parts(values[:, block, 1, :, slot])
            terms.append([weight * v[:, :, None, :] for v in halves])
    return tuple(_sum(list(half)) for half in zip(*terms, strict=True))


def _sum(terms: list[jax.Array]) -> jax.Array:
    """Sum in a fixed order, in a few chains that a processor adds up side by side."""
    chains = []
    for first in range(min(_CHAINS, len(terms))):
        chain = terms[first]
        for term in terms[first + _CHAINS :: _CHAINS]:
            chain = chain + term
        chains.append(chain)
    while len(chains) > 1:
        pairs = [a + b for a, b in zip(chains[::2], chains[1::2], strict=False)]
        chains = pairs + chains[2 * len(pairs) :]
    return chains[0]


def _combine(splits: Splits, scratch: Scratch) -> jax.Array:
    """``f32[n, G, H', D]``: every row's splits, some at a time, in their order (online softmax)."""
    last = scratch.top.shape[0] - 1
    some = jnp.arange(_COMBINED, dtype=jnp.int32)

    def add(j: jax.Array, carry: tuple) -> tuple:
        top, total, out = carry
        nth = j * _COMBINED + some
        there = nth < splits.count[:, None]
        place = jnp.minimum(splits.first[:, None] + nth, last)
        tops = jnp.where(there[..., None, None], scratch.top[place], _LOWEST)
        new_top = jnp.maximum(top, tops.max(axis=1))
        fade = jnp.exp(top - new_top)
        gain = jnp.exp(tops - new_top[:, None])
        # Beyond a row's splits lie those of other rows: 0 times their NaN would be NaN.
        totals = jnp.where(there[..., None, None], gain * scratch.total[place], 0)

        def summed(x: jax.Array, more: jax.Array) -> jax.Array:
            x = x * fade[..., None]
            for i in range(_COMBINED):
                part = gain[:, i, :, :, None] * more[place[:, i]]
                x = x + jnp.where(there[:, i, None, None, None], part, 0)
            return x

        out = tuple(summed(x, more) for x, more in zip(out, scratch.out, strict=True))
        return new_top, total * fade + totals.sum(axis=1), out

    n = splits.count.shape[0]
    top = jnp.full((n, *scratch.top.shape[1:]), _LOWEST, jnp.float32)
    zeros = tuple(jnp.zeros((n, *x.shape[1:]), jnp.float32) for x in scratch.out)
    start = (top, jnp.zeros_like(top), zeros)
    turns = (splits.count.max() + _COMBINED - 1) // _COMBINED
    _, total, out = lax.fori_loop(0, turns, add, start)
    return jnp.concatenate(out, axis=-1) / jnp.where(total > 0, total, 1)[..., None]
