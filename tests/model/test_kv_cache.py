import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oxidize_jax.model import kv_cache

B, K = 5, 4


@pytest.fixture(params=["float32", "bfloat16"])
def empty(request, kit):
    config = kit.configs["gqa_tied"]
    return kv_cache.init_kv(config, B, K, request.param)


def values(count: int, seed: int = 0) -> np.ndarray:
    """Keys or values f32[T, 2, 8] that bfloat16 holds exactly."""
    return np.random.default_rng(seed).integers(-64, 64, (count, 2, 8)).astype(np.float32)


def as_floats(kv) -> np.ndarray:
    return np.asarray(kv_cache.unpack(kv).astype(jnp.float32))


def write(kv, layer, slots, k, v):
    step = jax.jit(kv_cache.write, static_argnames=("num_blocks", "block_size"))
    slots = jnp.asarray(np.asarray(slots, np.int32))
    return step(kv, jnp.int32(layer), slots, k, v, num_blocks=B, block_size=K)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_tokens_land_in_their_slot_of_their_layer(empty, layer):
    slots, k, v = [0, 7, 19, 12], values(4), values(4, 1)
    kv = as_floats(write(empty, layer, slots, k, v))
    wanted = np.zeros_like(kv)
    for t, slot in enumerate(slots):
        wanted[layer * B + slot // K, 0, :, slot % K] = k[t]
        wanted[layer * B + slot // K, 1, :, slot % K] = v[t]
    np.testing.assert_array_equal(kv, wanted)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("padding", [B * K, B * K + 1, 2**31 - 1])
def test_jx02_padding_slots_write_nowhere_in_any_layer(empty, layer, padding):
    before = write(empty, 1, range(B * K), values(B * K), values(B * K, 1))
    after = write(before, layer, [padding] * 3, values(3, 2), values(3, 3))
    np.testing.assert_array_equal(as_floats(after), as_floats(before))


def test_copies_run_in_order_in_all_layers(empty):
    kv = empty
    for layer in range(3):
        kv = write(kv, layer, range(B * K), values(B * K, layer), values(B * K, 9 + layer))
    pad = B
    copy = jax.jit(kv_cache.copy_blocks, static_argnames="num_layers")
    src, dst = jnp.array([0, 2, pad, pad], jnp.int32), jnp.array([2, 4, pad, pad], jnp.int32)
    for count in (0, 1, 2):
        wanted = as_floats(kv).reshape(3, B, 2, 2, K, 8).copy()
        for i in range(count):
            wanted[:, dst[i]] = wanted[:, src[i]]
        after = copy(kv, src, dst, jnp.int32(count), num_layers=3)
        np.testing.assert_array_equal(as_floats(after).reshape(wanted.shape), wanted)


def test_pack_keeps_bits_and_rounds_like_a_cast():
    x = jnp.array([1.0, -0.0, 3.14159, jnp.inf, jnp.nan, 1e-40], jnp.float32)
    stored = kv_cache.pack(x, jnp.dtype(jnp.uint16))
    assert stored.dtype == jnp.uint16
    rounded = np.asarray(x.astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(stored), rounded.view(np.uint16))
    np.testing.assert_array_equal(np.asarray(kv_cache.unpack(stored)).view(np.uint16), stored)
    np.testing.assert_array_equal(kv_cache.pack(x, jnp.dtype(jnp.float32)), x)


def test_storage_by_platform():
    assert kv_cache.storage_dtype("bfloat16", "cpu") == jnp.uint16
    assert kv_cache.storage_dtype("bfloat16", "gpu") == jnp.bfloat16
    assert kv_cache.storage_dtype(jnp.bfloat16, "tpu") == jnp.bfloat16
    assert kv_cache.storage_dtype("float32", "cpu") == jnp.float32


def test_kv21_indices_beyond_32_bits_are_refused_at_start_up(kit):
    config = dataclasses.replace(kit.configs["gqa_tied"], num_layers=32)
    with pytest.raises(ValueError, match=r"num_layers \* num_blocks = 2240000000.*2147483647"):
        kv_cache.init_kv(config, 70_000_000, 4)
    with pytest.raises(ValueError, match=r"num_blocks \* block_size = 2800000000.*2147483647"):
        kv_cache.init_kv(config, 70_000, 40_000)


def test_kv21_more_than_2_31_numbers_are_no_limit(kit):
    """Pages are reached by page index: a pool of 2^34 numbers still has small indices."""
    config = dataclasses.replace(kit.configs["gqa_tied"], num_layers=32, head_dim=128)
    shape = kv_cache.kv_shape(config, 70_000, 16)
    assert np.prod(shape, dtype=np.int64) > 2**34
    kv = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((3, 2, 128), jnp.float32)
    after = jax.eval_shape(
        lambda kv, slots, k: kv_cache.write(
            kv, jnp.int32(31), slots, k, k, num_blocks=70_000, block_size=16
        ),
        kv,
        jax.ShapeDtypeStruct((3,), jnp.int32),
        tokens,
    )
    assert after == kv


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_empty_pools_are_refused(kit, blocks, size):
    with pytest.raises(ValueError, match="at least 1"):
        kv_cache.init_kv(kit.configs["gqa_tied"], blocks, size)
