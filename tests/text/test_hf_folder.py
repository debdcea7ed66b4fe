"""Tokenizers read from a Hugging Face folder."""

import base64
import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from oxidize_jax.text.tokenizer import Tokenizer

WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_tk01_exactly_one_bos(hf_folder, adds_bos, template):
    tokenizer = Tokenizer.from_hf_folder(hf_folder(adds_bos, chat_template=template))
    plain = tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.add_bos is adds_bos
    # A conversation has the template's BOS and no other, a plain prompt the tokenizer's.
    assert tokenizer.apply_chat_template(HI) == [1] * (template is WITH_BOS) + plain
    assert tokenizer.encode("Hi") == [1] * adds_bos + plain


@pytest.mark.parametrize("adds_bos", [True, False])
def test_sv01_empty_text_is_the_bos_or_nothing(hf_folder, adds_bos):
    tokenizer = Tokenizer.from_hf_folder(hf_folder(adds_bos))
    assert tokenizer.encode("") == [1] * adds_bos


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, (2,)),
        ({"config": {"eos_token_id": 7}}, (2, 7)),
        ({"generation_config": {"eos_token_id": [7, 9]}}, (2, 7, 9)),
        (
            {"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [7, 9]}},
            (2, 7, 9),
        ),
        ({"config": {"eos_token_id": [9, 2]}, "generation_config": {}}, (2, 9)),
        ({"config": {"eos_token_id": None}}, (2,)),
        ({"tokenizer_config": {"eos_token": "<|endoftext|>"}}, (0, 2)),
        ({"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}}}, (0, 2)),
        (
            {"tokenizer_config": {}, "special_tokens_map": {"eot_token": "<|im_start|>"}},
            (1, 2),
        ),
    ],
)
def test_tk02_stop_ids_are_a_union(hf_folder, files, stops):
    assert Tokenizer.from_hf_folder(hf_folder(**files)).eos_token_ids == stops


@pytest.mark.parametrize("value", [-1, True, "2", [2, None], 2.0])
def test_eos_that_is_no_id(hf_folder, value):
    with pytest.raises(ValueError, match=r"config.json: eos_token_id=.*must be an id"):
        Tokenizer.from_hf_folder(hf_folder(config={"eos_token_id": value}))


@pytest.mark.parametrize("file", ["config", "generation_config"])
@pytest.mark.parametrize("value", [5000, [2, 5000]])
def test_eos_outside_the_vocabulary_is_refused(hf_folder, file, value):
    # The tokenizer has 462 tokens; a model's vocabulary may be padded beyond that.
    with pytest.raises(ValueError, match=rf"/{file}\.json: eos_token_id=.*5000.* of 462 tokens"):
        Tokenizer.from_hf_folder(hf_folder(**{file: {"eos_token_id": value}}))


def test_eos_in_the_padding_of_the_models_vocabulary_is_an_id(hf_folder):
    files = {"config": {"vocab_size": 512}, "generation_config": {"eos_token_id": 511}}
    assert Tokenizer.from_hf_folder(hf_folder(**files)).eos_token_ids == (2, 511)
    files["generation_config"] = {"eos_token_id": 512}
    with pytest.raises(ValueError, match=r"eos_token_id=512 is outside .* of 512 tokens"):
        Tokenizer.from_hf_folder(hf_folder(**files))


def test_no_truncation_and_no_padding(hf_folder):
    tokenizer = Tokenizer.from_hf_folder(hf_folder())  # the file says 4 tokens, padded to 4
    assert len(tokenizer.encode("x" * 100)) == 100
    assert len(tokenizer.encode("x")) == 1


def test_the_same_ids_as_from_gguf(hf_folder, byte_level, golden):
    tokenizer = Tokenizer.from_hf_folder(hf_folder())
    for text, ids, _ in golden("byte_level")["cases"]["gpt-2"]:
        if "<think>" not in text:  # an added token in the GGUF vocabulary alone
            assert tokenizer.encode(text) == ids == byte_level.encode(text)


def test_special_tokens_by_name(hf_folder):
    files = {
        "tokenizer_config": {"bos_token": None, "eos_token": {"content": "<|im_end|>"}},
        "special_tokens_map": {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"},
    }
    tokenizer = Tokenizer.from_hf_folder(hf_folder(**files))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.bos_token_id == 1
    none = Tokenizer.from_hf_folder(hf_folder(tokenizer_config={}, special_tokens_map={}))
    assert none.bos_token_id is None
    assert none.eos_token is None
    assert not none.add_bos


def test_special_tokens_that_tokenizer_json_does_not_mark(hf_folder):
    files = {
        "tokenizer_config": {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {
                "1": {"content": "<|im_start|>", "special": True, "normalized": False}
            },
        },
        "special_tokens_map": {"additional_special_tokens": ["<think>"]},
    }
    tokenizer = Tokenizer.from_hf_folder(hf_folder(special=(), **files))
    assert {1, 2} < tokenizer.special_token_ids
    assert len(tokenizer.encode("<|im_start|><|im_end|><think>")) == 3
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<|im_end|>b<think>")) == "ab"


def test_files_of_different_tokenizers_are_refused(hf_folder):
    files = {"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<new>"}}}}
    with pytest.raises(ValueError, match=r"added_tokens_decoder\[9\] is '<new>'.*makes id 462"):
        Tokenizer.from_hf_folder(hf_folder(**files))


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config": {"chat_template": "a"}, "chat_template": "b"}, "b"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": "d"},
                    ]
                }
            },
            "d",
        ),
    ],
)
def test_where_the_chat_template_comes_from(hf_folder, files, template):
    assert Tokenizer.from_hf_folder(hf_folder(**files)).chat_template == template


def test_no_chat_template(hf_folder):
    with pytest.raises(ValueError, match="no chat template: pass --raw"):
        Tokenizer.from_hf_folder(hf_folder()).apply_chat_template(HI)


def test_no_tokenizer_json(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json: not found"):
        Tokenizer.from_hf_folder(tmp_path)


def test_broken_files(hf_folder):
    folder = hf_folder()
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config.json: holds a list"):
        Tokenizer.from_hf_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        Tokenizer.from_hf_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer this reads"):
        Tokenizer.from_hf_folder(folder)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "without a decoder"),
        (decoders.WordPiece(), "WordPiece.*not supported"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), "Strip.*not supported"),
        (decoders.Sequence([decoders.Replace("_", " ")]), "Replace.*not supported"),
    ],
)
def test_decoders_that_are_not_byte_strings_are_refused(hf_folder, decoder, message):
    folder = hf_folder()
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_hf_folder(folder)


def test_metaspace_decoder(golden, spm, tmp_path):
    content = golden("llama_folder")["tokenizer"]
    backend = Backend.from_str(json.dumps(content))
    backend.decoder = decoders.Metaspace("▁", "always")
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_hf_folder(tmp_path)
    ids = tokenizer.encode("the dog doesn't mind")
    assert tokenizer.decode(ids) == backend.decode(ids) == "the dog doesn't mind"


def test_an_id_that_no_table_can_have_is_refused(hf_folder):
    folder = hf_folder()
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 4_000_000_000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json: token 'far' has id 4000000000: ids up"):
        Tokenizer.from_hf_folder(folder)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "\ud800"}},
        {"special_tokens_map": {"additional_special_tokens": ["\ud800"]}},
        {"tokenizer_config": {"chat_template": "\ud800"}},
    ],
)
def test_half_a_character_in_a_file_is_refused_by_name(hf_folder, files):
    (name,) = files
    with pytest.raises(
        ValueError, match=rf"{name}\.json: has a lone surrogate .*\\ud800"
    ) as caught:
        Tokenizer.from_hf_folder(hf_folder(**files))
    assert not isinstance(caught.value, UnicodeError)


def test_a_panic_of_the_library_is_a_value_error(hf_folder):
    folder = hf_folder()
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": ""}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: not a tokenizer this reads: .*charsmap"
    ):
        Tokenizer.from_hf_folder(folder)


def test_a_panic_while_a_text_is_encoded_is_a_value_error(hf_folder):
    folder = hf_folder()
    content = json.loads((folder / "tokenizer.json").read_text())
    # A trie that ends before its first node.
    charsmap = base64.b64encode(b"\4" + bytes(7)).decode()
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_hf_folder(folder)
    with pytest.raises(ValueError, match="tokenizer cannot encode the text: index out of bounds"):
        tokenizer.encode("a")
