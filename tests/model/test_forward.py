"""The paged forward pass against the dense reference, however the work is cut."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oxidize_jax.model import attention
from oxidize_jax.model.functional import build
from oxidize_jax.model.reference import reference_forward
from oxidize_jax.types import replace

B, K = 19, 4
SIZES = {"num_blocks": B, "block_size": K}
STEP = {**SIZES, "tokens": 20, "decodes": 6, "tiles": 7}
"""One padded shape for most steps, so that a model is compiled once. The decode part reaches
into the tokens of the prefill part."""
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}

run = jax.jit(
    lambda decoder, leaves, kv, batch: decoder.forward(leaves, kv, batch), static_argnums=0
)


def shuffled_tables(count: int, blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(B)[: count * blocks].reshape(count, blocks)


def prompt(config, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, length).astype(np.int32)


_dense = jax.jit(reference_forward, static_argnums=0)


def dense(config, params, tokens) -> np.ndarray:
    """The oracle's logits; what follows a token does not matter to it, so pad to one shape."""
    padded = np.zeros(20, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_dense(config, params, padded))[: len(tokens)]


def run_chunks(kit, config, params, tokens, cuts, table, **options):
    """Logits of every token, from a prefill cut at ``cuts``; 1-token chunks are decodes."""
    decoder, leaves = build(config, params)
    kv = decoder.init_kv(B, K)
    logits = []
    for start, end in itertools.pairwise([0, *cuts, len(tokens)]):
        piece = kit.piece(2, table, start, tokens[start:end], decode=end - start == 1)
        batch = kit.batch([piece], **(options or STEP))
        out, kv = run(decoder, leaves, kv, batch)
        logits.append(np.asarray(out)[: end - start])
    return np.concatenate(logits)


def test_one_prefill_matches_the_reference(kit, config):
    params, tokens = kit.params(config), prompt(config, 13)
    table = shuffled_tables(1, 4)[0]
    paged = run_chunks(kit, config, params, tokens, [], table)
    np.testing.assert_allclose(paged, dense(config, params, tokens), **TOLERANCE)


CUTS = [
    list(range(1, 13)),
    [2, 4, 6, 8, 10, 12],
    [3, 6, 9, 12],
    [4, 8, 12],
    [5, 10],
    [7],
    [1, 2, 12],
    [4, 5, 6],
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_sc09_every_cut_of_a_prompt_gives_the_same_logits(kit, cuts):
    config = kit.configs["gqa_tied"]
    params, tokens = kit.params(config), prompt(config, 13)
    table = shuffled_tables(1, 4, seed=1)[0]
    paged = run_chunks(kit, config, params, tokens, cuts, table)
    np.testing.assert_allclose(paged, dense(config, params, tokens), **TOLERANCE)


def mixed_step(kit, config, params, kv_fill=None, built=None, **options):
    """Two rows in their context, then one step of a decode, a decode and two prefills."""
    decoder, leaves = built or build(config, params)
    tables = shuffled_tables(4, 4, seed=3)
    texts = [prompt(config, n, seed=n) for n in (6, 10, 9, 3)]
    kv = decoder.init_kv(B, K)
    if kv_fill is not None:
        kv = jnp.full_like(kv, kv_fill)
    begin = [kit.piece(r, tables[r], 0, texts[r][:n]) for r, n in ((0, 5), (1, 9), (2, 2))]
    _, kv = run(decoder, leaves, kv, kit.batch(begin, **STEP))
    pieces = [
        kit.piece(0, tables[0], 5, texts[0][5:], decode=True),
        kit.piece(1, tables[1], 9, texts[1][9:], decode=True),
        kit.piece(2, tables[2], 2, texts[2][2:]),
        kit.piece(3, tables[3], 0, texts[3]),
    ]
    out, kv = run(decoder, leaves, kv, kit.batch(pieces, **(options or STEP)))
    live = sum(len(piece.tokens) for piece in pieces)
    wanted = np.concatenate([dense(config, params, texts[p.row])[p.start :] for p in pieces])
    return np.asarray(out), wanted, live, kv


def test_decodes_and_prefills_in_one_step(kit, config):
    out, wanted, live, _ = mixed_step(kit, config, kit.params(config))
    np.testing.assert_allclose(out[:live], wanted, **TOLERANCE)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("padding", [{}, {"tokens": 15, "decodes": 2}], ids=str)
def test_padding_changes_nothing(kit, padding):
    config = kit.configs["gqa_tied"]
    out, wanted, live, _ = mixed_step(kit, config, kit.params(config), **SIZES, **padding)
    np.testing.assert_allclose(out[:live], wanted, **TOLERANCE)
    assert np.isfinite(out).all()


def test_kv19_nan_pages_give_the_bits_of_a_zeroed_pool(kit, config):
    params = kit.params(config)
    clean, wanted, live, _ = mixed_step(kit, config, params)
    dirty, *_ = mixed_step(kit, config, params, kv_fill=np.nan)
    np.testing.assert_array_equal(dirty, clean)
    np.testing.assert_allclose(dirty[:live], wanted, **TOLERANCE)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_kv19_short_prompts_in_a_pool_of_nan(kit, length):
    config = kit.configs["gqa_tied"]
    decoder, leaves = build(config, kit.params(config))
    tokens = prompt(config, length)
    batch = kit.batch([kit.piece(0, [7, 3], 0, tokens)], **STEP)
    kv = decoder.init_kv(B, K)
    clean, _ = run(decoder, leaves, kv, batch)
    dirty, _ = run(decoder, leaves, jnp.full_like(kv, jnp.nan), batch)
    np.testing.assert_array_equal(dirty, clean)
    assert np.isfinite(dirty).all()


def test_jx01_a_padded_table_entry_never_reads_a_foreign_block(kit):
    """With layer * B added, padding B is the next layer's block 0: fill that with a trap."""
    config = kit.configs["gqa_tied"]
    decoder, leaves = build(config, kit.params(config))
    tokens = prompt(config, 3)
    kv = decoder.init_kv(B, K)
    trap = kv
    for layer in range(config.num_layers):
        trap = trap.at[layer * B].set(1e30)
    table = [5]
    batch = kit.batch([kit.piece(1, table, 0, tokens)], **STEP)
    clean, _ = run(decoder, leaves, kv, batch)
    for value in (B, B + 1, 2**31 - 1):
        padded = replace(
            batch, block_tables=jnp.where(batch.block_tables == B, value, batch.block_tables)
        )
        out, _ = run(decoder, leaves, trap, padded)
        np.testing.assert_array_equal(out, clean)


def test_jx01_an_absent_block_within_the_context_is_not_attended_to(kit):
    """A token whose blocks are partly missing sees the others and nothing else.

    No plan has such holes. Pages of an accelerator, which a table's padding guards; a CPU goes
    by the length of the context.
    """
    config = kit.configs["gqa_tied"]
    decoder, leaves = build(config, kit.params(config), platform="gpu")
    tokens = prompt(config, 9)
    _, kv = run(
        decoder,
        leaves,
        decoder.init_kv(B, K),
        kit.batch([kit.piece(0, [3, 8, 5], 0, tokens)], **STEP),
    )
    last = kit.batch([kit.piece(0, [3, 8, 5], 8, tokens[8:], decode=True)], **STEP)
    holed = replace(last, block_tables=last.block_tables.at[0, 1].set(B))
    out, _ = run(decoder, leaves, kv, holed)
    poisoned = kv
    for layer in range(config.num_layers):
        for block in (0, 8):
            poisoned = poisoned.at[layer * B + block].set(jnp.nan)
    again, _ = run(decoder, leaves, poisoned, holed)
    np.testing.assert_array_equal(again, out)
    whole, _ = run(decoder, leaves, kv, last)
    assert np.abs(np.asarray(out - whole)).max() > 1e-3


def test_tables_wider_than_any_chunk_and_not_its_multiple(kit, monkeypatch):
    config = kit.configs["gqa_tied"]
    monkeypatch.setattr(attention, "_plan", lambda *_: attention.Plan(rows=1, chunk=3))
    params, tokens = kit.params(config), prompt(config, 17)
    table = shuffled_tables(1, 5, seed=2)[0]
    decoder, leaves = build(config, params)
    step = jax.jit(decoder.forward)  # traced anew, with the smaller chunk
    batch = kit.batch([kit.piece(0, table, 0, tokens)], **SIZES, width=7)
    out, kv = step(leaves, decoder.init_kv(B, K), batch)
    np.testing.assert_allclose(out, dense(config, params, tokens), **TOLERANCE)
    again = kit.batch([kit.piece(0, table, 16, tokens[16:], decode=True)], **SIZES, width=7)
    np.testing.assert_allclose(step(leaves, kv, again)[0][0], out[16], **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 17])
def test_many_decodes_of_unequal_length(kit, rows):
    """More rows than one group holds: they are sorted by length, cut, padded and put back."""
    config = kit.configs["one_kv_head"]
    params = kit.params(config)
    decoder, leaves = build(config, params)
    lengths = [1 + (5 * r) % 4 for r in range(rows)]
    texts = [prompt(config, n, seed=r) for r, n in enumerate(lengths)]
    order = np.random.default_rng(0).permutation(B)
    begin = [kit.piece(r, [order[r]], 0, texts[r][:-1]) for r in range(rows) if lengths[r] > 1]
    kv = decoder.init_kv(B, K)
    if begin:
        _, kv = run(decoder, leaves, kv, kit.batch(begin, **SIZES, seqs=rows, width=1))
    pieces = [
        kit.piece(r, [order[r]], lengths[r] - 1, texts[r][-1:], decode=True) for r in range(rows)
    ]
    out, _ = run(decoder, leaves, kv, kit.batch(pieces, **SIZES, seqs=rows, width=1))
    wanted = [dense(config, params, text)[-1] for text in texts]
    np.testing.assert_allclose(out, wanted, **TOLERANCE)


def test_copies_happen_before_anything_is_read_or_written(kit, config):
    """Copy-on-write: two rows share block 9 until one of them writes into its copy."""
    params = kit.params(config)
    decoder, leaves = build(config, params)
    tokens = prompt(config, 6)
    other = tokens.copy()
    other[5] = (other[5] + 1) % config.vocab_size
    first = kit.batch([kit.piece(0, [4, 9], 0, tokens[:5])], **STEP)
    _, kv = run(decoder, leaves, decoder.init_kv(B, K), first)
    pieces = [
        kit.piece(0, [4, 9], 5, tokens[5:], decode=True),
        kit.piece(1, [4, 2], 5, other[5:], decode=True),
    ]
    out, _ = run(decoder, leaves, kv, kit.batch(pieces, **STEP, copies=[(9, 2)]))
    np.testing.assert_allclose(out[0], dense(config, params, tokens)[5], **TOLERANCE)
    np.testing.assert_allclose(out[1], dense(config, params, other)[5], **TOLERANCE)


def test_logits_only_where_asked(kit):
    config = kit.configs["gqa_tied"]
    params, tokens = kit.params(config), prompt(config, 6)
    decoder, leaves = build(config, params)
    batch = kit.batch([kit.piece(0, [1, 2], 0, tokens)], **STEP)
    batch = replace(batch, logits_indices=jnp.array([5, 6, 0], jnp.int32))
    out, _ = run(decoder, leaves, decoder.init_kv(B, K), batch)
    wanted = dense(config, params, tokens)
    assert out.shape == (3, config.vocab_size)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out[0], wanted[5], **TOLERANCE)
    np.testing.assert_allclose(out[2], wanted[0], **TOLERANCE)
    assert np.isfinite(np.asarray(out)).all()


def test_bfloat16_weights_and_cache_stay_near_float32(kit):
    config = kit.configs["gqa_tied"]
    params = kit.params(config, dtype=jnp.bfloat16)
    tokens = prompt(config, 13)
    table = shuffled_tables(1, 4)[0]
    decoder, leaves = build(config, params, kv_dtype="bfloat16")
    wanted = dense(config, params, tokens)
    kv = decoder.init_kv(B, K)
    for start, end in ((0, 12), (12, 13)):
        piece = kit.piece(2, table, start, tokens[start:end], decode=end - start == 1)
        out, kv = run(decoder, leaves, kv, kit.batch([piece], **STEP))
        error = np.asarray(out)[: end - start] - wanted[start:end]
        assert np.sqrt(np.mean(error**2)) < 0.05 * wanted.std()
    assert kv.dtype == (jnp.uint32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def test_what_other_platforms_do_differently_gives_the_same(kit):
    """Whole parts at once, other chunks, no uint16; on TPUs heads padded to 128 lanes."""
    config = kit.configs["gqa_tied"]
    params = kit.params(config)
    for platform, lanes in (("gpu", 8), ("tpu", 128)):
        decoder, leaves = build(config, params, platform=platform)
        assert decoder.init_kv(B, K).shape[-1] == lanes
        out, wanted, live, _ = mixed_step(kit, config, params, built=(decoder, leaves))
        np.testing.assert_allclose(out[:live], wanted, **TOLERANCE)


def test_a_trainers_own_parameters_serve_as_leaves(kit):
    """The leaves are the flat dict of parameters; bfloat16 ones need not be prepared."""
    config = kit.configs["mha_untied_biased"]
    tokens = prompt(config, 5)
    batch = kit.batch([kit.piece(0, [1, 2], 0, tokens)], **STEP)
    for dtype in (jnp.float32, jnp.bfloat16):
        params = kit.params(config, dtype=dtype)
        decoder, leaves = build(config, params)
        kv = decoder.init_kv(B, K)
        built, _ = run(decoder, leaves, kv, batch)
        raw, _ = run(decoder, params, kv, batch)
        np.testing.assert_array_equal(raw, built)
        if dtype == jnp.float32:
            assert all(leaves[name] is params[name] for name in params)


def test_forward_runs_inside_scan_and_while_loop(kit):
    config = kit.configs["gqa_tied"]
    params, tokens = kit.params(config), prompt(config, 8)
    decoder, leaves = build(config, params)
    steps = [
        kit.batch([kit.piece(0, [3, 1], i, tokens[i : i + 1], decode=True)], **SIZES)
        for i in range(8)
    ]
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)

    def body(kv, batch):
        logits, kv = decoder.forward(leaves, kv, batch)
        return kv, logits[0]

    _, scanned = jax.jit(lambda kv: jax.lax.scan(body, kv, batches))(decoder.init_kv(B, K))
    np.testing.assert_allclose(scanned, dense(config, params, tokens), **TOLERANCE)
