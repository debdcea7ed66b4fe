"""The real SmolLM2 tokenizer, built from its GGUF file alone."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

GREEDY = Path(__file__).parents[1] / "goldens" / "smollm2_greedy.json"
CASES = json.loads(GREEDY.read_text())["cases"]

# SmolLM2 has no token for these bytes, and drops them as its Hugging Face tokenizer does.
NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"

TEXTS = [
    "café cafe\u0301 naïve Ångström",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽",
    "日本の首都は東京です。",
    "القاهرة هي عاصمة مصر \u200f(RTL)\u200e",
    "\x00\x01\x07\x1b[31m\x7f\u200b\u00a0\u3000",
    " " * 50 + "\t" * 7 + "\n" * 13 + "\r\n\r\n x ",
    "0123456789 1,234.56 ½²３Ⅷ",
    "a\n\n\n b\n \n  c",
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_prompt_and_output_agree_with_transformers(smollm2, case):
    if case["kind"] == "chat":
        ids = smollm2.apply_chat_template([{"role": "user", "content": case["prompt"]}])
    else:
        ids = smollm2.encode(case["prompt"])
    assert ids == case["prompt_ids"]
    assert smollm2.decode(case["output_ids"], prompt_ids=ids) == case["text"]


def test_what_the_file_says(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_token_ids == frozenset(range(17))
    assert not smollm2.add_bos
    assert smollm2.strip_spaces == 0


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_exactly(smollm2, text):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    # The library's own decoding is the same bytes.
    assert smollm2.backend.decode(ids) == text


def test_each_digit_is_a_token(smollm2):
    ids = smollm2.encode("a 2024")
    assert [smollm2.decode([i]) for i in ids] == ["a", " ", "2", "0", "2", "4"]


def test_bytes_without_a_token_are_dropped(smollm2):
    assert smollm2.decode(smollm2.encode(f"a{NO_TOKEN}b")) == "ab"


# U+40000 to U+BFFFF, unassigned, need the lead bytes F1 and F2, which have no token either.
ENCODABLE = st.characters(
    codec="utf-8", exclude_characters=NO_TOKEN, max_codepoint=0x3FFFF
) | st.characters(min_codepoint=0xC0000, max_codepoint=0x10FFFF)


@settings(max_examples=200, deadline=None)
@given(st.text(ENCODABLE))
def test_any_text_comes_back_exactly(smollm2, text):
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_special_tokens_in_a_text_are_special(smollm2):
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "user\nHi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"


def test_sv01_empty_text_has_no_ids(smollm2):
    assert smollm2.encode("") == []
    assert smollm2.encode(" ") == [216]
    assert smollm2.decode([]) == ""


def test_sv03_lone_surrogate_is_refused(smollm2):
    with pytest.raises(ValueError, match="lone surrogate at index 3"):
        smollm2.encode("abc\ud83d")


def test_text_must_be_a_string(smollm2):
    with pytest.raises(ValueError, match="text=bytes: must be a string"):
        smollm2.encode(b"abc")


def test_ids_beyond_the_vocabulary_are_no_text_and_negative_ones_an_error(smollm2):
    assert smollm2.decode([28120, 49152, 60000, 905]) == smollm2.decode([28120, 905])
    with pytest.raises(ValueError, match="token id -1"):
        smollm2.decode([-1])
