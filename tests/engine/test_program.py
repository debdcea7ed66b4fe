"""The compiled step: the cache is never copied, and unused slots never matter."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from write_checkpoints import TINY_LLAMA as MODEL
from write_checkpoints import random_params

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.engine import Engine, EngineRequest
from oxidize_jax.engine.step import init_state, run_steps
from oxidize_jax.model.functional import build

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "max_num_requests": 4}


@pytest.fixture(scope="module")
def decoder():
    return build(MODEL, jax.tree.map(jnp.asarray, random_params(MODEL)))


def test_the_program_does_not_copy_the_cache(decoder):
    model, params = decoder
    config = EngineConfig(max_model_len=64, num_blocks=16384, prefill_tile=4, **SIZES)
    state = jax.eval_shape(lambda: init_state(config, model))
    program = jax.jit(partial(run_steps, config, model), donate_argnums=1)
    compiled = program.lower(params, state, jnp.int32(1)).compile()
    shape = ",".join(str(n) for n in state.kv.shape)
    text = compiled.as_text()
    assert re.search(rf"f32\[{shape}\]", text), "the cache is not in the program"
    assert not re.findall(rf"f32\[{shape}\]\S* (?:copy|convert)\(", text)
    kv_bytes = state.kv.size * state.kv.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < kv_bytes / 10


def run(engine, prompts, max_new_tokens):
    ids = [engine.add(EngineRequest(p, max_new_tokens, num_logprobs=1)) for p in prompts]
    got = {}
    while engine.num_unfinished:
        for update in engine.step():
            got.setdefault(update.request_id, []).extend(
                zip(update.token_ids, update.logprobs, strict=True)
            )
    return [got[i] for i in ids]


def test_kv19_a_pool_full_of_nan_gives_the_same_bits(decoder):
    model, params = decoder
    config = EngineConfig(max_model_len=32, num_blocks=12, prefill_tile=4, **SIZES)
    prompts = [tuple(range(1, 1 + n)) for n in (1, 3, 4, 5)]
    clean, dirty = Engine(config, model, params), Engine(config, model, params)
    kv = jnp.full(dirty.state.kv.shape, np.nan, dirty.state.kv.dtype)
    dirty.state = type(dirty.state)(scheduler=dirty.state.scheduler, kv=kv)
    expected = run(clean, prompts, 6)
    assert run(dirty, prompts, 6) == expected
    assert all(np.isfinite(logprob) for tokens in expected for _, logprob in tokens)
    # Once more: every block has been used now, and its tail holds NaN or old tokens.
    assert run(dirty, prompts[::-1], 6)[::-1] == run(clean, prompts[::-1], 6)[::-1]
