"""What LLM says of texts that are there: log probabilities, perplexity, embeddings.

These passes run beside the engine, with KV pages of their own (see
:mod:`~oxidize_jax.scoring.scorer`): requests that run meanwhile give the tokens that they would
give alone, and a score does not depend on what the prefix cache holds.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from oxidize_jax.completion import Group, spell
from oxidize_jax.messages import short_repr
from oxidize_jax.outputs import Logprob
from oxidize_jax.progress import progress_bar
from oxidize_jax.prompts import Prompt, as_prompts, single_text_or_ids
from oxidize_jax.scheduler.submit import check_token_ids
from oxidize_jax.score_outputs import ContinuationScore, Perplexity, PromptLogprobs, ScoreOutput
from oxidize_jax.scoring.programs import ScoringModel
from oxidize_jax.scoring.scorer import Scorer, SequenceScores

if TYPE_CHECKING:
    from oxidize_jax.config import EngineConfig
    from oxidize_jax.engine.engine import Engine
    from oxidize_jax.model.config import ModelConfig
    from oxidize_jax.sampling.params import SamplingParams
    from oxidize_jax.text.tokenizer import Tokenizer

POOLING = ("mean", "last")
_Encoded = tuple[str | None, tuple[int, ...]]


class Scores:
    """Scoring methods of :class:`~oxidize_jax.llm.LLM`.

    Memory: KV pages for the longest sequence of a call (rounded up to 1, 4, 16, ... times
    ``max_num_batched_tokens`` tokens, ``max_model_len`` at most) and one step's tokens, beside
    the engine's, and logits of 128 tokens; all of it is free again after the call. The programs
    are compiled when they are first used, for each such size, and kept as the engine's are.
    """

    if TYPE_CHECKING:
        config: EngineConfig
        engine: Engine
        model_config: ModelConfig
        tokenizer: Tokenizer
        _progress: bool

        def _encode(self, prompt: Prompt) -> _Encoded: ...

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        top_logprobs: int = 0,
        use_tqdm: bool | None = None,
    ) -> list[ScoreOutput]:
        """Log probability of every token of each prompt but the first, given those before it.

        Args:
          prompts: one prompt or a list, up to ``max_model_len`` tokens each, packed into steps
            together; a number does not depend on what else there is, but for rounding.
          top_logprobs: likeliest alternatives to give of each token, up to ``max_logprobs``.
          use_tqdm: show a bar; default: after a second of work.

        Raises:
          ValueError: a prompt cannot be scored; then nothing has run.
        """
        limit = self.config.max_logprobs
        top = _whole("top_logprobs", top_logprobs, 0, limit, "raise max_logprobs of the LLM")
        encoded = self._encoded(as_prompts(prompts))
        scores = self._scores([ids for _, ids in encoded], top=top, use_tqdm=use_tqdm)
        return [
            ScoreOutput(
                prompt=text,
                prompt_token_ids=ids,
                token_logprobs=(None, *one.logprobs.tolist()),
                token_ranks=(None, *one.ranks.tolist()),
                prompt_logprobs=_prompt_logprobs(self.tokenizer, ids, one) if top else None,
            )
            for (text, ids), one in zip(encoded, scores, strict=True)
        ]

    def loglikelihood(
        self, pairs: Sequence[tuple[Prompt, Prompt]], *, use_tqdm: bool | None = None
    ) -> list[ContinuationScore]:
        """Log likelihood of each continuation behind its context, and whether it is greedy.

        It is what lm-evaluation-harness asks of a model under this name.

        Args:
          pairs: ``(context, continuation)``, both text or both token ids. Text is encoded as
            one: the continuation is what is left behind the tokens that the context has in
            common with the whole, so ``("The ", "sea")`` is ``("The", " sea")``.

        Raises:
          ValueError: one of the two is empty, or both together are too long.
        """
        if not isinstance(pairs, Sequence) or isinstance(pairs, str):
            raise ValueError(
                f"pairs is {type(pairs).__name__}: give a list of (context, continuation) pairs."
            )
        sequences, starts = [], []
        for i, pair in enumerate(pairs):
            with _where(f"pairs[{i}]", len(pairs)):
                ids, start = self._pair(pair)
                self._check_ids(ids)
                sequences.append(ids)
                starts.append(start)
        scores = self._scores(sequences, starts=starts, use_tqdm=use_tqdm)
        return [
            ContinuationScore(
                logprob=math.fsum(one.logprobs.tolist()),
                is_greedy=bool((one.ranks == 1).all()),
                token_ids=ids[one.start :],
                token_logprobs=tuple(one.logprobs.tolist()),
            )
            for ids, one in zip(sequences, scores, strict=True)
        ]

    def perplexity(
        self,
        text: Prompt,
        *,
        stride: int | None = None,
        window: int | None = None,
        use_tqdm: bool | None = None,
    ) -> Perplexity:
        """Perplexity of a text of any length, by windows that slide over it.

        Each window is a sequence of its own. Those behind the first score only what no window
        before them did, so every token but the first is scored once, with at least ``window -
        stride`` tokens before it once the text is that long::

            window=6, stride=2     - 1 2 3 4 5              (- not scored, . context)
                                       . . . . 6 7
                                           . . . . 8 9

        A small stride comes nearer to what the model could do with all of the text before each
        token, and takes ``window / stride`` times as long. With ``stride=window`` the windows do
        not overlap, and the first token of each is not scored.

        Args:
          text: one prompt, in text or token ids. Of a single token nothing is scored, and its
            perplexity is NaN.
          window: tokens of a window, up to ``max_model_len``, the default.
          stride: tokens from one window's beginning to the next; default: half of ``window``.
        """
        limit = self.config.max_model_len
        size = (
            limit if window is None else _whole("window", window, 2, limit, "raise max_model_len")
        )
        step = max(1, size // 2)
        if stride is not None:
            step = _whole("stride", stride, 1, size, "use at most the window's size")
        if isinstance(text, list | tuple) and any(isinstance(part, str) for part in text):
            raise ValueError("text is a list of texts: perplexity takes one; join them.")
        _, ids = self._encode(text)
        if not ids:
            raise ValueError("prompt has 0 tokens: give at least one token (text, or token ids).")
        check_token_ids("prompt_token_ids", ids, self.engine.model.vocab_size)
        cuts = list(windows(len(ids), size, step))
        sequences = [ids[begin:end] for begin, _, end in cuts]
        starts = [first - begin for begin, first, _ in cuts]
        scores = self._scores(sequences, starts=starts, use_tqdm=use_tqdm)
        return Perplexity(
            nll=-math.fsum(float(one.logprobs.sum(dtype=np.float64)) for one in scores),
            num_tokens=sum(one.logprobs.size for one in scores),
            num_windows=len(cuts),
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        use_tqdm: bool | None = None,
    ) -> np.ndarray:
        """Embeddings ``f32[N, E]``: of each prompt the model's hidden states, after the final norm.

        Args:
          pooling: ``mean`` over all tokens of the prompt, or ``last``: that of its last one.
          normalize: divide by the length, so that a dot product is the cosine.
        """
        if pooling not in POOLING:
            raise ValueError(f"pooling={short_repr(pooling)}: must be one of {', '.join(POOLING)}.")
        if not isinstance(normalize, bool):
            raise ValueError(f"normalize={short_repr(normalize)}: must be true or false.")
        sequences = [ids for _, ids in self._encoded(as_prompts(prompts))]
        total = sum(map(len, sequences))
        with self._bar(total, use_tqdm) as bar:
            mean, last = self._scorer.pool(self.engine.params, sequences, progress=bar.update)
        chosen = mean if pooling == "mean" else last
        if not sequences:
            return np.zeros((0, self.model_config.hidden_size), np.float32)
        if not normalize:
            return chosen
        length = np.linalg.norm(chosen, axis=1, keepdims=True)
        return chosen / np.where(length > 0, length, np.float32(1))

    def score_prompts(self, groups: Sequence[Group]) -> None:
        """Give prepared groups (see :meth:`LLM.prepare`) the ``prompt_logprobs`` they ask for."""
        self._score_prompts(groups, use_tqdm=False)

    def _score_prompts(self, groups: Sequence[Group], use_tqdm: bool | None) -> None:
        """Give each group the ``prompt_logprobs`` that its parameters ask for.

        A pass of its own over their prompts: it costs as much as to compute those again. So
        the numbers are there whatever of a prompt comes from the prefix cache.
        """
        asking = [group for group in groups if group.params.prompt_logprobs is not None]
        if not asking:
            return
        top = max(group.params.prompt_logprobs or 0 for group in asking)
        ids = [group.prompt_token_ids for group in asking]
        scores = self._scores(ids, top=top, use_tqdm=use_tqdm)
        for group, one in zip(asking, scores, strict=True):
            count = group.params.prompt_logprobs or 0
            group.prompt_logprobs = _prompt_logprobs(
                self.tokenizer, group.prompt_token_ids, one, count
            )

    def _check_prompt_logprobs(self, params: SamplingParams) -> None:
        limit = self.config.max_logprobs
        if (params.prompt_logprobs or 0) > limit:
            raise ValueError(
                f"prompt_logprobs={params.prompt_logprobs}: the limit is max_logprobs={limit}; "
                "ask for fewer, or raise that where the LLM is made, LLM(max_logprobs=...)."
            )

    @cached_property
    def _scorer(self) -> Scorer:
        config = self.config
        return Scorer(
            cast(ScoringModel, self.engine.model),
            max_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            tile=config.prefill_tile,
            num_top=config.max_logprobs,
        )

    def _scores(
        self,
        sequences: Sequence[tuple[int, ...]],
        *,
        starts: Sequence[int] | None = None,
        top: int = 0,
        use_tqdm: bool | None,
    ) -> list[SequenceScores]:
        total = sum(len(ids) - 1 for ids in sequences)
        params = self.engine.params
        with self._bar(total, use_tqdm) as bar:
            return self._scorer.score(
                params, sequences, starts=starts, top=top, progress=bar.update
            )

    def _bar(self, total: int, use_tqdm: bool | None) -> Any:
        shown = self._progress if use_tqdm is None else use_tqdm
        return progress_bar(total, shown=shown, unit="token", label="scoring")

    def _encoded(self, prompts: Sequence[Prompt]) -> list[_Encoded]:
        """Check and encode everything before anything runs."""
        encoded = []
        for i, prompt in enumerate(prompts):
            with _where(f"prompts[{i}]", len(prompts)):
                text, ids = self._encode(prompt)
                self._check_ids(ids)
                encoded.append((text, ids))
        return encoded

    def _pair(self, pair: tuple[Prompt, Prompt]) -> tuple[tuple[int, ...], int]:
        """The ids of context and continuation together, and where the continuation begins."""
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"{short_repr(pair, 60)}: give a (context, continuation) pair.")
        for name, part in zip(("context", "continuation"), pair, strict=True):
            if not isinstance(part, str | Mapping | Sequence | np.ndarray):
                raise ValueError(f"{name} is {type(part).__name__}: give text or token ids.")
        given = [single_text_or_ids(part) for part in pair]
        if isinstance(given[0], str) != isinstance(given[1], str):
            raise ValueError(
                "one of context and continuation is text: give both as text or as ids."
            )
        for name, part in zip(("context", "continuation"), given, strict=True):
            if not len(part):
                hint = "give at least one token, such as the id that begins a text"
                raise ValueError(f"{name} is empty: {hint if name == 'context' else 'give one'}.")
        (_, context), (_, rest) = self._encode(pair[0]), self._encode(pair[1])
        if not isinstance(given[0], str):
            return context + rest, len(context)
        _, whole = self._encode(str(given[0]) + str(given[1]))
        same = next(
            (i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b),
            min(len(context), len(whole)),
        )
        start = min(same, len(whole) - 1)
        if start < 1:
            raise ValueError(
                "context and continuation begin with one token together: give token ids."
            )
        return whole, start

    def _check_ids(self, ids: Sequence[int]) -> None:
        limit = self.config.max_model_len
        if not ids:
            raise ValueError("prompt has 0 tokens: give at least one token (text, or token ids).")
        if len(ids) > limit:
            raise ValueError(
                f"prompt has {len(ids)} tokens, but max_model_len={limit}: shorten it, raise "
                "max_model_len if the model was made for more, or use LLM.perplexity, which takes "
                "a text in windows."
            )
        check_token_ids("prompt_token_ids", ids, self.engine.model.vocab_size)


def windows(length: int, size: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """``(begin, first, end)`` of each window, which scores its tokens from ``first`` on."""
    scored = 1
    for begin in range(0, length, stride):
        end = min(begin + size, length)
        yield begin, max(scored, begin + 1), end
        scored = end
        if end == length:
            return


def _prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], scores: SequenceScores, count: int | None = None
) -> PromptLogprobs:
    """For each token of ``ids`` its entry, with ``count`` alternatives, by default all."""
    entries: list[dict[int, Logprob] | None] = [None]
    tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
    own = zip(ids[1:], scores.logprobs.tolist(), scores.ranks.tolist(), strict=True)
    for (token, logprob, rank), (top_ids, top_logprobs) in zip(own, tops, strict=True):
        entry = {token: Logprob(logprob, rank, spell(tokenizer, token))}
        for place, (other, value) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
            if count is not None and place > count:
                break
            entry.setdefault(other, Logprob(value, place, spell(tokenizer, other)))
        entries.append(entry)
    return tuple(entries)


class _where:
    """Says in a ValueError which of several inputs it is about."""

    def __init__(self, name: str, count: int) -> None:
        self._prefix = f"{name}: " if count > 1 else ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self._prefix}{error}") from None


def _whole(name: str, value: Any, low: int, high: int, hint: str) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        raise ValueError(
            f"{name}={short_repr(value)}: must be a whole number, {low} to {high}; {hint}."
        )
    return int(value)
