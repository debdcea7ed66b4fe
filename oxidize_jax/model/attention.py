"""Attention over the paged cache. Backends are chosen by name; ``gather`` runs everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.model import attention_cpu
from oxidize_jax.model.attention_rows import AttentionSpec, Part, Plan, attend_rows

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""``attend(q f32[T, H, D], kv, layer i32[], scratch) -> (f32[T, H, D], scratch)``, once the step
has written KV."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of one step."""

    scratch: Any
    """Arrays to work in; handed from layer to layer, and of no use after the last."""
    attend: Attend


def make_attention(
    name: str, spec: AttentionSpec, batch: BatchDescriptor, kv: jax.Array
) -> Attention:
    """The attention of one step: what depends on the batch alone is worked out here, once.

    A token at position ``p`` sees the keys at positions ``<= p`` of its row, in a layer with a
    window ``w`` those of them ``> p - w``. Tokens that belong to no row give zeros.

    Raises ValueError for an unknown ``name``.
    """
    check_backend(name)
    return _BACKENDS[name](spec, batch, kv)


def check_backend(name: str) -> None:
    """Raise ValueError unless ``name`` is a backend."""
    if name not in _BACKENDS:
        raise ValueError(f"attention={name!r}: no such backend; there are {sorted(_BACKENDS)}.")


def _gather(spec: AttentionSpec, batch: BatchDescriptor, kv: jax.Array) -> Attention:
    """Gather pages chunk by chunk and keep a running softmax; plain XLA on every platform."""
    if spec.platform == "cpu":
        return _gather_on_cpu(spec, batch, kv)
    attends = [_attend_tiles(spec, p) for p in (_decode_part(batch), _prefill_part(batch))]

    def attend(
        q: jax.Array, kv: jax.Array, layer: jax.Array, scratch: Any
    ) -> tuple[jax.Array, Any]:
        out = jnp.zeros_like(q)
        for one in attends:
            out = one(out, q, kv, layer)
        return out, scratch

    return Attention((), attend)


def _gather_on_cpu(spec: AttentionSpec, batch: BatchDescriptor, kv: jax.Array) -> Attention:
    """The same for a CPU: tiles as everywhere, decodes by :mod:`.attention_cpu`."""
    decode, tiles = _decode_part(batch), _attend_tiles(spec, _prefill_part(batch))
    n, width = decode.tables.shape
    if not n:
        return Attention((), lambda q, kv, layer, _: (tiles(jnp.zeros_like(q), q, kv, layer), ()))
    like = jax.ShapeDtypeStruct(kv.shape, kv.dtype)
    sizes = attention_cpu.plan_sizes(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.num_blocks,
        spec.block_size,
        n,
        width,
        like,
        scale=spec.scale,
        softcap=spec.softcap,
    )
    splits_at = attention_cpu.splits_by_layer(
        sizes, decode.positions[:, 0] + 1, decode.tables, spec.windows
    )

    def attend(
        q: jax.Array, kv: jax.Array, layer: jax.Array, scratch: Any
    ) -> tuple[jax.Array, Any]:
        out, scratch = attention_cpu.attend(
            sizes, splits_at(layer), scratch, q[:n], kv, layer * spec.num_blocks
        )
        # Rows that are not decodes come out as zeros, and tiles put theirs in their place.
        out = jnp.concatenate([out, jnp.zeros_like(q[n:])])
        return tiles(out, q, kv, layer), scratch

    return Attention(attention_cpu.make_scratch(sizes, like), attend)


def _attend_tiles(
    spec: AttentionSpec, part: Part
) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """``(out, q, kv, layer) -> out`` with the results of ``part`` in their places."""
    if not part.tokens.size:
        return lambda out, q, kv, layer: out
    plan = _plan(spec, part)
    groups = _grouped(part, plan)

    def attend(out: jax.Array, q: jax.Array, kv: jax.Array, layer: jax.Array) -> jax.Array:
        window = spec.window_at(layer)
        result = _attend_part(spec, plan, groups, q, kv, layer * spec.num_blocks, window)
        return out.at[groups.tokens].set(result, mode="drop")

    return attend


_BACKENDS: dict[str, Callable[[AttentionSpec, BatchDescriptor, jax.Array], Attention]] = {
    "gather": _gather
}


def _decode_part(batch: BatchDescriptor) -> Part:
    """One row per token of the decode part; a token that is not a decode token sees nothing."""
    (num_tokens,), (n,) = batch.token_ids.shape, batch.decode_rows.shape
    live = batch.decode_rows < batch.block_tables.shape[0]
    return Part(
        tokens=jnp.where(live, jnp.arange(n, dtype=jnp.int32), num_tokens)[:, None],
        positions=jnp.where(live, batch.positions[:n], -1)[:, None],
        tables=_tables(batch, batch.decode_rows),
    )


def _prefill_part(batch: BatchDescriptor) -> Part:
    """One row per tile."""
    return Part(
        tokens=batch.tile_tokens,
        positions=batch.positions.at[batch.tile_tokens].get(mode="fill", fill_value=-1),
        tables=_tables(batch, batch.tile_rows),
    )


def _tables(batch: BatchDescriptor, rows: jax.Array) -> jax.Array:
    no_block = jnp.iinfo(jnp.int32).max
    return batch.block_tables.at[rows].get(mode="fill", fill_value=no_block)


@dataclasses.dataclass(frozen=True)
class _Budget:
    """How much to do at a time."""

    rows: int
    queries: int
    """rows x A"""
    keys: int
    """tokens of a chunk"""
    pairs: int
    """queries x keys"""
    numbers: int
    """of K gathered; V is as many again"""


_CPU = _Budget(rows=8, queries=128, keys=96, pairs=128 * 96, numbers=2**20)
"""Tiles of like length share a loop, and a chunk stays in a core's cache. Measured on two cores
with 512 prompt tokens of SmolLM2 a step, 128 or 512 to a sequence; half and twice of either
size cost 5 to 25 % more of the step."""

_ACCELERATOR = _Budget(rows=2**31, queries=2**31, keys=1024, pairs=2**20, numbers=2**24)
"""A loop step is a few kernel launches, so it should carry some megabytes."""


def _plan(spec: AttentionSpec, part: Part) -> Plan:
    n, width = part.tokens.shape
    budget = _CPU if spec.platform == "cpu" else _ACCELERATOR
    rows = min(n, budget.rows, max(1, budget.queries // width))
    keys = min(
        budget.keys,
        budget.pairs // (rows * width),
        budget.numbers // (rows * spec.num_kv_heads * spec.head_dim),
    )
    return Plan(rows, max(1, min(part.tables.shape[1], keys // spec.block_size)))


def _grouped(part: Part, plan: Plan) -> Part:
    """``part`` as ``[groups, rows, ...]``, longest context first, padded to fit the plan."""
    n = part.tokens.shape[0]
    if 1 < plan.rows < n:
        order = jnp.argsort(-part.positions.max(axis=1))
        part = jax.tree.map(lambda leaf: leaf[order], part)
    rows = -n % plan.rows
    blocks = -part.tables.shape[1] % plan.chunk
    past_the_end = jnp.iinfo(jnp.int32).max
    padded = Part(
        tokens=_pad(part.tokens, rows, 0, past_the_end),
        positions=_pad(part.positions, rows, 0, -1),
        tables=_pad(part.tables, rows, blocks, past_the_end),
    )
    return jax.tree.map(lambda leaf: leaf.reshape(-1, plan.rows, leaf.shape[1]), padded)


def _pad(x: jax.Array, rows: int, columns: int, value: int) -> jax.Array:
    return jnp.pad(x, ((0, rows), (0, columns)), constant_values=value)


def _attend_part(
    spec: AttentionSpec,
    plan: Plan,
    groups: Part,
    q: jax.Array,
    kv: jax.Array,
    offset: jax.Array,
    window: jax.Array | int | None,
) -> jax.Array:
    """Attention outputs ``f32[groups, rows, A, H, D]``; ``offset`` is the layer's first page."""
    scaled = q * jnp.float32(spec.scale)

    def one(group: Part) -> jax.Array:
        queries = scaled.at[group.tokens].get(mode="fill", fill_value=0)
        return attend_rows(spec, plan, group, queries, kv, offset, window)

    if groups.tokens.shape[0] == 1:
        return one(jax.tree.map(lambda leaf: leaf[0], groups))[None]
    return lax.map(one, groups)
