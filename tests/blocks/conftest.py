"""A pool under test: the transitions on Python lists, with every state checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import numpy as np
import pytest
from fake_model import quick_jit

from oxidize_jax.blocks import hashing, prefix
from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.blocks.pool import NOT_IN_RING, BlockPool
from oxidize_jax.scheduler.invariants import check_pool

BLOCK_SIZE = 4


@dataclasses.dataclass(frozen=True)
class Chain:
    """Where a sequence's chain of registered blocks goes on."""

    hash: tuple[int, int]
    parent: int


class Transitions:
    """The transitions of the pool, compiled for lists of ``lanes`` blocks."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        # Closures of this object, so that what is traced is what the modules are by then.
        self.allocate = quick_jit(lambda pool, n: block_pool.allocate(pool, n, lanes))
        self.share = quick_jit(lambda pool, blocks: block_pool.share(pool, blocks))
        self.release = quick_jit(lambda pool, blocks: block_pool.release(pool, blocks))
        self.copy_on_write = quick_jit(lambda pool, blocks: block_pool.copy_on_write(pool, blocks))
        self.lookup = quick_jit(lambda *args: prefix.lookup_prefix(*args))
        self.root = quick_jit(lambda salt: (hashing.root_hash(salt), block_pool.root_parent(salt)))

        def register(pool: Any, blocks: Any, parent_hash: Any, tokens: Any, parent: Any) -> Any:
            block_hash = hashing.chain_hash(parent_hash, tokens)
            pool, serial, _ = prefix.register(pool, blocks, block_hash, tokens, parent)
            return pool, block_hash, serial

        self.register = quick_jit(register)


class CheckedPool:
    """A pool with the transitions as methods; the invariants are checked after each."""

    def __init__(self, transitions: Transitions, num_blocks: int) -> None:
        self.run = transitions
        self.num_blocks = num_blocks
        self.state: BlockPool = block_pool.create(num_blocks, BLOCK_SIZE)

    def allocate(self, count: int) -> list[int] | None:
        """The blocks, or None if exhausted (then the pool must be unchanged)."""
        pool, blocks, ok = self.run.allocate(self.state, np.int32(count))
        return self._take(pool, blocks, ok)

    def share(self, *blocks: int) -> None:
        self._set(self.run.share(self.state, self._ids(blocks)))

    def release(self, *blocks: int) -> None:
        self._set(self.run.release(self.state, self._ids(blocks)))

    def copy_on_write(self, *blocks: int) -> tuple[list[int], list[int], list[int]] | None:
        """``(written, src, dst)`` for the lanes given, or None if exhausted."""
        pool, written, src, dst, ok = self.run.copy_on_write(self.state, self._ids(blocks))
        n = len(blocks)
        assert set(src[n:].tolist()) | set(dst[n:].tolist()) <= {self.num_blocks}
        if not ok:
            assert set(src.tolist()) | set(dst.tolist()) == {self.num_blocks}
        assert not (set(src.tolist()) & set(dst.tolist())) - {self.num_blocks}
        if self._take(pool, written, ok) is None:
            return None
        return written[:n].tolist(), src[:n].tolist(), dst[:n].tolist()

    def root(self, salt: int = 0) -> Chain:
        words, parent = self.run.root(np.int32(salt))
        return Chain(tuple(words.tolist()), int(parent))

    def register(self, *entries: tuple[int, Sequence[int], Chain]) -> list[Chain]:
        """Register ``(block, tokens, chain before it)`` together; the chains behind them."""
        lanes = self.run.lanes
        hashes = np.zeros((lanes, 2), np.uint32)
        tokens = np.zeros((lanes, BLOCK_SIZE), np.int32)
        parents = np.zeros((lanes,), np.int32)
        for i, (_, words, chain) in enumerate(entries):
            hashes[i], tokens[i], parents[i] = chain.hash, words, chain.parent
        blocks = self._ids([block for block, _, _ in entries])
        pool, hashes, serials = self.run.register(self.state, blocks, hashes, tokens, parents)
        self._set(pool)
        return [Chain(tuple(h), p) for h, p in zip(hashes.tolist(), serials.tolist(), strict=True)][
            : len(entries)
        ]

    def register_sequence(
        self, blocks: Sequence[int], tokens: Sequence[Sequence[int]], salt: int = 0
    ) -> Chain:
        """Register the blocks of one sequence, one after the other."""
        chain = self.root(salt)
        for block, words in zip(blocks, tokens, strict=True):
            (chain,) = self.register((block, words, chain))
        return chain

    def lookup(
        self, tokens: Sequence[Sequence[int]], limit: int | None = None, salt: int = 0
    ) -> list[int]:
        """The blocks of the longest prefix (of at most ``limit`` blocks)."""
        return self.find(tokens, limit, salt)[0]

    def find(
        self, tokens: Sequence[Sequence[int]], limit: int | None = None, salt: int = 0
    ) -> tuple[list[int], Chain]:
        """Like :meth:`lookup`, with the chain behind the prefix."""
        words = np.full((self.run.lanes, BLOCK_SIZE), 77, np.int32)
        words[: len(tokens)] = np.array(tokens, np.int32).reshape(-1, BLOCK_SIZE)
        limit = len(tokens) if limit is None else limit
        found = self.run.lookup(self.state, words, np.int32(limit), np.int32(salt))
        count = int(found.num_blocks)
        assert (found.blocks[count:] == self.num_blocks).all()
        chain = Chain(tuple(found.chain_hash.tolist()), int(found.chain_parent))
        return found.blocks[:count].tolist(), chain

    @property
    def free(self) -> list[int]:
        """Free blocks, the next to be taken first."""
        return self.state.free_stack[: int(self.state.num_free)].tolist()[::-1]

    @property
    def cached(self) -> list[int]:
        """Cached blocks, the next to be taken first."""
        position = np.asarray(self.state.lru_pos)
        return sorted(np.flatnonzero(position != NOT_IN_RING).tolist(), key=position.__getitem__)

    @property
    def ref_counts(self) -> list[int]:
        return self.state.ref_count.tolist()

    def _ids(self, blocks: Sequence[int]) -> np.ndarray:
        ids = np.full((self.run.lanes,), self.num_blocks, np.int32)
        ids[: len(blocks)] = blocks
        return ids

    def _take(self, pool: BlockPool, blocks: jax.Array, ok: jax.Array) -> list[int] | None:
        if not ok:
            chex.assert_trees_all_equal(pool, self.state)
            return None
        self._set(pool)
        return [b for b in blocks.tolist() if b != self.num_blocks]

    def _set(self, pool: BlockPool) -> None:
        self.state = jax.device_get(pool)
        check_pool(self.state)


@pytest.fixture(scope="session")
def transitions() -> Transitions:
    return Transitions(lanes=6)


@pytest.fixture
def make_pool(transitions: Transitions) -> Callable[..., CheckedPool]:
    """``make_pool(num_blocks)``: an empty pool of blocks of 4 tokens."""
    return lambda num_blocks=6: CheckedPool(transitions, num_blocks)


@pytest.fixture
def make_fresh_pool() -> Callable[..., CheckedPool]:
    """Like ``make_pool``, compiled anew: for a test that changes the modules."""
    return lambda num_blocks, lanes: CheckedPool(Transitions(lanes), num_blocks)
