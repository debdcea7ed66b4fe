"""A host engine of the scripted model, and what its tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.engine import Engine, EngineRequest, RequestUpdate

CONFIG = EngineConfig(
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=32,
    num_blocks=12,
    block_size=4,
    max_num_requests=3,
    prefill_tile=4,
    max_logprobs=2,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_bad_words=2,
    max_bad_word_tokens=3,
    token_mask_size=97,
)


def request(prompt: Sequence[int], max_new_tokens: int = 5, **options: Any) -> EngineRequest:
    return EngineRequest(tuple(prompt), max_new_tokens, **options)


def run(engine: Engine, max_steps: int = 16) -> dict[int, list[RequestUpdate]]:
    """All updates until nothing is left, by request id."""
    updates: dict[int, list[RequestUpdate]] = {}
    for _ in range(200):
        if not engine.num_unfinished:
            return updates
        for update in engine.step(max_steps):
            updates.setdefault(update.request_id, []).append(update)
    raise AssertionError("the engine does not come to an end")


def tokens(updates: Sequence[RequestUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def assert_clean(engine: Engine) -> None:
    engine.step()
    pool = jax.device_get(engine.state.scheduler.pool)
    assert not pool.ref_count.any()
    assert int(pool.num_free) + int(pool.num_cached) == CONFIG.num_blocks
    assert engine._slots.owners == [None] * CONFIG.max_num_requests
