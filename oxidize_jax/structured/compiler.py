"""GrammarCompiler: compiled grammars, kept by their text, and a limit of time for each."""

from __future__ import annotations

import collections
import threading
from typing import Any

from oxidize_jax.sampling.structured import StructuredOutputsParams
from oxidize_jax.structured.guidance import GuidanceGrammar, Vocabulary, compile_grammar, first_line
from oxidize_jax.text.tokenizer import Tokenizer

COMPILE_SECONDS = 10.0
"""How long a grammar may compile. Usual ones take some milliseconds."""
_AT_ONCE = 2
"""Grammars that compile at the same time; more wait, within their time."""
_KEPT = 128
"""Compiled grammars that are kept."""


class GrammarCompiler:
    """Compiles the grammars of one model. Threads may share it.

    A grammar compiles in a thread of its own, outside of Python's lock, so that one that takes
    long holds up nobody but its caller; llguidance's limits end it at last.

    Args:
      vocab_size: V, the model's; masks have a bit for each id.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, *, seconds: float = COMPILE_SECONDS
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._seconds = seconds
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._places = threading.Semaphore(_AT_ONCE)
        self._kept: collections.OrderedDict[tuple[str, str], GuidanceGrammar] = (
            collections.OrderedDict()
        )
        self.num_compiled = 0
        """Grammars compiled so far; those that were kept are not counted again."""

    def compile(self, params: StructuredOutputsParams) -> GuidanceGrammar:
        """A grammar at its start, the caller's own. Raises ValueError, in one line."""
        key = params.kind, params.text
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key].copy()
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size)
            vocabulary = self._vocabulary
        grammar = self._within_time(vocabulary, params)
        with self._lock:
            self.num_compiled += 1
            self._kept[key] = grammar
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            # Copies are made under the lock: the one that is kept is no thread's own.
            return grammar.copy()

    def _within_time(
        self, vocabulary: Vocabulary, params: StructuredOutputsParams
    ) -> GuidanceGrammar:
        result: list[Any] = []

        def work() -> None:
            try:
                result.append(compile_grammar(vocabulary, params))
            # llguidance's own panics are no Exception.
            except BaseException as error:
                result.append(error)
            finally:
                self._places.release()

        where = f"structured_outputs.{params.kind}"
        if not self._places.acquire(timeout=self._seconds):
            raise ValueError(
                f"{where}: {_AT_ONCE} other grammars have been compiling for {self._seconds:g} s; "
                "try again."
            )
        # A daemon: the interpreter does not wait for it.
        thread = threading.Thread(target=work, name="compile-grammar", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if not result:
            raise ValueError(
                f"{where}: takes more than {self._seconds:g} s to compile; make it simpler."
            )
        if isinstance(result[0], ValueError):
            raise result[0]
        if isinstance(result[0], BaseException):
            raise ValueError(f"{where}: {first_line(f'panic: {result[0]}')}") from None
        return result[0]
