"""Tokens that a grammar names by themselves, and what cannot come of them.

llguidance's Lark has ``<|name|>`` for a special token and ``<[5,7-9]>``, ``<[^5]>``, ``<[*]>`` for
token ids (its ``docs/syntax.md``). Here no special token is part of a structured output, and an
id that ends it is sampled where the grammar is at its end: a rule that needs one would get stuck
in the middle of a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set

import numpy as np

_LEXEMES = re.compile(
    r"""
      (?: // | \# ) [^\n]*               # a comment
    | " (?: \\. | [^"\\\n] )* "          # a string
    | / (?: \\. | [^/\\\n] )+ /          # a regular expression
    | < (?P<reference> [^<>\s]+ ) >
    """,
    re.VERBOSE,
)
_IDS = re.compile(r"\[(?P<not>\^)?(?P<ranges>\*|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]")


def check_references(
    grammar: str, spoken: np.ndarray, ends: Set[int], names: Mapping[str, int]
) -> None:
    """Refuse a Lark grammar that names a token which is never sampled inside of an output.

    Args:
      spoken: ``bool[V]``, ids that may be sampled before an output is complete.
      ends: ids that end it.
      names: special tokens by their text.

    Raises ValueError, in one line, naming the token and what to do.
    """
    for reference in _references(grammar):
        ids = _token_ids(reference, spoken.size, names)
        if ids.size and spoken[ids].any():
            continue
        if ids.size and set(ids.tolist()) <= ends:
            raise ValueError(
                f"<{reference}> ends an output, which is done by itself where the grammar is at "
                "its end: leave it out"
            )
        raise ValueError(
            f"<{reference}> is never sampled in a structured output, as no special token is: "
            "leave it out"
        )


def _references(grammar: str) -> Iterator[str]:
    for lexeme in _LEXEMES.finditer(grammar):
        if lexeme["reference"] is not None:
            yield lexeme["reference"]


def _token_ids(reference: str, vocab_size: int, names: Mapping[str, int]) -> np.ndarray:
    """``i64[n]``: the ids below V that it stands for."""
    listed = _IDS.fullmatch(reference)
    if listed is None:
        name = names.get(f"<{reference}>")
        return np.array([] if name is None else [name], np.int64)
    if listed["ranges"] == "*":
        return np.arange(vocab_size)
    named = np.zeros((vocab_size,), np.bool_)
    for part in listed["ranges"].split(","):
        first, _, last = part.partition("-")
        named[int(first) : int(last or first) + 1] = True
    return np.flatnonzero(~named if listed["not"] else named)
