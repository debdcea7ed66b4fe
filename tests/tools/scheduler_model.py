"""The scheduler and its pool in plain Python, written from the rules: the oracle of the machine.

Requests, rows and blocks are objects, and everything happens to one of them at a time. What
the device state must be after each event is what this model is; see ``run_machine.Twin``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Sequence

from oxidize_jax.config import EngineConfig
from oxidize_jax.scheduler.state import (
    ABORTED,
    FINISHED,
    LENGTH,
    NEVER,
    NOT_FINISHED,
    POOL_EXHAUSTED,
    RUNNING,
    STOPPED,
    WAITING,
)

_REASONS = {STOPPED: "stop", LENGTH: "length", ABORTED: "abort", POOL_EXHAUSTED: "pool too small"}

DETACHED = 1
"""Parent of blocks that nobody may find: what was computed before them is not known."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """Where a sequence stands in the prefix cache: behind its last full, written block."""

    history: tuple[object, ...]
    """The salt, then the tokens of each block: what the hash is made of."""
    parent: int
    """Serial of the last block; below 0 for the first block of a salt; or ``DETACHED``."""

    @classmethod
    def root(cls, salt: int) -> Chain:
        return cls(history=(salt,), parent=-1 - salt)


class PoolModel:
    """A stack of free blocks, an ordered dictionary of cached ones, and registrations."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))[::-1]
        """The last is taken first."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Registered and held by nobody; the first is taken first."""
        self.holders = [0] * num_blocks
        self.known: dict[int, Chain] = {}
        """Of each registered block, ``Chain(history with it, its parent)``."""
        self.serial: dict[int, int] = {}
        self.next_serial = DETACHED + 1
        self.last_history: dict[int, tuple[object, ...]] = {}
        """What each block stood for when it was registered last, even if forgotten since."""

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A block for one holder."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            del self.known[block], self.serial[block]
        self.holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holders[block] += 1
            self.cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Take a holder from each; the order given is the order of reuse."""
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0 and block in self.known:
                self.cached[block] = None
            elif self.holders[block] == 0:
                self.free.append(block)

    def register(self, block: int, words: tuple[int, ...], chain: Chain) -> Chain:
        """Make a full block findable, unless an equal one is; the chain behind it."""
        history = (*chain.history, words)
        key = Chain(history, chain.parent)
        twins = [other for other, known in self.known.items() if known == key]
        if twins:
            return Chain(history, self.serial[twins[0]])
        self.known[block] = key
        self.last_history[block] = history
        self.serial[block] = self.next_serial
        self.next_serial += 1
        return Chain(history, self.serial[block])

    def lookup(self, blocks: Sequence[tuple[int, ...]], salt: int) -> tuple[list[int], Chain]:
        """The longest registered prefix, and the chain behind it."""
        found: list[int] = []
        chain = Chain.root(salt)
        for words in blocks:
            key = Chain((*chain.history, words), chain.parent)
            match = [block for block, known in self.known.items() if known == key]
            if not match:
                break
            found.append(match[0])
            chain = Chain(key.history, self.serial[match[0]])
        return found, chain

    def reset(self) -> None:
        """Forget every registration; what was cached is free, in the order of ids."""
        self.free += sorted(self.cached)
        self.cached.clear()
        self.known.clear()
        self.serial.clear()
        self.next_serial = DETACHED + 1


@dataclasses.dataclass(eq=False)
class Request:
    """What a user submitted, and what came of it."""

    slot: int
    tokens: list[int]
    prompt_len: int
    arrival: int
    priority: int
    max_tokens: int
    """All tokens; see ``SchedulerModel.submit``."""
    min_tokens: int
    stop_ids: tuple[int, ...]
    salt: int
    use_cache: bool
    fork_of: Request | None
    fork_len: int
    key: tuple[int, int] = (0, 0)
    pause_at: int = NEVER
    """All tokens; see ``SchedulerModel.submit``."""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    status: int = WAITING
    finish_reason: int = NOT_FINISHED
    row: Row | None = None
    num_cached: int = 0
    num_preemptions: int = 0

    @property
    def num_computed(self) -> int:
        return self.row.computed if self.row else 0

    @property
    def alive(self) -> bool:
        return self.status in (WAITING, RUNNING)

    @property
    def preempted(self) -> bool:
        return self.status == RUNNING and self.row is None

    @property
    def paused(self) -> bool:
        return len(self.tokens) >= self.pause_at

    @property
    def waits_for_parent(self) -> bool:
        return self.status == WAITING and self.fork_of is not None and self.fork_of.alive

    @property
    def queues(self) -> bool:
        """Lacks nothing but room."""
        waits = self.status == WAITING and not self.waits_for_parent
        return (self.preempted or waits) and not self.paused

    @property
    def place_in_line(self) -> tuple[bool, int, int]:
        return not self.preempted, self.priority, self.arrival


@dataclasses.dataclass(eq=False)
class Row:
    """The right to run, with the blocks of one request."""

    index: int
    request: Request
    blocks: list[int]
    computed: int
    kv_len: int
    chain: Chain

    @property
    def lacking(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.request.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Lacks its newest token only; the last one of a prompt counts as prompt."""
        return self.lacking == 1 and self.computed >= self.request.prompt_len


@dataclasses.dataclass
class Grants:
    """Tokens by row index."""

    decodes_first: bool
    decode: dict[int, int] = dataclasses.field(default_factory=dict)
    prefill: dict[int, int] = dataclasses.field(default_factory=dict)

    def of(self, row: Row) -> int:
        return self.decode.get(row.index, 0) + self.prefill.get(row.index, 0)


class SchedulerModel:
    """Slots, rows, pool and plan; a method for every event."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = PoolModel(config.num_blocks)
        self.slots: list[Request | None] = [None] * config.max_num_requests
        self.rows: list[Row | None] = [None] * config.max_num_seqs
        self.scheduled: dict[int, int] = {}
        """The plan: tokens by row index, none of them 0."""
        self.copies: list[tuple[int, int]] = []
        self.decode_turn = False
        """Prompts left nothing for a decode: it goes first in the step after."""
        self.totals: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        """What has happened that the device does not count; for reports."""

    # Events from outside.

    def accepts(self, num_prompt_tokens: int) -> bool:
        """Whether such a prompt can ever run, and leave room for a token."""
        config = self.config
        in_pool = num_prompt_tokens <= config.num_blocks * config.block_size
        return 1 <= num_prompt_tokens < config.max_model_len and in_pool

    def is_free(self, slot: int) -> bool:
        request = self.slots[slot]
        return request is None or (request.status == FINISHED and request.row is None)

    def submit(self, request: Request) -> None:
        """``max_tokens``, ``min_tokens`` and ``pause_at`` come as counts of new tokens."""
        request.pause_at = request.prompt_len + min(request.pause_at, self.config.max_model_len)
        request.max_tokens = min(request.prompt_len + request.max_tokens, self.config.max_model_len)
        request.min_tokens += request.prompt_len
        self._enter_slot(request)

    def abort(self, slot: int) -> None:
        request = self.slots[slot]
        if request is not None:
            self._finish(request, ABORTED)

    def set_masks(self, pause_at: dict[int, int]) -> None:
        """Pause requests, by slot, at other numbers of tokens.

        Those that go on join a step that is planned, where they need no block and it has room.
        """
        k, resumed = self.config.block_size, []
        for slot, tokens in pause_at.items():
            request = self.slots[slot]
            was_paused, request.pause_at = request.paused, tokens
            if was_paused and not request.paused and request.row and request.status == RUNNING:
                resumed.append(request.row)
        left = self.config.token_budget - sum(self.scheduled.values())
        planned = bool(self.scheduled)
        for row in self._in_order():
            column = row.kv_len // k
            held = column < len(row.blocks)
            copies = (
                held and row.kv_len == row.computed and self.pool.holders[row.blocks[column]] > 1
            )
            fits = row.computed < len(row.blocks) * k and not copies
            joins = row in resumed and row.index not in self.scheduled and row.lacking == 1
            if planned and joins and fits and left:
                self.scheduled[row.index] = 1
                left -= 1
                self.seen["resumed into a plan"] += 1

    def fork(
        self,
        parent: int,
        children: Sequence[int],
        arrivals: Sequence[int],
        keys: Sequence[tuple[int, int]],
        last_tokens: Sequence[int | None],
        last_logprobs: Sequence[float],
    ) -> bool:
        """Copies of a request as it stands, all or none; ``None`` keeps its last token."""
        source = self.slots[parent]
        if source is None or not source.alive or not all(map(self.is_free, children)):
            return False
        replaces = any(token is not None for token in last_tokens)
        if replaces and len(source.tokens) == source.prompt_len:
            return False
        for i, slot in enumerate(children):
            child = dataclasses.replace(
                source,
                slot=slot,
                tokens=list(source.tokens),
                logprobs=list(source.logprobs),
                arrival=arrivals[i],
                key=keys[i],
                fork_of=source,
                fork_len=len(source.tokens) - (last_tokens[i] is not None),
                status=WAITING,
                row=None,
                num_cached=0,
                num_preemptions=0,
            )
            if last_tokens[i] is not None:
                child.tokens[-1], child.logprobs[-1] = last_tokens[i], last_logprobs[i]
            self._enter_slot(child)
        return True

    def reset_prefix_cache(self) -> None:
        """What rows write behind what they have written is not to be found either."""
        self.pool.reset()
        for row in self._running():
            if row.kv_len:
                row.chain = Chain(row.chain.history, DETACHED)

    def _enter_slot(self, request: Request) -> None:
        for other in self._requests():
            if other.fork_of is self.slots[request.slot]:
                other.fork_of = None
        self.slots[request.slot] = request

    # One step: what the model computed goes in, and the next step is planned.

    def sampling_rows(self) -> list[Row]:
        """Rows that compute their last token in the planned step."""
        return [row for row in self._running() if self.scheduled.get(row.index) == row.lacking]

    def step(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Commit the plan, with a token of each row that samples, and plan again."""
        sampling = self.sampling_rows()
        self._advance()
        for row in sampling:
            self._append(row.request, tokens[row.index], logprobs[row.index])
        self._schedule()

    def _advance(self) -> None:
        k = self.config.block_size
        self.totals["steps"] += bool(self.scheduled)
        self.totals["scheduled_tokens"] += sum(self.scheduled.values())
        filled: list[list[tuple[Row, int]]] = []
        for row in self._running():
            before = row.kv_len
            row.computed += self.scheduled.get(row.index, 0)
            row.kv_len = max(row.kv_len, row.computed)
            if self.config.enable_prefix_caching and row.request.use_cache:
                filled.append([(row, c) for c in range(before // k, row.kv_len // k)])
        # The first full block of every row, then the second of every row, and so on.
        for turn in range(max(map(len, filled), default=0)):
            for row, column in (blocks[turn] for blocks in filled if turn < len(blocks)):
                words = tuple(row.request.tokens[column * k : (column + 1) * k])
                row.chain = self.pool.register(row.blocks[column], words, row.chain)

    def _append(self, request: Request, token: int, logprob: float) -> None:
        if request.status != RUNNING:
            return
        self.totals["generated_tokens"] += 1
        stops = token in request.stop_ids and len(request.tokens) >= request.min_tokens
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if stops:
            self._finish(request, STOPPED)
        elif len(request.tokens) >= request.max_tokens:
            self._finish(request, LENGTH)

    def _schedule(self) -> None:
        self._place_forks()
        for row in self._running():
            if row.request.status == FINISHED:
                self._free(row)
        grants, preempted = self._make_room()
        self._grow(grants)
        admitted: dict[int, int] = {}
        if not preempted or not self._running():
            admitted = self._admit(grants)
        self._plan(grants, admitted)

    # Forks: rows for those whose parent has computed what they have in common.

    def _place_forks(self) -> None:
        while None in self.rows and not any(r.preempted and not r.paused for r in self._requests()):
            ready = [r for r in self._requests() if self._is_ready(r)]
            if not ready or self._uncommitted() <= 0:
                return
            self._place(min(ready, key=lambda r: r.place_in_line))

    def _is_ready(self, request: Request) -> bool:
        parent = request.fork_of
        if request.status != WAITING or parent is None or parent.row is None:
            return False
        return parent.row.kv_len >= request.fork_len

    def _place(self, child: Request) -> None:
        assert child.fork_of is not None
        source = child.fork_of.row
        assert source is not None
        shared, chain = self._common(source, child.fork_len, child.salt)
        blocks = source.blocks[: _blocks(shared, self.config.block_size)]
        self.pool.share(blocks)
        computed = min(shared, len(child.tokens) - 1)
        self._seat(child, blocks, computed, shared, chain)
        self.totals["forked_tokens"] += computed
        self.seen["forks placed"] += 1

    def _common(self, source: Row, shared: int, salt: int) -> tuple[int, Chain]:
        """How much of a row can be shared, and where the chain stands behind it."""
        k, pool = self.config.block_size, self.pool
        full = shared // k
        if shared % k and source.blocks[full] in pool.known:
            # The parent has filled it with tokens of its own, for all to find.
            shared = full * k
        if shared == 0:
            return shared, Chain.root(salt)
        if source.kv_len // k == full:
            return shared, source.chain
        last = source.blocks[full - 1] if full else None
        if last in pool.known:
            return shared, Chain(pool.known[last].history, pool.serial[last])
        self.seen["forks detached"] += 1
        return shared, Chain(pool.last_history.get(last, ()), DETACHED)

    # Running rows: budget, preemption, blocks.

    def _make_room(self) -> tuple[Grants, bool]:
        preempted = False
        while True:
            grants = self._grant()
            needed = len(self._copying(grants)) + sum(self._growth(grants).values())
            if needed <= self.pool.available:
                return grants, preempted
            preempted = True
            rows = self._in_order()
            if len(rows) == 1:
                self._finish(rows[0].request, POOL_EXHAUSTED)
            else:
                rows[-1].request.num_preemptions += 1
                self.totals["preemptions"] += 1
            self._free(rows[-1])

    def _grant(self) -> Grants:
        """Budget for the rows in order, first for the kind whose turn it is."""
        tokens, tiles = self.config.token_budget, self.config.max_prefill_tiles
        grants = Grants(self.config.policy == "decode_first" or self.decode_turn)
        for row in sorted(self._in_order(), key=lambda row: row.decodes != grants.decodes_first):
            if row.request.paused:
                continue
            if row.decodes:
                chunk = min(1, tokens)
                grants.decode[row.index] = chunk
            else:
                chunk = max(0, min(row.lacking, tokens, tiles * self.config.prefill_tile))
                tiles -= self._tiles(row.lacking)
                grants.prefill[row.index] = chunk
            tokens -= chunk
        return grants

    def _tiles(self, chunk: int) -> int:
        """One token runs as a decode, without a tile."""
        return _blocks(chunk, self.config.prefill_tile) if chunk > 1 else 0

    def _copying(self, grants: Grants) -> list[Row]:
        """Rows that write into a block with others, but for the last if all of them write."""
        holders = dict(enumerate(self.pool.holders))
        copying = []
        for row in self._running():
            column = row.kv_len // self.config.block_size
            writes = row.computed + grants.of(row) > row.kv_len
            if not writes or column >= len(row.blocks):
                continue
            if holders[row.blocks[column]] > 1:
                holders[row.blocks[column]] -= 1
                copying.append(row)
        return copying

    def _growth(self, grants: Grants) -> dict[Row, int]:
        """Blocks that each row lacks for its granted tokens."""
        growth = {}
        for row in self._running():
            needed = _blocks(row.computed + grants.of(row), self.config.block_size)
            growth[row] = max(0, needed - len(row.blocks)) if grants.of(row) else 0
        return growth

    def _grow(self, grants: Grants) -> None:
        self.copies = []
        for row in self._copying(grants):
            column = row.kv_len // self.config.block_size
            src, dst = row.blocks[column], self.pool.take()
            self.copies.append((src, dst))
            row.blocks[column] = dst
        self.pool.release([src for src, _ in self.copies])
        self.totals["copies"] += len(self.copies)
        for row, count in self._growth(grants).items():
            row.blocks += [self.pool.take() for _ in range(count)]

    def _free(self, row: Row) -> None:
        self.pool.release(row.blocks[::-1])
        self.rows[row.index] = row.request.row = None

    # Admission.

    def _admit(self, grants: Grants) -> dict[int, int]:
        """First chunks of new rows, by row index."""
        config = self.config
        tokens = config.token_budget - sum(grants.prefill.values())
        if grants.decodes_first:
            tokens -= sum(grants.decode.values())
        tiles = config.max_prefill_tiles - sum(map(self._tiles, grants.prefill.values()))
        admitted: dict[int, int] = {}
        while None in self.rows and tokens > 0 and (tiles > 0 or tokens == 1):
            line = [r for r in self._requests() if r.queues]
            if not line:
                break
            request = min(line, key=lambda r: r.place_in_line)
            if _blocks(len(request.tokens), config.block_size) > config.num_blocks:
                self._finish(request, POOL_EXHAUSTED)
                continue
            hits, chain = self._lookup(request)
            if not self._has_room(request, hits):
                break
            if self._is_under_way(request, hits, grants, admitted):
                self.seen["waits for a block under way"] += 1
                break
            cached = min(len(hits) * config.block_size, len(request.tokens) - 1)
            chunk = min(len(request.tokens) - cached, tokens, max(tiles * config.prefill_tile, 1))
            row = self._enter(request, hits, cached, chunk, chain)
            admitted[row.index] = chunk
            tokens -= chunk
            tiles -= self._tiles(chunk)
        return admitted

    def _lookup(self, request: Request) -> tuple[list[int], Chain]:
        k = self.config.block_size
        full = [tuple(request.tokens[i : i + k]) for i in range(0, len(request.tokens), k)]
        if not self.config.enable_prefix_caching or not request.use_cache:
            full = []
        return self.pool.lookup([words for words in full if len(words) == k], request.salt)

    def _has_room(self, request: Request, hits: list[int]) -> bool:
        """Blocks for all tokens, beside what is promised, and a row, beside those of forks."""
        lacking = _blocks(len(request.tokens), self.config.block_size) - len(hits)
        revived = sum(self.pool.holders[block] == 0 for block in hits)
        spare = 1 if self._running() else 0
        forks = 0
        if not request.preempted:
            forks = sum(r.waits_for_parent and r.fork_of.row is not None for r in self._requests())
        idle = self.rows.count(None)
        return lacking <= self._uncommitted() - revived - spare - forks and idle > forks

    def _is_under_way(
        self, request: Request, hits: list[int], grants: Grants, admitted: dict[int, int]
    ) -> bool:
        """Whether a row computes the block behind the hits in this very step, for all to find."""
        start = len(hits) * self.config.block_size
        end = start + self.config.block_size
        if not self.config.enable_prefix_caching or not request.use_cache:
            return False
        for row in self._running():
            other = row.request
            planned = row.computed + grants.of(row) + admitted.get(row.index, 0)
            if not other.use_cache or not row.kv_len < end <= planned:
                continue
            if hits and row.blocks[len(hits) - 1] != hits[-1]:
                continue
            if not hits and other.salt != request.salt:
                continue
            if end <= len(request.tokens) and other.tokens[start:end] == request.tokens[start:end]:
                return True
        return False

    def _enter(
        self, request: Request, hits: list[int], cached: int, chunk: int, chain: Chain
    ) -> Row:
        k = self.config.block_size
        self.pool.share(hits)
        fresh = [self.pool.take() for _ in range(_blocks(cached + chunk, k) - len(hits))]
        if request.num_preemptions == 0:
            request.num_cached = cached
        self.totals["cached_tokens"] += cached
        self.seen["admissions"] += 1
        self.seen["admissions with hits"] += bool(hits)
        self.seen["admissions with all tokens hit"] += len(hits) * k == len(request.tokens)
        return self._seat(request, hits + fresh, cached, len(hits) * k, chain)

    def _plan(self, grants: Grants, admitted: dict[int, int]) -> None:
        """Where prompts go first, decodes get what new ones left too."""
        self.scheduled = grants.prefill | admitted
        left = self.config.token_budget - sum(self.scheduled.values())
        skipped = False
        for row in self._in_order():
            if row.index in grants.decode:
                self.scheduled[row.index] = min(grants.decode[row.index], left)
                left -= self.scheduled[row.index]
                skipped |= self.scheduled[row.index] == 0
        self.scheduled = {row: count for row, count in self.scheduled.items() if count}
        self.decode_turn = skipped and not grants.decodes_first
        self.seen["decodes put off"] += self.decode_turn

    # What several of them need.

    def _finish(self, request: Request, reason: int) -> None:
        if request.finish_reason == NOT_FINISHED:
            request.status, request.finish_reason = FINISHED, reason
            self.seen[f"finished: {_REASONS[reason]}"] += 1

    def _uncommitted(self) -> int:
        """Available blocks, less those that the rows will take in any case."""
        k = self.config.block_size
        promised = 0
        for row in self._running():
            promised += max(0, _blocks(len(row.request.tokens), k) - len(row.blocks))
            column = row.kv_len // k
            if column < len(row.blocks):
                promised += self.pool.holders[row.blocks[column]] > 1
            elif row.kv_len > row.computed and column == len(row.blocks):
                promised += 1  # All is there but the block for its next token.
        return self.pool.available - promised

    def _seat(
        self, request: Request, blocks: list[int], computed: int, kv_len: int, chain: Chain
    ) -> Row:
        row = Row(self.rows.index(None), request, list(blocks), computed, kv_len, chain)
        self.rows[row.index] = request.row = row
        request.status, request.fork_of = RUNNING, None
        return row

    def _running(self) -> list[Row]:
        return [row for row in self.rows if row is not None]

    def _in_order(self) -> list[Row]:
        return sorted(self._running(), key=lambda r: (r.request.priority, r.request.arrival))

    def _requests(self) -> list[Request]:
        return [request for request in self.slots if request is not None]


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)
