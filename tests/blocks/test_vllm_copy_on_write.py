"""vLLM's tests of blocks and copy-on-write, told as tests of this pool.

Read for behaviour in ``opendatahub-io/vllm`` at 7f15f78 (``tests/core/block``), vLLM's first
block manager, which forks sequences. Each line is a vLLM test (``*`` a family) and the test
here, or where its behaviour is tested, or why it is not. ``pool`` and ``prefix`` stand for
``test_pool.py`` and ``test_prefix.py`` beside this file, ``grow`` and so on for
``test_grow.py`` in ``tests/scheduler``.

test_block_table.py
  allocate_naive, allocate_free -> tables_take_their_blocks_and_give_them_back
  allocate_prefix_caching -> equal_sequences_share_all_but_a_last_block_that_is_not_full
  append_token_ids_allocation, ensure_num_empty_slots_allocation -> grow:
    a_block_is_taken_only_where_the_next_token_begins_one, a_chunk_takes_the_blocks_of_its_tokens
  append_token_ids_correct_content -> random_forks_keep_what_each_sequence_wrote
  fork -> a_fork_takes_no_block_and_blocks_go_back_with_their_last_holder
  cow -> an_append_after_a_fork_copies_a_last_block_that_is_not_full; of requests:
    forks_of_a_prompt_share_it_and_write_blocks_of_their_own, forks_of_what_was_generated_*,
    forks_outlive_a_parent_*, forks_in_a_pool_too_small_for_all_end_right
  cow_lookahead_simple -> blocks_reserved_before_a_fork_are_copied_when_they_are_written;
    differs by design: a request forks before it has blocks to spare
  num_blocks_touched_by_append_slots -> random_forks_keep_what_each_sequence_wrote (the count
    that writers_that_copy foretells), grow: make_room_counts_copies
test_naive_block.py
  allocate_ooms -> pool: exhaustion_is_a_value_and_changes_nothing
  free_prevents_oom -> a_full_pool_gives_the_block_that_was_released[new]
  get_num_free_blocks -> tables_take_their_blocks_and_give_them_back
  naive_block_get_num_full_blocks_touched -> not ours: counts for a swap
test_prefix_caching_block.py
  first_block_*, nth_block_has_correct_content_hash -> prefix: prefix_hashes_are_the_chain,
    hashes_depend_on_salt_parent_and_order; commit: only_full_blocks_are_registered
  blocks_have_correct_hash_in_chain -> prefix: a_block_equal_to_a_registered_one_goes_on
  allocate_mutable_ooms -> pool: exhaustion_is_a_value_and_changes_nothing
  allocate_immutable_does_not_oom_single_hash -> one_block_serves_any_number_of_holders
  allocate_immutable_ooms_many_hash -> a_full_pool_still_serves_what_it_knows
  free_prevents_oom -> a_full_pool_gives_the_block_that_was_released[known]
  get_num_free_blocks, _shared -> shared_blocks_are_available_after_their_last_release
  get_common_computed_block_ids -> the_common_prefix_ends_with_the_last_equal_block
  alloc_promotion -> prefix: a_block_equal_to_a_registered_one; differs by design: the equal
    block stays with its sequence, unregistered, and is freed first
  eviction_alloc_mixed -> eviction_and_allocation_in_turn
  eviction_order -> the_tail_of_the_sequence_released_first_is_evicted
  metric -> not ours here: counted by the scheduler (admit: a_hit_leaves_at_least_one_token)
  touch_block -> commit: only_full_blocks_are_registered; cases: kv06_equal_prompts_in_one_step
  find_cached_blocks_prefix -> a_new_chain_evicts_no_more_than_it_needs
  reset_prefix_cache -> a_reset_forgets_all_*, a_reset_of_an_idle_pool_*; differs by design:
    it is never refused, and live blocks stay with who holds them
  prefix_caching_block_get_num_full_blocks_touched -> not ours: counts for a swap
  ComputedBlocksTracker: get_num_cached_tokens, correct_block_hash -> admit:
    a_hit_leaves_at_least_one_token_to_compute; correct_extra_hash -> prefix: salts_do_not_share
test_common.py
  incr, incr_decr -> pool: share_adds_holders, kv03_block_edges (below 0)
test_cpu_gpu_block_allocator.py
  allocate_mutable_block, allocate_immutable_block -> tables_take_their_blocks_and_give_them_back;
    not ours: a second pool on the host
test_block_manager.py
  can_allocate_seq_group -> admit: the_head_of_the_line_holds_up, submit: check_prompt_refuses;
    differs: no watermark, one block is kept while something runs
  append_slots -> grow: a_chunk_takes_the_blocks_of_its_tokens
  *swap* -> not ours: preemption recomputes; *encoder_decoder* -> not ours;
  sliding_window -> not ours
"""

import dataclasses
import functools
import random

import chex
import numpy as np
import pytest
from fake_model import VOCAB, Driver, quick_jit, small_config, solo

from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.scheduler.fork import Fork, fork
from oxidize_jax.scheduler.state import ABORTED, FINISHED, NO_TOKEN, RUNNING, WAITING

LENGTHS = [1, 4, 9]
"""Tokens in part of a block, in a full one, in two full ones and a part."""

writers_that_copy = quick_jit(block_pool.writers_that_copy)


class Memory:
    """What each slot of each block holds; the model's part of a copy is done here."""

    def __init__(self, pool):
        self.pool = pool
        self.slots = np.full((pool.num_blocks, 4), -1)

    def copy(self, pairs):
        for src, dst in pairs:
            self.slots[dst] = self.slots[src]


class Sequence:
    """A block table, and the words that were written through it."""

    def __init__(self, memory, words=(), blocks=()):
        self.memory, self.pool = memory, memory.pool
        self.words, self.blocks = list(words), list(blocks)

    def fork(self):
        self.pool.share(*self.blocks)
        return Sequence(self.memory, self.words, self.blocks)

    def targets(self, count):
        """The blocks that are there already and that ``count`` more words go into."""
        return self.blocks[len(self.words) // 4 : -(-(len(self.words) + count) // 4)]

    def reserve(self, count):
        """Take the blocks that ``count`` more words lack."""
        needed = -(-(len(self.words) + count) // 4)
        self.blocks += self.pool.allocate(needed - len(self.blocks))

    def append(self, words):
        """Write, with the copies ``(src, dst)`` that it takes, or None where blocks lack."""
        first, targets = len(self.words) // 4, self.targets(len(words))
        written, src, dst = self.pool.copy_on_write(*targets)
        self.blocks[first : first + len(targets)] = written
        copies = [pair for pair in zip(src, dst, strict=True) if pair[0] < self.pool.num_blocks]
        self.memory.copy(copies)
        self.reserve(len(words))
        for word in words:
            block = self.blocks[len(self.words) // 4]
            assert self.pool.ref_counts[block] == 1, "writes into a block of others"
            self.memory.slots[block, len(self.words) % 4] = word
            self.words.append(word)
        return copies

    def read(self):
        return self.memory.slots[self.blocks].ravel()[: len(self.words)].tolist()

    def release(self):
        self.pool.release(*self.blocks[::-1])


@pytest.fixture
def make_sequence(make_pool):
    """``make_sequence(length)``: a sequence of the words 0, 1, ... in a pool of 6 blocks."""
    memory = Memory(make_pool(6))

    def make(length):
        sequence = Sequence(memory)
        sequence.append(range(length))
        return sequence

    return make


def available(pool):
    return len(pool.free) + len(pool.cached)


@pytest.mark.parametrize("length", LENGTHS)
def test_tables_take_their_blocks_and_give_them_back(make_sequence, length):
    size = -(-length // 4)
    sequences = []
    for i in range(6 // size):
        sequences.append(make_sequence(length))
        assert len(sequences[i].blocks) == size
        assert available(sequences[i].pool) == 6 - (i + 1) * size
    assert len({block for s in sequences for block in s.blocks}) == 6 // size * size
    for i, sequence in enumerate(sequences):
        sequence.release()
        assert available(sequence.pool) == 6 - (len(sequences) - i - 1) * size


@pytest.mark.parametrize("length", [1, 4, 5])
def test_equal_sequences_share_all_but_a_last_block_that_is_not_full(make_pool, length):
    pool = make_pool(6)
    full, part = divmod(length, 4)
    words = [[7] * 4] * full
    tables = []
    for i in range(1, 6):
        hits, chain = pool.find(words)
        pool.share(*hits)
        fresh = pool.allocate(full - len(hits) + (part > 0))
        for block in fresh[: full - len(hits)]:
            (chain,) = pool.register((block, [7] * 4, chain))
        tables.append(hits + fresh)
        assert available(pool) == 6 - full - i * (part > 0)
    assert len({tuple(table[:full]) for table in tables}) == 1
    assert [pool.ref_counts[block] for block in tables[0][:full]] == [5] * full


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fork_takes_no_block_and_blocks_go_back_with_their_last_holder(make_sequence, length):
    parent = make_sequence(length)
    pool, before = parent.pool, available(parent.pool)
    child = parent.fork()
    assert child.blocks == parent.blocks
    assert child.read() == parent.read() == list(range(length))
    assert available(pool) == before
    parent.release()
    assert available(pool) == before
    assert child.read() == list(range(length))
    child.release()
    assert available(pool) == 6


@pytest.mark.parametrize("appender", ["child", "parent"])
@pytest.mark.parametrize("more", [1, 4, 7])
@pytest.mark.parametrize("length", LENGTHS)
def test_an_append_after_a_fork_copies_a_last_block_that_is_not_full(
    make_sequence, length, more, appender
):
    parent = make_sequence(length)
    child, original = parent.fork(), list(parent.blocks)
    writer, other = (child, parent) if appender == "child" else (parent, child)
    copies = writer.append(range(50, 50 + more))
    full = length // 4
    assert copies == ([(original[full], writer.blocks[full])] if length % 4 else [])
    assert other.blocks == original
    assert writer.blocks[:full] == original[:full]
    assert not set(writer.blocks[full:]) & set(original)
    fresh = -(-(length + more) // 4) - full
    assert available(writer.pool) == 6 - len(original) - fresh
    assert other.read() == list(range(length))
    assert writer.read() == [*range(length), *range(50, 50 + more)]
    # The other now holds its last block alone.
    assert other.append([60]) == []
    assert other.blocks[: len(original)] == original
    other.release()
    writer.release()
    assert available(writer.pool) == 6


def test_no_copy_is_made_for_the_last_holder(make_sequence):
    parent = make_sequence(5)
    child = parent.fork()
    parent.release()
    before = list(child.blocks)
    assert child.append([50]) == []
    assert child.blocks == before
    assert child.read() == [0, 1, 2, 3, 4, 50]


def test_children_of_children_copy_what_they_write_and_nothing_else(make_sequence):
    parent = make_sequence(5)
    child = parent.fork()
    assert child.append([10]) == [(1, 2)]
    grandchild = child.fork()
    assert [s.blocks for s in (parent, child, grandchild)] == [[0, 1], [0, 2], [0, 2]]
    assert grandchild.append([20]) == [(2, 3)]
    assert child.append([11]) == []
    assert parent.append([30, 31, 32]) == []
    assert parent.append([33]) == []  # a new block: the last was full
    assert parent.read() == [0, 1, 2, 3, 4, 30, 31, 32, 33]
    assert child.read() == [0, 1, 2, 3, 4, 10, 11]
    assert grandchild.read() == [0, 1, 2, 3, 4, 10, 20]
    assert parent.pool.ref_counts == [3, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("appender", ["child", "parent"])
@pytest.mark.parametrize(("length", "ahead"), [(1, 4), (4, 1), (4, 5)])
def test_blocks_reserved_before_a_fork_are_copied_when_they_are_written(
    make_sequence, length, ahead, appender
):
    parent = make_sequence(length)
    parent.reserve(ahead)
    child, original = parent.fork(), list(parent.blocks)
    writer, other = (child, parent) if appender == "child" else (parent, child)
    first = length // 4
    copies = writer.append(range(50, 50 + ahead))
    assert copies == list(zip(original[first:], writer.blocks[first:], strict=True))
    assert other.blocks == original
    assert writer.blocks[:first] == original[:first]
    assert other.append(range(60, 60 + ahead)) == []
    assert writer.read() == [*range(length), *range(50, 50 + ahead)]
    assert other.read() == [*range(length), *range(60, 60 + ahead)]


def test_siblings_that_write_together_copy_for_all_but_one(make_sequence):
    parent = make_sequence(6)
    family = [parent, parent.fork(), parent.fork()]
    pool, last = parent.pool, parent.blocks[1]
    written, src, dst = pool.copy_on_write(*[s.targets(1)[0] for s in family])
    assert (src, dst) == ([last, last, 6], [2, 3, 6])
    parent.memory.copy(list(zip(src, dst, strict=True))[:2])
    for sequence, block, word in zip(family, written, (50, 60, 70), strict=True):
        sequence.blocks[1] = block
        assert sequence.append([word]) == []
    assert [s.read() for s in family] == [[*range(6), word] for word in (50, 60, 70)]
    assert (pool.ref_counts, available(pool)) == ([3, 1, 1, 1, 0, 0], 2)


def test_random_forks_keep_what_each_sequence_wrote(make_sequence):
    rng = random.Random(0)
    alive = [make_sequence(rng.randint(1, 6))]
    pool, copied, refused = alive[0].pool, 0, 0
    for _ in range(300):
        event = rng.choice(["fork", "fork", "append", "append", "release"])
        sequence = rng.choice(alive)
        if event == "fork" and len(alive) < 5:
            alive.append(sequence.fork())
        elif event == "append":
            count = rng.randint(1, 3)
            needed, copies = _blocks_for(sequence, count)
            before = available(pool)
            if needed > before:
                refused += 1
                event = "release"  # make room
            else:
                assert len(sequence.append(rng.choices(range(100), k=count))) == copies
                assert before - available(pool) == needed
                copied += copies
        if event == "release":
            alive.remove(sequence)
            sequence.release()
            alive = alive or [make_sequence(rng.randint(1, 6))]
        assert [s.read() for s in alive] == [s.words for s in alive]
    assert copied > 20
    assert refused > 5
    for sequence in alive:
        sequence.release()
    assert (available(pool), pool.ref_counts) == (6, [0] * 6)


def _blocks_for(sequence, count):
    """Blocks that an append of ``count`` words takes, and how many of them are copies."""
    pool, lanes = sequence.pool, np.full((6,), 6, np.int32)
    targets = sequence.targets(count)
    lanes[: len(targets)] = targets
    copies = int(writers_that_copy(pool.state, lanes).sum())
    growth = -(-(len(sequence.words) + count) // 4) - len(sequence.blocks)
    return copies + max(growth, 0), copies


@pytest.mark.parametrize("kind", ["new", "known"])
def test_a_full_pool_gives_the_block_that_was_released_over_and_over(make_pool, kind):
    pool = make_pool(6)
    blocks = pool.allocate(6)
    if kind == "known":
        pool.register_sequence(blocks, [[word] * 4 for word in blocks])
    for turn in range(20):
        assert pool.allocate(1) is None
        block = blocks[turn % 6]
        pool.release(block)
        assert available(pool) == 1
        assert pool.allocate(1) == [block]


def test_one_block_serves_any_number_of_holders(make_pool):
    pool = make_pool(6)
    (block,) = pool.allocate(1)
    pool.register_sequence([block], [[7] * 4])
    for _ in range(50):
        hits = pool.lookup([[7] * 4])
        assert hits == [block]
        pool.share(*hits)
    assert (pool.ref_counts, available(pool)) == ([51, 0, 0, 0, 0, 0], 5)


def test_a_full_pool_still_serves_what_it_knows(make_pool):
    pool = make_pool(6)
    words = [[word] * 4 for word in range(6)]
    blocks = pool.allocate(6)
    pool.register_sequence(blocks, words)
    assert pool.allocate(1) is None
    assert pool.lookup([[9] * 4]) == []
    assert pool.lookup(words) == blocks
    pool.share(*blocks)
    assert pool.ref_counts == [2] * 6


@pytest.mark.parametrize("count", [1, 3, 6])
def test_shared_blocks_are_available_after_their_last_release(make_pool, count):
    pool = make_pool(6)
    blocks = pool.allocate(count)
    pool.register_sequence(blocks, [[word] * 4 for word in range(count)])
    pool.share(*blocks)
    for block in blocks:
        pool.release(block)
        assert available(pool) == 6 - count
    for i, block in enumerate(blocks):
        pool.release(block)
        assert available(pool) == 6 - count + i + 1
    assert pool.cached == blocks


@pytest.mark.parametrize("place", range(12))
def test_the_common_prefix_ends_with_the_last_equal_block(make_pool, place):
    pool = make_pool(6)
    words = list(range(12))

    def cut(words):
        return np.reshape(words, (3, 4))

    one = pool.allocate(3)
    pool.register_sequence(one, cut(words))
    words[place:] = [99] * (12 - place)
    assert pool.lookup(cut(words)) == one[: place // 4]
    # A second chain registers what is new in it, and the prefix is that of the first.
    other = one[: place // 4] + pool.allocate(3 - place // 4)
    chain = pool.find(cut(words), limit=place // 4)[1]
    for block, content in list(zip(other, cut(words), strict=True))[place // 4 :]:
        (chain,) = pool.register((block, content, chain))
    assert pool.lookup(cut(words)) == other
    assert pool.lookup(cut(range(12))) == one


def test_eviction_and_allocation_in_turn(make_pool):
    pool = make_pool(3)
    words = [[word] * 4 for word in range(3)]
    assert (pool.free, pool.cached, pool.ref_counts) == ([0, 1, 2], [], [0] * 3)
    blocks = pool.allocate(3)
    for block, content in zip(blocks, words, strict=True):
        pool.register_sequence([block], [content])
    assert (pool.free, pool.cached, pool.ref_counts) == ([], [], [1] * 3)
    pool.release(*blocks)
    assert (pool.free, pool.cached, pool.ref_counts) == ([], [0, 1, 2], [0] * 3)
    # The oldest is evicted and forgotten; not full, it is free after its release.
    assert pool.allocate(1) == [0]
    assert block_pool.physical_block(pool.state, 0).block_hash is None
    assert pool.lookup([words[0]]) == []
    pool.release(0)
    assert (pool.free, pool.cached) == ([0], [1, 2])
    # What it held comes back into it, since a free block goes first.
    assert pool.allocate(1) == [0]
    pool.register_sequence([0], [words[0]])
    assert [pool.lookup([content]) for content in words] == [[0], [1], [2]]
    assert pool.allocate(1) == [1]
    assert (pool.cached, pool.ref_counts) == ([2], [1, 1, 0])


def test_the_tail_of_the_sequence_released_first_is_evicted(make_pool):
    pool = make_pool(6)
    first, second = pool.allocate(2), pool.allocate(4)
    pool.register_sequence(first, [[1] * 4, [2] * 4])
    pool.register_sequence(second, [[word] * 4 for word in range(3, 7)])
    pool.release(*first[::-1])
    pool.release(*second[::-1])
    assert pool.allocate(1) == [first[-1]]
    assert pool.allocate(2) == [first[0], second[-1]]


def test_a_new_chain_evicts_no_more_than_it_needs(make_pool):
    pool = make_pool(6)
    old, new = ([[word] * 4 for word in words] for words in (range(6), range(6, 9)))
    blocks = pool.allocate(6)
    pool.register_sequence(blocks, old)
    assert pool.lookup(old) == blocks
    pool.release(*blocks[::-1])
    assert pool.lookup(old) == blocks
    taken = pool.allocate(3)
    pool.register_sequence(taken, new)
    assert pool.lookup(new) == taken == blocks[:2:-1]
    assert pool.lookup(old) == blocks[:3]


reset_prefix_cache = quick_jit(block_pool.reset_prefix_cache)


def test_a_reset_forgets_all_and_takes_nothing_from_those_who_hold_it(make_pool):
    pool = make_pool(6)
    words = [[word] * 4 for word in range(3)]
    blocks = pool.allocate(4)
    end = pool.register_sequence(blocks[:3], words)
    pool.share(0)
    pool.release(2)
    assert (pool.free, pool.cached, pool.lookup(words)) == ([4, 5], [2], [0, 1, 2])
    pool._set(reset_prefix_cache(pool.state))
    assert pool.ref_counts == [2, 1, 0, 1, 0, 0]
    assert (sorted(pool.free), pool.cached, pool.lookup(words)) == ([2, 4, 5], [], [])
    assert [block_pool.physical_block(pool.state, b).token_ids for b in range(6)] == [None] * 6
    # What was known when it began is not to be found when it ends, nor what it goes on with.
    detached = dataclasses.replace(end, parent=block_pool.DETACHED)
    pool.register((3, [9] * 4, detached))
    assert pool.lookup([*words, [9] * 4]) == []
    # The same words, written anew, are.
    fresh = pool.allocate(3)
    pool.register_sequence(fresh, words)
    assert pool.lookup([*words, [9] * 4]) == fresh
    pool.release(0, 1, 0)
    assert (pool.free, pool.cached) == ([0, 1], [])
    pool.release(3)
    assert (pool.free, pool.cached) == ([0, 1], [3])
    assert pool.allocate(3) == [0, 1, 3]


def test_a_reset_of_an_idle_pool_makes_every_block_free(make_pool):
    pool = make_pool(6)
    blocks = pool.allocate(6)
    pool.register_sequence(blocks, [[word] * 4 for word in range(6)])
    pool.release(*blocks)
    assert (pool.free, pool.cached) == ([], blocks)
    for _ in range(2):
        pool._set(reset_prefix_cache(pool.state))
        assert (sorted(pool.free), pool.cached) == (blocks, [])
    assert not pool.state.hashed.any()
    assert sorted(pool.allocate(6)) == blocks


# The same through the scheduler: forks of a request.

WIDE = small_config(max_num_batched_tokens=64)
POOL_8 = small_config(max_num_batched_tokens=5, num_blocks=8)
BUDGET_2 = small_config(max_num_batched_tokens=2, num_blocks=20, policy="decode_first")


@functools.cache
def jitted_fork(config):
    return quick_jit(functools.partial(fork, config))


class Forks(Driver):
    """A driver that forks; requests are named by their slots."""

    def fork(self, parent, last_tokens, children=None):
        """A child for each of ``last_tokens`` (None keeps the parent's), or None if refused."""
        count = len(last_tokens)
        children = children or self.free_slots()[:count]
        slots = np.full((3,), self.config.max_num_requests, np.int32)
        slots[:count] = children
        tokens = np.full((3,), NO_TOKEN, np.int32)
        tokens[:count] = [NO_TOKEN if token is None else token for token in last_tokens]
        new = Fork(
            parent=np.int32(parent),
            children=slots,
            keys=np.zeros((3, 2), np.uint32),
            arrivals=np.arange(100, 103, dtype=np.int32),
            last_tokens=tokens,
            last_logprobs=np.zeros((3,), np.float32),
        )
        scheduler, ok = jitted_fork(self.config)(self.state.scheduler, new)
        if not ok:
            chex.assert_trees_all_equal(scheduler, self.state.scheduler)
            return None
        self._set_scheduler(scheduler)
        return children

    def tables(self, *slots):
        rows, row = self.host.rows, self.host.requests.row
        return [rows.block_table[row[s], : rows.num_blocks[row[s]]].tolist() for s in slots]

    def in_use(self):
        return int((self.host.pool.ref_count > 0).sum())


def words(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("length", [1, 3, 4, 6, 9])
def test_forks_of_a_prompt_share_it_and_write_blocks_of_their_own(length):
    driver, prompt = Forks(WIDE, seed=length), words(length, length)
    parent = driver.submit(prompt, 6)
    family = [parent, *(driver.submit(prompt, 6, fork_of=parent) for _ in range(2))]
    driver.step()
    assert driver.host.plan.num_scheduled.tolist() == [length, 0, 0, 0]
    assert [driver.status(slot) for slot in family] == [RUNNING, WAITING, WAITING]
    driver.step()
    # The parent writes on, and its children run the last token of the prompt for its logits.
    assert driver.host.plan.num_scheduled.tolist() == [1, 1, 1, 0]
    assert driver.host.totals.forked_tokens == 2 * (length - 1)
    full, held = length // 4, -(-length // 4)
    first, *others = driver.tables(*family)
    assert others == [others[0]] * 2
    assert (len(others[0]), others[0][:full]) == (held, first[:full])
    assert driver.in_use() == held + 1
    driver.step()
    # Now each has a last block of its own; the last to write keeps the one they shared.
    tables = driver.tables(*family)
    assert len({tuple(table[:full]) for table in tables}) == 1
    assert len({table[full] for table in tables}) == 3
    assert driver.host.pool.ref_count[tables[0][:full]].tolist() == [3] * full
    assert driver.host.totals.copies == (2 if length % 4 else 0)
    driver.run()
    assert [driver.tokens(slot) for slot in family] == [solo(prompt, 6)] * 3
    driver.assert_clean()


@pytest.mark.parametrize("made", [1, 2, 3, 4])
def test_forks_of_what_was_generated_go_their_own_ways(made):
    driver, prompt = Forks(WIDE, seed=made), words(7, 6)
    parent = driver.submit(prompt, 12)
    for _ in range(1 + made):
        driver.step()
    seen = driver.tokens(parent)
    assert len(seen) == 6 + made
    beams = [token for token in range(VOCAB) if token != seen[-1]][:2]
    children = driver.fork(parent, [*beams, None])
    assert [driver.tokens(slot)[-1] for slot in children] == [*beams, seen[-1]]
    driver.step()
    # All have the full block before it in common, and a last one that is not full with it,
    # unless the parent has filled and registered that meanwhile.
    together = len(seen) - 1 if made != 2 else 4
    assert driver.host.totals.forked_tokens >= 3 * together
    assert len({table[0] for table in driver.tables(parent, *children)}) == 1
    driver.run()
    assert driver.tokens(parent) == driver.tokens(children[2]) == solo(prompt, 12)
    for slot, token in zip(children, beams, strict=False):
        assert driver.tokens(slot) == solo([*seen[:-1], token], 12 - made)
    driver.assert_clean()


def test_a_fork_holds_no_block_that_its_parent_filled_with_other_tokens():
    driver, prompt = Forks(BUDGET_2, seed=2), words(2, 6)
    stranger = driver.submit(words(3, 3), 12)
    parent = driver.submit(prompt, 8)
    while len(driver.tokens(parent)) < 8:
        driver.step()
    seen = driver.tokens(parent)
    # The parent is about to fill its second block.
    assert driver.host.plan.num_scheduled.tolist() == [1, 1, 0, 0]
    token = (seen[-1] + 1) % VOCAB
    (child,) = driver.fork(parent, [token])
    driver.step()
    # The child has a row, and the two that came before it take the whole budget.
    assert driver.host.plan.num_scheduled.tolist() == [1, 1, 0, 0]
    first, second = driver.tables(parent, child)
    assert driver.host.pool.hashed[first[1]]
    assert second == first[:1]
    driver.run()
    assert driver.tokens(stranger) == solo(words(3, 3), 12)
    assert driver.tokens(parent) == solo(prompt, 8)
    assert driver.tokens(child) == solo([*seen[:-1], token], 6)
    driver.assert_clean()


@pytest.mark.parametrize("steps", range(4))
def test_forks_outlive_a_parent_that_is_aborted(steps):
    driver, prompt = Forks(WIDE, seed=3), words(3, 10)
    parent = driver.submit(prompt, 9)
    children = [driver.submit(prompt, 5, fork_of=parent) for _ in range(3)]
    for _ in range(steps):
        driver.step()
    driver.abort(parent)
    driver.run()
    assert driver.reason(parent) == ABORTED
    assert [driver.tokens(slot) for slot in children] == [solo(prompt, 5)] * 3
    if steps >= 2:  # they had their rows by then
        assert driver.host.totals.forked_tokens == 3 * 9
    driver.assert_clean()


def test_a_parent_that_ends_with_its_first_token_still_shares_its_prompt():
    driver, prompt = Forks(WIDE, seed=4), words(4, 10)
    parent = driver.submit(prompt, 1)
    children = [driver.submit(prompt, 5, fork_of=parent) for _ in range(3)]
    driver.step()
    driver.step()
    assert driver.status(parent) == FINISHED
    assert len({tuple(table[:2]) for table in driver.tables(*children)}) == 1
    assert driver.host.totals.forked_tokens == 27
    driver.run()
    assert driver.host.totals.copies == 2
    assert [driver.tokens(slot) for slot in children] == [solo(prompt, 5)] * 3
    driver.assert_clean()


def test_a_fork_is_all_or_nothing():
    driver, prompt = Forks(WIDE), words(5, 6)
    parent, other = driver.submit(prompt, 3), driver.submit(words(6, 3), 3)
    driver.step()
    assert driver.fork(parent, [None, None], children=[5, other]) is None
    assert driver.fork(parent, [3]) is None  # the last token is the prompt's
    assert driver.fork(4, [None]) is None  # nobody there
    children = driver.fork(parent, [None, None])
    driver.run()
    assert [driver.tokens(slot) for slot in (parent, *children)] == [solo(prompt, 3)] * 3
    assert driver.fork(parent, [None]) is None  # it has finished
    driver.assert_clean()


@pytest.mark.parametrize("length", [5, 8, 11])
def test_forks_in_a_pool_too_small_for_all_end_right(length):
    driver, prompt = Forks(POOL_8, seed=length), words(length, length)
    parent = driver.submit(prompt, 14)
    family = [parent, *(driver.submit(prompt, 14, fork_of=parent) for _ in range(3))]
    stranger = driver.submit(words(8, 9), 6)
    driver.run()
    assert [driver.tokens(slot) for slot in family] == [solo(prompt, 14)] * 4
    assert driver.tokens(stranger) == solo(words(8, 9), 6)
    assert driver.host.totals.preemptions > 0
    driver.assert_clean()
