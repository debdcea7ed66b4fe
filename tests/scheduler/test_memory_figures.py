"""The memory figures of the benchmarks, on sizes that run in seconds (the full ones: slow)."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import forks
import kv_waste
import prefix_sharing
import pressure
import simulate

from oxidize_jax.config import EngineConfig
from oxidize_jax.types import replace

AMPLE = EngineConfig(
    max_num_seqs=16,
    max_num_batched_tokens=2048,
    max_model_len=2208,
    num_blocks=1536,
    max_num_requests=32,
    max_logprobs=0,
    max_stop_token_ids=1,
)
TIGHT = replace(AMPLE, num_blocks=128, max_model_len=2048, max_num_batched_tokens=256)


@pytest.mark.parametrize(("config", "requests"), [(AMPLE, 24), (TIGHT, 6)], ids=["ample", "tight"])
def test_blocks_in_use_are_the_blocks_needed_and_hardly_a_slot_is_empty(config, requests):
    waste = kv_waste.measure(simulate.run(config, kv_waste.random_load(requests, 100, 1024, 0)))
    assert not waste.missed()
    assert (waste.preemptions > 0) == (config is TIGHT)


def test_a_prefix_that_many_prompts_share_is_held_and_computed_once():
    sharing = measure_sharing(prefix=2048, shuffled=True)
    assert not sharing.missed()
    assert sharing.times < 1.05


def test_prompts_of_one_prefix_that_arrive_together_hold_it_once():
    assert not measure_sharing(prefix=512, shuffled=False).missed()


def measure_sharing(*, prefix, shuffled):
    load = prefix_sharing.grouped_load(8, 8, prefix, 0, shuffled=shuffled)
    return prefix_sharing.measure(simulate.run(AMPLE, load.requests), load)


@pytest.mark.parametrize("families", [1, 6])
def test_four_samples_of_a_prompt_hold_its_full_blocks_once(families):
    load = forks.family_load(families, 4, 1000, (32, 96), seed=0)
    figures = forks.measure(simulate.run(AMPLE, load), 4)
    assert not figures.missed()
    if families == 1:
        assert figures.most_of_minimum == 1
        assert figures.copies == 3
        assert figures.prompt_computed == 1


@pytest.mark.parametrize(("demand", "requests"), [(1.2, 32), (2, 32), (10, 6)])
def test_loads_larger_than_the_pool_finish_and_the_oldest_hardly_waits(demand, requests):
    load = pressure.load_of_demand(TIGHT, demand, requests, seed=1)
    figures = pressure.measure(simulate.run(TIGHT, load))
    assert not figures.missed()
    assert figures.preemptions > 0
    assert figures.recomputed < figures.lost  # the prefix cache gives some of it back
    assert figures.extra < 0.25


def test_the_figures_of_a_single_request_are_those_on_paper():
    """40 prompt tokens and 10 more, a budget of 256: one prefill, 9 decodes, 3 then 4 blocks."""
    run = simulate.run(TIGHT, [simulate.Request(np.arange(40, dtype=np.int32), 10)])
    assert run.scheduled.sum(axis=1).tolist() == [40] + [1] * 9
    assert run.held.tolist() == list(range(40, 50))
    assert run.live.tolist() == run.needed.tolist() == [3] * 9 + [4]
    waste = kv_waste.measure(run)
    assert waste.at_finish == pytest.approx(1 - 49 / 64)
    assert waste.largest == pytest.approx(1 - 49 / 64)
    assert len(waste.missed()) == 2  # both bounds of waste: one short request is not a load


@pytest.mark.slow
@pytest.mark.parametrize(
    "benchmark",
    [
        forks,
        kv_waste,
        prefix_sharing,
        pressure,
    ],
    ids=lambda module: module.__name__,
)
def test_the_full_sizes_hold_their_bounds(benchmark):
    assert benchmark.main([]) == 0
