"""Streams of text: the same as decoding at once, and never half a character."""

import itertools

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from oxidize_jax.text.detokenizer import IncrementalDetokenizer
from oxidize_jax.text.pieces import byte_alphabet

BROKEN = "\ufffd"
FAMILY = "👩‍👩‍👧"


@pytest.fixture(scope="session")
def byte_id(byte_level):
    """``byte_id(b)``: the token of one byte."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    return lambda byte: byte_level.backend.token_to_id(letters[byte])


@pytest.fixture(scope="session")
def spm_byte_id(spm):
    return lambda byte: spm.backend.token_to_id(f"<0x{byte:02X}>")


def stream(tokenizer, ids, prompt_ids=(), **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, **options)
    return [*(detokenizer.add([i]) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("family", ["byte_level", "spm"])
@pytest.mark.parametrize("text", ["é", "😀", FAMILY, "a é\n😀!"])
def test_tx06_characters_come_whole(request, family, text):
    tokenizer = request.getfixturevalue(family)
    to_id = request.getfixturevalue("byte_id" if family == "byte_level" else "spm_byte_id")
    ids = [to_id(byte) for byte in text.encode()]
    parts = stream(tokenizer, ids)
    assert [part for part in parts if part] == list(text)
    assert "".join(parts) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("family", ["byte_level", "spm"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_tx06_a_cut_tail_is_one_replacement_mark_at_the_very_end(request, family, cut):
    tokenizer = request.getfixturevalue(family)
    to_id = request.getfixturevalue("byte_id" if family == "byte_level" else "spm_byte_id")
    ids = [to_id(byte) for byte in ("ok " + FAMILY + "😀").encode()[:-cut]]
    *parts, last = stream(tokenizer, ids)
    assert "".join(parts) == "ok " + FAMILY
    assert last == BROKEN
    assert tokenizer.decode(ids) == "ok " + FAMILY + BROKEN


def test_sv03_invalid_bytes_are_marked_as_soon_as_they_are_known_to_be(byte_level, byte_id):
    ids = [byte_id(byte) for byte in b"a\xffb\xe2\x82c\xf0\x9f"]
    assert stream(byte_level, ids) == ["a", BROKEN, "b", "", "", BROKEN + "c", "", "", BROKEN]


def test_special_tokens_are_left_out_or_whole(smollm2):
    ids = [1, *smollm2.encode("Hi"), 2]
    assert stream(smollm2, ids) == ["", "Hi", "", ""]
    shown = stream(smollm2, ids, skip_special_tokens=False)
    assert shown == ["<|im_start|>", "Hi", "<|im_end|>", ""]


def test_a_special_token_inside_a_character(byte_level, byte_id):
    first, second = (byte_id(byte) for byte in "é".encode())
    assert "".join(stream(byte_level, [first, 2, second])) == "é"
    shown = stream(byte_level, [first, 2, second], skip_special_tokens=False)
    assert "".join(shown) == f"{BROKEN}<|im_end|>{BROKEN}"


def test_tk04_the_stream_keeps_the_leading_space_after_a_prompt(spm):
    prompt, word = spm.encode("the dog"), spm.encode("fox", add_special_tokens=False)
    assert spm.pieces[word[0]].startswith(b" ")
    assert "".join(stream(spm, word)) == spm.decode(word) == "fox"
    assert "".join(stream(spm, word, prompt)) == spm.decode(word, prompt_ids=prompt) == " fox"
    # A prompt without text (only a BOS) leaves the output at the start of the text ...
    assert "".join(stream(spm, word, [1])) == "fox"
    # ... unless its special tokens are part of the text.
    assert "".join(stream(spm, word, [1], skip_special_tokens=False)) == " fox"


def test_only_one_space_is_dropped_and_only_at_the_start(spm):
    ids = spm.encode("  a  b", add_special_tokens=False)
    assert "".join(stream(spm, ids)) == "  a  b"
    assert "".join(stream(spm, [2, *ids, *ids])) == "  a  b   a  b"


def test_a_character_begun_in_the_prompt_belongs_to_the_output(byte_level, byte_id):
    prompt = [byte_id(byte) for byte in b"a\xf0\x9f"]
    rest = [byte_id(byte) for byte in b"\x98\x80!"]
    assert stream(byte_level, rest, prompt) == ["", "😀", "!", ""]
    assert byte_level.decode(rest, prompt_ids=prompt) == "😀!"
    # One that the output does not go on with is the prompt's, and no output is no text.
    assert stream(byte_level, [byte_id(ord("b"))], prompt) == ["b", ""]
    assert stream(byte_level, [], prompt) == [""]
    assert stream(byte_level, [byte_id(0xFF)], prompt) == [BROKEN, ""]


def test_after_finish(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.finish() == ""
    assert detokenizer.finish() == ""
    with pytest.raises(ValueError, match="after finish"):
        detokenizer.add([5])


def test_a_step_of_many_ids(smollm2):
    ids = smollm2.encode("Hello, wörld 😀!")
    detokenizer = IncrementalDetokenizer(smollm2)
    assert detokenizer.add(ids[:3]) + detokenizer.add(iter(ids[3:])) == "Hello, wörld 😀!"
    assert detokenizer.add([]) == ""


def test_cost_of_a_token_does_not_grow_with_the_text(smollm2):
    class Counted:
        """A tokenizer that counts the ids it is asked for."""

        asked = 0
        strip_spaces = smollm2.strip_spaces

        def bytes_of(self, ids, skip_special_tokens):
            ids = list(ids)
            self.asked += len(ids)
            return smollm2.bytes_of(ids, skip_special_tokens)

    counted = Counted()
    ids = smollm2.encode("one two " * 500)
    stream(counted, ids, prompt_ids=ids)
    assert counted.asked <= len(ids) + 3


def test_every_short_byte_sequence_in_every_split(byte_level, byte_id):
    """Python's decoder in steps, at once, and the tokenizers library's agree."""
    edges = [0x41, 0x80, 0x90, 0xA0, 0xBF, 0xC2, 0xE0, 0xED, 0xE1, 0xF0, 0xF1, 0xF4, 0xFF]
    for data in itertools.product(edges, repeat=3):
        ids = [byte_id(byte) for byte in data]
        whole = byte_level.decode(ids)
        assert whole == bytes(data).decode("utf-8", "replace")
        assert whole == byte_level.backend.decode(ids)
        assert "".join(stream(byte_level, ids)) == whole


@st.composite
def chunked(draw, size):
    """Random ids of a vocabulary (and some beyond it), cut at random places."""
    ids = draw(st.lists(st.integers(0, size + 3), max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    bounds = itertools.pairwise([0, *cuts, len(ids)])
    return ids, [ids[start:end] for start, end in bounds]


def check_stream(tokenizer, ids, chunks, prompt_ids, skip):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip)
    parts = [detokenizer.add(chunk) for chunk in chunks]
    text = tokenizer.decode(ids, skip, prompt_ids)
    assert "".join([*parts, detokenizer.finish()]) == text
    return text


@settings(max_examples=300, deadline=None)
@given(case=chunked(49152), skip=st.booleans())
def test_smollm2_stream_equals_one_shot(smollm2, case, skip):
    ids, chunks = case
    text = check_stream(smollm2, ids, chunks, (), skip)
    assert text == smollm2.backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("family", ["byte_level", "spm"])
def test_small_vocabularies_stream_equals_one_shot(request, family, data, skip):
    """Mostly single bytes, so that most characters are broken; after random prompts."""
    tokenizer = request.getfixturevalue(family)
    ids, chunks = data.draw(chunked(tokenizer.vocab_size))
    prompt_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=6))
    text = check_stream(tokenizer, ids, chunks, prompt_ids, skip)
    before, after = tokenizer.decode(prompt_ids, skip), tokenizer.decode([*prompt_ids, *ids], skip)
    if before.endswith(BROKEN):  # the output may have gone on with the prompt's last character
        assert after in (before + text, before[:-1] + text)
    else:
        assert after == before + text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
@example(text="<|im_end|>")
@pytest.mark.parametrize("family", ["byte_level", "spm"])
def test_any_text_comes_back_and_streams(request, family, text):
    tokenizer = request.getfixturevalue(family)
    # Hypothesis draws texts it finds in our modules too, the names of special tokens among them.
    assume(not any(tokenizer.backend.id_to_token(i) in text for i in tokenizer.special_token_ids))
    ids = tokenizer.encode(text, add_special_tokens=False)
    # U+2581 is the space of a SentencePiece vocabulary.
    expected = text.replace("\u2581", " ") if family == "spm" else text
    assert tokenizer.decode(ids) == expected
    assert "".join(stream(tokenizer, ids)) == expected
    assert tokenizer.backend.decode(ids) == expected
