"""The real model gives transformers' greedy tokens, however its work is cut and batched."""

import gc
import json
from pathlib import Path

import jax.numpy as jnp
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


@pytest.mark.parametrize("chunk", [16, pytest.param(64, marks=pytest.mark.slow), pytest.param(512)])
def test_all_cases_in_one_batch(smollm2_path, chunk):
    for output, case in zip(run_batch(make(smollm2_path, chunk)), CASES, strict=True):
        check(output, case)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_each_case_alone(smollm2_path, chunk):
    for output, case in zip(run_alone(make(smollm2_path, chunk)), CASES, strict=True):
        check(output, case)


@pytest.mark.slow
def test_same_weights_from_safetensors(smollm2_path, tmp_path):
    checkpoint = load_checkpoint(smollm2_path, jnp.float32)
    write_hf_folder(tmp_path, checkpoint.config, checkpoint.params, shards=2)
    del checkpoint
    llm = make(tmp_path, 512, tokenizer=str(smollm2_path))
    for output, case in zip(run_batch(llm), CASES, strict=True):
        check(output, case)
