"""The tokenizer of Gemma 3 270M, the built-in base model, against llama.cpp on the same file.

The golden file is made by ``tests/tools/compare_llama_cpp.py record``.
"""

import json
from pathlib import Path

import pytest

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
