"""From sequences to steps: what goes into each, and its BatchDescriptor, on the host.

Sequences are packed first come, first served, as prefill chunks without gaps::

    step 1   [ sequence 0    ][ sequence 1 ][ sequence 2, beg]
    step 2   [inning ][ sequence 3 ][ sequence 4             ]

So a step leaves at most one sequence unfinished, and the pool holds the longest one and a
step's worth of others, however many sequences there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from oxidize_jax.batch.descriptor import BatchDescriptor

_GROWTH = 4
"""Ratio of neighbouring sizes: few programs to compile, at most 4x too large."""
_TOKENS_PER_ROW = 16
"""Of shorter sequences than this, on average, a step is not full."""
NO_TARGET = -1
"""Stands on the host where a token's successor is not asked for."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape of one step; hashable. All steps of a call have one."""

    tokens: int
    """T"""
    rows: int
    """S: sequences in a step"""
    tile: int
    """Q: tokens of one sequence that attend together"""
    table_width: int
    """M: blocks of the longest sequence"""
    block_size: int
    """K"""

    @property
    def tiles(self) -> int:
        """P: each sequence may leave its last one part empty."""
        return -(-self.tokens // self.tile) + self.rows

    @property
    def num_blocks(self) -> int:
        """B: the longest sequence, a step of others, and the end of each."""
        return self.table_width + -(-self.tokens // self.block_size) + self.rows


def choose_shape(
    lengths: Sequence[int], *, max_tokens: int, max_len: int, block_size: int, tile: int
) -> Shape:
    """The shape for sequences of these lengths: sizes come from short ladders.

    T is ``max_tokens``, or a fraction of it that holds all of them in one step. M is a step's
    worth of blocks, or a multiple of it up to what ``max_len`` tokens need.
    """
    total, longest = sum(lengths), max(lengths)
    sizes = [max_tokens]
    while sizes[0] // _GROWTH >= 2 * tile:
        sizes.insert(0, sizes[0] // _GROWTH)
    fits = (t for t in sizes if t >= total and _rows(t) >= len(lengths))
    tokens = next(fits, max_tokens)
    width, most = -(-tokens // block_size), -(-max_len // block_size)
    while width * block_size < longest:
        width *= _GROWTH
    return Shape(tokens, _rows(tokens), tile, min(width, most), block_size)


def _rows(tokens: int) -> int:
    return max(2, tokens // _TOKENS_PER_ROW)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a sequence, run in one step."""

    sequence: int
    start: int
    end: int


def plan_steps(shape: Shape, lengths: Sequence[int]) -> Iterator[list[Chunk]]:
    """Each step's chunks, at most S of them and T tokens; a sequence of no tokens has none."""
    step: list[Chunk] = []
    room = shape.tokens
    for sequence, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room or len(step) == shape.rows:
                yield step
                step, room = [], shape.tokens
            end = min(length, start + room)
            step.append(Chunk(sequence, start, end))
            room -= end - start
            start = end
    if step:
        yield step


class Tables:
    """Block tables of the sequences under way; blocks go back where a sequence ends."""

    def __init__(self, shape: Shape, lengths: Sequence[int]) -> None:
        self._shape, self._lengths = shape, lengths
        self._free = list(range(shape.num_blocks))
        self._tables: dict[int, list[int]] = {}

    def extend(self, chunk: Chunk) -> list[int]:
        """The blocks of the chunk's sequence, up to its end."""
        table = self._tables.setdefault(chunk.sequence, [])
        while len(table) * self._shape.block_size < chunk.end:
            table.append(self._free.pop())
        return table

    def release(self, chunk: Chunk) -> None:
        """Give back the blocks of a sequence whose last chunk this is."""
        if chunk.end == self._lengths[chunk.sequence]:
            self._free += self._tables.pop(chunk.sequence)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one call of a program takes, as numpy arrays."""

    chunks: list[Chunk]
    batch: BatchDescriptor
    """``logits_indices i32[T]`` are the tokens whose successor is asked for, at the front."""
    targets: np.ndarray
    """i32[T]: those successors; 0 at padding."""
    num_targets: np.int32
    """How many there are."""
    last: np.ndarray
    """i32[S]: last token of each row's chunk, ``T`` where there is none."""


def build_step(
    shape: Shape,
    chunks: list[Chunk],
    tables: Tables,
    token_ids: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
) -> Step:
    """Lay out ``chunks``, row r being the r-th.

    ``targets[i] i32[n]`` are the successors of the n tokens of ``token_ids[i] i32[n]``, or
    :data:`NO_TARGET`.
    """
    t, s, k = shape.tokens, shape.rows, shape.block_size
    ids, positions, wanted = _zeros(t), _zeros(t), np.full(t, NO_TARGET, np.int32)
    rows, slots = np.full(t, s, np.int32), np.full(t, shape.num_blocks * k, np.int32)
    block_tables = np.full((s, shape.table_width), shape.num_blocks, np.int32)
    kv_lens, last = _zeros(s), np.full(s, t, np.int32)
    tile_rows = np.full(shape.tiles, s, np.int32)
    tile_tokens = np.full((shape.tiles, shape.tile), t, np.int32)
    at = tile = 0
    for row, chunk in enumerate(chunks):
        table = np.array(tables.extend(chunk), np.int32)
        here, count = slice(chunk.start, chunk.end), chunk.end - chunk.start
        place, end = np.arange(chunk.start, chunk.end, dtype=np.int32), at + count
        ids[at:end], wanted[at:end] = token_ids[chunk.sequence][here], targets[chunk.sequence][here]
        positions[at:end], rows[at:end] = place, row
        slots[at:end] = table[place // k] * k + place % k
        block_tables[row, : len(table)] = table
        kv_lens[row], last[row] = chunk.end, end - 1
        for first in range(at, end, shape.tile):
            some = np.arange(first, min(end, first + shape.tile), dtype=np.int32)
            tile_rows[tile], tile_tokens[tile, : some.size] = row, some
            tile += 1
        at = end
    for chunk in chunks:
        tables.release(chunk)
    (scored,) = np.nonzero(wanted != NO_TARGET)
    indices, packed = np.full(t, t, np.int32), _zeros(t)
    indices[: scored.size], packed[: scored.size] = scored, wanted[scored]
    none = np.full(s, shape.num_blocks, np.int32)
    fields: dict[str, Any] = {
        "token_ids": ids,
        "positions": positions,
        "token_rows": rows,
        "slot_mapping": slots,
        "block_tables": block_tables,
        "kv_lens": kv_lens,
        "decode_rows": _zeros(0),
        "tile_rows": tile_rows,
        "tile_tokens": tile_tokens,
        "sample_rows": np.full(t, s, np.int32),
        "logits_indices": indices,
        "copy_src": none,
        "copy_dst": none,
        "num_copies": np.int32(0),
    }
    return Step(chunks, BatchDescriptor(**fields), packed, np.int32(scored.size), last)


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.int32)
