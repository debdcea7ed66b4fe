"""``oxidize-jax generate``: prompts in, text out."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from oxidize_jax.cli.backend import start_backend
from oxidize_jax.cli.beams import (
    BeamCompletion,
    add_beam_options,
    beam_options,
    beam_params,
    search,
)
from oxidize_jax.cli.models import announce_fetch
from oxidize_jax.cli.parser import (
    Parser,
    UsageError,
    add_engine_options,
    add_sampling_options,
    engine_options,
    filled,
    sampling_params,
)
from oxidize_jax.cli.prompts import read_prompts
from oxidize_jax.cli.stats import Stats
from oxidize_jax.cli.structured import add_structured_options, structured_outputs
from oxidize_jax.cli.terminal import Status
from oxidize_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from oxidize_jax.llm import LLM
    from oxidize_jax.outputs import CompletionOutput, Logprob, RequestOutput

_DESCRIPTION = """\
Complete prompts, or answer them. One prompt on its own is written as the text is made;
several run together as one batch and are written in order, each under a header line.

A model with a chat template answers each prompt as a user's message; any other model goes
on with the text. --chat and --raw choose."""
_EXAMPLES = """\
examples:
  oxidize-jax generate "What is the capital of France?"
  oxidize-jax generate --raw --max-tokens 40 "Once upon a time"
  oxidize-jax generate --temperature 0.8 --top-p 0.95 --n 3 "Write a title for a sea story."
  oxidize-jax generate --beam-width 4 --length-penalty 0.8 "Translate to French: good morning"
  oxidize-jax generate --file prompts.txt --json | jq -r '.outputs[0].text'
  oxidize-jax generate --model ~/models/some.gguf --config configs/cpu.toml "Hello"
  cat letter.txt | oxidize-jax generate --system "Summarise the letter in one sentence." """
_SIZES = (1, 4)
"""Of max_num_seqs where few completions are asked for; each size is compiled on its own."""
_LONG_TEXT, _SHORT_STEP = 400, 128
"""A text of fewer characters fits, as good as always, into a step of so many tokens."""
_DEFAULT_MAX_LOGPROBS = 5
_MOST_LOGPROBS = 20
"""Room that is made unasked: it is kept for every token of every request."""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "generate",
        usage="%(prog)s [options] [PROMPT ...]",
        help="complete prompts, or answer them",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run, parser=parser)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("words", nargs="*", metavar="PROMPT", help="a prompt; quote it")
    prompts.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="the same, as an option"
    )
    prompts.add_argument(
        "--file",
        type=filled,
        action="append",
        default=[],
        metavar="FILE",
        help="a prompt in each line, blank lines skipped; - is standard input. Without any "
        "prompt, standard input is one prompt",
    )
    style = prompts.add_mutually_exclusive_group()
    style.add_argument(
        "--chat",
        dest="chat",
        action="store_true",
        default=None,
        help="answer through the chat template",
    )
    style.add_argument("--raw", dest="chat", action="store_false", help="go on with the text")
    prompts.add_argument("--system", metavar="TEXT", help="system message of the chat")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object a line per prompt")
    output.add_argument(
        "--stats", action="store_true", help="times, speed and memory, on standard error"
    )
    add_sampling_options(parser)
    add_beam_options(parser)
    add_structured_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print. What the arguments alone can show to be wrong is refused first."""
    args.structured_outputs = structured_outputs(args)
    params = sampling_params(args)
    beams = beam_params(args, params)
    for flag, count in (
        ("--logprobs", args.logprobs),
        ("--prompt-logprobs", args.prompt_logprobs),
    ):
        if count is not None and not args.json:
            raise UsageError(f"{flag}: log probabilities are written with --json only; add it.")
    if args.system is not None and args.chat is False:
        raise UsageError("--system: a system message needs a chat; leave out --raw.")
    texts = read_prompts([*args.words, *args.prompt], args.file)
    status, stats = Status(), Stats()
    with ExitStack() as stack:
        stack.callback(status.clear)
        status.show("starting ...")
        options = llm_options(args, len(texts), params, longest=max(map(len, texts), default=0))
        if beams is not None:
            options = beam_options(options, beams)
        _check_logprobs(params, options)
        stack.enter_context(stats.listening())
        llm = _load(options, status)
        stats.loaded()
        prompts = [_encode(llm, text, args) for text in texts]
        if len(texts) == 1 and params.num_sampled == 1 and not args.json and beams is None:
            _stream(llm, prompts[0], params, status, stats)
        else:
            outputs = (
                llm.generate(prompts, params)
                if beams is None
                else search(llm, prompts, params, beams)
            )
            status.clear()
            stats.count(outputs)
            _print_all(texts, outputs, as_json=args.json)
            if not args.json:
                for note in cut_notes(params, outputs):
                    status.note(note)
    if args.stats:
        stats.engine(llm.engine)
        stats.print()
    return 0


def llm_options(
    args: argparse.Namespace, count: int, params: SamplingParams, longest: int = _LONG_TEXT
) -> dict[str, Any]:
    """Options of the LLM for ``count`` prompts of at most ``longest`` characters.

    Unless the user says otherwise a few completions get a KV cache for a few sequences, and
    not for the 16 that are the default; and for short prompts no step is compiled that is as
    long as the default's longest, which takes a third of the first start.
    """
    options = engine_options(args)
    sizes = [size for size in _SIZES if size >= count * (args.beam_width or params.num_sampled)]
    if sizes:
        options.setdefault("max_num_seqs", sizes[0])
        if longest < _LONG_TEXT:
            options.setdefault("max_num_batched_tokens", _SHORT_STEP)
    most = max(params.logprobs or 0, params.prompt_logprobs or 0)
    if most > _DEFAULT_MAX_LOGPROBS:
        options.setdefault("max_logprobs", min(most, _MOST_LOGPROBS))
    return options


def _check_logprobs(params: SamplingParams, options: dict[str, Any]) -> None:
    """As the engine does, but before the model is loaded."""
    from oxidize_jax.options import Options

    limit = options.get("max_logprobs", Options.max_logprobs)
    given = {"--logprobs": params.logprobs, "--prompt-logprobs": params.prompt_logprobs}
    for flag, count in given.items():
        if (count or 0) > limit:
            raise UsageError(
                f"{flag} {count}: the limit is --max-logprobs {limit}; ask for fewer, or raise "
                "that (it takes memory for every token)."
            )


def _load(options: dict[str, Any], status: Status) -> LLM:
    start_backend()
    from oxidize_jax.llm import LLM
    from oxidize_jax.options import Options

    announce_fetch(options.get("model", Options.model), status)
    status.show("preparing ... (the first run compiles for this machine, later ones reuse it)")
    llm = LLM(**options, progress=status.watched)
    status.clear()
    return llm


def _encode(llm: LLM, text: str, args: argparse.Namespace) -> list[int]:
    """Token ids of ``text``, as a chat or as it is."""
    has_template = llm.tokenizer.chat_template is not None
    if args.chat is False or (args.chat is None and not has_template):
        if args.system is not None:
            raise UsageError("--system: this model has no chat template; leave it out.")
        return llm.tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return llm.tokenizer.apply_chat_template(messages)


def _stream(
    llm: LLM, prompt: list[int], params: SamplingParams, status: Status, stats: Stats
) -> None:
    """Print the text as it is made.

    The first piece waits for the second: before that one the decode program is compiled,
    and a text that stands still after a word looks broken.
    """
    text, shown, count = "", 0, 0
    for number, delta in enumerate(llm.stream(prompt, params)):
        count += len(delta.token_ids)
        stats.text(len(delta.token_ids))
        text += delta.text
        if number == 0 and delta.finish_reason is None:
            continue
        status.clear()
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if delta.finish_reason is not None:
            stats.finished(len(prompt))
            print(end="" if text.endswith("\n") else "\n", flush=True)
            if delta.finish_reason == "length":
                status.note(f"[cut off: {why_cut(params, count, delta.stop_reason)}]")


def why_cut(params: SamplingParams, count: int, stop_reason: int | str | None) -> str:
    """Tell a person why a text ends in mid-sentence."""
    if stop_reason == "kv_cache_exhausted":
        return "the KV cache is full; a larger --kv-cache-gib or --num-blocks gives more"
    if count == params.max_tokens:
        return f"--max-tokens is {count}; a larger one gives more"
    return "prompt and output have reached --max-model-len, or the model's own limit"


def cut_notes(params: SamplingParams, outputs: Sequence[RequestOutput]) -> list[str]:
    """A line for each reason why some of the texts end in mid-sentence."""
    texts = [completion for output in outputs for completion in output.outputs]
    reasons = Counter(
        why_cut(params, len(text.token_ids), text.stop_reason)
        for text in texts
        if text.finish_reason == "length"
    )
    return [f"[{n} of {len(texts)} texts cut off: {reason}]" for reason, n in reasons.items()]


def _print_all(texts: Sequence[str], outputs: Sequence[RequestOutput], *, as_json: bool) -> None:
    """Print every completion, under a header line where there are several."""
    for index, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        if as_json:
            print(json.dumps(record(index, text, output), ensure_ascii=False, allow_nan=False))
            continue
        for completion in output.outputs:
            if len(texts) * len(output.outputs) > 1:
                print(_header(index, text, len(texts), completion.index, len(output.outputs)))
            print(completion.text, end="" if completion.text.endswith("\n") else "\n")


def _header(index: int, text: str, count: int, completion: int, n: int) -> str:
    where = f"{index + 1}/{count}" + (f", completion {completion + 1}/{n}" if n > 1 else "")
    first = " ".join(text.split())
    return f"=== {where}: {first if len(first) <= 60 else first[:59] + '…'}"


def record(index: int, text: str, output: RequestOutput) -> dict[str, Any]:
    """One line of ``--json``: the RequestOutput, with ``prompt`` as the user gave it."""
    return {
        "index": index,
        "prompt": text,
        "outputs": [_completion_record(completion) for completion in output.outputs],
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "total_tokens": output.usage.total_tokens,
            "cached_tokens": output.usage.cached_tokens,
        },
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": _prompt_records(output),
        "request_id": output.request_id,
        "finished": output.finished,
    }


def _completion_record(completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": completion.index,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": list(completion.token_ids),
        "cumulative_logprob": _finite(completion.cumulative_logprob),
        "logprobs": _token_records(completion),
        **({"score": _finite(completion.score)} if isinstance(completion, BeamCompletion) else {}),
    }


def _prompt_records(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """The same for each token of the prompt, itself among the alternatives; null for the first."""
    if output.prompt_logprobs is None:
        return None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [None if entry is None else _token_record(token, entry) for token, entry in pairs]


def _token_records(completion: CompletionOutput) -> list[dict[str, Any]] | None:
    """For each token its own log probability and the alternatives, best first, itself with its
    rank among them. ``--logprobs 0`` has no alternative but itself."""
    if completion.logprobs is None:
        return None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [_token_record(token, entry) for token, entry in pairs]


def _token_record(token: int, entry: dict[int, Logprob]) -> dict[str, Any]:
    alternatives = [_logprob_record(i, e) for i, e in entry.items() if e.rank is not None]
    alternatives.sort(key=lambda one: one["rank"])
    return _logprob_record(token, entry[token]) | {"alternatives": alternatives}


def _logprob_record(token: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token_id": token,
        "token": entry.decoded_token,
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity: null."""
    return value if math.isfinite(value) else None
