"""LLM: prompts in, text out, in this process. The interface is vLLM's ``entrypoints/llm.py``."""

from __future__ import annotations

import dataclasses
import difflib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oxidize_jax.beam_search import check_beam_prompt, check_search, search_prompts
from oxidize_jax.compile_cache import enable_compile_cache
from oxidize_jax.completion import Group
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.constraint import Grammar
from oxidize_jax.engine.engine import Engine
from oxidize_jax.engine.recorder import Recorder
from oxidize_jax.engine.request import EngineRequest
from oxidize_jax.llm_saves import Saves
from oxidize_jax.llm_scores import Scores
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.options import Options, cache_dtype, load_options, weight_dtype
from oxidize_jax.outputs import BeamSearchOutput, RequestOutput, StreamDelta
from oxidize_jax.progress import progress_bar
from oxidize_jax.prompts import (
    CacheSalts,
    Messages,
    Prompt,
    as_conversations,
    as_ids,
    as_params,
    as_priorities,
    as_prompts,
    single_text_or_ids,
)
from oxidize_jax.runner import Runner
from oxidize_jax.sampling.beam_params import BeamSearchParams
from oxidize_jax.sampling.keys import child_key
from oxidize_jax.sampling.params import SamplingParams
from oxidize_jax.startup import start, with_saved_dtype
from oxidize_jax.structured.compiler import GrammarCompiler
from oxidize_jax.text.bad_words import word_sequences


class LLM(Scores, Saves):
    """A model with its tokenizer and an engine to run it.

    Args:
      model: a built-in name (``smollm2-135m-instruct``), a Hugging Face folder or repo id,
        a ``.gguf`` file, or a folder that :meth:`save` made.
      compile_cache: keep compiled programs on disk, so that the next start is fast. A cache
        that JAX is configured with already is left as it is.
      progress: bars while a model loads and while prompts take longer than a second.
      warm_up: compile every program of the engine now, while the weights are read, and then
        size the KV cache by the memory that is left; no request waits for a compiler any
        more. Without it the first requests do, and memory is only estimated.
      options: see :class:`~oxidize_jax.options.Options`.

    Raises:
      ValueError: an option, or the model, cannot be used; one line that says what to do.

    Threads may share it: what they ask for runs side by side, in the same batches. One of
    them runs the engine for all; while it does, the others wait for what comes of it.
    """

    def __init__(
        self,
        model: str | Path = Options.model,
        *,
        compile_cache: bool = True,
        progress: bool = True,
        warm_up: bool = True,
        **options: Any,
    ) -> None:
        chosen = with_saved_dtype(_options({**options, "model": model}))
        if compile_cache:
            enable_compile_cache()
        recorder = _recorder(chosen)
        started = start(chosen, warm_up=warm_up, progress=progress)
        self.options = chosen
        self.tokenizer = started.tokenizer
        self._tokenizer_path = started.tokenizer_path
        self.model_config: ModelConfig = started.model_config
        self.config: EngineConfig = started.config
        engine = Engine(
            started.config,
            started.decoder,
            started.params,
            check_invariants=chosen.check_invariants,
            recorder=recorder,
        )
        self._runner = Runner(engine, self.tokenizer)
        self._salts = CacheSalts()
        self._grammars = GrammarCompiler(self.tokenizer, self.model_config.vocab_size)
        self._progress = progress
        self._seeds = random.Random(chosen.seed)
        # A tokenizer may have ids that the model has no logit for: they cannot be drawn.
        vocab_size = self.model_config.vocab_size
        self._eos = tuple(i for i in self.tokenizer.eos_token_ids if i < vocab_size)

    @classmethod
    def from_config(cls, path: str | Path, **overrides: Any) -> LLM:
        """Make an LLM from a TOML preset (see ``configs/``); keyword arguments win."""
        return cls(**{**load_options(path), **overrides})

    @property
    def engine(self) -> Engine:
        """What runs the requests. Another one may be put in its place while nothing runs."""
        return self._runner.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._runner.engine = engine

    @property
    def num_compiles(self) -> int:
        """Programs that this process compiled, or took from its disk cache, since the engine
        was made; see :attr:`Engine.num_compiles`. It stands still while the LLM is used, but for
        the first scores and embeddings of a size."""
        return self.engine.num_compiles

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; the results are in the order of the prompts.

        Args:
          prompts: one prompt or a list; see :data:`Prompt`. A list of ints is one prompt.
          sampling_params: for all prompts, or one for each. Default: ``SamplingParams()``.
          use_tqdm: show a bar; default: after a second of work.
          priority: a whole number for each prompt, default 0: the smaller goes first, among those
            that wait and in the batch, and loses its row last.

        Raises:
          ValueError: a prompt or a parameter cannot be used; then nothing has run.
        """
        groups = self._groups(as_prompts(prompts), sampling_params, priority)
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

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the likeliest continuations of each prompt; results in the order of the prompts.

        They are transformers' (``generate(num_beams=k, num_return_sequences=k)``). All prompts
        are searched side by side in one program, as far as ``max_num_seqs`` has rows for
        ``beam_width`` of each; it is compiled the first time. What other threads run meanwhile
        is preempted, and goes on afterwards.

        Raises:
          ValueError: a prompt or a parameter cannot be used; then nothing has run.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params is {type(params).__name__}: give a BeamSearchParams.")
        stop_ids = (-1,) * len(self._eos) if params.ignore_eos else self._eos
        vocab_size, given = self.model_config.vocab_size, as_prompts(prompts)
        check_search(self.config, vocab_size, params, len(stop_ids))
        checked = []
        for i, prompt in enumerate(given):
            try:
                text, ids = self._encode(prompt)
                salt = self._salts.number(prompt)
                checked.append(check_beam_prompt(self.config, vocab_size, params, text, ids, salt))
            except ValueError as error:
                where = f"prompts[{i}]: " if len(given) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        shown = self._progress if use_tqdm is None else use_tqdm
        with progress_bar(len(checked), shown=shown) as bar, self._runner.exclusive() as engine:
            return search_prompts(
                engine, self.tokenizer, checked, params, stop_ids, lambda n: bar.update(n - bar.n)
            )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """Yield the text of one prompt as it is made; ``generate`` gives the same in one piece.

        The prompt is checked at the call. Closing the iterator aborts the request.

        Raises ValueError for ``best_of`` above ``n``: nobody knows the best before the end.
        """
        (params,) = as_params(sampling_params, 1)
        if params.num_sampled > params.n:
            raise ValueError(
                f"best_of={params.best_of}: which {params.n} are the best is "
                "known at the end only; use generate, or leave best_of out."
            )
        if params.prompt_logprobs is not None:
            raise ValueError(
                f"prompt_logprobs={params.prompt_logprobs}: a stream has none; ask "
                "LLM.generate or LLM.score for them."
            )
        (group,) = self._groups([prompt], params)
        return self._runner.stream(group)

    def chat_prompt(
        self, messages: Messages, *, cache_salt: str | None = None, **template_options: Any
    ) -> Prompt:
        """The prompt that the model's chat template makes of a conversation."""
        ids = self.tokenizer.apply_chat_template(messages, **template_options)
        return {"prompt_token_ids": ids, "cache_salt": cache_salt}

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[Group]:
        """Check and encode prompts as :meth:`generate` does, for a server that runs them itself.

        Raises ValueError for what cannot run; a group has no ``prompt_logprobs``.
        """
        return self._groups(as_prompts(prompts), sampling_params, priority)

    @property
    def runner(self) -> Runner:
        """What brings the groups of all callers through the engine."""
        return self._runner

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV: call it when the parameters have changed.

        Streams that run meanwhile go on with the KV they have, and nobody else shares it.
        """
        with self._runner.exclusive() as engine:
            engine.reset_prefix_cache()

    def _run(self, groups: list[Group], use_tqdm: bool | None) -> list[RequestOutput]:
        self._score_prompts(groups, use_tqdm)
        total = sum(len(group.keys) for group in groups)
        shown = self._progress if use_tqdm is None else use_tqdm
        with progress_bar(total, shown=shown) as bar:

            def report(done: int, tokens: int) -> None:
                bar.update(done - bar.n)
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)

            self._runner.run(groups, report)
        return [group.output() for group in groups]

    def _groups(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
    ) -> list[Group]:
        """Check and encode everything before anything runs."""
        params = as_params(sampling_params, len(prompts))
        ranks = as_priorities(priority, len(prompts))
        groups = []
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                groups.append(self._group(prompt, p, ranks[i]))
            except ValueError as error:
                where = f"prompts[{i}]: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        return groups

    def _group(self, prompt: Prompt, params: SamplingParams, priority: int) -> Group:
        text, ids = self._encode(prompt)
        self._check_prompt_logprobs(params)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self._eos
        held = self._eos if params.ignore_eos and params.min_tokens else ()
        limit = self.config.max_model_len
        request = EngineRequest(
            prompt_token_ids=ids,
            max_new_tokens=limit if params.max_tokens is None else params.max_tokens,
            min_new_tokens=params.min_tokens,
            stop_token_ids=tuple(dict.fromkeys([*eos, *params.stop_token_ids])),
            held_token_ids=tuple(i for i in held if i not in params.stop_token_ids),
            temperature=params.temperature,
            top_k=max(params.top_k, 0),  # vLLM has -1 for all, too
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple(params.logit_bias or ()),  # type: ignore[arg-type]
            bad_words=word_sequences(self.tokenizer, params.bad_words or ()),
            allowed_token_ids=params.allowed_token_ids,
            banned_token_ids=params.banned_token_ids,
            num_logprobs=params.logprobs,
            grammar=self._grammar(params),
            salt=self._salts.number(prompt),
            priority=priority,
        )
        self.engine.validate(request)
        keys = [child_key(seed, child).tolist() for child in range(params.num_sampled)]
        return Group(text, params, request, [(first, second) for first, second in keys])

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        return self._grammars.compile(params.structured_outputs)

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        given = single_text_or_ids(prompt)
        if not isinstance(given, str):
            return None, as_ids(given)
        ids = tuple(self.tokenizer.encode(given))
        if not ids:
            raise ValueError("prompt is empty: give at least one character of text.")
        return given, ids


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
