"""Tokenizers built from GGUF metadata, against those of other libraries."""

import json

import pytest

from oxidize_jax.text.tokenizer import Tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_ids_agree_with_transformers(golden, byte_level_metadata, pre):
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre, add_bos_token=False))
    for text, ids, decoded in golden("byte_level")["cases"][pre]:
        # transformers leaves out that Llama 3 takes a whole word before it merges; no word of
        # this vocabulary is out of reach of its merges, so the ids are the same.
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == decoded


def test_pre_tokenizers_differ(byte_level_metadata):
    def words(pre, text):
        backend = Tokenizer.from_gguf(byte_level_metadata(pre)).backend
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    text = "a 1234+x"
    assert words("gpt-2", text) == ["a", "Ġ1234", "+", "x"]
    assert words("smollm", text) == ["a", "Ġ", "1", "2", "3", "4", "+", "x"]
    assert words("qwen2", text) == ["a", "Ġ", "1", "2", "3", "4", "+x"]
    assert words("llama-bpe", text) == ["a", "Ġ", "123", "4", "+x"]
    assert words("default", text) == ["a", "Ġ", "123", "4", "+", "x"]
    assert words("default", "a 12 b") == ["a", "Ġ", "12", "Ġb"]


def test_missing_pre_tokenizer_is_the_default_one(byte_level_metadata):
    unnamed = Tokenizer.from_gguf(byte_level_metadata(None))
    default = Tokenizer.from_gguf(byte_level_metadata("default"))
    assert unnamed.encode("x+12345 y") == default.encode("x+12345 y")


def test_llama_bpe_takes_a_whole_word_that_no_merge_reaches(byte_level_metadata, golden):
    tokens = [*golden("byte_level")["tokens"], "zqj"]
    types = [*golden("byte_level")["types"], 1]
    more = {"tokens": tokens, "token_type": types}
    whole = Tokenizer.from_gguf(byte_level_metadata("llama-bpe", **more))
    merged = Tokenizer.from_gguf(byte_level_metadata("qwen2", **more))
    assert whole.encode("zqj", add_special_tokens=False) == [len(tokens) - 1]
    assert len(merged.encode("zqj")) == 3


@pytest.mark.parametrize("prefix", [True, False])
def test_spm_ids_and_texts_agree_with_sentencepiece(golden, spm_metadata, prefix):
    tokenizer = Tokenizer.from_gguf(spm_metadata(prefix))
    for text, ids, decoded in golden("sentencepiece")["prefix" if prefix else "no_prefix"]["cases"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == decoded
    assert tokenizer.strip_spaces == prefix


def test_tk04_space_prefix_is_the_same_from_gguf_and_from_a_folder(golden, spm, tmp_path):
    data = golden("llama_folder")
    (tmp_path / "tokenizer.json").write_text(json.dumps(data["tokenizer"]))
    folder = Tokenizer.from_hf_folder(tmp_path)
    for text, ids, decoded in data["cases"]:
        assert folder.encode(text) == ids
        assert spm.encode(text, add_special_tokens=False) == ids
        assert folder.decode(ids) == spm.decode(ids) == decoded


def test_tx09_byte_tokens_are_bytes(spm, spm_metadata):
    newline = spm_metadata()["tokenizer.ggml.tokens"].index("<0x0A>")
    a = spm.encode("a", add_special_tokens=False)
    assert spm.decode([newline]) == "\n"
    assert spm.decode([*a, newline, newline]) == "a\n\n"
    # The name of a byte token in a text is that text.
    assert spm.decode(spm.encode("<0x0A>")) == "<0x0A>"


def test_without_byte_tokens_a_run_of_unknown_characters_is_one_unknown_token(spm_metadata):
    tokenizer = Tokenizer.from_gguf(
        spm_metadata(
            tokens=["<unk>", "<s>", "</s>", "▁", "a", "▁a"],
            scores=[0.0, 0.0, 0.0, -2.0, -3.0, -1.0],
            token_type=[2, 3, 3, 1, 1, 1],
        )
    )
    assert tokenizer.encode("a日本a") == [1, 5, 0, 4]


def test_tk01_bos_as_the_file_says(byte_level_metadata, spm_metadata):
    def added(metadata):
        tokenizer = Tokenizer.from_gguf(metadata)
        plain = tokenizer.encode("G", add_special_tokens=False)
        assert tokenizer.encode("G") == [1] * tokenizer.add_bos + plain
        return tokenizer.add_bos

    assert not added(byte_level_metadata("gpt-2"))
    assert added(byte_level_metadata("gpt-2", add_bos_token=True))
    assert added(byte_level_metadata("llama-bpe"))
    assert not added(byte_level_metadata("llama-bpe", add_bos_token=False))
    assert added(spm_metadata())
    assert not added(spm_metadata(add_bos_token=False))


def test_tk04_marks_of_turns_of_phi3_take_the_blanks_behind_them(spm_metadata):
    plain = Tokenizer.from_gguf(spm_metadata())
    phi3 = Tokenizer.from_gguf(spm_metadata() | {"general.architecture": "phi3"})
    hi = plain.encode("Hi", add_special_tokens=False)
    end, begin = plain.encode("<|im_end|><s>", add_special_tokens=False)
    assert phi3.encode("<|im_end|>\n Hi<|im_end|>\n", add_special_tokens=False) == [end, *hi, end]
    assert plain.encode("<|im_end|>\nHi", add_special_tokens=False) != [end, *hi]
    # The beginning of a text is no mark of a turn.
    spaced = plain.encode("<s> Hi", add_special_tokens=False)
    assert phi3.encode("<s> Hi", add_special_tokens=False) == spaced != [begin, *hi]


def test_eos_is_added_where_the_file_says(spm_metadata):
    tokenizer = Tokenizer.from_gguf(spm_metadata(add_eos_token=True))
    assert tokenizer.encode("") == [1, 2]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_tk02_stop_ids_are_eos_eot_eom_and_the_end_of_turn(byte_level_metadata, spm_metadata):
    def stops(metadata):
        return Tokenizer.from_gguf(metadata).eos_token_ids

    assert stops(byte_level_metadata()) == (2,)
    assert stops(byte_level_metadata(eos_token_id=None)) == (2,)  # <|im_end|> by its name
    assert stops(byte_level_metadata(eos_token_id=0)) == (0, 2)
    assert stops(byte_level_metadata(eos_token_id=0, eot_token_id=2, eom_token_id=1)) == (0, 2, 1)
    assert stops(spm_metadata()) == (2, 3)
    assert stops(spm_metadata(eos_token_id=3)) == (3,)


def test_end_of_turn_counts_only_as_a_control_token(byte_level_metadata, golden):
    types = golden("byte_level")["types"].copy()
    types[2] = 4
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(eos_token_id=0, token_type=types))
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>")) == "a<|im_end|>"


def test_user_defined_tokens_are_matched_and_stay_text(byte_level, byte_level_metadata):
    think = byte_level_metadata()["tokenizer.ggml.tokens"].index("<think>")
    assert think in byte_level.encode("so <think>hm")
    assert think not in byte_level.special_token_ids
    assert byte_level.decode(byte_level.encode("so <think>hm")) == "so <think>hm"


def test_added_tokens_are_their_own_text(byte_level_metadata, golden):
    # "é" and "Ġ" are stand-ins for single bytes, but not in a token that is literal text.
    tokens = [*golden("byte_level")["tokens"], "<éĠ>", "<é Ġ>"]
    types = [*golden("byte_level")["types"], 4, 3]
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(tokens=tokens, token_type=types))
    ids = tokenizer.encode("<éĠ><é Ġ>")
    assert ids == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<éĠ><é Ġ>"


def test_sequence_marks_left_among_the_words_are_special(byte_level_metadata, golden):
    types = golden("byte_level")["types"].copy()
    types[2] = 1
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(token_type=types))
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2]) == ""


def test_padding_tokens_are_no_tokens(byte_level_metadata, golden):
    size = len(golden("byte_level")["tokens"])
    tokens = [*golden("byte_level")["tokens"], f"[PAD{size}]", f"[PAD{size}]", "", ""]
    types = [*golden("byte_level")["types"], 5, 5, 1, 1]
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(tokens=tokens, token_type=types))
    assert tokenizer.vocab_size == size + 4
    assert max(tokenizer.encode(f"[PAD{size}]")) < size
    assert tokenizer.decode(range(size, size + 4), skip_special_tokens=False) == ""


def test_chat_template_and_names_come_from_the_file(byte_level_metadata):
    metadata = byte_level_metadata(padding_token_id=0, unknown_token_id=0)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ pad_token }}"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.chat_template == "{{ bos_token }}{{ pad_token }}"
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == [1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported"),
        ({"model": None}, "tokenizer.ggml.model=None is not supported"),
        ({"pre": "mpt"}, "tokenizer.ggml.pre='mpt' is not supported"),
        ({"add_space_prefix": True}, "add_space_prefix=true with pre='gpt-2' is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"token_type": None}, "tokenizer.ggml.token_type is missing"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for 462 tokens"),
        ({"token_type": [9] * 462}, "token_type holds 9"),
        ({"merges": ["a b c"]}, r"merges\[0\]='a b c': not two tokens"),
        ({"merges": ["ab"]}, r"merges\[0\]='ab': not two tokens"),
        ({"merges": ["\u4e00 a"]}, "merges do not fit tokenizer.ggml.tokens"),
        ({"eos_token_id": 462}, "eos_token_id=462 is outside the vocabulary of 462"),
        ({"bos_token_id": None, "add_bos_token": True}, "wants bos round a text"),
        ({"tokens": ["a"] * 462}, "'a' is both id 0 and 1"),
    ],
)
def test_byte_level_metadata_that_cannot_be_used(byte_level_metadata, changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, "scores has 1 entries for 460 tokens"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces=true is not supported"),
    ],
)
def test_spm_metadata_that_cannot_be_used(spm_metadata, changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(spm_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": "257"}, "eos_token_id='257': must be an integer"),
        ({"eos_token_id": [257]}, r"eos_token_id=\[257\]: must be an integer"),
        ({"eot_token_id": True}, "eot_token_id=True: must be an integer"),
        ({"bos_token_id": "x"}, "bos_token_id='x': must be an integer"),
        ({"padding_token_id": "x"}, "padding_token_id='x': must be an integer"),
        ({"unknown_token_id": 1.0}, "unknown_token_id=1.0: must be an integer"),
        ({"model": 5}, "tokenizer.ggml.model=5: must be text"),
        ({"pre": ["smollm"]}, r"tokenizer.ggml.pre=\['smollm'\]: must be text"),
        ({"pre": "x" * 999}, r"tokenizer.ggml.pre='x+\.\.\.x+' is not supported"),
        ({"add_bos_token": 1}, "add_bos_token=1: must be true or false"),
        ({"tokens": 5}, "tokenizer.ggml.tokens=5: must be a list"),
        ({"tokens": list(range(462))}, r"tokenizer.ggml.tokens\[0\]=0: must be text"),
        ({"token_type": 5}, "tokenizer.ggml.token_type=5: must be a list"),
        ({"token_type": [1.5] * 462}, r"token_type\[0\]=1.5: must be an integer"),
        ({"merges": 5}, "tokenizer.ggml.merges=5: must be a list"),
        ({"merges": "a b"}, "tokenizer.ggml.merges='a b': must be a list"),
        ({"merges": [1, 2]}, r"tokenizer.ggml.merges\[0\]=1: must be text"),
    ],
)
def test_metadata_of_the_wrong_type_is_named_in_one_line(byte_level_metadata, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_gguf(byte_level_metadata(**changes))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_other_metadata_of_the_wrong_type(byte_level_metadata, spm_metadata):
    with pytest.raises(ValueError, match=r"scores\[0\]='0': must be a float"):
        Tokenizer.from_gguf(spm_metadata(scores=["0"] * 460))
    template = {"tokenizer.chat_template": ["x"]}
    with pytest.raises(ValueError, match=r"tokenizer\.chat_template=\['x'\]: must be text"):
        Tokenizer.from_gguf(byte_level_metadata() | template)
