"""What bytes a token id stands for.

A decoder of the `tokenizers` library turns a *list* of tokens into text, which a stream
cannot use: a character may be split over tokens, and the answer for one token depends on
its neighbours. The two families this engine reads are both, underneath, one byte string
per token, so the table of those strings is all that decoding needs:

* byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): each character of a token is a stand-in
  for one byte;
* SentencePiece with byte fallback (Llama 2, Mistral, Gemma): ``▁`` is a space, ``<0x0A>``
  is the byte 0x0A, and the first space of a text is dropped again.

Text is then ``b"".join(pieces).decode("utf-8", "replace")``, at once or in steps.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

SPACE_MARK = "\u2581"
"""SentencePiece's visible space, ``▁``."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The bytes of every id, ``table[id]``, and the spaces a text loses at its start.

    ``table`` has one entry for each id in ``[0, vocab_size)``; an id that no token has
    (padding of the vocabulary) stands for no bytes. ``strip_spaces`` is how many leading
    spaces decoding takes off the start of a whole text: 1 where the tokenizer put one
    there itself, else 0.
    """

    table: tuple[bytes, ...]
    strip_spaces: int


def read_pieces(backend: tokenizers.Tokenizer, vocab_size: int) -> Pieces:
    """Bytes of the ids ``[0, vocab_size)`` of a tokenizer, by the decoder it declares.

    Raises:
        ValueError: the decoder is neither byte-level nor SentencePiece's.
    """
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if not kinds:
        raise ValueError("tokenizer without a decoder: how its tokens make text is not said.")
    spell: Callable[[str], bytes]
    spell_added: Callable[[str], bytes]
    if kinds == ["ByteLevel"]:
        alphabet = byte_alphabet()
        spell, spell_added, strip = lambda t: _byte_level(t, alphabet), str.encode, 0
    else:
        spell = _sentencepiece if "ByteFallback" in kinds else _spaced
        spell_added, strip = _spaced, _leading_spaces(steps)
    table = [b""] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=False).items():
        table[token_id] = spell(token)
    for token_id, added in backend.get_added_tokens_decoder().items():
        table[token_id] = spell_added(added.content)
    return Pieces(tuple(table), strip)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, the table of byte-level BPE (GPT-2).

    Printable Latin-1 bytes stand for themselves; the others, in order, take the
    characters from U+0100 on, so that no token holds a blank or a control character.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The declared decoder as a flat list of its steps."""
    if backend.decoder is None:
        return []
    # The decoder's own state is its JSON; the whole tokenizer's would drag the vocabulary along.
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _leading_spaces(steps: list[dict[str, Any]]) -> int:
    """Spaces that SentencePiece-like steps take off the start of a text; checks each step."""
    stripped, fused = 0, False
    for step in steps:
        match step:
            case {"type": "ByteFallback"}:
                pass
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": mark}, "content": " "} if (
                mark == SPACE_MARK
            ):
                pass
            case {"type": "Metaspace", "replacement": mark} if mark == SPACE_MARK:
                stripped += int(step["prepend_scheme"] != "never")
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                stripped += start
            case _:
                raise ValueError(
                    f"tokenizer decoder step {step}: not supported. It must turn {SPACE_MARK} into "
                    "a space, join bytes, or strip spaces from the start of the joined text."
                )
    return stripped


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:  # written as plain text, not in stand-ins
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _spaced(token)


def _spaced(token: str) -> bytes:
    return token.replace(SPACE_MARK, " ").encode()
