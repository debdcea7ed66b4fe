"""Grammars that name tokens by themselves, or spell the text of one."""

import numpy as np
import pytest
from tiny_model import write_tiny_model

from oxidize_jax.sampling.structured import StructuredOutputsParams
from oxidize_jax.sampling.token_mask import unpack_token_mask
from oxidize_jax.structured.compiler import GrammarCompiler
from oxidize_jax.text.tokenizer import Tokenizer

# Of the tiny model: 256 bytes, then three special tokens.
IM_START, IM_END = 257, 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_hf_folder(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def compiled(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)

    def make(**fields):
        return compiler.compile(StructuredOutputsParams(**fields))

    return make


def test_the_ids_are_those_of_the_tiny_model(tokenizer):
    assert tokenizer.encode("<|im_start|><|im_end|>") == [IM_START, IM_END]
    assert IM_END in tokenizer.eos_token_ids
    assert IM_START not in tokenizer.eos_token_ids


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: "a" <|im_end|>', r"<\|im_end\|> ends an output"),
        ("start: <|im_end|>", r"<\|im_end\|> ends an output"),
        ('start: "a" b\nb: ("c" | <|im_end|> "d")', r"<\|im_end\|> ends an output"),
        (f'start: "a" <[{IM_END}]>', rf"<\[{IM_END}\]> ends an output"),
        (f'start: "a" <[2,{IM_END}]>', rf"<\[2,{IM_END}\]> ends an output"),  # both are ends
        ('start: "a" <|im_start|> "b"', r"<\|im_start\|> is never sampled"),
        (f'start: "a" <[{IM_START}-{IM_END}]>', r"<\[257-258\]> is never sampled"),
        ('start: "a" <[^0-256]>', r"<\[\^0-256\]> is never sampled"),
        ('// "\nstart: "a//" /\\/"/ <|im_end|> "b"', r"<\|im_end\|> ends an output"),
    ],
)
def test_a_token_that_no_output_can_have_is_refused_by_name(compiled, grammar, message):
    with pytest.raises(ValueError, match=rf"^structured_outputs\.grammar: {message}.*out\.$") as no:
        compiled(grammar=grammar)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" // <|im_end|>\n',
        'start: "a" # <|im_end|>\n',
        'start: "a" | "<|im_end|>" | /<|im_end|>/',
        'start: "a" "\\"<|im_end|>"?',
        f'start: "a" <[65-{IM_END}]>?',
        'start: "a" <[^258]>?',
        'start: "a" <[*]>?',
    ],
)
def test_other_tokens_texts_and_comments_are_no_end(compiled, tokenizer, grammar):
    made = compiled(grammar=grammar)
    assert made.accept(tokenizer.encode("a"))
    assert made.is_complete


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": ["a<|im_end|>b"]},
        {"regex": r"a<\|im_end\|>b"},
        {"grammar": 'start: "a<|im_end|>b"'},
        {"json": {"const": "a<|im_end|>b<|im_start|>"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_text_that_spells_a_special_token_is_text(compiled, tokenizer, fields):
    grammar, ids = compiled(**fields), []
    while not grammar.is_complete:
        allowed = np.flatnonzero(unpack_token_mask(grammar.mask(), tokenizer.vocab_size))
        assert allowed.size, tokenizer.decode(ids)
        ids.append(int(allowed[-1]))
        assert ids[-1] not in tokenizer.special_token_ids
        assert grammar.accept(ids[-1:])
    assert "a<|im_end|>b" in tokenizer.decode(ids)
