"""LLM: prompts in, text out, in this process. The interface is vLLM's ``entrypoints/llm.py``."""

from __future__ import annotations

import dataclasses
import difflib
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from oxidize_jax.checkpoints.load import load_checkpoint
from oxidize_jax.checkpoints.resolve import ResolvedModel, resolve_model
from oxidize_jax.compile_cache import enable_compile_cache
from oxidize_jax.completion import Completion
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.engine import (
    STEPS_PER_DISPATCH,
    Engine,
    EngineStepError,
)
from oxidize_jax.engine.recorder import Recorder
from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.engine.updates import RequestUpdate
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.functional import build
from oxidize_jax.options import Options, cache_dtype, engine_config, load_options, weight_dtype
from oxidize_jax.outputs import RequestOutput, StreamDelta, Usage
from oxidize_jax.progress import progress_bar
from oxidize_jax.prompts import (
    CacheSalts,
    Messages,
    Prompt,
    as_conversations,
    as_ids,
    as_params,
    as_prompts,
    single_text_or_ids,
)
from oxidize_jax.sampling.keys import child_key
from oxidize_jax.sampling.params import SamplingParams
from oxidize_jax.text.tokenizer import Tokenizer


class LLM:
    """A model with its tokenizer and an engine to run it.

    Args:
      model: a built-in name (``smollm2-135m-instruct``), a Hugging Face folder or repo id,
        or a ``.gguf`` file.
      compile_cache: keep compiled programs on disk, so that the next start is fast. A cache
        that JAX is configured with already is left as it is.
      progress: bars while a model loads and while prompts take longer than a second.
      options: see :class:`~oxidize_jax.options.Options`.

    Raises:
      ValueError: an option, or the model, cannot be used; one line that says what to do.

    Threads may share it: calls of :meth:`generate` and :meth:`chat` take turns, streams go on
    side by side between them.
    """

    def __init__(
        self,
        model: str | Path = Options.model,
        *,
        compile_cache: bool = True,
        progress: bool = True,
        **options: Any,
    ) -> None:
        chosen = _options({**options, "model": str(model)})
        if compile_cache:
            enable_compile_cache()
        recorder = _recorder(chosen)
        resolved = resolve_model(chosen.model)
        checkpoint = load_checkpoint(
            resolved.path, jnp.dtype(weight_dtype(chosen)), progress=progress
        )
        self.options = chosen
        self.tokenizer = _load_tokenizer(chosen, resolved)
        self.model_config: ModelConfig = checkpoint.config
        self.config: EngineConfig = engine_config(chosen, checkpoint.config)
        decoder, params = build(
            checkpoint.config,
            checkpoint.params,
            attention=chosen.attention,
            kv_dtype=cache_dtype(chosen),
        )
        self.engine = Engine(
            self.config,
            decoder,
            params,
            check_invariants=chosen.check_invariants,
            recorder=recorder,
        )
        self._salts = CacheSalts()
        self._progress = progress
        self._seeds = random.Random(chosen.seed)
        # A tokenizer may have ids that the model has no logit for: they cannot be drawn.
        vocab_size = checkpoint.config.vocab_size
        self._eos = tuple(i for i in self.tokenizer.eos_token_ids if i < vocab_size)
        self._running: dict[int, Completion] = {}
        self._lock = threading.RLock()

    @classmethod
    def from_config(cls, path: str | Path, **overrides: Any) -> LLM:
        """Make an LLM from a TOML preset (see ``configs/``); keyword arguments win."""
        return cls(**{**load_options(path), **overrides})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; the results are in the order of the prompts.

        Args:
          prompts: one prompt or a list; see :data:`Prompt`. A list of ints is one prompt.
          sampling_params: for all prompts, or one for each. Default: ``SamplingParams()``.
          use_tqdm: show a bar; default: after a second of work.

        Raises:
          ValueError: a prompt or a parameter cannot be used; then nothing has run.
        """
        groups = self._groups(as_prompts(prompts), sampling_params)
        return self._run(groups, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        cache_salt: str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list, through the model's chat template.

        Only conversations of one ``cache_salt`` share cached KV.
        """
        conversations = as_conversations(messages)
        prompts = []
        for i, conversation in enumerate(conversations):
            try:
                prompts.append(
                    self.chat_prompt(conversation, cache_salt=cache_salt, **template_options)
                )
            except ValueError as error:
                where = f"conversations[{i}]: " if len(conversations) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        groups = self._groups(prompts, sampling_params)
        for group in groups:
            group.prompt = self.tokenizer.decode(group.prompt_token_ids, skip_special_tokens=False)
        return self._run(groups, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """Yield the text of one prompt as it is made; ``generate`` gives the same in one piece.

        The prompt is checked at the call. Closing the iterator aborts the request.
        """
        (group,) = self._groups([prompt], sampling_params)
        return self._stream(group)

    def chat_prompt(
        self, messages: Messages, *, cache_salt: str | None = None, **template_options: Any
    ) -> Prompt:
        """The prompt that the model's chat template makes of a conversation."""
        ids = self.tokenizer.apply_chat_template(messages, **template_options)
        return {"prompt_token_ids": ids, "cache_salt": cache_salt}

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV: call it when the parameters have changed.

        Streams that run meanwhile go on with the KV they have, and nobody else shares it.
        """
        with self._lock:
            self.engine.reset_prefix_cache()

    def _groups(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[_Group]:
        """Check and encode everything before anything runs."""
        params = as_params(sampling_params, len(prompts))
        groups = []
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                groups.append(self._group(prompt, p))
            except ValueError as error:
                where = f"prompts[{i}]: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        return groups

    def _group(self, prompt: Prompt, params: SamplingParams) -> _Group:
        text, ids = self._encode(prompt)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self._eos
        limit = self.config.max_model_len
        request = EngineRequest(
            prompt_token_ids=ids,
            max_new_tokens=limit if params.max_tokens is None else params.max_tokens,
            min_new_tokens=params.min_tokens,
            stop_token_ids=tuple(dict.fromkeys([*eos, *params.stop_token_ids])),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            num_logprobs=params.logprobs,
            salt=self._salts.number(prompt),
        )
        self.engine.validate(request)
        keys = [child_key(seed, child).tolist() for child in range(params.n)]
        return _Group(text, params, request, [(first, second) for first, second in keys])

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        given = single_text_or_ids(prompt)
        if not isinstance(given, str):
            return None, as_ids(given)
        ids = tuple(self.tokenizer.encode(given))
        if not ids:
            raise ValueError("prompt is empty: give at least one character of text.")
        return given, ids

    def _run(self, groups: list[_Group], use_tqdm: bool | None) -> list[RequestOutput]:
        total = sum(len(group.keys) for group in groups)
        shown = self._progress if use_tqdm is None else use_tqdm
        with self._lock, progress_bar(total, shown=shown) as bar:
            try:
                for group in groups:
                    self._start(group)
                left, tokens = {i for group in groups for i in group.ids}, 0
                while left:
                    for update in self._dispatch(STEPS_PER_DISPATCH):
                        tokens += len(update.token_ids)
                        if update.request_id in left and not self._is_running(update.request_id):
                            left.discard(update.request_id)
                            bar.update()
                    bar.set_postfix_str(f"{tokens} tokens", refresh=False)
            finally:
                for group in groups:
                    self._abandon(group)
        return [group.output() for group in groups]

    def _stream(self, group: _Group) -> Iterator[StreamDelta]:
        self._start(group)
        try:
            while True:
                # Deltas wait in the completions: another stream's dispatch may make them,
                # even while this one stands at its yield.
                fresh = [delta for c in group.completions if (delta := c.delta()) is not None]
                yield from fresh
                if not fresh and group.finished:
                    return
                if not fresh:
                    self._advance(group)
        finally:
            self._abandon(group)

    def _advance(self, group: _Group) -> None:
        """One step for everyone, unless another thread has just brought this group further."""
        with self._lock:
            if group.num_unshown:
                return
            for request_id in group.ids:
                if self._is_running(request_id) and not self.engine.has(request_id):
                    raise EngineStepError(
                        f"request {request_id} was lost in a failed step of another caller: "
                        "submit it again."
                    )
            self._dispatch(1)

    def _start(self, group: _Group) -> None:
        with self._lock:
            group.ids = self.engine.add_group(group.request, group.keys)
            for index, request_id in enumerate(group.ids):
                completion = Completion(index, group.prompt_token_ids, group.params, self.tokenizer)
                group.completions.append(completion)
                self._running[request_id] = completion

    def _abandon(self, group: _Group) -> None:
        """Abort what an exception or a closed iterator left running.

        Without the lock: the garbage collector may close an iterator in any thread.
        """
        for request_id in group.ids:
            if self._running.pop(request_id, None) is not None:
                self.engine.abort(request_id)

    def _is_running(self, request_id: int) -> bool:
        return request_id in self._running

    def _dispatch(self, max_steps: int) -> list[RequestUpdate]:
        """Run some steps for everyone, and hand each completion what is new of it."""
        updates = self.engine.step(max_steps)
        for update in updates:
            completion = self._running.get(update.request_id)
            if completion is None:
                continue
            completion.update(update)
            if completion.finish_reason is not None:
                self._running.pop(update.request_id, None)
                if completion.matched_stop_string:
                    self.engine.abort(update.request_id)
        return updates


class _Group:
    """One prompt with its ``n`` completions."""

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

    @property
    def num_unshown(self) -> int:
        return sum(c.has_delta for c in self.completions)

    @property
    def num_finished(self) -> int:
        return sum(c.finish_reason is not None for c in self.completions)

    @property
    def num_tokens(self) -> int:
        return sum(c.num_tokens for c in self.completions)

    @property
    def finished(self) -> bool:
        return self.num_finished == len(self.keys)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.ids[0],
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(c.output() for c in self.completions),
            usage=Usage(
                prompt_tokens=len(self.prompt_token_ids),
                completion_tokens=self.num_tokens,
                cached_tokens=self.completions[0].num_cached_tokens,
            ),
        )


def _options(values: dict[str, Any]) -> Options:
    known = {field.name for field in dataclasses.fields(Options)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
            raise ValueError(f"{name!r} is not an option of LLM.{hint}")
    return Options(**values)


def _recorder(options: Options) -> Recorder | None:
    if options.trace is None:
        return None
    return Recorder(
        options.trace,
        model={
            "name": options.model,
            "dtype": weight_dtype(options),
            "kv_cache_dtype": cache_dtype(options),
            "attention": options.attention,
        },
    )


def _load_tokenizer(options: Options, resolved: ResolvedModel) -> Tokenizer:
    path = resolved.path
    if options.tokenizer is not None:
        path = Path(options.tokenizer).expanduser()
        if not path.exists():
            raise ValueError(f"tokenizer={options.tokenizer!r}: there is no such file or folder.")
    return Tokenizer.from_gguf(path) if path.is_file() else Tokenizer.from_hf_folder(path)
