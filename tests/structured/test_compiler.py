"""Grammars through llguidance, on a vocabulary of bytes."""

import json
import re
import sys
import threading

import numpy as np
import pytest
from tiny_model import write_tiny_model

from oxidize_jax.sampling.structured import StructuredOutputsParams
from oxidize_jax.sampling.token_mask import unpack_token_mask
from oxidize_jax.structured import compiler as compiling
from oxidize_jax.structured.compiler import GrammarCompiler
from oxidize_jax.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_hf_folder(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.fixture
def compiled(compiler):
    def make(**fields):
        return compiler.compile(StructuredOutputsParams(**fields))

    return make


def allowed(grammar, tokenizer):
    return np.flatnonzero(unpack_token_mask(grammar.mask(), tokenizer.vocab_size)).tolist()


def test_masks_allow_what_goes_on_and_the_end_where_it_may_be(compiled, tokenizer):
    grammar = compiled(regex="ab?c")
    for text, ends in (("a", False), ("b", False), ("c", True)):
        spelled = tokenizer.decode(allowed(grammar, tokenizer))
        assert text in spelled
        assert grammar.accept(tokenizer.encode(text))
        assert grammar.is_complete == ends
    assert allowed(grammar, tokenizer) == sorted(tokenizer.eos_token_ids)
    for end in tokenizer.eos_token_ids:
        assert grammar.copy().accept([end])


def test_what_does_not_fit_is_not_accepted(compiled, tokenizer):
    assert not compiled(regex="ab").accept(tokenizer.encode("b"))
    grammar = compiled(choice=["yes", "no"])
    assert tokenizer.decode(sorted(allowed(grammar, tokenizer))) == "ny"


def test_special_tokens_are_no_text(compiled, tokenizer):
    grammar = compiled(regex="(.|\n)*")
    ends = tokenizer.special_token_ids & set(tokenizer.eos_token_ids)
    assert ends
    assert set(allowed(grammar, tokenizer)) & tokenizer.special_token_ids == ends


def test_an_end_that_is_text_is_no_text(compiled, tokenizer):
    (end,) = set(tokenizer.eos_token_ids) - tokenizer.special_token_ids
    assert tokenizer.bytes_of([end]) == b"#"
    grammar = compiled(regex='"[^"]*"')
    assert end not in allowed(grammar, tokenizer)
    assert grammar.accept(tokenizer.encode('"'))
    assert end not in allowed(grammar, tokenizer)
    assert grammar.accept(tokenizer.encode('"'))
    assert end in allowed(grammar, tokenizer)  # it may end here
    for choice in (["#1", "#2"], ["a#", "b#c"]):  # at the start, or behind a token
        with pytest.raises(ValueError, match=r"choice: no text keeps to it.*'#' ends an output"):
            compiled(choice=choice)
    dead = compiled(regex="ab(c#|d)")
    assert dead.accept(tokenizer.encode("abc"))
    with pytest.raises(ValueError, match="'#' ends an output and is never part of one"):
        dead.mask()


@pytest.mark.parametrize("item", ["\x7f", "a", 'say "hi"\n', "naïve ☃", "\\d+", "a|b"])
def test_a_choice_is_taken_literally(compiled, tokenizer, item):
    grammar = compiled(choice=[item, "other"])
    assert grammar.accept(tokenizer.encode(item))
    assert grammar.is_complete
    assert not compiled(choice=[item, "other"]).accept(tokenizer.encode("5"))


def test_anchors_round_a_regex_mean_nothing(compiled, tokenizer):
    for regex in ("ab", "^ab", "ab$", "^ab$"):
        grammar = compiled(regex=regex)
        assert grammar.accept(tokenizer.encode("ab"))
        assert grammar.is_complete
    grammar = compiled(regex=r"^a\$")
    assert grammar.accept(tokenizer.encode("a$"))
    assert grammar.is_complete


def test_copies_go_their_own_ways(compiled, tokenizer):
    first = compiled(regex="(ab|ba)")
    first.mask()
    second = first.copy()
    assert first.accept(tokenizer.encode("a"))
    assert second.accept(tokenizer.encode("b"))
    assert tokenizer.decode(allowed(first, tokenizer)) == "b"
    assert tokenizer.decode(allowed(second, tokenizer)) == "a"


def test_compiled_grammars_are_kept(tokenizer, monkeypatch):
    monkeypatch.setattr(compiling, "_KEPT", 2)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    for regex in ("a", "b", "a", "c", "a", "b"):  # b has to go for c
        grammar = compiler.compile(StructuredOutputsParams(regex=regex))
        assert grammar.accept(tokenizer.encode(regex))  # moved on: what is kept is not
    assert compiler.num_compiled == 4


def test_a_model_with_more_or_fewer_ids_than_the_tokenizer(tokenizer):
    for vocab_size in (tokenizer.vocab_size + 61, tokenizer.vocab_size - 0):
        grammar = GrammarCompiler(tokenizer, vocab_size).compile(
            StructuredOutputsParams(regex="(.|\n)*")
        )
        mask = grammar.mask()
        assert mask.shape == (-(-vocab_size // 32),)
        assert not unpack_token_mask(mask, 32 * mask.size)[tokenizer.vocab_size :].any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "json: .*uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, "json: .*not"),
        ({"json": {"if": {}, "then": {}}}, "json: .*if"),
        ({"json": {"type": "strin"}}, "json: Invalid type: strin"),
        ({"json": {"type": "string", "format": "nonsense"}}, "json: Unknown format"),
        ({"json": {"$ref": "#/$defs/x"}}, "json: .*x"),
        ({"json": {"$ref": "http://example.com/x.json"}}, "json: .*example.com"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json: Unsatisfiable"),
        ({"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "json"),
        ({"regex": "(ab"}, "regex: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex: .*look-around"),
        ({"regex": "a\\"}, "regex: ends with a single backslash"),
        ({"regex": "a\\\\\\"}, "regex: ends with a single backslash"),
        ({"regex": r"[^\s\S]"}, "regex: no text keeps to it"),
        ({"grammar": "start: start"}, "grammar: no text keeps to it"),
        ({"regex": "a{1000000000}"}, "regex: "),
        ({"grammar": "start: " + " | ".join(f'"{i}"' for i in range(5000))}, "grammar: .*max is"),
        ({"grammar": "start: nothing"}, "grammar: .*nothing"),
        ({"grammar": "begin: /a/"}, "grammar: .*start"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name_in_one_line(compiled, fields, message):
    with pytest.raises(ValueError, match=rf"^structured_outputs\.{message}") as refused:
        compiled(**fields)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 450


def test_a_panic_of_llguidance_is_told_in_a_line_without_its_backtrace(compiled, capfd):
    with pytest.raises(ValueError, match=r"^structured_outputs\.grammar: it breaks the") as refused:
        compiled(grammar="start: y\ny[stop=/a/]: ")
    said = str(refused.value)
    assert re.search(
        r"parser \(assertion failed.*\); write it in another way \(llguidance\)$", said
    )
    assert "\n" not in said
    assert "backtrace" not in said
    assert len(said) < 250
    assert capfd.readouterr().err == ""


HOSTILE = {
    "nested repetition": {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    "exponential automaton": {"regex": "((a|b)*a(a|b){30}c)*" * 8},
    "many dots": {"regex": ".{0,5000}x.{0,5000}y.{0,5000}z"},
    "ambiguous grammar": {"grammar": 'start: s\ns: s s s | "a" | "b" | "ab" | '},
    "deep schema": {"json": "{" + '"properties":{"a":{' * 400 + "}}" * 400 + "}"},
    "wide enum": {"json": {"enum": [f"{i:05d}" for i in range(5000)]}},
    "refs into each other": {
        "json": {
            "$defs": {
                f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(12)]}
                for i in range(12)
            },
            "$ref": "#/$defs/d0",
        }
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_walks_on_within_its_limits(compiled, tokenizer, name):
    """Neither compiling nor any step may fail in another way than by ValueError, or last long:
    the limits are of work done, so that this holds on a slow machine too."""
    said = ""
    try:
        walk(compiled(**HOSTILE[name]), tokenizer)
    except ValueError as error:
        said = str(error)
    assert not said or said.startswith("structured_outputs.") or said.endswith("(llguidance)")


def walk(grammar, tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(40):
        options = [i for i in allowed(grammar, tokenizer) if i not in tokenizer.eos_token_ids]
        if not options:
            return
        assert grammar.accept([int(rng.choice(options))])


def test_a_grammar_that_compiles_too_long_is_given_up(tokenizer, monkeypatch):
    release = threading.Event()

    def slow(vocabulary, params):
        release.wait(20)
        raise ValueError("too late")

    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, seconds=0.05)
    compiler.compile(StructuredOutputsParams(regex="a"))
    with monkeypatch.context() as patched:
        patched.setattr(compiling, "compile_grammar", slow)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"regex: takes more than 0\.05 s to compile"):
                compiler.compile(StructuredOutputsParams(regex="b"))
        # Both places are taken: a third one is told so, and one that is kept is served.
        with pytest.raises(ValueError, match="regex: 2 other grammars have been compiling"):
            compiler.compile(StructuredOutputsParams(regex="c"))
        assert compiler.compile(StructuredOutputsParams(regex="a")).accept(tokenizer.encode("a"))
    release.set()
    for thread in threading.enumerate():
        if thread.name == "compile-grammar":
            thread.join(20)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    assert compiler.compile(StructuredOutputsParams(regex="b")).accept(tokenizer.encode("b"))


def test_without_llguidance_the_remedy_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    with pytest.raises(ValueError, match=r"pip install 'oxidize-jax\[structured\]'"):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_whitespace_in_json_is_free_but_has_an_end(compiled, tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text in ('{"a":1}', '{"a": 1}', json.dumps({"a": 1}, indent=4)):
        assert compiled(json=schema).accept(tokenizer.encode(text)), text
    assert not compiled(json=schema).accept(tokenizer.encode("{" + " " * 30))
