"""Text to token ids and back, from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oxidize_jax.text.backend_errors import backend_errors
from oxidize_jax.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    import tokenizers

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Tokens that end a turn whatever the metadata says, where they are special tokens."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A `tokenizers` tokenizer, with what an engine needs beside it.

    Made by :meth:`from_hf_folder` or :meth:`from_gguf`. Immutable and safe to share
    between threads.

    **Encoding** is the backend's, so ids are those of Hugging Face. Special tokens
    spelled in a text are recognised. A byte-level vocabulary without a token for some
    byte (SmolLM2 lacks a few control characters) drops that byte, as it does there.

    **Decoding** is UTF-8 with replacement over the bytes of the tokens (see
    :mod:`~oxidize_jax.text.pieces`), here and in the stream alike. It equals
    ``tokenizers``' decode except that an invalid run of byte tokens gives one U+FFFD for
    each maximal broken part (that library: one for each byte, and it gives up valid
    characters of the same run), and that an added token is always its own literal text.

    **Stop ids**, :attr:`eos_token_ids`, are a union, the tokenizer's own first:

    * Hugging Face: ``eos_token`` and ``eot_token`` of the tokenizer files,
      ``eos_token_id`` of config.json and of generation_config.json (a number or a list);
    * GGUF: ``eos_token_id``, ``eot_token_id`` and ``eom_token_id``;
    * both: each of :data:`END_OF_TURN` that is a special token of the vocabulary.

    Attributes:
        backend: the wrapped ``tokenizers.Tokenizer``; neither truncates nor pads.
        pieces: ``pieces[id]`` is the bytes of that id; ``b""`` for an id no token has.
        special_token_ids: ids that ``skip_special_tokens`` leaves out of a text.
        eos_token_ids: ids that end a generation, without duplicates; may be empty.
        special_tokens: name -> text (``{"bos_token": "<s>"}``), as templates see them.
        chat_template: Jinja source, or None.
        strip_spaces: spaces that decoding takes off the start of a whole text.
    """

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    pieces: tuple[bytes, ...] = dataclasses.field(repr=False)
    special_token_ids: frozenset[int] = dataclasses.field(repr=False)
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    strip_spaces: int = 0

    @classmethod
    def from_hf_folder(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json and the files beside it that are there.

        Those are tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
        config.json and generation_config.json.

        Raises:
            ValueError: tokenizer.json is missing, or a file cannot be used; names it.
        """
        from oxidize_jax.text.hf_folder import load_hf_folder

        return load_hf_folder(Path(path))

    @classmethod
    def from_gguf(cls, source: str | Path | Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer that GGUF metadata describes.

        ``source`` is a file, or its metadata already read: full key
        (``"tokenizer.ggml.tokens"``) -> value.

        Raises:
            ValueError: a tokenizer or pre-tokenizer that is not supported, by name, or
                metadata that contradict each other.
        """
        from oxidize_jax.text.gguf_vocab import load_gguf

        return load_gguf(source)

    @property
    def vocab_size(self) -> int:
        """Ids run in ``[0, vocab_size)``. A model's logits may be padded beyond it."""
        return len(self.pieces)

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the tokenizer's own end-of-sequence token."""
        return self.special_tokens.get("eos_token")

    @functools.cached_property
    def bos_token_id(self) -> int | None:
        """Id of :attr:`bos_token`."""
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @functools.cached_property
    def add_bos(self) -> bool:
        """Whether :meth:`encode` puts the BOS before a text."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with ``add_special_tokens`` the BOS or EOS this tokenizer adds.

        A text that already spells its BOS (a rendered chat) must be encoded with
        ``add_special_tokens=False``, or it gets a second one. An empty text may give no
        ids at all: callers refuse an empty prompt.

        Raises:
            ValueError: ``text`` is not a string or holds half a surrogate pair, or the
                tokenizer has no token for it.
        """
        if not isinstance(text, str):
            raise ValueError(f"text={type(text).__name__}: must be a string.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate at index {error.start}: it is not valid Unicode; "
                "send the character whole."
            ) from None
        with backend_errors("the tokenizer cannot encode the text"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        ids: Iterable[int],
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> str:
        """Text of ids, as a whole text or as the continuation of ``prompt_ids``.

        The same bytes as :class:`IncrementalDetokenizer`, whose joined stream it equals.
        Ids that no token has (a padded vocabulary) add nothing.

        Raises:
            ValueError: an id is negative.
        """
        stream = IncrementalDetokenizer(self, prompt_ids, skip_special_tokens)
        return stream.add(ids) + stream.finish()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Ids of a conversation rendered by the chat template.

        No special token is added to what the template wrote, so a conversation has
        exactly the BOS of its template. ``extra`` goes to the template
        (``tools=[...]``, ``enable_thinking=False``).

        Raises:
            ValueError: no chat template, bad messages, or the template refused them.
        """
        from oxidize_jax.text.chat import render_chat

        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template: pass --raw, or use generate with a plain "
                "prompt."
            )
        text = render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **{"bos_token": None, "eos_token": None, **self.special_tokens, **extra},
        )
        return self.encode(text, add_special_tokens=False)

    def bytes_of(self, ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """The bytes that ids stand for, joined; they need not be whole characters.

        Raises:
            ValueError: an id is negative.
        """
        table = self._spoken if skip_special_tokens else self.pieces
        return b"".join(_lookup(table, token_id) for token_id in ids)

    @functools.cached_property
    def _spoken(self) -> tuple[bytes, ...]:
        """:attr:`pieces` without the special tokens."""
        special = self.special_token_ids
        return tuple(b"" if i in special else piece for i, piece in enumerate(self.pieces))


def make_tokenizer(
    backend: tokenizers.Tokenizer,
    *,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    special_tokens: Mapping[str, str],
    chat_template: str | None,
) -> Tokenizer:
    """A :class:`Tokenizer` round a finished backend, with what can be read from it.

    ``eos_token_ids`` are those the files name, in order, duplicates allowed; the
    :data:`END_OF_TURN` tokens of the vocabulary are added here.
    """
    from oxidize_jax.text.pieces import read_pieces

    pieces = read_pieces(backend, vocab_size)
    added = backend.get_added_tokens_decoder()
    special = {token_id: token.content for token_id, token in added.items() if token.special}
    turn_ends = sorted(i for i, content in special.items() if content in END_OF_TURN)
    return Tokenizer(
        backend=backend,
        pieces=pieces.table,
        special_token_ids=frozenset(special),
        eos_token_ids=tuple(dict.fromkeys([*eos_token_ids, *turn_ends])),
        special_tokens=dict(special_tokens),
        chat_template=chat_template,
        strip_spaces=pieces.strip_spaces,
    )


def _lookup(table: tuple[bytes, ...], token_id: int) -> bytes:
    if token_id < 0:
        raise ValueError(f"token id {token_id}: ids are 0 or more.")
    return table[token_id] if token_id < len(table) else b""
