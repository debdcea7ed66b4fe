"""Constraint: a grammar on the host says, token by token, what a request may sample next.

The mask of the next token is known only when the last one has been read. So a constrained
request is sent with the mask of its first token and paused behind that; each token that is
read moves the grammar on, and the next mask goes to the device with leave for one token
more. Other requests do not wait for any of this::

    run              | k          | k + 1     | k + 2
    others           | token      | token     | token
    constrained      | token      | paused    | token
    host                 reads k ^ sends mask ^

Since a run is dispatched before the one before it is read, a constrained request sits out
every second step; where all requests are constrained nothing is dispatched ahead, and none is
sat out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from oxidize_jax.sampling.token_mask import pack_token_mask


class Grammar(Protocol):
    """What an engine asks of a grammar: where one output stands in it. Used by one thread."""

    def mask(self) -> np.ndarray:
        """``u32[ceil(V / 32)]``: ids that may come next, packed as
        :mod:`~oxidize_jax.sampling.token_mask` says. Where the output may end here, the ids
        that end it are among them."""
        ...

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Move on. False, and nothing may be asked of it any more, for what does not fit."""
        ...

    @property
    def is_finished(self) -> bool:
        """Nothing may come next, and no id says so: the request ends here."""
        ...

    def copy(self) -> Grammar:
        """Another output that stands at the same place."""
        ...


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a grammar says to the tokens that were read."""

    num_accepted: int
    """Of them; those behind are not part of the output."""
    finish_reason: str | None = None
    """``stop`` or ``abort`` where the request ends here for the grammar's sake."""
    failure: str | None = None
    """Why it was aborted."""


class Constraint:
    """A grammar with what its request allows of the ids besides.

    Args:
      grammar: it is moved on; give each request one of its own.
      own: ``u32[ceil(V / 32)]``, ids that the request allows, or None for all.
      ends: ids that end the request, which ``min_new_tokens`` keeps from being sampled.
      bad_words: token sequences that the device keeps out of the output.
    """

    def __init__(
        self,
        grammar: Grammar,
        own: np.ndarray | None,
        ends: Sequence[int] = (),
        min_new_tokens: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self._grammar = grammar
        self._own = own
        self._ends = tuple(ends)
        self._min_new_tokens = min_new_tokens
        self._bad_words = tuple(map(tuple, bad_words))
        self._tokens: list[int] = []

    def mask(self) -> np.ndarray:
        """``u32[ceil(V / 32)]``: ids that may come next. Raises ValueError if there is none."""
        try:
            words = np.asarray(self._grammar.mask(), np.uint32)
        except Exception as error:
            raise ValueError(f"structured_outputs: {_line(error)}") from error
        if self._own is not None:
            words = words & self._own
        banned = self._banned()
        left = words & pack_token_mask(32 * words.size, None, banned) if banned else words
        if not left.any():
            raise ValueError(
                "structured_outputs: the grammar allows no token here that allowed_token_ids, "
                "banned_token_ids, bad_words and min_tokens leave: relax one of them."
            )
        return words

    def _banned(self) -> list[int]:
        """Ids that the device does not sample next, whatever the mask is."""
        banned = list(self._ends) if len(self._tokens) < self._min_new_tokens else []
        for *before, last in self._bad_words:
            if not before or self._tokens[-len(before) :] == before:
                banned.append(last)
        return banned

    def accept(self, token_ids: Sequence[int], *, ended: bool) -> Verdict:
        """Move on by the tokens that were read; ``ended``: the device has ended the request."""
        for count, token in enumerate(token_ids):
            try:
                fits = self._grammar.accept([token])
            except Exception as error:
                return Verdict(count, "abort", f"structured_outputs: {_line(error)}")
            if not fits:
                # The mask that was sent is the grammar's own: it contradicts itself.
                reason = f"structured_outputs: token {token} is not what the grammar allows."
                return Verdict(count, "abort", reason)
            self._tokens.append(token)
        if ended or not self._grammar.is_finished:
            return Verdict(len(token_ids))
        if len(self._tokens) < self._min_new_tokens:
            reason = "structured_outputs: the grammar ends before min_tokens: lower that."
            return Verdict(len(token_ids), "abort", reason)
        return Verdict(len(token_ids), "stop")

    def copy(self) -> Constraint:
        """For a fork: it stands where this one stands, and goes its own way."""
        twin = Constraint(
            self._grammar.copy(), self._own, self._ends, self._min_new_tokens, self._bad_words
        )
        twin._tokens = list(self._tokens)
        return twin


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
