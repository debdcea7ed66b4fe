"""Bad words as the token sequences that spell them."""

from __future__ import annotations

from collections.abc import Iterable

from oxidize_jax.messages import short_repr
from oxidize_jax.text.tokenizer import Tokenizer


def word_sequences(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The sequences that must not be completed, each once.

    As in vLLM (``SamplingParams.update_from_tokenizer``), a word is spelled as at the start of
    a text, and behind a space too where the space is part of its first token. Other spellings,
    such as capital letters or other cuts into tokens, are other words.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if not bare:
            raise ValueError(f"bad_words={short_repr(word)}: has no tokens; remove it.")
        sequences[bare] = None
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences[spaced] = None
    return tuple(sequences)
