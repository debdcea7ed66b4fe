"""What build refuses, and that a decoder is a plain static value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oxidize_jax.model.config import RopeScaling
from oxidize_jax.model.functional import build, forward
from oxidize_jax.model.transformer import parameter_shapes


def test_parameter_shapes_of_every_kind(kit):
    shapes = parameter_shapes(kit.configs["mha_untied_biased"])
    assert shapes == {
        "embed.weight": (37, 20),
        "final_norm.weight": (20,),
        "lm_head.weight": (37, 20),
        "layers.input_norm.weight": (2, 20),
        "layers.post_norm.weight": (2, 20),
        "layers.q.weight": (2, 30, 20),
        "layers.q.bias": (2, 30),
        "layers.k.weight": (2, 30, 20),
        "layers.k.bias": (2, 30),
        "layers.v.weight": (2, 30, 20),
        "layers.v.bias": (2, 30),
        "layers.o.weight": (2, 20, 30),
        "layers.o.bias": (2, 20),
        "layers.gate.weight": (2, 28, 20),
        "layers.gate.bias": (2, 28),
        "layers.up.weight": (2, 28, 20),
        "layers.up.bias": (2, 28),
        "layers.down.weight": (2, 20, 28),
        "layers.down.bias": (2, 20),
    }
    tied = parameter_shapes(kit.configs["gqa_tied"])
    assert "lm_head.weight" not in tied
    assert not [name for name in tied if name.endswith("bias")]


def test_number_of_parameters_is_that_of_the_shapes(config):
    total = sum(np.prod(shape) for shape in parameter_shapes(config).values())
    assert total == config.num_parameters


def test_ld06_missing_parameters_are_named(kit, config):
    for name in parameter_shapes(config):
        params = kit.params(config)
        del params[name]
        with pytest.raises(ValueError, match=f"'{name}'.*missing"):
            build(config, params)


def test_ld06_a_head_of_its_own_is_not_silently_ignored(kit):
    config = kit.configs["gqa_tied"]
    params = kit.params(config)
    params["lm_head.weight"] = params["embed.weight"]
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is not one of this model"):
        build(config, params)


def test_wrong_shapes_are_named_with_both_shapes(kit, config):
    for name, shape in parameter_shapes(config).items():
        params = kit.params(config)
        params[name] = jnp.zeros((*shape, 1), params[name].dtype)
        with pytest.raises(ValueError, match=f"'{name}'") as caught:
            build(config, params)
        assert str(list(shape)) in str(caught.value)


def test_mixed_dtypes_are_named(kit, config):
    for name in parameter_shapes(config):
        params = kit.params(config)
        params[name] = params[name].astype(jnp.bfloat16)
        with pytest.raises(ValueError, match=r"^parameter '[a-z_.]+' is (bfloat16|float32)"):
            build(config, params)
    params = {name: leaf.astype(jnp.float16) for name, leaf in kit.params(config).items()}
    with pytest.raises(ValueError, match=r"'embed\.weight' is float16"):
        build(config, params)


def test_unknown_backend_and_kv_dtype(kit):
    config = kit.configs["gqa_tied"]
    with pytest.raises(ValueError, match=r"attention='flash'.*gather"):
        build(config, kit.params(config), attention="flash")
    for dtype in ("float16", "int8"):
        with pytest.raises(ValueError, match=f"kv dtype={dtype}.*float32, bfloat16"):
            build(config, kit.params(config), kv_dtype=dtype)


def test_a_cache_of_another_shape_or_type_is_refused(kit):
    config = kit.configs["gqa_tied"]
    decoder, leaves = build(config, kit.params(config))
    batch = kit.batch([kit.piece(0, [1], 0, [1, 2])], num_blocks=6, block_size=4)
    kv = decoder.init_kv(6, 4)
    for wrong in (kv[:-1], kv[:, :1], kv.astype(jnp.bfloat16)):
        with pytest.raises(ValueError, match="init_kv"):
            forward(decoder, leaves, wrong, batch, block_size=4)
    with pytest.raises(ValueError, match="block_size=8"):
        forward(decoder, leaves, kv, batch, block_size=8)


def test_decoders_of_equal_configs_are_equal_and_hashable(kit, config):
    first, _ = build(config, kit.params(config, seed=1))
    second, _ = build(dataclasses.replace(config), kit.params(config, seed=2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.vocab_size == config.vocab_size


def test_build_needs_no_memory_to_compile_for(kit, config):
    params = jax.eval_shape(lambda: kit.params(config, dtype=jnp.bfloat16))
    decoder, leaves = build(config, params, platform="cpu", kv_dtype="bfloat16")
    assert leaves["layers.q.weight"].dtype == jnp.uint16
    assert leaves["embed.weight"].dtype == jnp.bfloat16
    kv = jax.eval_shape(lambda: decoder.init_kv(6, 4))
    batch = kit.batch([kit.piece(0, [1], 0, [1, 2])], num_blocks=6, block_size=4)
    logits, after = jax.eval_shape(decoder.forward, leaves, kv, batch)
    assert logits.shape == (2, config.vocab_size)
    assert after == kv


def test_gpu_build_keeps_bfloat16_as_it_is(kit):
    config = kit.configs["gqa_tied"]
    decoder, leaves = build(
        config, kit.params(config, dtype=jnp.bfloat16), platform="gpu", kv_dtype="bfloat16"
    )
    assert leaves["layers.q.weight"].dtype == jnp.bfloat16
    assert decoder.init_kv(3, 4).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_norm": "rows"}, "qk_norm='rows'"),
        ({"activation": "relu"}, "activation='relu'"),
        ({"layer_windows": (4,)}, "layer_windows names 1 layers"),
        ({"layer_windows": (4, 0, -1)}, "layer_windows"),
        ({"layer_ropes": ("global", "local")}, "layer_ropes names 2 layers"),
        ({"layer_ropes": ("global", "local", "rope")}, "'rope'"),
        ({"rotary_dim": 3}, "rotary_dim=3"),
        ({"rotary_dim": 10}, "rotary_dim=10"),
        ({"rotary_dim": 0}, "rotary_dim=0"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(kit, changes, named):
    config = kit.configs["gqa_tied"]
    assert (config.num_layers, config.head_dim) == (3, 8)
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(config, **changes)


def test_rope_factors_must_be_as_many_as_pairs(kit):
    with pytest.raises(ValueError, match="rope kind='ntk'"):
        RopeScaling("ntk")
    config = kit.configs["gqa_tied"]
    four, three = (1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0)
    for scaling in (
        RopeScaling("factors", factors=three),
        RopeScaling("longrope", factors=four, long_factors=three),
    ):
        with pytest.raises(ValueError, match=r"there are 3, .* there must be 4"):
            dataclasses.replace(config, rope_scaling=scaling)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_layers_that_are_alike_make_the_program_of_a_llama(kit, platform):
    """What might differ by layer costs a model nothing whose layers do not."""

    def program(config):
        decoder, leaves = build(
            config, jax.eval_shape(lambda: kit.params(config)), platform=platform
        )
        kv = jax.eval_shape(lambda: decoder.init_kv(6, 4))
        batch = kit.batch([kit.piece(0, [1], 0, [1, 2])], num_blocks=6, block_size=4, decodes=2)
        return jax.jit(decoder.forward).lower(leaves, kv, batch).as_text()

    plain = kit.configs["gqa_tied"]
    alike = dataclasses.replace(plain, layer_windows=(0,) * 3, layer_ropes=("global",) * 3)
    differ = dataclasses.replace(plain, layer_windows=(0, 4, 0))
    assert program(plain) == program(alike)
    assert program(plain) != program(differ)
    one_window = dataclasses.replace(plain, layer_windows=(4,) * 3)
    assert len(program(one_window)) < len(program(differ))
