import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.model import cpu_pages, kv_cache

B, K = 5, 4


@pytest.fixture(params=["cpu-float32", "cpu-bfloat16", "gpu-float32", "gpu-bfloat16"])
def cache(request, kit):
    platform, dtype = request.param.split("-")
    return Cache(kit.configs["gqa_tied"], platform, dtype)


class Cache:
    """A cache of one platform, seen as plain arrays ``f32[L * B, 2, G, K, D]``."""

    def __init__(self, config, platform, dtype):
        self.platform = platform
        self.empty = kv_cache.init_kv(config, B, K, dtype, platform=platform)
        self._write = jax.jit(self._write_step)

    def _write_step(self, kv, layer, slots, k, v, tiles):
        t = slots.shape[0]
        tables = jnp.zeros((t, 1), jnp.int32)
        batch = BatchDescriptor(
            **dict.fromkeys(f.name for f in dataclasses.fields(BatchDescriptor))
            | {"slot_mapping": slots, "block_tables": tables, "tile_rows": tiles}
        )
        return kv_cache.make_write(batch, B, K, self.platform)(kv, layer, k, v)

    def write(self, kv, layer, slots, k, v, tiles=1):
        slots = jnp.asarray(np.asarray(slots, np.int32))
        tiles = jnp.zeros((tiles,), jnp.int32)
        return self._write(kv, jnp.int32(layer), slots, jnp.asarray(k), jnp.asarray(v), tiles)

    def as_floats(self, kv):
        if self.platform != "cpu":
            return np.asarray(kv.astype(jnp.float32))
        keys, values = cpu_pages.halves(kv, 2, K)
        k = jnp.concatenate(cpu_pages.parts(keys), axis=2).swapaxes(2, 3)
        v = jnp.concatenate(cpu_pages.parts(values), axis=3)
        return np.asarray(jnp.stack([k, v], axis=1))


def values(count: int, seed: int = 0) -> np.ndarray:
    """Keys or values f32[T, 2, 8] that bfloat16 holds exactly."""
    return np.random.default_rng(seed).integers(-64, 64, (count, 2, 8)).astype(np.float32)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("tiles", [0, 1])
def test_tokens_land_in_their_slot_of_their_layer(cache, layer, tiles):
    slots, k, v = [0, 7, 19, 12], values(4), values(4, 1)
    kv = cache.as_floats(cache.write(cache.empty, layer, slots, k, v, tiles))
    wanted = np.zeros_like(kv)
    for t, slot in enumerate(slots):
        wanted[layer * B + slot // K, 0, :, slot % K] = k[t]
        wanted[layer * B + slot // K, 1, :, slot % K] = v[t]
    np.testing.assert_array_equal(kv, wanted)


@pytest.mark.parametrize("cuts", [[20], [1, 20], [3, 4, 9, 20], [7, 8, 12, 13, 14, 20]], ids=str)
def test_a_block_filled_in_several_steps_keeps_what_it_has(cache, cuts):
    k, v = values(20), values(20, 1)
    kv, begin = cache.empty, 0
    for end in cuts:
        part = slice(begin, end)
        kv = cache.write(kv, 1, range(begin, end), k[part], v[part])
        begin = end
    whole = cache.write(cache.empty, 1, range(20), k, v)
    np.testing.assert_array_equal(cache.as_floats(kv), cache.as_floats(whole))


@pytest.mark.parametrize("tiles", [0, 1])
def test_kv19_on_a_cpu_a_block_is_clean_once_its_first_slot_is_written(kit, tiles):
    for dtype in ("float32", "bfloat16"):
        cache = Cache(kit.configs["gqa_tied"], "cpu", dtype)
        nan = np.full((20, 2, 8), np.nan, np.float32)
        dirty = cache.write(cache.empty, 1, range(20), nan, nan)
        kv = cache.as_floats(cache.write(dirty, 1, [4, 11], values(2), values(2, 1), tiles))
        first = kv[B + 1]  # block 1: slot 4 is its first
        np.testing.assert_array_equal(first[0, :, 0], values(2)[0])
        assert not first[:, :, 1:].any()
        assert np.isnan(kv[B + 2][:, :, :3]).all()  # block 2: slot 11 is its last
        assert np.isfinite(kv[B + 2][:, :, 3]).all()


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("padding", [B * K, B * K + 1, 2**31 - 1])
@pytest.mark.parametrize("tiles", [0, 1])
def test_jx02_padding_slots_write_nowhere_in_any_layer(cache, layer, padding, tiles):
    before = cache.write(cache.empty, 1, range(B * K), values(B * K), values(B * K, 1))
    after = cache.write(before, layer, [padding] * 3, values(3, 2), values(3, 3), tiles)
    np.testing.assert_array_equal(cache.as_floats(after), cache.as_floats(before))


def test_copies_run_in_order_in_all_layers(cache):
    kv = cache.empty
    for layer in range(3):
        kv = cache.write(kv, layer, range(B * K), values(B * K, layer), values(B * K, 9 + layer))
    pad = B
    copy = jax.jit(kv_cache.copy_blocks, static_argnames="num_layers")
    src, dst = jnp.array([0, 2, pad, pad], jnp.int32), jnp.array([2, 4, pad, pad], jnp.int32)
    for count in (0, 1, 2):
        wanted = cache.as_floats(kv).reshape(3, B, 2, 2, K, 8).copy()
        for i in range(count):
            wanted[:, dst[i]] = wanted[:, src[i]]
        after = copy(kv, src, dst, jnp.int32(count), num_layers=3)
        np.testing.assert_array_equal(cache.as_floats(after).reshape(wanted.shape), wanted)


def test_words_keep_the_bits_of_bfloat16_and_round_like_a_cast():
    x = jnp.array([1.0, -0.0, 3.14159, jnp.inf, jnp.nan, 1e-40], jnp.float32)
    words = cpu_pages.to_words(x, jnp.dtype(jnp.uint32))
    assert words.shape == (3,)
    assert words.dtype == jnp.uint32
    back = jnp.concatenate(cpu_pages.parts(words))
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(back, rounded)
    assert np.signbit(back[1])
    np.testing.assert_array_equal(cpu_pages.to_words(x, jnp.dtype(jnp.float32)), x)


def test_storage_by_platform():
    assert kv_cache.storage_dtype("bfloat16", "cpu") == jnp.uint32
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
    for platform in ("cpu", "gpu", "tpu"):
        shape = kv_cache.kv_shape(config, 70_000, 16, platform)
        assert np.prod(shape, dtype=np.int64) > 2**33
        kv = jax.ShapeDtypeStruct(shape, jnp.float32)
        tokens = jax.ShapeDtypeStruct((3, 2, 128), jnp.float32)
        names = (f.name for f in dataclasses.fields(BatchDescriptor))
        batch = BatchDescriptor(
            **dict.fromkeys(names)
            | {
                "slot_mapping": jnp.zeros((3,), jnp.int32),
                "block_tables": jnp.zeros((3, 1), jnp.int32),
                "tile_rows": jnp.zeros((1,), jnp.int32),
            }
        )
        write = kv_cache.make_write(batch, 70_000, 16, platform)
        after = jax.eval_shape(lambda kv, k, w=write: w(kv, jnp.int32(31), k, k), kv, tokens)
        assert after == kv


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_empty_pools_are_refused(kit, blocks, size):
    with pytest.raises(ValueError, match="at least 1"):
        kv_cache.init_kv(kit.configs["gqa_tied"], blocks, size)
