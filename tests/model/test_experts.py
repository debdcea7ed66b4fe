"""Layers of experts: what a token gets, what is read for it, and what is lowered."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import quick_jit

from oxidize_jax.model import experts
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.experts import Step, tile_rows
from oxidize_jax.model.functional import build
from oxidize_jax.model.quantize import dequantize_weight, quantize, stays_float32
from oxidize_jax.model.reference import _experts_block
from oxidize_jax.model.transformer import merge, parameter_shapes, split_modules

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=17,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    architecture="mixtral",
    num_experts=7,
    num_experts_per_token=3,
)
LAYER = 1
ERROR = {"float32": 1e-6, "bfloat16": 0.01, "int8": 0.03}


def parameters(dtype="float32", config=CONFIG, seed=0):
    """Parameters of a checkpoint, with those of the experts in ``dtype``."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        values = jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)
        params[name] = values
        if dtype == "bfloat16" and not stays_float32(name):
            params[name] = values.astype(jnp.bfloat16)
    return quantize(params) if dtype == "int8" else params


def module(params, platform, config=CONFIG):
    """Layer 1, as a step on ``platform`` has it."""
    _, leaves = build(config, params, platform=platform)
    mine = {
        name.removeprefix("layers."): leaf if platform == "cpu" and ".experts." in name else leaf[1]
        for name, leaf in leaves.items()
        if name.startswith("layers.")
    }
    graph = split_modules(config, "layers.experts.up.scale" in leaves)[0][1]
    return merge(graph, mine)


def mixed(params, platform, h, live=None, config=CONFIG):
    """What layer 1 makes of ``h f32[T, E]``."""
    layer = module(params, platform, config)
    return layer.experts(h, layer.router(h), Step(live, jnp.int32(LAYER), platform))


run = quick_jit(mixed, static_argnums=(1, 4), static_argnames=("config",))


def wanted(params, h, config=CONFIG):
    """Every expert of every token, from the definition."""
    layer = {}
    for name, leaf in params.items():
        if name.startswith("layers.") and name.endswith(".weight"):
            leaf = leaf[LAYER]
            scale = params.get(name.removesuffix("weight") + "scale")
            if scale is not None and leaf.dtype == jnp.int8:
                rows = leaf.reshape(-1, leaf.shape[-1])
                leaf = dequantize_weight(rows, scale[LAYER].reshape(-1)).reshape(leaf.shape)
            layer[name.removeprefix("layers.")] = leaf.astype(jnp.float32)
    return _experts_block(config, layer, h)


def tokens(count, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, 24), np.float32))


def off(ours, theirs):
    return np.linalg.norm(np.asarray(ours) - np.asarray(theirs)) / np.linalg.norm(theirs)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_experts_are_those_of_the_definition(platform, dtype):
    params = parameters(dtype)
    for count in (2, 5, 64):
        h = tokens(count, count)
        assert off(run(params, platform, h), wanted(params, h)) < ERROR[dtype], count


@pytest.mark.parametrize("changes", [{"norm_topk_prob": False}, {"num_experts_per_token": 7}])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_weights_that_do_not_add_up_to_one_and_all_experts(platform, changes):
    config = dataclasses.replace(CONFIG, **changes)
    params, h = parameters(), tokens(9)
    assert off(run(params, platform, h, config=config), wanted(params, h, config)) < 1e-6


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_no_token_is_dropped_where_all_want_the_same_expert(platform):
    config = dataclasses.replace(CONFIG, num_experts_per_token=1)
    params, h = parameters(), jnp.abs(tokens(40))
    router = jnp.zeros_like(params["layers.router.weight"]).at[:, 4].set(1)
    params |= {"layers.router.weight": router}
    assert tile_rows(config, 40) < 40, "it should take several tiles"
    assert off(run(params, platform, h, config=config), wanted(params, h, config)) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sc05_a_tokens_bits_do_not_depend_on_its_place_or_its_company(dtype):
    """In a step of one shape, which is what a deterministic engine has."""
    params, one = parameters(dtype), tokens(1, 5)
    seen = set()
    for seed in range(6):
        for place in (0, 3, 12, 15):
            h = tokens(16, seed).at[place].set(one[0])
            live = jnp.arange(16) <= max(place, 4 * seed)
            seen.add(np.asarray(run(params, "cpu", h, live))[place].tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_token_alone_gets_what_it_gets_in_a_batch(platform):
    params, h = parameters(), tokens(33)
    together = run(params, platform, h)
    for index in (0, 17, 32):
        alone = run(params, platform, h[index : index + 1])
        np.testing.assert_allclose(alone[0], together[index], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_padding_takes_no_part(platform):
    params, h = parameters(), tokens(12)
    live = jnp.arange(12) % 3 != 1
    padded = jnp.where(live[:, None], h, jnp.nan)
    ours, all_live = (
        np.asarray(run(params, platform, x, y)) for x, y in ((padded, live), (h, None))
    )
    np.testing.assert_allclose(ours[live], all_live[live], rtol=1e-5, atol=1e-6)
    pairs = experts._route(CONFIG, jnp.asarray(tokens(12)[:, :7]), jnp.asarray(live))
    assert int(pairs.sizes.sum()) == 8 * 3


def test_on_a_cpu_experts_that_no_token_chose_are_not_read():
    """They are NaN, which a product of zeros with them would give, too."""
    params, h = parameters(), tokens(2)
    clean = run(params, "cpu", h)
    layer = module(params, "cpu")
    used = np.unique(experts.choose(CONFIG, layer.router(h))[1])
    assert len(used) < CONFIG.num_experts
    for name in ("gate", "up", "down"):
        name = f"layers.experts.{name}.weight"
        others = np.full_like(np.asarray(params[name]), np.nan)
        others[LAYER, used] = np.asarray(params[name])[LAYER, used]
        params[name] = jnp.asarray(others)
    np.testing.assert_array_equal(run(params, "cpu", h), clean)


WIDE = dataclasses.replace(
    CONFIG, hidden_size=128, intermediate_size=320, num_experts=16, num_experts_per_token=2
)
SIZES = {"num_blocks": 8, "block_size": 4, "width": 4}


def step_of(config, platform, dtype, kit, tokens=4):
    """A decode step, and abstract arguments."""
    params = jax.eval_shape(lambda: parameters(dtype, config))
    decoder, leaves = build(config, params, platform=platform)
    kv = jax.eval_shape(lambda: decoder.init_kv(8, 4))
    batch = kit.batch([kit.piece(0, [3], 1, [1], decode=True)], **SIZES, tokens=tokens, decodes=4)
    return jax.jit(decoder.forward), (leaves, kv, batch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_on_a_cpu_no_product_and_no_copy_is_of_all_experts(dtype, kit, monkeypatch):
    monkeypatch.setattr(experts, "_TILE_BYTES", 100 * 128)
    function, arguments = step_of(WIDE, "cpu", dtype, kit)
    compiled = function.lower(*arguments).compile()
    text = compiled.as_text()
    whole = r"(?:3,16|16|48),(?:320,128|128,320)"
    made = re.compile(rf"= \w+\[{whole}\]\S* (?!parameter|get-tuple-element|bitcast)")
    found = [line.strip()[:160] for line in text.splitlines() if made.search(line)]
    assert not found, found
    # The experts of a layer in the type of the weights.
    layer = 16 * 3 * 320 * 128 * {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    assert compiled.memory_analysis().temp_size_in_bytes < layer / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_get_a_grouped_product(platform, dtype, kit):
    function, arguments = step_of(WIDE, "gpu" if platform == "cuda" else platform, dtype, kit)
    text = function.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    # Three in the one body of all layers; no product with an axis of experts beside them.
    assert text.count('= "chlo.ragged_dot"(') == 3
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert dots
    assert not [line for line in dots if "tensor<16x" in line.split("->")[0] and "320" in line]


def test_the_number_of_experts_is_checked():
    for changes in ({"num_experts_per_token": 8}, {"num_experts_per_token": 0}, {"num_experts": 0}):
        with pytest.raises(ValueError, match="num_experts_per_token"):
            dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ValueError, match="mlp_bias=True"):
        dataclasses.replace(CONFIG, mlp_bias=True)


def test_parameters_are_counted():
    shapes = parameter_shapes(CONFIG)
    assert CONFIG.num_parameters == sum(int(np.prod(shape)) for shape in shapes.values())
    assert shapes["layers.experts.down.weight"] == (3, 7, 24, 17)
    assert shapes["layers.router.weight"] == (3, 7, 24)
    quantized = parameter_shapes(CONFIG, quantized=True)
    assert quantized["layers.experts.down.scale"] == (3, 7, 24)
    assert "layers.router.scale" not in quantized
