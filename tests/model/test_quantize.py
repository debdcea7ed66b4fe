"""int8 matrices: error bounds, independence of rows, and the model around them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oxidize_jax.checkpoints import load_checkpoint
from oxidize_jax.model.functional import build
from oxidize_jax.model.quantize import (
    block_size,
    dequantize_weight,
    hadamard,
    is_matrix,
    quantize,
    quantize_rows,
    quantize_weight,
    quantize_weight_on_host,
    scale_name,
)
from oxidize_jax.model.reference import reference_forward
from oxidize_jax.model.transformer import Matrix, parameter_shapes

GOLDENS = Path(__file__).parents[1] / "goldens" / "smollm2_greedy.json"
IN = 96
"""Inputs of the matrices here: three blocks of 32 channels."""
SIZES = {"num_blocks": 19, "block_size": 4}
STEP = {**SIZES, "tokens": 20, "decodes": 3, "tiles": 7}
WIDER = {**STEP, "tokens": 32, "tiles": 10}

run = jax.jit(
    lambda decoder, leaves, kv, batch: decoder.forward(leaves, kv, batch), static_argnums=0
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def awkward_rows():
    """Rows in which one number dwarfs the others, or all are equal, tiny, huge or zero."""
    rows = normal(9, IN)
    rows[1] = 0
    rows[2, 5] = 3e4
    rows[3] = -2.5
    rows[4] *= 1e-30
    rows[5] *= 1e35
    rows[6, 1:] = 0
    rows[7] = np.abs(rows[7])
    rows[8] = np.linspace(-1, 1, IN)
    return rows


def test_no_number_is_off_by_more_than_half_a_step():
    x = awkward_rows()
    rows, scale = map(np.asarray, jax.jit(quantize_rows)(x))
    assert (rows.dtype, scale.dtype) == (np.int8, np.float32)
    np.testing.assert_allclose(scale, np.abs(x).max(axis=1) / 127, rtol=1e-6)
    assert np.abs(rows.astype(int)).max(axis=1).tolist() == [127, 0] + [127] * 7
    back = rows * scale[:, None]
    assert np.all(np.abs(back - x) <= 0.5001 * scale[:, None])


def test_ties_go_to_even_and_minus_128_is_never_used():
    x = np.array([[127, 0.5, 1.5, -0.5, -1.5, -126.5, -127]], np.float32)
    rows, scale = quantize_rows(x)
    assert scale[0] == 1
    assert np.asarray(rows)[0].tolist() == [127, 0, 2, 0, -2, -126, -127]


def test_numbers_too_small_to_invert_are_zero():
    rows, scale = quantize_rows(np.array([[1e-39, 0], [1e-44, -1e-45]], np.float32))
    assert not np.any(rows)
    assert np.all(np.isfinite(scale))


@pytest.mark.parametrize(
    ("inner", "block"), [(576, 64), (1536, 64), (96, 32), (24, 8), (30, 2), (33, 1)]
)
def test_channels_are_mixed_in_blocks_by_an_orthogonal_matrix(inner, block):
    assert block_size(inner) == block
    matrix = hadamard(block)
    np.testing.assert_array_equal(np.abs(matrix), 1)
    np.testing.assert_array_equal(matrix @ matrix.T, block * np.eye(block))
    np.testing.assert_array_equal(matrix, matrix.T)


def test_a_weight_comes_back_within_half_a_step():
    """Turned back, a number has the mean of its block's errors with signs: half a step at most."""
    weight = awkward_rows()
    rows, scale = quantize_weight(jnp.asarray(weight))
    back = np.asarray(dequantize_weight(rows, scale))
    half_step = 32 * np.asarray(scale)[:, None] / 2
    assert np.all(np.abs(back - weight) <= 1.001 * half_step)


def test_on_the_host_a_weight_is_the_same_but_for_ties():
    weight = awkward_rows()
    rows, scale = quantize_weight_on_host(weight)
    expected_rows, expected_scale = jax.jit(quantize_weight)(weight)
    assert (rows.dtype, scale.dtype) == (np.int8, np.float32)
    np.testing.assert_allclose(scale, expected_scale, rtol=1e-5)
    assert np.max(np.abs(rows.astype(int) - np.asarray(expected_rows, int))) <= 1
    assert np.mean(rows != np.asarray(expected_rows)) < 0.01


def matrix_of(weight, bias=None):
    """A quantised Matrix of these floats."""
    matrix = Matrix(*weight.shape, bias=bias is not None, quantized=True)
    rows, scale = quantize_weight(jnp.asarray(weight))
    matrix.weight, matrix.scale = nnx.Param(rows), nnx.Param(scale)
    if bias is not None:
        matrix.bias = nnx.Param(jnp.asarray(bias))
    return matrix


def turned(x):
    return (x.reshape(-1, 32) @ hadamard(32).astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_within_the_bound_of_its_roundings(with_bias):
    """Turned, with x = x' + a and w = w' + b: x.w - x'.w' = a.w + x.b - a.b, and a and b are
    half a step at most. Before that x is rounded to bfloat16: 2^-9 of it at most."""
    x, weight = awkward_rows(), awkward_rows()[::-1] * np.float32(0.3)
    x[5] *= np.float32(1e-20)
    weight[3] *= np.float32(1e-20)
    bias = normal(9, seed=1) if with_bias else None
    y = np.asarray(matrix_of(weight, bias)(jnp.asarray(x)))
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    tx, tw = np.abs(turned(x)), np.abs(turned(weight))
    half_x, half_w = tx.max(axis=1)[:, None] / 254 * (1 + 2**-9), tw.max(axis=1) / 254
    bound = half_x * tw.sum(axis=1) + tx.sum(axis=1)[:, None] * half_w + IN * half_x * half_w
    bound = bound / 32 + np.abs(x) @ np.abs(weight).T * 2**-9 * 1.1
    exact = x @ weight.T + (0 if bias is None else bias)
    assert np.all(np.abs(y - exact) <= 1.001 * bound + 1e-6 * np.abs(exact) + 1e-30)


def test_a_channel_that_dwarfs_the_others_costs_little():
    """What the turn is for: with one scale for such a row the rest has a step or two."""
    x, weight = normal(16, IN), normal(24, IN, seed=1)
    x[:, 7] *= 200
    weight[:, 7] *= np.float32(0.005)
    exact = x @ weight.T
    rows, scale = map(np.asarray, quantize_rows(x))
    plain = (rows * scale[:, None]) @ weight.T
    error, without = (np.std(y - exact) for y in (matrix_of(weight)(jnp.asarray(x)), plain))
    assert error < 0.5 * without


def test_products_are_summed_as_whole_numbers():
    """Past 2^24, where float32 would lose the ones: 2,048 x 127 x 127 and a little."""
    rng = np.random.default_rng(0)
    matrix = matrix_of(np.ones((3, 2049), np.float32))
    matrix.weight = nnx.Param(jnp.asarray(rng.integers(120, 128, (3, 2049)), jnp.int8))
    matrix.scale = nnx.Param(jnp.ones((3,), jnp.float32))
    x = rng.integers(120, 128, (2, 2049)).astype(np.float32)
    x[:, 0] = 127
    total = x.astype(np.int64) @ np.asarray(matrix.weight[...], np.int64).T
    assert total.min() > 2**24
    np.testing.assert_array_equal(np.asarray(matrix(x)), total.astype(np.float32))


def test_rows_of_an_embedding():
    weight = awkward_rows()
    got = np.asarray(matrix_of(weight).rows(jnp.array([2, 0, 2, 99], jnp.int32)))
    expected = np.asarray(dequantize_weight(*quantize_weight(jnp.asarray(weight))))
    np.testing.assert_array_equal(got, expected[[2, 0, 2, 8]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_spoils_itself_alone(bad):
    matrix, x = matrix_of(normal(6, 16)), normal(5, 16, seed=1)
    expected = np.asarray(jax.jit(matrix.__call__)(x))
    spoilt = x.copy()
    spoilt[2, 3] = bad
    got = np.asarray(jax.jit(matrix.__call__)(spoilt))
    assert np.all(np.isnan(got[2]))
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(expected, 2, 0))


def test_what_a_token_gets_does_not_depend_on_its_neighbours():
    matrix, x = matrix_of(normal(48, 64)), normal(64, 64, seed=1)
    x[1] *= 1e4
    product = jax.jit(matrix.__call__)
    whole = np.asarray(product(x))
    for count in (1, 2, 7, 16):
        np.testing.assert_array_equal(product(x[:count]), whole[:count])


def test_names_shapes_and_types(kit, config):
    params = kit.params(config)
    quantized = quantize(params)
    assert {n: leaf.shape for n, leaf in quantized.items()} == parameter_shapes(
        config, quantized=True
    )
    matrices = [name for name in params if is_matrix(name)]
    assert len(matrices) == len(params) - sum("norm" in n or n.endswith("bias") for n in params)
    assert set(quantized) - set(params) == {scale_name(name) for name in matrices}
    for name, leaf in quantized.items():
        assert leaf.dtype == (jnp.int8 if name in matrices else jnp.float32)
    for name in set(params) - set(matrices):
        np.testing.assert_array_equal(quantized[name], params[name])


def test_abstract_or_in_a_jitted_program_it_is_the_same(kit, config):
    params = kit.params(config, dtype=jnp.bfloat16)
    quantized = quantize(params)
    abstract = quantize(jax.eval_shape(lambda: params))
    inside = jax.jit(quantize)(params)
    assert abstract.keys() == inside.keys() == quantized.keys()
    for name, leaf in quantized.items():
        assert (abstract[name].shape, abstract[name].dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(inside[name], leaf)


def one_prefill(kit, decoder, leaves, prompt, neighbours=(), **options):
    """Logits of ``prompt``, alone or with other prompts in the step."""
    pieces = [kit.piece(2, [3, 9, 1, 14], 0, prompt)]
    tables = ([5, 2], [17, 0])
    for row, (table, other) in enumerate(zip(tables, neighbours, strict=False)):
        pieces.append(kit.piece(row, table, 0, other))
    batch = kit.batch(pieces, **{**STEP, **options})
    logits, _ = run(decoder, leaves, decoder.init_kv(19, 4), batch)
    return np.asarray(logits)[: len(prompt)]


def dequantized(quantized):
    floats = {}
    for name, leaf in quantized.items():
        if is_matrix(name):
            rows, scale = leaf.reshape(-1, leaf.shape[-1]), quantized[scale_name(name)]
            leaf = dequantize_weight(rows, scale.reshape(-1)).reshape(leaf.shape)
        if not name.endswith(".scale"):
            floats[name] = leaf
    return floats


def relative_error(got, expected):
    return np.sqrt(np.mean((got - expected) ** 2) / np.var(expected))


def test_logits_are_near_those_of_float32(kit, config):
    params = kit.params(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 13).astype(np.int32)
    quantized = quantize(params)
    decoder, leaves = build(config, quantized)
    assert decoder.quantized
    got = one_prefill(kit, decoder, leaves, tokens)
    exact = np.asarray(reference_forward(config, params, tokens))
    same_weights = np.asarray(reference_forward(config, dequantized(quantized), tokens))
    assert relative_error(got, exact) < 0.05
    assert relative_error(got, same_weights) < 0.04
    assert relative_error(got, same_weights) > 1e-4  # activations are rounded too


def test_every_parameter_moves_the_logits(kit, config):
    quantized = quantize(kit.params(config))
    decoder, leaves = build(config, quantized)
    tokens = np.arange(9, dtype=np.int32)
    before = one_prefill(kit, decoder, leaves, tokens)
    for name, leaf in quantized.items():
        _, changed = build(config, {**quantized, name: jnp.flip(leaf, -1)})
        assert not np.array_equal(one_prefill(kit, decoder, changed, tokens), before), name


def test_logits_have_the_same_bits_alone_and_in_company(kit, config):
    decoder, leaves = build(config, quantize(kit.params(config)))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 11).astype(np.int32)
    alone = one_prefill(kit, decoder, leaves, tokens)
    together = one_prefill(kit, decoder, leaves, tokens, neighbours=([1, 2, 3, 4], [5]))
    wider = one_prefill(kit, decoder, leaves, tokens, ([1, 2, 3, 4], [5]), **WIDER)
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(wider, alone)


def test_a_trainers_parameters_are_quantised_in_the_program(kit):
    config = kit.configs["gqa_tied"]
    params = kit.params(config)
    decoder, leaves = build(config, quantize(kit.params(config, seed=1)))
    batch = kit.batch([kit.piece(0, [1], 0, [1, 2])], **SIZES)
    kv = decoder.init_kv(19, 4)
    with pytest.raises(
        ValueError, match=r"'embed\.weight' is float32.*int8 weights: quantize them"
    ):
        decoder.forward(params, kv, batch)
    inside = jax.jit(lambda params, kv: decoder.forward(quantize(params), kv, batch)[0])(params, kv)
    outside = run(decoder, build(config, quantize(params))[1], kv, batch)[0]
    np.testing.assert_array_equal(inside, outside)
    floating, _ = build(config, params)
    with pytest.raises(
        ValueError, match=r"'embed\.weight' is int8.*floating weights: do not quantize"
    ):
        floating.forward(leaves, kv, batch)


def test_build_names_what_is_not_as_quantize_makes_it(kit, config):
    quantized = quantize(kit.params(config))
    for name, leaf in quantized.items():
        missing = {n: p for n, p in quantized.items() if n != name}
        with pytest.raises(ValueError, match=f"'{name}'.*(missing|not one of)"):
            build(config, missing)
        for wrong in (leaf.astype(jnp.bfloat16), leaf[..., None]):
            with pytest.raises(ValueError, match=r"^parameter '[a-z_.]+' .*(is|has|not one of) "):
                build(config, {**quantized, name: wrong})
    with pytest.raises(ValueError, match=r"'embed\.scale' is not one of this model"):
        build(config, {**kit.params(config), "embed.scale": quantized["embed.scale"]})


@pytest.mark.slow
def test_the_real_model_prefers_the_same_tokens(kit, smollm2_path):
    """Greedy tokens of transformers in float32, each after the true text before it."""
    cases = json.loads(GOLDENS.read_text())["cases"]
    checkpoint = load_checkpoint(smollm2_path, jnp.int8)
    decoder, leaves = build(checkpoint.config, checkpoint.params, kv_dtype="bfloat16")
    same, count = 0, 0
    longest = max(len(c["prompt_ids"]) + len(c["output_ids"]) for c in cases)
    sizes = {"num_blocks": 64, "block_size": 16, "width": 32, "tile": 16}
    sizes |= {"tokens": -(-longest // 16) * 16, "tiles": -(-longest // 16), "decodes": 1}
    for case in cases:
        text = [*case["prompt_ids"], *case["output_ids"]]
        batch = kit.batch([kit.piece(0, list(range(32)), 0, text)], **sizes)
        logits, _ = run(decoder, leaves, decoder.init_kv(64, 16), batch)
        start = len(case["prompt_ids"]) - 1
        best = np.asarray(jnp.argmax(logits, axis=-1))[start : start + len(case["output_ids"])]
        same += int(np.sum(best == np.array(case["output_ids"])))
        count += len(best)
    assert same >= 0.93 * count, f"{same} of {count}"
