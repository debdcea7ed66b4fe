"""Random loads through pools of many sizes: every request ends, with the oracle's tokens."""

import dataclasses
import random

import pytest
from fake_model import VOCAB, Driver, small_config, solo

from oxidize_jax.scheduler.state import ABORTED, FINISHED, LENGTH, POOL_EXHAUSTED, RUNNING, STOPPED

SIZES = {
    # One budget per line, for SC09, each with another pool and policy.
    1: small_config(max_num_batched_tokens=1, num_blocks=10),
    2: small_config(max_num_batched_tokens=2, num_blocks=20, policy="decode_first"),
    3: small_config(max_num_batched_tokens=3, num_blocks=6, enable_prefix_caching=False),
    4: small_config(max_num_batched_tokens=4, num_blocks=10),
    5: small_config(max_num_batched_tokens=5, num_blocks=8),
    7: small_config(
        max_num_batched_tokens=7,
        num_blocks=10,
        policy="decode_first",
        enable_prefix_caching=False,
    ),
    # Tiles of 8 tokens, 4 of them: short prompts meet the tile limit before the budget.
    13: small_config(
        max_num_batched_tokens=13,
        num_blocks=20,
        max_num_seqs=6,
        prefill_tile=8,
        policy="decode_first",
    ),
    64: small_config(max_num_batched_tokens=64, num_blocks=40),
}
TIGHT = [
    small_config(max_num_batched_tokens=8, num_blocks=4, max_model_len=64),
    small_config(max_num_batched_tokens=6, num_blocks=5, policy="decode_first"),
]
"""Pools in which no two requests fit for long."""


@pytest.mark.parametrize("budget", SIZES)
def test_sc09_a_prompt_in_chunks_of_any_size_gives_the_same_tokens(budget):
    driver = Driver(SIZES[budget], seed=budget)
    prompt = [random.Random(9).randrange(VOCAB) for _ in range(13)]
    neighbour = driver.submit([3, 1, 4], 5)
    driver.step()  # plans the neighbour's prompt
    slot = driver.submit(prompt, 4)
    chunks, together = [], False
    while driver.host.requests.num_tokens[slot] == 13:
        requests, plan = driver.host.requests, driver.host.plan
        row = int(requests.row[slot])
        chunk = int(plan.num_scheduled[row]) if row < driver.config.max_num_seqs else 0
        decoding = driver.status(neighbour) == RUNNING and requests.num_tokens[neighbour] > 3
        together |= chunk > 0 and decoding
        done = int(requests.num_computed[slot]) + chunk
        driver.step()
        if chunk:
            chunks.append(chunk)
            # Only the chunk with the last token samples.
            assert int(driver.host.requests.num_tokens[slot]) == 13 + (done == 13)
    assert together
    assert (sum(chunks), max(chunks)) == (13, min(max(chunks), budget))
    assert len(chunks) >= -(-13 // budget)
    driver.run()
    assert driver.tokens(slot) == solo(prompt, 4)
    assert driver.tokens(neighbour) == solo([3, 1, 4], 5)
    driver.assert_clean()


@dataclasses.dataclass
class Case:
    """One request and what must come of it."""

    prompt: list[int]
    expected: list[int]
    reason: int
    aborted: bool = False


class Load:
    """Random submissions and aborts, each checked as soon as it has finished."""

    def __init__(self, driver, seed):
        self.driver, self.rng = driver, random.Random(seed)
        self.open: dict[int, Case] = {}
        self.finished = []
        config = driver.config
        longest = min(config.num_blocks * config.block_size, config.max_model_len - 1)
        self.stems = [self.words(min(longest, 12)) for _ in range(2)]
        self.longest = min(longest, 20)

    def words(self, count):
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def submit(self):
        rng, config = self.rng, self.driver.config
        stem = rng.choice(self.stems)[: rng.choice([0, 3, 4, 8, 12])]
        prompt = (stem + self.words(rng.choice([0, 0, 1, 2, 5, 9])))[: self.longest]
        prompt = prompt or [7]
        options = {"stop_ids": self.words(2), "min_tokens": rng.choice([0, 0, 3])}
        count = min(rng.choice([1, 2, 5, 9, 25]), config.max_model_len - len(prompt))
        expected = solo(prompt, count, **options)
        stopped = expected[-1] in options["stop_ids"]
        stopped &= len(expected) - len(prompt) > options["min_tokens"]
        reason = STOPPED if stopped else LENGTH
        most = config.num_blocks * config.block_size + 1  # the last token needs no KV
        if len(expected) > most:
            expected, reason = expected[:most], POOL_EXHAUSTED
        options |= {"priority": rng.choice([0, 0, 0, 1]), "salt": rng.choice([0, 0, 0, 1])}
        slot = self.driver.submit(prompt, count, **options)
        self.open[slot] = Case(prompt, expected, reason)

    def abort(self):
        slots = range(self.driver.config.max_num_requests)
        slot = self.rng.choice([*slots, *self.open, *self.open])
        running = self.driver.status(slot) != FINISHED
        self.driver.abort(slot)
        if slot in self.open and running:
            self.open[slot].aborted = True

    def collect(self):
        free = set(self.driver.free_slots())
        for slot in [slot for slot in self.open if slot in free]:
            case = self.open.pop(slot)
            tokens, reason = self.driver.tokens(slot), self.driver.reason(slot)
            if case.aborted:
                assert reason == ABORTED
                assert tokens == case.expected[: len(tokens)]
            else:
                assert (reason, tokens) == (case.reason, case.expected), case
            self.finished.append(reason)

    def run(self, requests, max_steps):
        left = requests
        for _ in range(max_steps):
            while left and self.driver.free_slots() and self.rng.random() < 0.6:
                self.submit()
                left -= 1
            if self.rng.random() < 0.08:
                self.abort()
            self.driver.step()
            self.collect()
            if not left and not self.driver.busy():
                return
        raise AssertionError(f"still {len(self.open)} open after {max_steps} steps")


@pytest.mark.parametrize(
    "config", [*SIZES.values(), *TIGHT], ids=lambda c: f"{c.num_blocks}-blocks"
)
def test_random_loads_end_with_the_tokens_of_the_oracle(config):
    driver = Driver(config, seed=config.num_blocks)
    load = Load(driver, seed=config.max_num_batched_tokens)
    load.run(requests=40, max_steps=40 * 80)
    assert not load.open
    assert len(load.finished) == 40
    assert {LENGTH, ABORTED} <= set(load.finished)
    driver.assert_clean()
    totals = driver.host.totals
    if config.num_blocks <= 8:
        assert totals.preemptions > 0
    assert (totals.cached_tokens > 0) == config.enable_prefix_caching
