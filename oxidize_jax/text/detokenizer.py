"""Text from a stream of token ids, with never half a character in it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oxidize_jax.text.tokenizer import Tokenizer

_LONGEST_TAIL = 3
"""Bytes that an unfinished UTF-8 character can have."""


class IncrementalDetokenizer:
    """Turns output ids into text as they come.

    The strings that :meth:`add` and :meth:`finish` return, joined, equal
    ``tokenizer.decode(ids, prompt_ids=prompt_ids)`` for any ids in any chunks: both are
    one UTF-8 decoding of the same bytes, so there is no window to re-decode and a token
    costs O(its bytes). A character is held back until its last byte is there; bytes that
    can never become one give U+FFFD as soon as that is known, and an unfinished character
    at the end gives one U+FFFD from :meth:`finish`.

    The output continues the prompt. Where the tokenizer drops the space at the start of
    a text (SentencePiece), it is dropped only if the prompt has no text before it. If
    the prompt ends inside a character (only a prompt given as ids can) and the output
    goes on with it, the whole character belongs to the output.

    Not for use from several threads at once.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = _text_tail(tokenizer, prompt_ids, skip_special_tokens)
        self._spaces_to_strip = 0 if tail else tokenizer.strip_spaces
        self._prompt_tail = _unfinished(tail)
        self._finished = False

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids add and that no later id can change.

        Raises:
            ValueError: :meth:`finish` was called before, or an id is negative.
        """
        if self._finished:
            raise ValueError("add() after finish(): make a new IncrementalDetokenizer.")
        return self._decoder.decode(self._next_bytes(ids))

    def finish(self) -> str:
        """What was held back: ``""``, or one U+FFFD for a character that never ended."""
        self._finished = True
        return self._decoder.decode(b"", final=True)

    def _next_bytes(self, ids: Iterable[int]) -> bytes:
        data = self._tokenizer.bytes_of(ids, self._skip_special_tokens)
        if data and self._prompt_tail:
            if _goes_on(self._prompt_tail, data[:1]):
                data = self._prompt_tail + data
            self._prompt_tail = b""
        while data and self._spaces_to_strip:
            if data[:1] != b" ":
                self._spaces_to_strip = 0
                break
            data = data[1:]
            self._spaces_to_strip -= 1
        return data


def _text_tail(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> bytes:
    """The last bytes of a prompt, enough to see whether it ends inside a character."""
    tail = b""
    for token_id in reversed(ids):
        if len(tail) >= _LONGEST_TAIL:
            break
        tail = tokenizer.bytes_of((token_id,), skip_special_tokens) + tail
    return tail[-_LONGEST_TAIL:]


def _unfinished(tail: bytes) -> bytes:
    """The unfinished character at the end of ``tail``, or nothing."""
    # A lead byte starts a character wherever decoding began, so three bytes of context do.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


def _goes_on(unfinished: bytes, byte: bytes) -> bool:
    """Whether ``byte`` can follow in the character that ``unfinished`` begins."""
    try:
        codecs.utf_8_decode(unfinished + byte, "strict", False)
    except UnicodeDecodeError:
        return False
    return True
