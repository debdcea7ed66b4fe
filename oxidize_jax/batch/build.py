"""From the scheduler's plan to a BatchDescriptor of a bucket's shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from oxidize_jax.arrays import prefix_sum, segments
from oxidize_jax.batch.buckets import Bucket
from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.budget import tiles_for
from oxidize_jax.scheduler.state import SchedulerState


def build_batch(config: EngineConfig, bucket: Bucket, state: SchedulerState) -> BatchDescriptor:
    """Lay out the planned tokens: decodes first, then each prefill chunk, without gaps.

    ``bucket`` must hold the plan (``select_bucket``); what it has beyond is padding. Without
    tiles every token is a decode row, those of a chunk too.
    """
    rows, requests = state.rows, state.requests
    seqs, t = config.max_num_seqs, bucket.tokens
    scheduled = state.plan.num_scheduled
    layout = _layout(state)
    num_decodes = jnp.sum(scheduled == 1, dtype=jnp.int32) if bucket.tiles else layout.ends[-1]

    token = jnp.arange(t, dtype=jnp.int32)
    place = segments(layout.ends, t)
    row = layout.rows.at[place].get(mode="fill", fill_value=seqs)
    live = token < layout.ends[-1]
    row = jnp.where(live, row, seqs)

    computed = _of_request(requests.num_computed, rows.request)
    start = jnp.zeros((seqs,), jnp.int32).at[layout.rows].set(layout.starts)
    position = jnp.where(live, token - _row(start, row, 0) + _row(computed, row, 0), 0)
    request = _row(rows.request, row, config.max_num_requests)
    ids = requests.tokens.at[request, position].get(mode="fill", fill_value=0)
    block = rows.block_table.at[row, position // config.block_size].get(
        mode="fill", fill_value=config.num_blocks
    )
    slot = block * config.block_size + position % config.block_size
    no_slot = config.num_blocks * config.block_size
    # A token whose KV came with shared blocks is run for its logits only.
    writes = live & (position >= _row(rows.kv_len, row, 0))

    kv_lens = jnp.where(scheduled > 0, computed + scheduled, 0)
    sampling = sampling_rows(state)
    sample_rows = _pack(layout.rows, sampling[layout.rows], bucket.samples, seqs)
    last = jnp.where(scheduled > 0, start + scheduled - 1, t)
    decode = jnp.arange(bucket.decode_rows, dtype=jnp.int32)
    tile_rows, tile_tokens = _tiles(config, bucket, layout, scheduled)
    return BatchDescriptor(
        token_ids=jnp.where(live, ids, 0),
        positions=position,
        token_rows=row,
        slot_mapping=jnp.where(writes, slot, no_slot),
        block_tables=rows.block_table,
        kv_lens=kv_lens,
        decode_rows=jnp.where(decode < num_decodes, row[: bucket.decode_rows], seqs),
        tile_rows=tile_rows,
        tile_tokens=tile_tokens,
        sample_rows=sample_rows,
        logits_indices=_row(last, sample_rows, t),
        copy_src=state.plan.copy_src,
        copy_dst=state.plan.copy_dst,
        num_copies=state.plan.num_copies,
    )


def sampling_rows(state: SchedulerState) -> jax.Array:
    """bool[S]: rows whose planned tokens are the last that are not computed yet."""
    request, scheduled = state.rows.request, state.plan.num_scheduled
    computed = _of_request(state.requests.num_computed, request)
    total = _of_request(state.requests.num_tokens, request)
    return (scheduled > 0) & (computed + scheduled == total)


class _Layout:
    """Rows in the order of their tokens, with the first token and the end of each."""

    def __init__(self, rows: jax.Array, counts: jax.Array) -> None:
        self.rows = rows
        self.ends = prefix_sum(counts)
        self.starts = self.ends - counts


def _layout(state: SchedulerState) -> _Layout:
    """Decoding rows first, then prefilling ones, each in the order of the plan."""
    order = state.plan.order
    counts = state.plan.num_scheduled[order]
    # A stable partition into three classes: decode, prefill, idle.
    decode, prefill = counts == 1, counts > 1
    place = jnp.zeros_like(counts)
    for kind in (decode, prefill, counts == 0):
        first = jnp.sum(place > 0, dtype=jnp.int32)
        place = jnp.where(kind, first + prefix_sum(kind), place)
    perm = jnp.zeros_like(counts).at[place - 1].set(jnp.arange(counts.size, dtype=jnp.int32))
    return _Layout(order[perm], counts[perm])


def _tiles(
    config: EngineConfig, bucket: Bucket, layout: _Layout, scheduled: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(i32[P], i32[P, Q])``: row of each tile, and its tokens padded with T."""
    q = config.prefill_tile
    counts = scheduled[layout.rows]
    tiles = tiles_for(counts, q)
    ends = prefix_sum(tiles)
    tile = jnp.arange(bucket.tiles, dtype=jnp.int32)
    place = segments(ends, bucket.tiles)
    used = tile < ends[-1]
    nth = tile - _row(ends - tiles, place, 0)
    begin = _row(layout.starts, place, 0) + nth * q
    end = _row(layout.ends, place, 0)
    token = begin[:, None] + jnp.arange(q, dtype=jnp.int32)
    valid = used[:, None] & (token < end[:, None])
    rows = jnp.where(used, _row(layout.rows, place, config.max_num_seqs), config.max_num_seqs)
    return rows, jnp.where(valid, token, bucket.tokens)


def _pack(values: jax.Array, keep: jax.Array, size: int, pad: int) -> jax.Array:
    """i32[size]: the kept ``values``, in order, at the front."""
    place = jnp.where(keep, prefix_sum(keep) - 1, size)
    return jnp.full((size,), pad, jnp.int32).at[place].set(values, mode="drop")


def _row(values: jax.Array, index: jax.Array, fill: int) -> jax.Array:
    return values.at[index].get(mode="fill", fill_value=fill)


def _of_request(values: jax.Array, request: jax.Array) -> jax.Array:
    """Per-request ``values`` seen from the rows; 0 for a row without a request."""
    return values.at[request].get(mode="fill", fill_value=0)
