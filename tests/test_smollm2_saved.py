"""The real model, saved and restored: the tokens of transformers, whatever it came from."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from oxidize_jax import LLM, SamplingParams
from oxidize_jax.checkpoints.load import load_checkpoint

pytestmark = pytest.mark.slow
GOLDENS = Path(__file__).parent / "goldens" / "smollm2_greedy.json"
CASES = json.loads(GOLDENS.read_text())["cases"]
LENGTH = 20


def make(model, dtype):
    sizes = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    return LLM(model, dtype=dtype, progress=False, **sizes)


def prompts():
    return [{"prompt_token_ids": case["prompt_ids"]} for case in CASES]


@pytest.fixture(scope="module", params=["float32", "int8"])
def pair(request, smollm2_path, tmp_path_factory):
    """The outputs of the model from its GGUF, and of the same saved and restored."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=5)
    llm = make(smollm2_path, request.param)
    outputs = llm.generate(prompts(), params)
    folder = llm.save(tmp_path_factory.mktemp("saved") / "m")
    del llm
    restored = make(folder, "auto")
    assert restored.options.dtype == request.param
    # One at a time: steps of few tokens, padded otherwise than those of the batch.
    alone = [restored.generate(prompt, params)[0] for prompt in prompts()[:2]]
    return request.param, folder, outputs, restored.generate(prompts(), params), alone


def test_ld09_a_saved_model_gives_the_tokens_of_hugging_face(pair, smollm2_path):
    dtype, folder, outputs, restored, alone = pair
    assert [output.outputs for output in restored] == [output.outputs for output in outputs]
    saved, loaded = load_checkpoint(folder, dtype).params, load_checkpoint(smollm2_path, dtype)
    for name, values in loaded.params.items():
        np.testing.assert_array_equal(np.asarray(saved[name]), np.asarray(values), strict=True)
    for output, case in zip([*restored, *alone], [*CASES, *CASES[:2]], strict=True):
        completion = output.outputs[0]
        expected = tuple(case["output_ids"][:LENGTH])
        if dtype == "float32":
            assert completion.token_ids == expected
        # Of the first token, before texts part: float32's, to what the type rounds.
        first, wanted = completion.logprobs[0], case["top5"][0][0]
        tolerance = {"float32": 1e-3, "bfloat16": 0.15, "int8": 0.6}[dtype]
        assert math.isclose(first[wanted[0]].logprob, wanted[1], abs_tol=tolerance)
