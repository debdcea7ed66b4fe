"""The paged KV cache: one array for all layers, written and copied in place.

All layers share one array because a loop over layers scatters into its carry in place, while
slicing a layer out of a stacked array copies it. Page ``layer * B + block`` holds one block.

On GPUs and TPUs ``kv`` is ``[L * B, 2, G, K, D']``: for keys (0) and values (1) and for each kv
head, the K tokens of a block next to each other. One head of one block is then one contiguous
run of ``K * D'`` numbers, which is what attention reads. ``D'`` is D, on TPUs rounded up to a
multiple of 128: those lanes are there in any case, and with fewer XLA:TPU turns the whole
array round between writing and reading.

On CPUs it is ``[L * B, W]``: see :mod:`~oxidize_jax.model.cpu_pages`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.model import cpu_pages
from oxidize_jax.model.config import ModelConfig

KV_DTYPES = ("float32", "bfloat16")
"""Types that keys and values can have."""

_INT32_MAX = 2**31 - 1


def init_kv(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: DTypeLike = jnp.float32,
    *,
    platform: str | None = None,
) -> jax.Array:
    """A zeroed cache of ``num_blocks`` blocks of ``block_size`` tokens.

    Raises ValueError for a dtype other than :data:`KV_DTYPES`, for sizes below 1, and for
    a pool whose slot or page numbers do not fit an int32.
    """
    shape = kv_shape(config, num_blocks, block_size, platform, dtype)
    return jnp.zeros(shape, storage_dtype(dtype, platform))


def kv_shape(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    platform: str | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[int, ...]:
    """Shape of the cache, once its indices are known to fit an int32.

    Pages are reached by their own index and never by a flat element number, so the limits
    are on pages and on slots, not on the number of elements.
    """
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1.")
    limits = (
        (
            "num_blocks * block_size",
            num_blocks * block_size,
            "slots are numbered block * K + offset",
        ),
        (
            "num_layers * num_blocks",
            config.num_layers * num_blocks,
            "pages are numbered layer * B + block",
        ),
    )
    for name, value, why in limits:
        if value > _INT32_MAX:
            raise ValueError(
                f"{name} = {value} is more than {_INT32_MAX}: {why} in an int32. Use fewer blocks."
            )
    platform = platform or jax.default_backend()
    if platform == "cpu":
        packed = storage_dtype(dtype, platform) == jnp.uint32
        numbers = config.head_dim // 2 if packed else config.head_dim
        width = 2 * config.num_kv_heads * numbers * block_size
        return (config.num_layers * num_blocks, width)
    lanes = 128 if platform == "tpu" else 1
    head_dim = -(-config.head_dim // lanes) * lanes
    return (config.num_layers * num_blocks, 2, config.num_kv_heads, block_size, head_dim)


def storage_dtype(dtype: DTypeLike, platform: str | None = None) -> jnp.dtype:
    """Type under which ``dtype`` is stored on ``platform`` (default: where JAX runs)."""
    name = jnp.dtype(dtype).name
    if name not in KV_DTYPES:
        raise ValueError(f"kv dtype={name}: must be one of {', '.join(KV_DTYPES)}.")
    on_cpu = (platform or jax.default_backend()) == "cpu"
    return jnp.dtype(jnp.uint32 if on_cpu and name == "bfloat16" else name)


def block_size_of(config: ModelConfig, kv: jax.Array) -> int:
    """K of a cache that :func:`init_kv` made for ``config``."""
    if kv.ndim == 5:
        return kv.shape[3]
    numbers = config.head_dim // 2 if kv.dtype == jnp.uint32 else config.head_dim
    return kv.shape[1] // (2 * config.num_kv_heads * numbers)


Write = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""``write(kv, layer i32[], k f32[T, G, D], v f32[T, G, D]) -> kv``"""


def make_write(batch: BatchDescriptor, num_blocks: int, block_size: int, platform: str) -> Write:
    """How the step of ``batch`` writes its keys and values into any layer.

    Padding slots, ``B * K`` or more, write nothing. They have to be moved past the end of
    the whole array *after* the layer's offset is added: slot ``B * K`` of one layer is the
    first slot of the next.
    """
    if platform == "cpu":
        plan = cpu_pages.plan_writes(batch, num_blocks, block_size)
        return lambda kv, layer, k, v: cpu_pages.write(kv, layer, plan, k, v, num_blocks)
    block, offset = batch.slot_mapping // block_size, batch.slot_mapping % block_size

    def write(kv: jax.Array, layer: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        page = jnp.where(block < num_blocks, block + layer * num_blocks, kv.shape[0])
        values = jnp.stack([k, v], axis=1).astype(kv.dtype)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, kv.shape[4] - k.shape[2])))
        half, head = (jnp.arange(size, dtype=jnp.int32) for size in kv.shape[1:3])
        # One index per run of D': with a window over halves and heads XLA:TPU copies the array.
        index = (page[:, None, None], half[:, None], head, offset[:, None, None])
        return kv.at[index].set(values, mode="drop")

    return write


def copy_blocks(
    kv: jax.Array, src: jax.Array, dst: jax.Array, num_copies: jax.Array, *, num_layers: int
) -> jax.Array:
    """``kv`` after ``num_copies`` block copies, in every layer, one after the other.

    ``src``, ``dst`` are ``i32[S]`` block ids with the entries in use at the front. The loop
    runs ``num_copies`` times, so a step without copy-on-write pays nothing.
    """
    pages = kv.reshape(num_layers, kv.shape[0] // num_layers, *kv.shape[1:])

    def copy(i: jax.Array, pages: jax.Array) -> jax.Array:
        block = lax.dynamic_slice_in_dim(pages, src[i], 1, axis=1)
        return lax.dynamic_update_slice_in_dim(pages, block, dst[i], axis=1)

    return lax.fori_loop(jnp.int32(0), num_copies, copy, pages).reshape(kv.shape)
