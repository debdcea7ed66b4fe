"""How sequences are cut into steps, and where their tokens and KV stand."""

import numpy as np
import pytest

from oxidize_jax.scoring.layout import (
    NO_TARGET,
    Chunk,
    Shape,
    Tables,
    build_step,
    choose_shape,
    plan_steps,
)

SIZES = {"max_tokens": 64, "max_len": 100, "block_size": 4, "tile": 8}


@pytest.mark.parametrize(
    ("lengths", "tokens", "width"),
    [
        ([5], 16, 4),
        ([8, 8], 16, 4),
        ([5] * 3, 64, 16),  # three rows are more than the small shape has
        ([17], 64, 16),
        ([64, 1], 64, 16),
        ([65], 64, 25),  # 4 x 16 blocks are more than max_len takes
        ([100] * 9, 64, 25),
    ],
)
def test_shapes_come_from_ladders(lengths, tokens, width):
    shape = choose_shape(lengths, **SIZES)
    assert (shape.tokens, shape.table_width) == (tokens, width)
    assert shape.rows == max(2, tokens // 16)


def test_a_budget_below_a_tile_and_lengths_that_divide_nothing():
    shape = choose_shape([7], max_tokens=3, max_len=50, block_size=16, tile=8)
    assert (shape.tokens, shape.tiles, shape.table_width) == (3, 3, 1)


def test_steps_are_full_and_only_the_last_chunk_is_cut():
    shape = Shape(tokens=10, rows=3, tile=4, table_width=8, block_size=4)
    steps = list(plan_steps(shape, [4, 0, 13, 1, 1, 1, 5]))
    assert steps == [
        [Chunk(0, 0, 4), Chunk(2, 0, 6)],
        [Chunk(2, 6, 13), Chunk(3, 0, 1), Chunk(4, 0, 1)],  # three rows
        [Chunk(5, 0, 1), Chunk(6, 0, 5)],
    ]


def test_a_step_drawn_by_hand():
    shape = Shape(tokens=8, rows=2, tile=2, table_width=3, block_size=2)
    ids = [np.array([7, 8, 9], np.int32), np.array([4, 5, 6, 3], np.int32)]
    targets = [np.array([8, 9, NO_TARGET], np.int32), np.array([NO_TARGET, 6, 3, 2], np.int32)]
    tables = Tables(shape, [3, 4])
    step = build_step(shape, [Chunk(0, 0, 3), Chunk(1, 0, 3)], tables, ids, targets)
    batch, b = step.batch, shape.num_blocks
    assert b == 3 + 4 + 2
    first, second = batch.block_tables[0][:2].tolist(), batch.block_tables[1][:2].tolist()
    assert len({*first, *second}) == 4
    assert batch.block_tables[:, 2].tolist() == [b, b]
    assert batch.token_ids.tolist() == [7, 8, 9, 4, 5, 6, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert batch.token_rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    slots = [2 * first[0], 2 * first[0] + 1, 2 * first[1]]
    slots += [2 * second[0], 2 * second[0] + 1, 2 * second[1]]
    assert batch.slot_mapping.tolist() == [*slots, 2 * b, 2 * b]
    assert batch.kv_lens.tolist() == [3, 3]
    assert batch.tile_rows.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.tile_tokens.tolist() == [[0, 1], [2, 8], [3, 4], [5, 8], [8, 8], [8, 8]]
    assert batch.logits_indices.tolist() == [0, 1, 4, 5, 8, 8, 8, 8]
    assert step.targets.tolist() == [8, 9, 6, 3, 0, 0, 0, 0]
    assert (step.num_targets, step.last.tolist()) == (4, [2, 5])
    # The second goes on where it was, the first has given its blocks back.
    after = build_step(shape, [Chunk(1, 3, 4)], tables, ids, targets)
    assert after.batch.block_tables[0].tolist() == [*second, b]
    assert after.batch.slot_mapping.tolist()[:2] == [2 * second[1] + 1, 2 * b]
    assert after.targets.tolist()[:2] == [2, 0]


def test_no_load_runs_out_of_blocks_and_all_come_back():
    rng = np.random.default_rng(1)
    for _ in range(30):
        lengths = rng.integers(0, 60, rng.integers(1, 40)).tolist()
        if not any(lengths):
            continue
        shape = choose_shape(lengths, **SIZES)
        tables = Tables(shape, lengths)
        seen = [0] * len(lengths)
        ids = [np.zeros(n, np.int32) for n in lengths]
        for chunks in plan_steps(shape, lengths):
            batch = build_step(shape, chunks, tables, ids, ids).batch
            live = batch.block_tables[batch.block_tables < shape.num_blocks]
            assert live.size == np.unique(live).size
            for chunk in chunks:
                assert chunk.start == seen[chunk.sequence] < chunk.end
                seen[chunk.sequence] = chunk.end
        assert seen == lengths
        assert sorted(tables._free) == list(range(shape.num_blocks))
