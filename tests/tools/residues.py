"""A grammar written by hand: what may come next hangs on all that came before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fake_model import VOCAB

from oxidize_jax.sampling.token_mask import pack_token_mask

END = 5


class Residues:
    """``length`` tokens of which each is, modulo 7, what the sum of those before is; then ``END``.

    Without ``ends`` it just stops, and no token says so.
    """

    def __init__(
        self, length: int, ends: bool = True, tokens: Sequence[int] = (), broken_at: int = -1
    ) -> None:
        self.length, self.ends, self.tokens = length, ends, list(tokens)
        self.broken_at = broken_at

    def allowed(self) -> list[int]:
        if len(self.tokens) < self.length:
            rest = sum(self.tokens) % 7
            return [t for t in range(VOCAB) if t % 7 == rest and t != END]
        return [END] if self.ends and END not in self.tokens else []

    def mask(self) -> np.ndarray:
        if len(self.tokens) == self.broken_at:
            raise RuntimeError("this grammar\nis broken")
        return pack_token_mask(VOCAB, self.allowed())

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            if token not in self.allowed():
                return False
            self.tokens.append(token)
        return True

    @property
    def is_finished(self) -> bool:
        return not self.ends and len(self.tokens) == self.length

    def copy(self) -> Residues:
        return Residues(self.length, self.ends, self.tokens, self.broken_at)


def keeps(tokens: Sequence[int], length: int) -> bool:
    """Whether ``tokens`` are the beginning of what the grammar allows."""
    return Residues(length).accept(tokens)
