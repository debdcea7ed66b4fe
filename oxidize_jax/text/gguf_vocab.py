"""The tokenizer that the metadata of a GGUF file describes.

A GGUF file keeps a vocabulary, merges or scores, a type for each token and the *name* of
a pre-tokenizer; the rest is convention. Key names and token types:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oxidize_jax.text.backend_errors import backend_errors
from oxidize_jax.text.pieces import SPACE_MARK
from oxidize_jax.text.tokenizer import Tokenizer, make_tokenizer

try:
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors

    from oxidize_jax.text.pre_tokenizers import WORD_RULES
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "Reading a tokenizer needs the tokenizers package: pip install tokenizers"
    ) from error


class TokenType(enum.IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TYPES: dict[str, type] = {
    "model": str,
    "pre": str,
    "bos_token_id": int,
    "eos_token_id": int,
    "eot_token_id": int,
    "eom_token_id": int,
    "unknown_token_id": int,
    "padding_token_id": int,
    "add_bos_token": bool,
    "add_eos_token": bool,
    "add_space_prefix": bool,
    "remove_extra_whitespaces": bool,
}
_ITEM_TYPES: dict[str, type] = {"tokens": str, "merges": str, "token_type": int, "scores": float}
"""Keys below ``tokenizer.ggml`` and the type of their value, or of the items of their list."""

_SPELLED = {str: "text", int: "an integer", bool: "true or false", float: "a float"}

EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the ids that end a text, a turn and a message to a tool."""


def load_gguf(source: str | Path | Mapping[str, Any]) -> Tokenizer:
    """Implements :meth:`Tokenizer.from_gguf`.

    ``tokenizer.ggml.model`` is ``gpt2`` (byte-level BPE; ``tokenizer.ggml.pre`` names the
    pre-tokenizer: :mod:`~oxidize_jax.text.pre_tokenizers`) or ``llama`` (SentencePiece BPE).

    Control and unknown tokens (types 3, 2) are special; user-defined ones (4) are matched
    in a text like them but are text when decoded. Unused ids (5: padding that a converter
    put in) are no tokens: nothing encodes to them and they decode to nothing. GGUF does
    not keep ``lstrip``/``rstrip`` of a token, so none strips the text beside it, but for
    Phi-3's marks of turns, which are known to take the blanks behind them.
    """
    metadata = source if isinstance(source, Mapping) else _read_metadata(Path(source))
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        _check_type("tokenizer.chat_template", template, str)
    vocab = _Vocabulary(metadata)
    kind = vocab.get("model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(vocab)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(vocab), True
    else:
        raise ValueError(
            f"tokenizer.ggml.model={reprlib.repr(kind)} is not supported: only 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece) are."
        )
    is_phi3 = kind == "llama" and metadata.get("general.architecture") == "phi3"
    _add_matched_tokens(backend, vocab, _PHI3_KEEPS_BLANKS if is_phi3 else None)
    _add_sequence_ends(backend, vocab, adds_bos)
    return make_tokenizer(
        backend,
        vocab_size=len(vocab.tokens),
        eos_token_ids=vocab.ids(*EOS_KEYS),
        special_tokens=vocab.named(),
        chat_template=template,
    )


def _read_metadata(path: Path) -> Mapping[str, Any]:
    from oxidize_jax.checkpoints.gguf_header import read_gguf_header

    return read_gguf_header(path).metadata


def _check_type(key: str, value: Any, wanted: type) -> None:
    # Not isinstance: true is no token id.
    if type(value) is not wanted:
        raise ValueError(
            f"{key}={reprlib.repr(value)}: must be {_SPELLED[wanted]}; the file is damaged: "
            "convert the model again."
        )


def _check_list(key: str, value: Any, wanted: type) -> None:
    if not isinstance(value, list):
        raise ValueError(
            f"{key}={reprlib.repr(value)}: must be a list; the file is damaged: convert the "
            "model again."
        )
    for index, item in enumerate(value):
        if type(item) is not wanted:
            _check_type(f"{key}[{index}]", item, wanted)


class _Vocabulary:
    """The ``tokenizer.ggml.*`` values, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        self.tokens: list[str] = list(self.need("tokens"))
        types = list(self.need("token_type"))
        if len(types) != len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.token_type has {len(types)} entries for {len(self.tokens)} "
                "tokens: the file is damaged."
            )
        known = {int(kind): kind for kind in TokenType}
        strange = next((kind for kind in types if kind not in known), None)
        if strange is not None:
            raise ValueError(
                f"tokenizer.ggml.token_type holds {strange}: known are 1 to {max(known)}."
            )
        # An empty token cannot be matched in a text and has none to give.
        self.types = [
            known[kind] if token else TokenType.UNUSED
            for token, kind in zip(self.tokens, types, strict=True)
        ]
        for token_id in self.ids("bos_token_id", *EOS_KEYS):
            # A sequence mark that a converter left among the words is a control token all the same.
            if self.types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED):
                self.types[token_id] = TokenType.CONTROL

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, of the type that the key asks for; ``default`` without one."""
        key = f"tokenizer.ggml.{name}"
        value = self._metadata.get(key)
        if value is None:
            return default
        if name in _TYPES:
            _check_type(key, value, _TYPES[name])
        else:
            _check_list(key, value, _ITEM_TYPES[name])
        return value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(
                f"tokenizer.ggml.{name} is missing: the file holds no usable tokenizer; convert "
                "the model again or load the tokenizer from its Hugging Face folder."
            )
        return value

    def id(self, name: str) -> int | None:
        """The id that a key names, or None; it must be one of the vocabulary's."""
        value = self.get(name)
        if value is not None and not 0 <= value < len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.{name}={value} is outside the vocabulary of {len(self.tokens)}."
            )
        return None if value is None else int(value)

    def ids(self, *names: str) -> list[int]:
        return [token_id for name in names if (token_id := self.id(name)) is not None]

    def named(self) -> dict[str, str]:
        """Special tokens as text, under the names that chat templates use."""
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self.id(f"{key}_token_id") for name, key in keys.items()}
        return {f"{name}_token": self.tokens[i] for name, i in ids.items() if i is not None}

    def of_type(self, *types: TokenType) -> dict[str, int]:
        """Token -> id of the tokens of these types; a token twice is an error."""
        chosen: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind not in types:
                continue
            if token in chosen:
                raise ValueError(
                    f"tokenizer.ggml.tokens: {token!r} is both id {chosen[token]} and {token_id}."
                )
            chosen[token] = token_id
        return chosen

    def used(self) -> dict[str, int]:
        return self.of_type(*(kind for kind in TokenType if kind != TokenType.UNUSED))


def _byte_level_bpe(vocab: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The backend, and whether this family adds a BOS unless told otherwise."""
    pre = vocab.get("pre", "default")
    rules = WORD_RULES.get(pre)
    if rules is None:
        raise ValueError(
            f"tokenizer.ggml.pre={reprlib.repr(pre)} is not supported (only "
            f"{', '.join(WORD_RULES)}): a wrong pre-tokenizer gives wrong ids; load the "
            "tokenizer from a Hugging Face folder."
        )
    if vocab.get("add_space_prefix", False):
        raise ValueError(
            f"tokenizer.ggml.add_space_prefix=true with pre={pre!r} is not supported: load the "
            "tokenizer from a Hugging Face folder."
        )
    merges = [_merge(index, line) for index, line in enumerate(vocab.need("merges"))]
    backend = _bpe(vocab.used(), merges, ignore_merges=rules.whole_words)
    backend.pre_tokenizer = rules.make()
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, rules.adds_bos


def _merge(index: int, line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not (left and space and right) or " " in right:
        raise ValueError(
            f"tokenizer.ggml.merges[{index}]={reprlib.repr(line)}: not two tokens and a space."
        )
    return left, right


def _sentencepiece_bpe(vocab: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE as `tokenizers` spells it: byte fallback, ``▁`` for spaces.

    Where ``add_space_prefix`` is on (the default), every stretch of text between special
    tokens gets a space in front, even one that starts with a space. That is what
    SentencePiece does to a text, what llama.cpp does, and what a tokenizer.json with a
    ``Prepend`` normalizer does (transformers calls it ``legacy``).
    """
    if vocab.get("remove_extra_whitespaces", False):
        raise ValueError(
            "tokenizer.ggml.remove_extra_whitespaces=true is not supported with "
            "tokenizer.ggml.model='llama': load the tokenizer from a Hugging Face folder."
        )
    unknown = vocab.id("unknown_token_id")
    backend = _bpe(
        vocab.used(),
        _merges_by_score(vocab),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else vocab.tokens[unknown],
    )
    prefixed = vocab.get("add_space_prefix", True)
    spaces_to_marks = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces_to_marks])
        if prefixed
        else spaces_to_marks
    )
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence([*steps, *strip])
    return backend


def _merges_by_score(vocab: _Vocabulary) -> list[tuple[str, str]]:
    """Merges in the order SentencePiece would make them: the best-scored result first.

    A token can be merged from any two tokens that spell it. Of splits with the same
    result the one with the longer left part comes first, as in the converted
    tokenizer.json files (SentencePiece would take the leftmost in the text).
    """
    scores = list(vocab.need("scores"))
    if len(scores) != len(vocab.tokens):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocab.tokens)} tokens: "
            "the file is damaged."
        )
    normal = vocab.of_type(TokenType.NORMAL)
    splits = [
        (float(scores[token_id]), cut, token)
        for token, token_id in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    splits.sort(key=lambda split: (-split[0], -split[1], split[1] - len(split[2])))
    return [(token[:cut], token[cut:]) for _, cut, token in splits]


def _bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    with backend_errors("tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"):
        return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))


_PHI3_KEEPS_BLANKS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Matched tokens without ``rstrip`` in the tokenizer.json of Phi-3 and 3.5; all others have it."""


def _add_matched_tokens(
    backend: tokenizers.Tokenizer, vocab: _Vocabulary, keep_blanks: frozenset[str] | None
) -> None:
    """Makes the tokens that are found in a text before it is cut into words.

    They take the blanks behind them where they are not among ``keep_blanks``; None keeps all.
    """

    def matched(tokens: Iterable[str], special: bool) -> list[tokenizers.AddedToken]:
        return [
            tokenizers.AddedToken(
                token,
                special=special,
                normalized=False,
                rstrip=keep_blanks is not None and token not in keep_blanks,
            )
            for token in tokens
        ]

    special = vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens(matched(special, special=True))
    backend.add_tokens(matched(vocab.of_type(TokenType.USER_DEFINED), special=False))


def _add_sequence_ends(backend: tokenizers.Tokenizer, vocab: _Vocabulary, adds_bos: bool) -> None:
    """Makes ``encode`` put BOS and EOS round a text, as ``add_bos_token`` and so on say."""
    ends = {"bos": vocab.get("add_bos_token", adds_bos), "eos": vocab.get("add_eos_token", False)}
    wanted = {name: vocab.id(f"{name}_token_id") for name, add in ends.items() if add}
    if None in wanted.values():
        raise ValueError(
            f"tokenizer.ggml.add_bos_token or add_eos_token wants {' and '.join(wanted)} round "
            "a text, but the file does not say which token that is."
        )
    if not wanted:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[*(["bos"] if "bos" in wanted else []), "$A", *(["eos"] if "eos" in wanted else [])],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [vocab.tokens[token_id]]}
            for name, token_id in wanted.items()
            if token_id is not None
        ],
    )
