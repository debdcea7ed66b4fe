"""The cache is updated in place: no program may copy it, in a loop or out of one.

Asked of the compiled program, with a cache larger than everything else together.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from oxidize_jax.model import kv_cache
from oxidize_jax.model.functional import build
from oxidize_jax.types import replace

B, K = 16384, 16


@pytest.fixture(params=[("float32", "float32"), ("bfloat16", "bfloat16")], ids=["f32", "bf16"])
def case(request, kit):
    """A decoder, and abstract leaves, cache and two batches (decode only, and mixed)."""
    weights, cache = request.param
    config = dataclasses.replace(kit.configs["gqa_tied"], num_layers=4)
    params = jax.eval_shape(lambda: kit.params(config, dtype=jnp.dtype(weights)))
    decoder, leaves = build(config, params, kv_dtype=cache)
    kv = jax.eval_shape(lambda: decoder.init_kv(B, K))
    sizes = {"num_blocks": B, "block_size": K, "width": 40, "tile": 8, "seqs": 8}
    decode = kit.batch([kit.piece(0, [3], 1, [1], decode=True)], **sizes, tokens=8, decodes=8)
    mixed = kit.batch([kit.piece(0, [3], 0, [1] * 9)], **sizes, tokens=32, decodes=8, tiles=6)
    return decoder, leaves, kv, decode, mixed


def compile_donated(function, leaves, kv, *rest):
    return jax.jit(function, donate_argnums=1).lower(leaves, kv, *rest).compile()


def check_in_place(compiled, kv):
    """No copy or conversion of an array of the cache's shape; little scratch; aliased."""
    size = kv.dtype.itemsize * kv.size
    whole = ",".join(map(str, kv.shape))
    by_layer = ",".join(map(str, (kv.shape[0] // B, B, *kv.shape[1:])))
    made = re.compile(rf"= \w+\[(?:{whole}|{by_layer})\]\S* (?:copy|convert|bitcast-convert)\(")
    found = [line.strip()[:160] for line in compiled.as_text().splitlines() if made.search(line)]
    assert not found, found
    assert compiled.memory_analysis().temp_size_in_bytes < size / 50
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def test_one_step(case):
    decoder, leaves, kv, _, mixed = case
    check_in_place(compile_donated(decoder.forward, leaves, kv, mixed), kv)


def test_one_step_of_layers_that_differ(kit):
    """Windows, rotations and lists of splits by layer, as Gemma 3 has them."""
    config = dataclasses.replace(
        kit.configs["gqa_tied"],
        num_layers=4,
        layer_windows=(64, 0, 64, 0),
        layer_ropes=("local", "global", "local", "none"),
        attention_softcap=30.0,
    )
    decoder, leaves = build(config, jax.eval_shape(lambda: kit.params(config)))
    kv = jax.eval_shape(lambda: decoder.init_kv(B, K))
    sizes = {"num_blocks": B, "block_size": K, "width": 40, "tile": 8, "seqs": 8}
    mixed = kit.batch([kit.piece(0, [3], 0, [1] * 9)], **sizes, tokens=32, decodes=8, tiles=6)
    check_in_place(compile_donated(decoder.forward, leaves, kv, mixed), kv)


def test_a_loop_of_decode_steps(case):
    decoder, leaves, kv, decode, _ = case

    def loop(leaves, kv, batch, steps):
        def body(carry):
            i, kv, seen = carry
            logits, kv = decoder.forward(leaves, kv, batch)
            return i + 1, kv, seen + logits[0, 0]

        start = (jnp.int32(0), kv, jnp.float32(0))
        return lax.while_loop(lambda carry: carry[0] < steps, body, start)

    steps = jax.ShapeDtypeStruct((), jnp.int32)
    check_in_place(compile_donated(loop, leaves, kv, decode, steps), kv)


def test_nested_loops_of_two_step_shapes(case):
    """The engine's loop: one inner loop per shape, each while the next step has its shape."""
    decoder, leaves, kv, decode, mixed = case

    def loop(leaves, kv, decode, mixed, steps):
        def run_while(kind, batch, carry):
            def body(carry):
                i, kv, seen = carry
                logits, kv = decoder.forward(leaves, kv, batch)
                return i + 1, kv, seen + logits[0, 0]

            return lax.while_loop(lambda c: (c[0] < steps) & (c[0] // 3 % 2 == kind), body, carry)

        def outer(carry):
            return run_while(1, mixed, run_while(0, decode, carry))

        start = (jnp.int32(0), kv, jnp.float32(0))
        return lax.while_loop(lambda carry: carry[0] < steps, outer, start)

    steps = jax.ShapeDtypeStruct((), jnp.int32)
    check_in_place(compile_donated(loop, leaves, kv, decode, mixed, steps), kv)


def test_weights_are_not_converted_or_copied_whole(case):
    """A scan may cut a layer out of the stacked weights, and nothing may make a new stack."""
    decoder, leaves, kv, decode, _ = case
    text = compile_donated(decoder.forward, leaves, kv, decode).as_text()
    for name in ("layers.gate.weight", "layers.q.weight"):
        shape = ",".join(map(str, leaves[name].shape))
        made = re.findall(rf"= \w+\[{shape}\]\S* (?!parameter|get-tuple-element)\S+\(", text)
        assert not made, (name, made)


def test_the_check_sees_a_copy(case):
    """Without donation the cache must be copied."""
    _, _, kv, decode, _ = case

    def scatter(_, kv):
        slots = jnp.arange(8, dtype=jnp.int32)
        k = jnp.ones((8, 2, 8), jnp.float32)
        step = replace(decode, slot_mapping=slots)
        return kv_cache.make_write(step, B, K, "cpu")(kv, jnp.int32(0), k, k)

    check_in_place(compile_donated(scatter, (), kv), kv)
    with pytest.raises(AssertionError):
        check_in_place(jax.jit(scatter).lower((), kv).compile(), kv)
