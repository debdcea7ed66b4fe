"""argparse with one-line errors, and the groups of options that commands share."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from oxidize_jax.sampling.params import SamplingParams

# Of oxidize_jax.options and oxidize_jax.config, which import jax; a test compares them.
DTYPES = ("auto", "float32", "bfloat16", "int8")
KV_DTYPES = ("auto", "float32", "bfloat16")
POLICIES = ("prefill_first", "decode_first")


_NO_VALUE = "expected one argument"
"""What argparse says of an option at the end, and of a value that looks like an option."""


class UsageError(ValueError):
    """Arguments that make no sense, in words for the person who typed them."""


class Parser(argparse.ArgumentParser):
    """Full option names only, and errors as :class:`UsageError`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, where argparse would print the usage and exit."""
        if message.endswith(_NO_VALUE):
            option = message.removeprefix("argument ").partition(":")[0]
            message += f"; one that starts with - is joined by =, as in {option}=-x"
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``, prompts after options included.

    argparse takes ``PROMPT ...`` only in one run: in ``generate A --n 2 B`` it leaves B over.
    """
    args, extra = parser.parse_known_args(argv)
    parser = getattr(args, "parser", parser)
    words: list[str] = []
    for i, word in enumerate(extra):
        if word == "--":
            words += extra[i + 1 :]
            break
        if word.startswith("-"):
            parser.error(f"there is no option {word}{_near(parser, word)}")
        words.append(word)
    if words and not hasattr(args, "words"):
        parser.error(f"there is no use for the argument {words[0]!r}")
    if words:
        args.words += words
    return args


def _near(parser: argparse.ArgumentParser, word: str) -> str:
    known = [flag for action in parser._actions for flag in action.option_strings]
    matches = difflib.get_close_matches(word.partition("=")[0], known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def filled(text: str) -> str:
    """An argparse type: any text but none, which a shell makes of a variable that is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give a value or leave it out")
    return text


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options whose names are fields of SamplingParams, each checked when it is parsed."""
    group = parser.add_argument_group("sampling")
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    defaults |= {"max_tokens": 256, "temperature": 0.0}

    def add(name: str, convert: Callable[[str], Any], metavar: str, text: str) -> None:
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_sampling_type(name, convert),
            default=defaults[name],
            metavar=metavar,
            help=text,
        )

    add("max_tokens", _whole_or_none, "N", "most new tokens, or 'none' (default: 256)")
    add("min_tokens", int, "N", "do not end before this many new tokens (default: 0)")
    add("temperature", float, "X", "0 takes the likeliest token, the same text for everyone; "
        "1 samples as the model says (default: 0)")  # fmt: skip
    add("top_k", int, "N", "sample from the N likeliest tokens; 0: from all (default: 0)")
    add("top_p", float, "X", "sample from the likeliest tokens that together have this "
        "probability (default: 1)")  # fmt: skip
    add("min_p", float, "X", "sample from tokens at least X times as likely as the likeliest "
        "(default: 0)")  # fmt: skip
    add("typical_p", float, "X", "sample from the tokens nearest to the expected surprise that "
        "together have this probability (default: 1)")  # fmt: skip
    add("repetition_penalty", float, "X", "above 1: rather not tokens of prompt or output "
        "(default: 1)")  # fmt: skip
    add("presence_penalty", float, "X", "above 0: rather not tokens of the output (default: 0)")
    add("frequency_penalty", float, "X", "above 0: the less, the oftener they were in the output "
        "(default: 0)")  # fmt: skip
    add("logit_bias", _biases, "ID:X,...", "add X to the logit of token ID, -100 to 100")
    add("allowed_token_ids", _ids, "ID,...", "sample nothing but these")
    add("banned_token_ids", _ids, "ID,...", "never sample these")
    add("seed", _whole_or_none, "N", "draw other samples; the same seed gives a prompt the same "
        "text. Without it, the same command gives the same text")  # fmt: skip
    add("n", int, "N", "completions of each prompt (default: 1)")
    add("best_of", _whole_or_none, "N", "sample N completions and write the --n likeliest of them")
    add("logprobs", _whole_or_none, "N", "with --json: log probabilities of N alternatives for "
        "each token; 0: of the chosen token alone")  # fmt: skip
    add("prompt_logprobs", _whole_or_none, "N", "with --json: the same of each token of the prompt")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text; can be given several times",
    )
    group.add_argument(
        "--bad-word",
        dest="bad_words",
        action="append",
        metavar="TEXT",
        help="never write this word; can be given several times",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end-of-sequence"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams of the options. Raises ValueError if they contradict each other."""
    names = [
        field.name for field in dataclasses.fields(SamplingParams) if hasattr(args, field.name)
    ]
    return SamplingParams(**{name: getattr(args, name) for name in names})


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--config`` and the options whose names are fields of Options."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        type=filled,
        metavar="MODEL",
        help="a built-in name, a .gguf file, a Hugging Face folder or repo id "
        "(default: smollm2-135m-instruct)",
    )
    model.add_argument(
        "--tokenizer",
        type=filled,
        metavar="PATH",
        help="take the tokenizer from here instead",
    )
    _choice(model, "dtype", DTYPES, "of the weights; auto: float32 on a CPU without AMX, "
            "else bfloat16; int8: half of that again, a little less exact")  # fmt: skip
    _choice(model, "kv_cache_dtype", KV_DTYPES, "of the KV cache; auto: as --dtype, bfloat16 "
            "for int8")  # fmt: skip

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--config",
        type=filled,
        metavar="FILE",
        help="read these options from a TOML file, with underscores in their names; the "
        "command line wins",
    )
    _number(engine, "max_model_len", _whole(2), "most tokens of prompt and output together "
            "(default: what the model was made for)")  # fmt: skip
    _number(engine, "max_num_seqs", _whole(1), "sequences that run at the same time (default: "
            "16; 1 or 4 where that is enough)")  # fmt: skip
    _number(engine, "max_num_batched_tokens", _whole(1), "tokens in a step (default: 512)")
    _number(engine, "block_size", _whole(1), "tokens in a block of the KV cache (default: 16)")
    _number(engine, "num_blocks", _whole(1), "blocks in the KV cache (default: by memory)")
    _number(engine, "kv_cache_gib", _positive, "memory for the KV cache in GiB (default: 2, or "
            "half of the free memory, on a CPU; else 90 %% of the device's)")  # fmt: skip
    _choice(engine, "policy", POLICIES, "who goes first in a step (default: prefill_first)")
    engine.add_argument(
        "--prefix-caching",
        dest="enable_prefix_caching",
        action=argparse.BooleanOptionalAction,
        help="share the KV of equal prompt beginnings (default: on)",
    )
    engine.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="the same text and logprobs, bit for bit, whatever else is in the batch (slower)",
    )
    engine.add_argument("--attention", metavar="NAME", help="attention backend (default: gather)")
    _number(
        engine,
        "max_logprobs",
        _whole(0),
        "most --logprobs (default: 5, or what is asked for, up to 20)",
    )
    _number(engine, "max_logit_bias", _whole(0), "most ids in --logit-bias (default: 300)")
    _number(engine, "max_bad_words", _whole(0), "most token sequences that --bad-word may make, "
            "two for most words (default: 32)")  # fmt: skip
    engine.add_argument(
        "--check-invariants",
        action="store_true",
        default=None,
        help="check the whole engine state all the time (slow; to hunt a fault)",
    )
    engine.add_argument(
        "--trace",
        type=filled,
        metavar="FILE",
        help="record every event of the engine, prompts included, for `oxidize-jax replay`",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of LLM: those of ``--config``, and the command line's over them."""
    from oxidize_jax.options import Options, load_options

    options = {} if args.config is None else load_options(args.config)
    names = {field.name for field in dataclasses.fields(Options)} - {"seed"}
    given = {name: getattr(args, name, None) for name in names}
    return options | {name: value for name, value in given.items() if value is not None}


def _choice(group: Any, name: str, choices: Sequence[str], text: str) -> None:
    group.add_argument(f"--{name.replace('_', '-')}", choices=choices, help=text)


def _number(group: Any, name: str, convert: Callable[[str], Any], text: str) -> None:
    metavar = "X" if convert is _positive else "N"
    group.add_argument(f"--{name.replace('_', '-')}", type=convert, metavar=metavar, help=text)


def _sampling_type(name: str, convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that lets SamplingParams judge the value of this one field."""

    def judge(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            kind = _KINDS.get(convert, "a whole number")
            raise argparse.ArgumentTypeError(f"{text!r}: must be {kind}") from None
        try:
            checked = SamplingParams(**{"max_tokens": None, name: value})
        except ValueError as error:
            message = str(error).removeprefix(f"{name}=").removesuffix(".")
            raise argparse.ArgumentTypeError(message) from None
        return getattr(checked, name)

    return judge


def _biases(text: str) -> list[tuple[str, float]]:
    pairs = [pair.split(":") for pair in text.split(",")]
    return [(token.strip(), float(bias)) for token, bias in pairs]  # ValueError unless two


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


_KINDS: dict[Callable[[str], Any], str] = {
    float: "a number",
    _biases: "token ids and numbers, as in 5:-2.5,17:100",
    _ids: "token ids, as in 5,17",
}
"""What a value must be, in words, by what converts it."""


def _whole_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _whole(low: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, {low} or more")
        return value

    return convert


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


positive = _positive
"""An argparse type for the numbers above 0."""
whole = _whole
"""``whole(low)``: an argparse type for the whole numbers from ``low`` up."""
