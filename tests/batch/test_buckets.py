"""Step shapes: what there is, and which one a plan gets."""

import functools
import random

import numpy as np
import pytest
from fake_model import VOCAB, Driver, FakeModel, quick_jit, small_config, solo

from oxidize_jax.batch.buckets import Bucket, buckets, select_bucket
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.step import engine_step


def config_of(seqs, budget, tile):
    return EngineConfig(
        max_num_seqs=seqs,
        max_num_requests=seqs,
        max_num_batched_tokens=budget,
        prefill_tile=tile,
    )


def test_the_default_shapes():
    assert buckets(config_of(16, 512, 16)) == (
        Bucket(tokens=4, decode_rows=4, tiles=0, samples=4),
        Bucket(tokens=16, decode_rows=16, tiles=0, samples=16),
        Bucket(tokens=128, decode_rows=16, tiles=16, samples=16),
        Bucket(tokens=512, decode_rows=16, tiles=64, samples=16),
    )


@pytest.mark.parametrize(
    ("seqs", "budget", "tile", "decode", "mixed"),
    [
        (1, 1, 16, [2], []),
        (4, 1, 16, [2], []),
        (4, 3, 16, [3], [32]),
        (1, 64, 16, [2], [64]),
        (8, 256, 16, [2, 8], [64, 256]),
        (64, 20, 4, [5, 20], [20]),
        (64, 64, 16, [2, 8, 32, 64], [64]),
        (256, 1024, 16, [2, 8, 32, 128, 256], [64, 256, 1024]),
    ],
)
def test_shapes_of_sizes(seqs, budget, tile, decode, mixed):
    shapes = buckets(config_of(seqs, budget, tile))
    assert [b.tokens for b in shapes if not b.tiles] == decode
    assert [b.tokens for b in shapes if b.tiles] == mixed
    # One row would multiply each matrix, the head included, with a vector.
    assert all(b.decode_rows == b.samples >= 2 for b in shapes)


CONFIGS = [
    config_of(*sizes) for sizes in ((16, 512, 16), (6, 13, 8), (4, 3, 4), (3, 1, 4), (40, 64, 2))
]


def random_plan(config, rng):
    """Tokens of each row, within budget and tiles; half of the plans are decodes only."""
    plan = [0] * config.max_num_seqs
    left, tiles = rng.randint(0, config.max_num_batched_tokens), config.max_prefill_tiles
    sizes = rng.choice([[1], [1, 1, 2, 3, config.prefill_tile + 1, 400]])
    for row in rng.sample(range(config.max_num_seqs), rng.randint(0, config.max_num_seqs)):
        most = min(left, tiles * config.prefill_tile) if tiles else min(left, 1)
        plan[row] = min(rng.choice(sizes), most)
        left -= plan[row]
        tiles -= tiles_of(config, plan[row])
    return plan


def tiles_of(config, tokens):
    return -(-tokens // config.prefill_tile) if tokens > 1 else 0


def holds(config, bucket, plan):
    """Whether every part of the descriptor has room for the plan, sampling for all rows."""
    return (
        sum(plan) <= bucket.tokens
        and sum(n == 1 for n in plan) <= bucket.decode_rows
        and sum(tiles_of(config, n) for n in plan) <= bucket.tiles
        and sum(n > 0 for n in plan) <= bucket.samples
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: str(c.max_num_batched_tokens))
def test_every_plan_gets_the_first_shape_that_holds_it(config):
    shapes, rng = buckets(config), random.Random(0)
    select = quick_jit(functools.partial(select_bucket, config, shapes))
    seen = set()
    for _ in range(300):
        plan = random_plan(config, rng)
        chosen = int(select(np.array(plan, np.int32)))
        fitting = [i for i, bucket in enumerate(shapes) if holds(config, bucket, plan)]
        assert chosen == (fitting[0] if any(plan) else len(shapes)), plan
        seen.add(chosen)
    assert len(seen) == len(shapes) + 1, "a shape that no plan got"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: str(c.max_num_batched_tokens))
def test_the_last_shape_holds_every_plan(config):
    rng = random.Random(1)
    for _ in range(300):
        assert holds(config, buckets(config)[-1], random_plan(config, rng))


def test_steps_of_every_shape_give_the_tokens_of_the_oracle():
    config = small_config(max_num_batched_tokens=13)
    rng = random.Random(2)
    driver = Driver(
        config, seed=2, step=quick_jit(functools.partial(engine_step, config, FakeModel(), None))
    )
    requests = {}
    for length, count in ((1, 9), (13, 4), (5, 5), (17, 1), (2, 7), (8, 3), (3, 8), (1, 1)):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        requests[driver.submit(prompt, count)] = (prompt, count)
    driver.run()
    for slot, (prompt, count) in requests.items():
        assert driver.tokens(slot) == solo(prompt, count)
    shapes = buckets(config)
    used = {
        next(i for i, bucket in enumerate(shapes) if holds(config, bucket, plan))
        for plan in driver.scheduled
    }
    assert used == set(range(len(shapes)))
