"""The real model gives transformers' greedy tokens, however its work is cut and batched."""

import dataclasses
import gc
import json
import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from write_checkpoints import write_hf_folder

from oxidize_jax import LLM, SamplingParams
from oxidize_jax.checkpoints import load_checkpoint

GOLDENS = Path(__file__).parent / "goldens" / "smollm2_greedy.json"
CASES = json.loads(GOLDENS.read_text())["cases"]


def make(model, chunk, **options):
    gc.collect()
    sizes = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": chunk}
    return LLM(model, dtype="float32", progress=False, **{**sizes, **options})


def params_of(case):
    return SamplingParams(temperature=0, max_tokens=len(case["output_ids"]), logprobs=1)


def check(output, case):
    assert output.prompt_token_ids == tuple(case["prompt_ids"])
    completion = output.outputs[0]
    assert completion.token_ids == tuple(case["output_ids"])
    assert completion.text == case["text"]
    for entry, expected in zip(completion.logprobs, case["top5"], strict=True):
        best_id, best = expected[0]
        assert entry[best_id].rank == 1
        assert entry[best_id].logprob == pytest.approx(best, abs=1e-3)


def prompts(llm):
    """Text in, so that tokenizer and template are part of what is shown."""
    for case in CASES:
        if case["kind"] == "chat":
            yield llm.chat_prompt([{"role": "user", "content": case["prompt"]}])
        else:
            yield case["prompt"]


def run_batch(llm):
    return llm.generate(list(prompts(llm)), [params_of(case) for case in CASES])


def run_alone(llm):
    pairs = zip(prompts(llm), CASES, strict=True)
    return [llm.generate(prompt, params_of(case))[0] for prompt, case in pairs]


@pytest.mark.parametrize("chunk", [64, 512])
def test_all_cases_in_one_batch(smollm2_path, chunk):
    for output, case in zip(run_batch(make(smollm2_path, chunk)), CASES, strict=True):
        check(output, case)


@pytest.mark.slow
def test_each_case_alone(smollm2_path):
    for output, case in zip(run_alone(make(smollm2_path, 16)), CASES, strict=True):
        check(output, case)


@pytest.mark.slow
def test_same_weights_from_safetensors(smollm2_path, tmp_path):
    checkpoint = load_checkpoint(smollm2_path, jnp.float32)
    write_hf_folder(tmp_path, checkpoint.config, checkpoint.params, shards=2)
    del checkpoint
    llm = make(tmp_path, 512, tokenizer=str(smollm2_path))
    for output, case in zip(run_batch(llm), CASES, strict=True):
        check(output, case)


@pytest.mark.slow
def test_forks_preemption_aborts_and_a_spoilt_pool_change_no_token(smollm2_path):
    """A pool that holds a third of the load, full of NaN and in disorder."""
    llm = make(smollm2_path, 64, num_blocks=30, check_invariants=True)
    spoil(llm.engine)
    for turn in range(2):  # the second time with hits
        cases, texts = CASES[::2], list(prompts(llm))[::2]
        params = [dataclasses.replace(params_of(case), n=1 + i % 3) for i, case in enumerate(cases)]
        streams = [llm.stream(text, params_of(CASES[0])) for text in ("A neighbour", "Another")]
        for stream in streams:
            next(stream)
            stream.close()
        for output, case in zip(llm.generate(texts, params), cases, strict=True):
            for completion in output.outputs:
                check(dataclasses.replace(output, outputs=(completion,)), case)
        totals = llm.engine.state.scheduler.totals
        assert int(totals.preemptions) > turn
        assert int(totals.forked_tokens) > 0
    assert int(totals.cached_tokens) > 0
    assert int(totals.copies) > 0


def spoil(engine):
    """NaN in every page, and the blocks given out in a random order."""
    state, ids = engine.state, list(range(engine.config.num_blocks))
    random.Random(3).shuffle(ids)
    pool = dataclasses.replace(state.scheduler.pool, free_stack=jnp.array(ids, jnp.int32))
    kv = jnp.full(state.kv.shape, np.nan, state.kv.dtype)
    scheduler = dataclasses.replace(state.scheduler, pool=pool)
    engine.state = dataclasses.replace(state, scheduler=scheduler, kv=kv)
