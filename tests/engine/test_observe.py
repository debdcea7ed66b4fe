"""What there is to see of an engine, beside what it does."""

from __future__ import annotations

from collections import Counter

import numpy as np
from fake_model import FakeModel, solo
from host_engine import CONFIG, assert_clean, request, tokens

from oxidize_jax.engine.engine import Engine


def test_looks_between_runs_agree_with_the_state_and_change_nothing():
    """More requests than slots."""
    engine = Engine(CONFIG, FakeModel(), None, check_invariants=True)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12 + i] for i in range(8)]
    ids = [engine.add(request(prompt, 9)) for prompt in prompts]
    first = engine.observe()
    assert first.requests == []
    assert first.num_queued == len(ids)
    updates, looks = {i: [] for i in ids}, [first]
    while engine.num_unfinished:
        for update in engine.step(1):
            updates[update.request_id].append(update)
        looks.append(engine.observe())
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens(updates[request_id]) == solo(prompt, 9)[len(prompt) :]
    # Read after later runs have taken the states that were looked at.
    for look in looks:
        held = Counter(block for one in look.requests for block in one.blocks)
        want = [held[block] for block in range(CONFIG.num_blocks)]
        assert look.ref_counts.tolist() == want
        assert not (look.is_cached & (look.ref_counts > 0)).any()
        for one in look.requests:
            assert one.request_id in ids
            assert (one.row is None) == (one.state in ("waiting", "preempted") or not one.blocks)
            assert one.prompt_tokens == 8 <= one.tokens <= one.max_tokens == 17
            assert len(one.blocks) * CONFIG.block_size >= one.computed_tokens
    states = {one.state for look in looks for one in look.requests}
    assert {"prefill", "decode"} <= states
    made = [look.totals["generated_tokens"] for look in looks]
    assert made == sorted(made)
    assert made[-1] == 8 * 9
    assert all(look.is_ready for look in looks)
    assert np.max([look.num_queued for look in looks[1:]]) == len(ids) - CONFIG.max_num_requests
    assert_clean(engine)
