"""Gemma 3 270M, the built-in base model, against llama.cpp on the same file.

The golden file is made by ``tests/tools/compare_llama_cpp.py record``. llama.cpp rounds its
activations to eight bits, so where two tokens are nearly as likely it may take the other one:
``compare`` shows the six of ten continuations that part, all at such places.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from oxidize_jax import LLM
from oxidize_jax.checkpoints.builtin import fetch_builtin
from oxidize_jax.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "goldens" / "gemma3_llama_cpp.json"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_gguf(fetch_builtin("gemma-3-270m"))


def test_token_ids_are_those_of_llama_cpp(tokenizer):
    golden = json.loads(GOLDEN.read_text())
    cases = [*golden["encoded"], *([c["prompt"], c["prompt_ids"]] for c in golden["cases"])]
    assert len(cases) == 41
    for text, ids in cases:
        assert tokenizer.encode(text) == ids, text


def test_tk02_both_ends_stop_a_text(tokenizer):
    assert tokenizer.eos_token_ids == (1, 106)
    assert tokenizer.decode([1, 106], skip_special_tokens=False) == "<eos><end_of_turn>"


def test_tk01_one_bos(tokenizer):
    assert tokenizer.add_bos
    assert tokenizer.encode("G").count(2) == 1


def test_a_base_model_does_not_chat_and_says_so(tokenizer):
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match=r"no chat template.*use generate with a plain prompt"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


NEAR_TIE = 0.5
"""Logits. The most that another token may stand above llama.cpp's."""


def test_along_the_tokens_of_llama_cpp_ours_would_go_the_same_way_but_for_near_ties():
    """A pass over its continuations, which compiles far less than to generate ours."""
    llm = LLM("gemma-3-270m", dtype="float32", max_model_len=64, warm_up=False, progress=False)
    cases = json.loads(GOLDEN.read_text())["cases"]
    prompts = [{"prompt_token_ids": case["prompt_ids"] + case["output_ids"]} for case in cases]
    agree, differences = 0, []
    for output, case in zip(llm.score(prompts, top_logprobs=1), cases, strict=True):
        for place, theirs in enumerate(case["top"], start=len(case["prompt_ids"])):
            best = max(entry.logprob for entry in output.prompt_logprobs[place].values())
            margin = best - output.token_logprobs[place]
            assert margin < NEAR_TIE, (case["prompt"], place)
            agree += margin == 0
            differences.append(abs(output.token_logprobs[place] - theirs[0][1]))
    assert len(differences) == 200
    assert agree >= 190
    assert np.mean(differences) < 0.1
