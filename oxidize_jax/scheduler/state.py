"""SchedulerState: requests, rows, pool and plan as arrays of fixed shape.

A *request* is what a user submitted; it keeps its tokens to the end. A *row* is the right
to run: one of ``max_num_seqs``, with a block table. Life goes strictly forward::

    UNUSED -> WAITING -> RUNNING -> FINISHED      (then the slot takes a new request)

A preempted request stays RUNNING but holds no row and no blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from oxidize_jax.blocks import pool as block_pool
from oxidize_jax.config import EngineConfig
from oxidize_jax.sampling.edits import NO_TOKEN as NO_TOKEN
from oxidize_jax.sampling.fields import SamplingFields, plain_sampling
from oxidize_jax.types import replace, state

UNUSED, WAITING, RUNNING, FINISHED = range(4)
"""Status of a request slot; it only grows until the slot is given to a new request."""

NOT_FINISHED, STOPPED, LENGTH, ABORTED, POOL_EXHAUSTED = range(5)
"""Why a request finished: stop id, token limit, abort, or a pool too small for it alone."""

HISTORY = 32
"""Steps whose statistics are kept."""
NEVER = 2**31 - 1
"""``pause_at`` of a request that is never paused: more tokens than any can have."""
NUM_STATS = 14
"""F: figures of a step."""


@state
class Requests(SamplingFields):
    """R request slots. Tokens, logprobs and limits count prompt and output together."""

    status: jax.Array
    """i32[R]: ``UNUSED`` .. ``FINISHED``."""
    finish_reason: jax.Array
    """i32[R]: ``NOT_FINISHED`` .. ``POOL_EXHAUSTED``."""
    arrival: jax.Array
    """i32[R]: ticket; first come, first served."""
    priority: jax.Array
    """i32[R]: compared before arrival; the smaller goes first (as in vLLM)."""
    row: jax.Array
    """i32[R]: the row that runs it, ``S`` for none."""
    prompt_len: jax.Array
    """i32[R]"""
    num_tokens: jax.Array
    """i32[R]: prompt plus generated."""
    num_computed: jax.Array
    """i32[R]: leading tokens that need no more work; 0 without a row."""
    max_tokens: jax.Array
    """i32[R]: ``num_tokens`` at which it finishes with ``LENGTH``."""
    min_tokens: jax.Array
    """i32[R]: ``num_tokens`` below which stop ids are not sampled."""
    pause_at: jax.Array
    """i32[R]: ``num_tokens`` at which nothing more is sampled until the host says so; see
    :mod:`~oxidize_jax.scheduler.pause`."""
    tokens: jax.Array
    """i32[R, N]"""
    logprobs: jax.Array
    """f32[R, N]: logprob of each generated token; 0 in the prompt."""
    top_ids: jax.Array
    """i32[R, N, A]: the A = max_logprobs likeliest tokens, where asked for."""
    top_logprobs: jax.Array
    """f32[R, N, A]"""
    ranks: jax.Array
    """i32[R, N]: place of each generated token in the vocabulary, 1 for the likeliest, where
    alternatives are asked for."""
    stop_ids: jax.Array
    """i32[R, Z], padded with ``NO_TOKEN``; ``~id``, below 0, of an id that is not sampled below
    ``min_tokens`` either, but ends nothing."""
    salt: jax.Array
    """i32[R] >= 0: requests share blocks only with those of the same salt."""
    use_cache: jax.Array
    """bool[R]: read the prefix cache, and leave blocks in it."""
    fork_of: jax.Array
    """i32[R]: while WAITING, the request whose blocks it will share; ``R`` for none."""
    fork_len: jax.Array
    """i32[R]: leading tokens that it has in common with ``fork_of``."""
    num_cached: jax.Array
    """i32[R]: prompt tokens that the prefix cache gave at first admission."""
    num_preemptions: jax.Array
    """i32[R]"""


@state
class Rows:
    """S rows."""

    request: jax.Array
    """i32[S]: the request that runs here, ``R`` for none."""
    block_table: jax.Array
    """i32[S, M]: block ids, ``B`` from ``num_blocks`` on."""
    num_blocks: jax.Array
    """i32[S]"""
    kv_len: jax.Array
    """i32[S]: leading tokens whose KV is in the blocks: ``num_computed``, or one more where
    all tokens were shared. Then the last is computed again, for its logits, and not written."""
    chain_hash: jax.Array
    """u32[S, 2]: hash of the last full, written block (the root's before that)."""
    chain_parent: jax.Array
    """i32[S]: what the next full block names as its parent."""


@state
class Plan:
    """What the next step does. The copies are executed with the step, then forgotten."""

    num_scheduled: jax.Array
    """i32[S]: tokens of each row in the next step."""
    copy_src: jax.Array
    """i32[S], padding B: blocks to copy for copy-on-write, packed at the front."""
    copy_dst: jax.Array
    """i32[S], padding B"""
    num_copies: jax.Array
    """i32[]"""
    decode_turn: jax.Array
    """bool[]: prompts left nothing for a decode, which goes first in the step after."""
    order: jax.Array
    """i32[S]: rows by priority, then arrival; idle rows last."""
    ordered: jax.Array
    """i32[S]: the requests of the rows when ``order`` was made; it holds while they do."""


@state
class Totals:
    """Counters since the state was made, ``i32[]`` each (they wrap after 2**31)."""

    steps: jax.Array
    scheduled_tokens: jax.Array
    generated_tokens: jax.Array
    cached_tokens: jax.Array
    """Tokens that admissions took from the prefix cache."""
    forked_tokens: jax.Array
    """Tokens that forks took from their parents."""
    preemptions: jax.Array
    copies: jax.Array


@state
class SchedulerState:
    """All that the engine knows, except parameters and KV."""

    pool: block_pool.BlockPool
    requests: Requests
    rows: Rows
    plan: Plan
    totals: Totals
    history: jax.Array
    """i32[HISTORY, F]: statistics of the last steps, step ``i`` at ``i % HISTORY``; see
    :mod:`~oxidize_jax.scheduler.stats`."""


_LONG = (
    "tokens",
    "logprobs",
    "top_ids",
    "top_logprobs",
    "ranks",
    "stop_ids",
    "bias_ids",
    "bias_values",
    "bad_words",
    "token_mask",
)


def without_sequences(state: SchedulerState) -> SchedulerState:
    """``state`` without the arrays of R sequences, which transitions of rows do not touch.

    XLA copies some of what a loop carries, and these are by far the largest.
    """
    return replace(state, requests=replace(state.requests, **dict.fromkeys(_LONG)))


def with_sequences(state: SchedulerState, like: SchedulerState) -> SchedulerState:
    """Undo :func:`without_sequences`."""
    arrays = {name: getattr(like.requests, name) for name in _LONG}
    return replace(state, requests=replace(state.requests, **arrays))


def init_scheduler(config: EngineConfig, secret: int = 0) -> SchedulerState:
    """An idle scheduler: every slot unused, every block free. ``secret``: the pool's."""
    r, s, n = config.max_num_requests, config.max_num_seqs, config.max_model_len
    a, z = config.max_logprobs, config.max_stop_token_ids

    def ints(*shape: int, value: int = 0) -> jax.Array:
        return jnp.full(shape, value, jnp.int32)

    def floats(*shape: int, value: float = 0.0) -> jax.Array:
        return jnp.full(shape, value, jnp.float32)

    sampling = {
        name: jnp.broadcast_to(value, (r, *value.shape))
        for name, value in plain_sampling(config).items()
    }
    requests = Requests(
        status=ints(r, value=UNUSED),
        finish_reason=ints(r, value=NOT_FINISHED),
        arrival=ints(r),
        priority=ints(r),
        row=ints(r, value=s),
        prompt_len=ints(r),
        num_tokens=ints(r),
        num_computed=ints(r),
        max_tokens=ints(r),
        min_tokens=ints(r),
        pause_at=ints(r, value=NEVER),
        tokens=ints(r, n),
        logprobs=floats(r, n),
        top_ids=ints(r, n, a),
        top_logprobs=floats(r, n, a),
        ranks=ints(r, n),
        stop_ids=ints(r, z, value=NO_TOKEN),
        salt=ints(r),
        use_cache=jnp.ones((r,), jnp.bool_),
        fork_of=ints(r, value=r),
        fork_len=ints(r),
        num_cached=ints(r),
        num_preemptions=ints(r),
        **sampling,
    )
    rows = Rows(
        request=ints(s, value=r),
        block_table=ints(s, config.blocks_per_seq, value=config.num_blocks),
        num_blocks=ints(s),
        kv_len=ints(s),
        chain_hash=jnp.zeros((s, 2), jnp.uint32),
        chain_parent=ints(s),
    )
    plan = Plan(
        num_scheduled=ints(s),
        copy_src=ints(s, value=config.num_blocks),
        copy_dst=ints(s, value=config.num_blocks),
        num_copies=ints(),
        decode_turn=jnp.zeros((), jnp.bool_),
        order=jnp.arange(s, dtype=jnp.int32),
        ordered=ints(s, value=r),
    )
    return SchedulerState(
        pool=block_pool.create(config.num_blocks, config.block_size, secret),
        requests=requests,
        rows=rows,
        plan=plan,
        totals=Totals(
            steps=ints(),
            scheduled_tokens=ints(),
            generated_tokens=ints(),
            cached_tokens=ints(),
            forked_tokens=ints(),
            preemptions=ints(),
            copies=ints(),
        ),
        history=ints(HISTORY, NUM_STATS),
    )
