"""Byte-level BPE by the name in a GGUF file, against the tokenizer.json of the family."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from oxidize_jax.text.pre_tokenizers import WORD_RULES
from oxidize_jax.text.tokenizer import Tokenizer

FAMILIES = ["llama-bpe", "qwen2", "gpt-4o", "dbrx", "tekken"]
UNREACHED = "ĠHELLO"
TEXTS = [
    "",
    " ",
    "   ",
    "G",
    " G",
    "  G ",
    "Hello, world! HELLO HELLO helloWorld HTMLParser naïveTest",
    "1, 12, 123, 1234 1234567 ½ ² \uff13 Ⅷ",
    "I'm, it's, THEY'RE, we'Ll 'tis 'S don't x's'd",
    "line\r\nline\r\n\r\n  end \t\n\n x",
    "path/to//file /\n/ http://x.y/z?",
    "café cafe\u0301 ﬁ Ångström A\u030angström",
    "日本の首都は東京です。2024年",
    "القاهرة هي عاصمة مصر १२३",
    "Москва — СТОЛИЦА России ǅungla",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽",
    "\x01\x07\x1b[0m \x7f \u200b\u00a0\u3000end",
    "price: $3.50+20% <= €7 ~ £2 ^ `x` |y|",
    "a" * 40 + " " * 20 + "\n" * 10 + "9" * 10,
    "<|im_start|>user\nHi<|im_end|> G<|endoftext|>\n",
    "<think> hm</think> so<|im_end",
]


@pytest.fixture(scope="module")
def pair(golden, byte_level_metadata):
    """``pair(name)``: the small vocabulary as GGUF metadata, and as a tokenizer.json of a family.

    Of the real tokenizer.json there is all but vocabulary, merges and added tokens. One token,
    a whole word, is out of reach of the merges.
    """
    vocabulary = golden("byte_level")
    tokens = [*vocabulary["tokens"], UNREACHED]
    types = [*vocabulary["types"], 1]

    def make(name):
        real = golden("pre_tokenizers")[name]
        added = [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == 3,
            }
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (3, 4)
        ]
        model = {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": vocabulary["merges"],
            "ignore_merges": real["ignore_merges"],
        }
        content = {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": real["normalizer"],
            "pre_tokenizer": real["pre_tokenizer"],
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
            "model": model,
        }
        metadata = byte_level_metadata(name, tokens=tokens, token_type=types, add_bos_token=False)
        return Tokenizer.from_gguf(metadata), tokenizers.Tokenizer.from_str(json.dumps(content))

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_tokenizer_json(pair, name):
    ours, theirs = pair(name)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_text_is_cut_alike(pair, name):
    ours, theirs = pair(name)

    @settings(max_examples=150, deadline=None)
    @given(st.text(st.sampled_from("aB'sRe \t\r\n1²٣/.é\u0301ǅ日한😀<|_")) | st.text())
    def check(text):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids

    check()


def test_whole_words_first_where_the_family_has_it(pair):
    for name in FAMILIES:
        ours, _ = pair(name)
        whole = ours.backend.token_to_id(UNREACHED)
        assert (whole in ours.encode("x HELLO")) == (name in ("llama-bpe", "tekken"))


def test_names_for_one_cut(golden):
    text = "a 1234+x HELLOWorld'S /\n/"
    words = {
        name: [word for word, _ in rules.make().pre_tokenize_str(text)]
        for name, rules in WORD_RULES.items()
    }
    assert words["smaug-bpe"] == words["llama3"] == words["llama-v3"] == words["llama-bpe"]
    assert words["dbrx"] == words["llama-bpe"]
    for apart in ("gpt-2", "smollm", "qwen2", "gpt-4o", "tekken"):
        others = [cut for name, cut in words.items() if name != apart]
        assert words[apart] not in others


def test_tk01_bos_by_default(byte_level_metadata):
    adding = {name for name in WORD_RULES if Tokenizer.from_gguf(byte_level_metadata(name)).add_bos}
    assert adding == {"llama-bpe", "llama-v3", "llama3", "tekken"}


@pytest.mark.parametrize("name", ["gemma4", "deepseek-r1-qwen", "llama4", "tekken2"])
def test_other_names_are_refused(byte_level_metadata, name):
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.pre='{name}' is not supported"):
        Tokenizer.from_gguf(byte_level_metadata(name))
