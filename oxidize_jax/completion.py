"""From an engine's updates to the text, ids and logprobs of a prompt's completions."""

from __future__ import annotations

import dataclasses

from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.engine.updates import RequestUpdate
from oxidize_jax.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta, Usage
from oxidize_jax.sampling.params import SamplingParams
from oxidize_jax.text.detokenizer import IncrementalDetokenizer
from oxidize_jax.text.stop import StopStrings
from oxidize_jax.text.tokenizer import Tokenizer


class Completion:
    """One sequence as it grows. Fed with updates; gives deltas and, at the end, the whole."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self._index = index
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop or ())
        self._text = ""
        self._shown_text = self._shown_ids = 0
        self._told_end = False
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._alternatives: list[dict[int, Logprob]] = []
        self._stop_reason: int | str | None = None
        self.finish_reason: str | None = None
        self.num_cached_tokens = 0

    @property
    def matched_stop_string(self) -> bool:
        """A stop string ended it, which the engine does not know: abort the request."""
        return self._stops.matched is not None

    @property
    def num_tokens(self) -> int:
        """Generated so far."""
        return len(self._ids)

    def update(self, update: RequestUpdate) -> None:
        """Take in what a dispatch brought; what follows a stop string is dropped."""
        self.num_cached_tokens = update.num_cached_tokens
        last = len(update.token_ids) - 1
        for i, token in enumerate(update.token_ids):
            self._append(update, i)
            # The text of the token that ended a generation is not part of it.
            if update.finish_reason == "stop" and i == last and not update.keeps_last:
                break
            new = self._detokenizer.add([token])
            # As in vLLM, no text of the first min_tokens tokens ends a request.
            too_early = len(self._ids) <= self._params.min_tokens
            self._text += new if too_early else self._stops.add(new)
            if self._stops.matched is not None:
                break
        self._text += self._finish(update)

    @property
    def has_delta(self) -> bool:
        """Whether :meth:`delta` has something to show: new text, or the end."""
        ended = self.finish_reason is not None
        return not self._told_end and (ended or len(self._text) > self._shown_text)

    def delta(self) -> StreamDelta | None:
        """What is new since the last call, if anything."""
        if not self.has_delta:
            return None
        text, ids = self._text[self._shown_text :], tuple(self._ids[self._shown_ids :])
        asked = self._params.logprobs is not None
        logprobs = tuple(self._alternatives[self._shown_ids :]) if asked else None
        self._shown_text, self._shown_ids = len(self._text), len(self._ids)
        self._told_end = self.finish_reason is not None
        reason = self.finish_reason
        return StreamDelta(self._index, text, ids, reason, self._stop_reason, logprobs)

    def output(self) -> CompletionOutput:
        """All of it so far."""
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=tuple(self._ids),
            cumulative_logprob=float(sum(self._logprobs)),
            logprobs=None if self._params.logprobs is None else tuple(self._alternatives),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _append(self, update: RequestUpdate, i: int) -> None:
        token, logprob = update.token_ids[i], update.logprobs[i]
        self._ids.append(token)
        self._logprobs.append(logprob)
        if self._params.logprobs is None:
            return
        ranked = update.top_logprobs[i] if update.top_logprobs else ()
        entry = {
            candidate: Logprob(value, rank, self._spell(candidate))
            for rank, (candidate, value) in enumerate(ranked, 1)
        }
        own = update.ranks[i] if update.ranks else None
        entry.setdefault(token, Logprob(logprob, own, self._spell(token)))
        self._alternatives.append(entry)

    def _finish(self, update: RequestUpdate) -> str:
        """Set the reasons and return the text that was held back."""
        if self._stops.matched is not None:
            self.finish_reason, self._stop_reason = "stop", self._stops.matched
            return ""
        if update.finish_reason is None:
            return ""
        self.finish_reason = update.finish_reason
        if update.pool_exhausted:
            self._stop_reason = "kv_cache_exhausted"
        elif update.failure is not None:
            self._stop_reason = update.failure
        elif self.finish_reason == "stop" and self._ids[-1] in self._params.stop_token_ids:
            self._stop_reason = self._ids[-1]
        tail = self._stops.add(self._detokenizer.finish()) + self._stops.finish()
        if self._stops.matched is not None:
            self.finish_reason, self._stop_reason = "stop", self._stops.matched
        return tail

    def _spell(self, token: int) -> str:
        return spell(self._tokenizer, token)


class Group:
    """One prompt with its completions: ``n``, or ``best_of`` where that is given."""

    def __init__(
        self,
        prompt: str | None,
        params: SamplingParams,
        request: EngineRequest,
        keys: list[tuple[int, int]],
    ) -> None:
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.params = params
        self.request = request
        self.keys = keys
        self.ids: list[int] = []
        self.completions: list[Completion] = []
        self.prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None

    @property
    def num_unshown(self) -> int:
        """Completions with a delta that nobody has taken."""
        return sum(c.has_delta for c in self.completions)

    @property
    def num_finished(self) -> int:
        """Completions that have come to their end."""
        return sum(c.finish_reason is not None for c in self.completions)

    @property
    def num_tokens(self) -> int:
        """Generated so far, over all completions."""
        return sum(c.num_tokens for c in self.completions)

    @property
    def finished(self) -> bool:
        """Whether every completion has come to its end."""
        return self.num_finished == len(self.keys)

    def output(self) -> RequestOutput:
        """What a caller gets."""
        return RequestOutput(
            request_id=self.ids[0],
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._returned(),
            usage=Usage(
                prompt_tokens=len(self.prompt_token_ids),
                completion_tokens=self.num_tokens,
                cached_tokens=self.completions[0].num_cached_tokens,
            ),
            prompt_logprobs=self.prompt_logprobs,
        )

    def _returned(self) -> tuple[CompletionOutput, ...]:
        """All completions; with ``best_of`` the likeliest ``n`` of them, the first of equals."""
        outputs = [completion.output() for completion in self.completions]
        if self.params.num_sampled == self.params.n:
            return tuple(outputs)
        best = sorted(outputs, key=lambda output: -output.cumulative_logprob)[: self.params.n]
        return tuple(dataclasses.replace(output, index=i) for i, output in enumerate(best))


def spell(tokenizer: Tokenizer, token: int) -> str:
    """One token by itself; bytes that are no character are replaced."""
    return tokenizer.bytes_of([token]).decode("utf-8", "replace")
