"""``oxidize-jax generate --beam-width``: the options, and results as those of sampling."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from oxidize_jax.cli.parser import UsageError
from oxidize_jax.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from oxidize_jax.sampling.beam_params import BeamSearchParams
from oxidize_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from oxidize_jax.llm import LLM

_NO_LIMIT = 2**31 - 1
_SHARED = ("n", "max_tokens", "ignore_eos")
"""Sampling options that mean something here too."""


def add_beam_options(parser: argparse.ArgumentParser) -> None:
    """``--beam-width`` and what goes with it."""
    group = parser.add_argument_group(
        "beam search", "the likeliest texts as a whole, instead of one likeliest token at a time"
    )
    group.add_argument(
        "--beam-width",
        type=int,
        metavar="K",
        help="keep the K likeliest beginnings in every step; the best text is written, or the --n "
        "best",
    )
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="divide a text's log probability by its length to the power of X: above 0 longer "
        "texts gain (default: 1)",
    )
    group.add_argument(
        "--early-stopping",
        action="store_true",
        default=None,
        help="stop as soon as there are K texts that end, better ones to come or not",
    )


def beam_params(args: argparse.Namespace, params: SamplingParams) -> BeamSearchParams | None:
    """What the options ask for, None without ``--beam-width``.

    Raises UsageError for options of the one without the other.
    """
    if args.beam_width is None:
        for name in ("length_penalty", "early_stopping"):
            if getattr(args, name) is not None:
                raise UsageError(f"{_flag(name)}: belongs to a beam search; add --beam-width.")
        return None
    shared = {name: getattr(params, name) for name in _SHARED}
    plain = SamplingParams(temperature=0.0, **shared)
    for field in dataclasses.fields(params):
        if getattr(params, field.name) != getattr(plain, field.name):
            raise UsageError(
                f"{_flag(_option(field.name, params))}: a beam search does not sample; leave it "
                "out, or leave out --beam-width."
            )
    given = {
        name: value
        for name in ("length_penalty", "early_stopping")
        if (value := getattr(args, name)) is not None
    }
    beams = BeamSearchParams(
        beam_width=args.beam_width,
        max_tokens=_NO_LIMIT if params.max_tokens is None else params.max_tokens,
        ignore_eos=params.ignore_eos,
        **given,
    )
    if params.n > beams.beam_width:
        raise UsageError(
            f"--n {params.n}: a beam search of --beam-width {beams.beam_width} finds so many texts "
            "only; raise that, or lower --n."
        )
    return beams


def _option(name: str, params: SamplingParams) -> str:
    """What sets a field of SamplingParams, where it is not called the same."""
    structured = params.structured_outputs
    if name != "structured_outputs" or structured is None:
        return name
    return "json_schema" if structured.kind == "json" else structured.kind


def beam_options(options: dict[str, Any], beams: BeamSearchParams) -> dict[str, Any]:
    """Options of an LLM that has rows for a beam search, and compiles nothing else."""
    rows = max(options.get("max_num_seqs", 16), beams.beam_width)
    return {"max_num_seqs": rows, **options, "warm_up": False}


@dataclasses.dataclass(frozen=True)
class BeamCompletion(CompletionOutput):
    """A sequence of a beam search among completions."""

    score: float = 0.0


def search(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, beams: BeamSearchParams
) -> list[RequestOutput]:
    """The ``n`` best sequences of each prompt, as if they were sampled."""
    outputs = llm.beam_search(prompts, beams)
    return [_as_request(index, output, params.n) for index, output in enumerate(outputs)]


def _as_request(index: int, output: BeamSearchOutput, count: int) -> RequestOutput:
    completions = [
        BeamCompletion(
            index=nth,
            text=found.text,
            token_ids=found.token_ids,
            cumulative_logprob=found.cumulative_logprob,
            logprobs=None,
            finish_reason=found.finish_reason,
            score=found.score,
        )
        for nth, found in enumerate(output.sequences[:count])
    ]
    return RequestOutput(
        index, output.prompt, output.prompt_token_ids, tuple(completions), output.usage
    )


def _flag(name: str) -> str:
    return "--bad-word" if name == "bad_words" else f"--{name.replace('_', '-')}"
