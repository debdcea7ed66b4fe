"""Dimension letters, sentinels and the dataclass decorator that every state uses.

Shapes are written next to fields as ``i32[S, M]``, with these letters:

====  =============================================================
R     request slots (``max_num_requests``): waiting, running, finished
S     rows (``max_num_seqs``): sequences that hold KV blocks
B     blocks in the pool (``num_blocks``)
K     tokens in a block (``block_size``, default :data:`BLOCK_SIZE`)
M     block-table width: blocks a sequence of ``max_model_len`` needs
N     token-buffer width (``max_model_len``)
T     tokens in a step's bucket
P     prefill tiles in a step's bucket; Q tokens in one tile
C     sequences a step can sample for
V     vocabulary; L layers; H query heads; G kv heads; D head dim; E hidden
====  =============================================================

A padding index is always *one past the end* of the axis it indexes (block ``B``,
row ``S``, request ``R``, token ``T``, slot ``B * K``), so that a scatter with
``mode="drop"`` ignores it. It is never -1, which JAX wraps to the last element.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

BLOCK_SIZE = 16
"""Tokens in a block unless the configuration says otherwise."""

BlockId = jax.Array
"""``i32[...]``: index of a physical block, in ``[0, B)``; ``B`` means no block."""

BlockTable = jax.Array
"""``i32[..., M]``: logical block -> :data:`BlockId`; unused entries hold ``B``."""

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def state(cls: type[_T]) -> type[_T]:
    """Frozen dataclass registered as a pytree, every field a child."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def replace(obj: _T, **changes: Any) -> _T:
    """``dataclasses.replace`` that keeps the type for checkers."""
    return dataclasses.replace(obj, **changes)  # type: ignore[type-var]
