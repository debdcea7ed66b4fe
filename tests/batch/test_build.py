"""From the plan to the arrays of a step: by example, and against plain loops."""

import functools
import random

import chex
import jax
import numpy as np
import pytest
from fake_model import quick_jit, small_config

from oxidize_jax.batch.buckets import Bucket
from oxidize_jax.batch.build import build_batch
from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.scheduler.state import RUNNING, init_scheduler

CONFIG = small_config(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=20)
S, B, M, K = 4, 20, 10, 4


def state_of(rows, order=None, copies=()):
    """A state of rows ``{row: (request, tokens, computed, table, scheduled)}``."""
    state = jax.tree.map(np.array, jax.device_get(init_scheduler(CONFIG)))
    for row, (request, tokens, computed, table, scheduled) in rows.items():
        state.requests.status[request] = RUNNING
        state.requests.row[request] = row
        state.requests.tokens[request] = 88  # what stands behind the tokens
        state.requests.tokens[request, : len(tokens)] = tokens
        state.requests.num_tokens[request] = len(tokens)
        state.requests.num_computed[request] = computed
        state.rows.request[row] = request
        state.rows.block_table[row, : len(table)] = table
        state.rows.num_blocks[row] = len(table)
        state.plan.num_scheduled[row] = scheduled
    if order is not None:
        state.plan.order[:] = order
    for i, (src, dst) in enumerate(copies):
        state.plan.copy_src[i], state.plan.copy_dst[i] = src, dst
    state.plan.num_copies[()] = len(copies)
    return state


@functools.cache
def building(bucket):
    return quick_jit(functools.partial(build_batch, CONFIG, bucket))


def build(bucket, state):
    """The descriptor as numpy arrays; -1 is nowhere in it."""
    batch = jax.device_get(building(bucket)(state))
    for leaf in jax.tree.leaves(batch):
        assert leaf.dtype == np.int32
        assert leaf.min(initial=0) >= 0
    return batch


EXAMPLE = Bucket(tokens=10, decode_rows=3, tiles=3, samples=3)
"""The shape of the example in BatchDescriptor's docstring."""


def test_the_example_of_the_docstring():
    state = state_of(
        {
            0: (5, [10, 11, 12, 13, 14], 4, [7, 3], 1),
            1: (2, [20, 21], 1, [9], 1),
            2: (0, [30, 31, 32, 33, 34, 35, 36], 2, [4, 0], 5),
        },
        copies=[(6, 9)],
    )
    batch = build(EXAMPLE, state)
    tables = np.full((S, M), B, np.int32)
    tables[0, :2], tables[1, :1], tables[2, :2] = [7, 3], [9], [4, 0]
    expected = {
        "token_ids": [14, 21, 32, 33, 34, 35, 36, 0, 0, 0],
        "positions": [4, 1, 2, 3, 4, 5, 6, 0, 0, 0],
        "token_rows": [0, 1, 2, 2, 2, 2, 2, S, S, S],
        "slot_mapping": [12, 37, 18, 19, 0, 1, 2, 80, 80, 80],
        "kv_lens": [5, 2, 7, 0],
        "decode_rows": [0, 1, S],
        "tile_rows": [2, 2, S],
        "tile_tokens": [[2, 3, 4, 5], [6, 10, 10, 10], [10, 10, 10, 10]],
        "sample_rows": [0, 1, 2],
        "logits_indices": [0, 1, 6],
        "copy_src": [6, B, B, B],
        "copy_dst": [9, B, B, B],
        "num_copies": 1,
        "block_tables": tables.tolist(),
    }
    assert {name: getattr(batch, name).tolist() for name in expected} == expected


def test_a_chunk_of_one_token_runs_with_the_decodes_and_does_not_sample():
    state = state_of(
        {
            0: (0, [1, 2, 3, 4, 5, 6], 4, [0, 1], 1),
            1: (1, [7, 8], 0, [2], 2),
            3: (3, [9, 9, 9], 2, [3], 1),
        },
        order=[1, 0, 3, 2],
    )
    batch = build(EXAMPLE, state)
    assert batch.token_rows.tolist() == [0, 3, 1, 1, S, S, S, S, S, S]
    assert batch.decode_rows.tolist() == [0, 3, S]
    assert batch.tile_rows.tolist() == [1, S, S]
    assert batch.sample_rows.tolist() == [3, 1, S]
    assert batch.logits_indices.tolist() == [1, 3, 10]


def test_a_chunk_that_is_not_the_last_does_not_sample():
    state = state_of({0: (0, [1] * 9, 0, [0, 1], 8), 1: (1, [2] * 5, 0, [2, 3], 0)})
    batch = build(EXAMPLE, state)
    assert batch.kv_lens.tolist() == [8, 0, 0, 0]
    assert batch.sample_rows.tolist() == [S] * 3
    assert batch.logits_indices.tolist() == [10] * 3
    assert batch.tile_tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [10] * 4]


def test_a_decode_only_step_in_a_decode_only_shape():
    state = state_of(
        {1: (4, [1, 2, 3], 2, [5], 1), 2: (3, [4] * 9, 8, [6, 7, 8], 1), 3: (0, [1], 0, [9], 0)},
        order=[2, 1, 3, 0],
    )
    batch = build(Bucket(tokens=3, decode_rows=3, tiles=0, samples=3), state)
    assert batch.token_rows.tolist() == [2, 1, S]
    assert batch.slot_mapping.tolist() == [32, 22, 80]
    assert batch.decode_rows.tolist() == [2, 1, S]
    assert batch.tile_rows.shape == (0,)
    assert batch.tile_tokens.shape == (0, 4)
    assert batch.sample_rows.tolist() == [2, 1, S]


def test_an_empty_plan_is_padding():
    batch = build(EXAMPLE, state_of({1: (0, [1, 2], 0, [3], 0)}))
    assert batch.token_rows.tolist() == [S] * 10
    assert batch.slot_mapping.tolist() == [B * K] * 10
    assert batch.tile_tokens.tolist() == [[10] * 4] * 3
    assert not batch.kv_lens.any()


def plain_build(bucket, state):
    """What :func:`build_batch` must give, token by token."""
    order, scheduled = state.plan.order, state.plan.num_scheduled
    rows = [r for r in order if scheduled[r] == 1] + [r for r in order if scheduled[r] > 1]
    q, t = CONFIG.prefill_tile, bucket.tokens
    out = {
        "token_ids": np.zeros(t, np.int32),
        "positions": np.zeros(t, np.int32),
        "token_rows": np.full(t, S, np.int32),
        "slot_mapping": np.full(t, B * K, np.int32),
        "kv_lens": np.zeros(S, np.int32),
        "decode_rows": np.full(bucket.decode_rows, S, np.int32),
        "tile_rows": np.full(bucket.tiles, S, np.int32),
        "tile_tokens": np.full((bucket.tiles, q), t, np.int32),
        "sample_rows": np.full(bucket.samples, S, np.int32),
        "logits_indices": np.full(bucket.samples, t, np.int32),
    }
    token = tile = sample = 0
    for row in rows:
        request = state.rows.request[row]
        computed = int(state.requests.num_computed[request])
        for i in range(scheduled[row]):
            position = computed + i
            out["token_ids"][token] = state.requests.tokens[request, position]
            out["positions"][token] = position
            out["token_rows"][token] = row
            block = state.rows.block_table[row, position // K]
            out["slot_mapping"][token] = block * K + position % K
            if scheduled[row] == 1:
                out["decode_rows"][token] = row
            else:
                out["tile_rows"][tile + i // q] = row
                out["tile_tokens"][tile + i // q, i % q] = token
            token += 1
        tile += -(-scheduled[row] // q) if scheduled[row] > 1 else 0
        out["kv_lens"][row] = computed + scheduled[row]
        if computed + scheduled[row] == state.requests.num_tokens[request]:
            out["sample_rows"][sample] = row
            out["logits_indices"][sample] = token - 1
            sample += 1
    return BatchDescriptor(
        **out,
        block_tables=state.rows.block_table,
        copy_src=state.plan.copy_src,
        copy_dst=state.plan.copy_dst,
        num_copies=state.plan.num_copies,
    )


def random_state(rng):
    """Up to four rows with random lengths, tables and chunks, 16 tokens in all at most."""
    ids, requests = rng.sample(range(B), B), rng.sample(range(8), 4)
    rows, left = {}, 16
    running = rng.sample(range(S), rng.randint(0, S))
    for row in running:
        tokens = [rng.randrange(97) for _ in range(rng.randint(1, 18))]
        computed = rng.choice([0, len(tokens) - 1, rng.randrange(len(tokens))])
        scheduled = min(rng.choice([0, 1, 2, 5, 20]), len(tokens) - computed, left)
        left -= scheduled
        table = [ids.pop() for _ in range(-(-len(tokens) // K))]
        rows[row] = (requests[row], tokens, computed, table, scheduled)
    idle = [row for row in range(S) if row not in rows]
    return state_of(rows, order=running + idle)


@pytest.mark.parametrize(
    "bucket",
    [
        Bucket(tokens=16, decode_rows=4, tiles=8, samples=4),
        Bucket(tokens=33, decode_rows=4, tiles=9, samples=4),
    ],
)
def test_random_plans_agree_with_plain_loops(bucket):
    rng = random.Random(bucket.tokens)
    for _ in range(150):
        state = random_state(rng)
        chex.assert_trees_all_equal(build(bucket, state), plain_build(bucket, state))
