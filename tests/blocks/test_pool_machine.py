"""Random use of the pool against a model written apart from it, block by block.

The model is a stack, an ordered dictionary and a dictionary of registrations; it says of
every transition which blocks it gives, and the pool must give exactly those.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

NUM_BLOCKS = 6
LANES = 6
CONTENTS = st.sampled_from([(1,) * 4, (2,) * 4, (3, 3, 3, 4)])


class PoolModel:
    """What the pool must do, with one block at a time."""

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))[::-1]
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.holders = [0] * NUM_BLOCKS
        self.known: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.serial: dict[int, int] = {}
        self.last_serial = 1

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free) + len(self.cached):
            return None
        blocks = []
        for _ in range(count):
            if self.free:
                block = self.free.pop()
            else:
                block, _ = self.cached.popitem(last=False)
                del self.known[block], self.serial[block]
            self.holders[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] += 1
            self.cached.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0 and block in self.known:
                self.cached[block] = None
            elif self.holders[block] == 0:
                self.free.append(block)

    def register(self, block: int, words: tuple[int, ...], parent: int) -> int:
        for other, key in self.known.items():
            if key == (parent, words):
                return self.serial[other]
        self.last_serial += 1
        self.known[block] = (parent, words)
        self.serial[block] = self.last_serial
        return self.last_serial

    def lookup(self, tokens: list[tuple[int, ...]], limit: int, salt: int) -> list[int]:
        blocks: list[int] = []
        parent = -1 - salt
        for words in tokens[:limit]:
            match = [b for b, key in self.known.items() if key == (parent, words)]
            if not match:
                break
            blocks.append(match[0])
            parent = self.serial[match[0]]
        return blocks

    def copy_on_write(self, blocks: list[int]) -> tuple[list[int], list[int], list[int]] | None:
        left = {block: self.holders[block] for block in blocks}
        copies = []
        for block in blocks:
            copies.append(left[block] > 1)
            left[block] -= copies[-1]
        fresh = self.allocate(sum(copies))
        if fresh is None:
            return None
        dst = [fresh.pop(0) if copy else NUM_BLOCKS for copy in copies]
        src = [b if copy else NUM_BLOCKS for b, copy in zip(blocks, copies, strict=True)]
        self.release([b for b in src if b < NUM_BLOCKS])
        written = [d if copy else b for b, d, copy in zip(blocks, dst, copies, strict=True)]
        return written, src, dst


@dataclasses.dataclass
class Holder:
    """A sequence: its table, the contents of its blocks, and how many are registered."""

    blocks: list[int]
    tokens: list[tuple[int, ...]]
    written: int
    chain: object


class PoolMachine(RuleBasedStateMachine):
    new_pool = None
    """Set by the test: makes the pool under test."""

    @initialize()
    def start(self) -> None:
        self.pool = type(self).new_pool(NUM_BLOCKS)
        self.model = PoolModel()
        self.holders: list[Holder] = []

    @rule(tokens=st.lists(CONTENTS, min_size=1, max_size=4), salt=st.integers(0, 1), data=st.data())
    def admit(self, tokens, salt, data) -> None:
        """A new sequence: share what is known, allocate the rest."""
        limit = data.draw(st.integers(0, len(tokens)), label="limit")
        hits, chain = self.pool.find(tokens, limit, salt)
        assert hits == self.model.lookup(tokens, limit, salt)
        self.pool.share(*hits)
        self.model.share(hits)
        fresh = self.pool.allocate(len(tokens) - len(hits))
        assert fresh == self.model.allocate(len(tokens) - len(hits))
        if fresh is None:
            self.pool.release(*hits[::-1])
            self.model.release(hits[::-1])
            return
        self.holders.append(Holder(hits + fresh, list(tokens), len(hits), chain))

    @rule(tokens=st.lists(CONTENTS, min_size=1, max_size=3), salt=st.integers(0, 1))
    def touch(self, tokens, salt) -> None:
        """A short use of what is known: cached blocks become the most recently used."""
        hits = self.pool.lookup(tokens, salt=salt)
        assert hits == self.model.lookup(tokens, len(tokens), salt)
        self.pool.share(*hits)
        self.model.share(hits)
        self.pool.release(*hits[::-1])
        self.model.release(hits[::-1])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data) -> None:
        """The next block of up to three sequences is full and written."""
        order = data.draw(st.permutations(self.holders), label="order")
        self.fill_next(order[:3])

    def fill_next(self, holders: list[Holder]) -> bool:
        """Register the next block of each; whether there was one."""
        chosen, blocks = [], set()
        for holder in holders:
            block = holder.blocks[holder.written] if holder.written < len(holder.blocks) else None
            # A block that several hold is registered by one of them, as after a copy.
            if block is not None and self.model.holders[block] == 1 and block not in blocks:
                chosen.append(holder)
                blocks.add(block)
        entries = [(h.blocks[h.written], h.tokens[h.written], h.chain) for h in chosen]
        chains = self.pool.register(*entries)
        for holder, (block, words, before), chain in zip(chosen, entries, chains, strict=True):
            assert chain.parent == self.model.register(block, words, before.parent)
            holder.written, holder.chain = holder.written + 1, chain
        return bool(chosen)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def run_to_the_end(self, data) -> None:
        """All blocks of a sequence are registered, and then it leaves them to the cache."""
        holder = data.draw(st.sampled_from(self.holders), label="holder")
        while self.fill_next([holder]):
            pass
        self.remove(holder, holder.blocks[::-1])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data) -> None:
        parent = data.draw(st.sampled_from(self.holders), label="parent")
        self.pool.share(*parent.blocks)
        self.model.share(parent.blocks)
        self.holders.append(dataclasses.replace(parent, blocks=list(parent.blocks)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def write(self, data) -> None:
        """Up to four sequences write into the block behind their registered ones."""
        order = data.draw(st.permutations(self.holders), label="order")
        writers = [h for h in order if h.written < len(h.blocks)][:4]
        blocks = [h.blocks[h.written] for h in writers]
        result = self.pool.copy_on_write(*blocks)
        assert result == self.model.copy_on_write(blocks)
        if result is not None:
            for holder, block in zip(writers, result[0], strict=True):
                holder.blocks[holder.written] = block

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), tail_first=st.booleans())
    def finish(self, data, tail_first) -> None:
        holder = data.draw(st.sampled_from(self.holders), label="holder")
        self.remove(holder, holder.blocks[::-1] if tail_first else holder.blocks)

    def remove(self, holder: Holder, blocks: list[int]) -> None:
        self.holders.remove(holder)
        self.pool.release(*blocks)
        self.model.release(blocks)

    @rule(extra=st.integers(1, 3))
    def exhaust(self, extra) -> None:
        room = len(self.model.free) + len(self.model.cached)
        if room + extra <= LANES:
            assert self.pool.allocate(room + extra) is None

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.free == self.model.free[::-1]
        assert self.pool.cached == list(self.model.cached)
        assert self.pool.ref_counts == self.model.holders
        state = self.pool.state
        assert np.flatnonzero(state.hashed).tolist() == sorted(self.model.known)
        for block, (parent, words) in self.model.known.items():
            assert state.serial[block] == self.model.serial[block]
            assert state.parent[block] == parent
            assert tuple(state.block_tokens[block].tolist()) == words


@pytest.fixture
def machine(make_pool):
    class Machine(PoolMachine):
        new_pool = staticmethod(make_pool)

    return Machine


def test_pool_agrees_with_the_model_in_random_use(machine):
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    case().runTest()
