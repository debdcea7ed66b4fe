"""llguidance behind the engine's :class:`~oxidize_jax.engine.constraint.Grammar`.

llguidance walks the vocabulary as a trie of bytes through lexer and Earley parser, and bounds
every step by fuel, so that no grammar can hold up the engine. Everything of it is imported
where it is first used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oxidize_jax.messages import short_repr
from oxidize_jax.sampling.structured import StructuredOutputsParams
from oxidize_jax.sampling.token_mask import pack_token_mask, unpack_token_mask
from oxidize_jax.structured.references import check_references
from oxidize_jax.text.tokenizer import Tokenizer

_TRIED = 8
"""First tokens that are tried when a grammar is compiled."""
_WHITESPACE = r"( |\n {0,16})?"
"""Between the tokens of JSON: enough to write it on one line or on many, and never without end."""
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""llguidance's own, which end any step within some 20 ms; states take about 2 kB each."""


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model as llguidance sees them: the bytes that the detokenizer writes."""

    tokenizer: Any
    """llguidance's LLTokenizer."""
    num_words: int
    """Words of a mask of llguidance."""
    spoken: np.ndarray
    """``u32[ceil(V / 32)]``: ids that may be sampled at all; ids without bytes are not."""
    unended: np.ndarray
    """``u32[ceil(V / 32)]``: :attr:`spoken` without those that end a sequence."""
    ends: frozenset[int]
    """Ids that end a sequence."""
    names: Mapping[str, int]
    """Special tokens by their text."""
    text_ends: tuple[bytes, ...] = ()
    """Text of the ids in :attr:`ends` that are no special tokens: it ends an output wherever it
    is sampled, so that only other tokens can spell it."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """Takes half a second. Raises ValueError where llguidance is not installed, or where
        nothing ends a sequence."""
        lib = llguidance()
        ends = [i for i in tokenizer.eos_token_ids if i < vocab_size]
        if not ends:
            raise ValueError(
                "structured_outputs: this tokenizer has no end-of-sequence id, which ends a "
                "structured output: use a model that has one."
            )
        size = max(vocab_size, tokenizer.vocab_size)
        pieces = [*tokenizer.pieces, *[b""] * (size - tokenizer.vocab_size)]
        wrapped = lib.TokenizerWrapper(_Backend(tokenizer, pieces, ends[0]))
        silent = [i for i, piece in enumerate(pieces[:vocab_size]) if not piece]
        silent += [i for i in tokenizer.special_token_ids if i < vocab_size]
        spoken = pack_token_mask(vocab_size, None, sorted(set(silent) - set(ends)))
        return cls(
            tokenizer=lib.LLTokenizer(wrapped, n_vocab=size, eos_token=ends),
            num_words=-(-size // 32),
            spoken=spoken,
            unended=spoken & pack_token_mask(vocab_size, None, ends),
            ends=frozenset(ends),
            text_ends=tuple(pieces[i] for i in ends if i not in tokenizer.special_token_ids),
            names={pieces[i].decode("utf-8", "replace"): i for i in tokenizer.special_token_ids},
        )

    @property
    def unspelled(self) -> str:
        """What is wrong where a grammar allows none of the tokens."""
        ends = [end.decode("utf-8", "replace") for end in self.text_ends if end]
        but = f"; {' and '.join(map(short_repr, ends))} ends an output and is never part of one"
        return f"no text keeps to it that this vocabulary can spell{but if ends else ''}; mend it."


class _Backend:
    """What llguidance's TokenizerWrapper asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], eos: int) -> None:
        self.tokens = pieces
        self.eos_token_id = eos
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self._encode = tokenizer.backend.encode
        silent = tokenizer.special_token_ids.union(tokenizer.eos_token_ids)
        self._silent = silent
        self._ids = {piece: i for i, piece in enumerate(pieces) if piece and i not in silent}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Of text that must come: its first token is all that is allowed next."""
        ids = self._encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        # What spells a special token is text here; that token would never be sampled.
        return ids if self._silent.isdisjoint(ids) else self._longest_pieces(text) or ids

    def _longest_pieces(self, text: bytes) -> list[int]:
        """Always the longest token next; none where one cannot be spelled on."""
        ids: list[int] = []
        while text:
            longest = min(self._longest, len(text))
            cut = next((n for n in range(longest, 0, -1) if text[:n] in self._ids), 0)
            if not cut:
                return []
            ids.append(self._ids[text[:cut]])
            text = text[cut:]
        return ids


class GuidanceGrammar:
    """An output's place in a compiled grammar."""

    def __init__(self, vocabulary: Vocabulary, matcher: Any) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._mask: np.ndarray | None = None
        self._ended = False

    def mask(self) -> np.ndarray:
        """``u32[ceil(V / 32)]``. Raises ValueError where a limit is met."""
        if self._mask is None:
            words = np.zeros((self.vocabulary.num_words,), np.uint32)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._check()
            # An id that ends a sequence may be text to llguidance, which it cannot be here.
            known = self.vocabulary.spoken if self.is_complete else self.vocabulary.unended
            words = words[: known.size] & known
            if not (words.any() or self._ended):
                raise ValueError(self.vocabulary.unspelled)
            self._mask = words
        return self._mask

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Move on; False for what does not fit. Raises ValueError where a limit is met."""
        return all(map(self._accept, token_ids))

    def _accept(self, token: int) -> bool:
        if token in self.vocabulary.ends:
            # Not given to the matcher, which would take it for the end of all.
            self._ended = self.is_complete and not self._ended
            return self._ended
        fits = not self._ended and self._matcher.validate_tokens([token]) == 1
        fits = fits and self._matcher.consume_token(token)
        self._check()
        self._mask = None
        return fits

    @property
    def is_finished(self) -> bool:
        """An id that ends a sequence was accepted."""
        return self._ended

    def copy(self) -> GuidanceGrammar:
        """Another output at the same place."""
        twin = GuidanceGrammar(self.vocabulary, self._matcher.deep_copy())
        twin._mask, twin._ended = self._mask, self._ended
        return twin

    @property
    def is_complete(self) -> bool:
        """The output may end here."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(first_line(self._matcher.get_error()))


def compile_grammar(vocabulary: Vocabulary, params: StructuredOutputsParams) -> GuidanceGrammar:
    """A grammar at its start, with its first mask. Raises ValueError, in one line."""
    lib, where = llguidance(), f"structured_outputs.{params.kind}"
    try:
        source = _source(lib, params)
    except ValueError as error:
        raise ValueError(f"{where}: {first_line(str(error))}") from None
    limits = lib.LLParserLimits(**_LIMITS)
    matcher = lib.LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(f"{where}: {first_line(matcher.get_error())}")
    if params.kind == "grammar":
        _check_tokens(vocabulary, where, params.text)
    grammar = GuidanceGrammar(vocabulary, matcher)
    try:
        _try_some_tokens(grammar)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if matcher.is_stopped() and not matcher.is_accepting():
        raise ValueError(f"{where}: {vocabulary.unspelled}")
    return grammar


def _check_tokens(vocabulary: Vocabulary, where: str, text: str) -> None:
    """Raises ValueError for a token by name that no output can have."""
    words = vocabulary.unended
    spoken = unpack_token_mask(words, 32 * words.size)
    try:
        check_references(text, spoken, vocabulary.ends, vocabulary.names)
    except ValueError as error:
        raise ValueError(f"{where}: {error}.") from None


def _try_some_tokens(grammar: GuidanceGrammar) -> None:
    """Raises ValueError where a limit is met, or nothing can be spelled, at the start or behind
    the first token: some limits show only there."""
    words = grammar.mask() & grammar.vocabulary.unended
    ids = np.flatnonzero(unpack_token_mask(words, 32 * words.size))
    for token in ids[:: max(1, ids.size // _TRIED)]:
        tried = grammar.copy()
        tried.accept([int(token)])
        tried.mask()


def _source(lib: Any, params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's form."""
    text = params.text
    if params.kind == "json":
        options = {"lenient": False, "whitespace_pattern": _WHITESPACE}
        return lib.LLMatcher.grammar_from_json_schema(text, overrides=options)
    if params.kind == "regex":
        return lib.LLMatcher.grammar_from_regex(_without_anchors(text))
    if params.kind == "choice":
        choices = " | ".join(map(_quoted, params.choice or ()))
        return lib.LLMatcher.grammar_from_lark(f"start: {choices}")
    return lib.LLMatcher.grammar_from_lark(text)


def _quoted(text: str) -> str:
    """As Lark has strings: those of JSON, but for a character that JSON lets stand."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_anchors(regex: str) -> str:
    """The whole text is matched in any case, and anchors mean nothing to llguidance."""
    if _ends_in_escape(regex):
        raise ValueError("ends with a single backslash, which escapes nothing")
    regex = regex.removeprefix("^")
    return regex[:-1] if regex.endswith("$") and not _ends_in_escape(regex[:-1]) else regex


def _ends_in_escape(regex: str) -> bool:
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def first_line(message: str) -> str:
    """What is wrong, in one line of bearable length."""
    # Of a panic of its own, which it catches, llguidance tells the backtrace too.
    told, backtrace, _ = message.partition("<backtrace>")
    line = " ".join(told.split()) or "the grammar cannot be used"
    if backtrace or line.startswith("panic:"):
        line = f"it breaks the parser ({_shortened(line.removeprefix('panic:').strip(), 160)})"
        line += "; write it in another way"
    if "NoExtensionBias" in line:  # its name for what cannot be begun
        line = "no text keeps to it; mend it"
    return f"{_shortened(line, 300)} (llguidance)"


def _shortened(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[:most]}..."


def llguidance() -> Any:
    """The package. Raises ValueError where it is not installed."""
    try:
        import llguidance
        from llguidance import _lib  # noqa: F401
    except ImportError:
        raise ValueError(
            "structured_outputs: llguidance is not installed: pip install 'oxidize-jax[structured]'"
        ) from None
    return llguidance
