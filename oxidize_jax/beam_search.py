"""From prompts to what a beam search finds for them: the host's part, before and after.

The search itself is a program on the device (:mod:`~oxidize_jax.engine.beams`); the host only
looks now and then how many prompts are done. It borrows the blocks of the engine: what runs is
preempted, and goes on afterwards. What the prefix cache knows is shared both ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.beams import (
    NewSearch,
    run_search,
    search_config,
    start_search,
)
from oxidize_jax.engine.engine import Engine
from oxidize_jax.engine.step import EngineState
from oxidize_jax.outputs import BeamSearchOutput, BeamSearchSequence, Usage
from oxidize_jax.sampling.beam_params import BeamSearchParams
from oxidize_jax.sampling.beams import Beams, make_rules, num_candidates, read_sequences
from oxidize_jax.scheduler import invariants
from oxidize_jax.scheduler.submit import check_prompt, check_token_ids
from oxidize_jax.text.detokenizer import IncrementalDetokenizer
from oxidize_jax.text.tokenizer import Tokenizer
from oxidize_jax.types import replace

GROUPS = (1, 4, 16)
"""Prompts that one program has room for; each number is compiled on its own. More than the last
are searched after one another."""
STEPS = 64
"""Steps that the device makes before the host looks whether it is done."""
_SHORTEST = 64
"""Least room for prompt and output, so that short prompts share a program."""


@dataclasses.dataclass(frozen=True)
class BeamPrompt:
    """A prompt that has been checked."""

    text: str | None
    token_ids: tuple[int, ...]
    salt: int
    max_tokens: int
    """New tokens that there is room for, at most those asked for."""


def check_search(
    config: EngineConfig, vocab_size: int, params: BeamSearchParams, num_stop_ids: int
) -> None:
    """Refuse what no prompt could be searched with. Raises ValueError."""
    width = params.beam_width
    if width > config.max_num_seqs:
        raise ValueError(
            f"beam_width={width} is above max_num_seqs={config.max_num_seqs}, the sequences that "
            "run at the same time: lower beam_width, or make the LLM with more."
        )
    count = num_candidates(width, num_stop_ids)
    if count > vocab_size:
        raise ValueError(
            f"beam_width={width} looks at {count} continuations in each step, but the vocabulary "
            f"has {vocab_size} tokens: lower beam_width."
        )


def check_beam_prompt(
    config: EngineConfig,
    vocab_size: int,
    params: BeamSearchParams,
    text: str | None,
    token_ids: tuple[int, ...],
    salt: int,
) -> BeamPrompt:
    """A prompt ready to be searched. Raises ValueError for one that can never run."""
    check_prompt(config, len(token_ids))
    check_token_ids("prompt_token_ids", token_ids, vocab_size)
    count = len(token_ids)
    max_tokens = min(params.max_tokens, config.max_model_len - count)
    blocks = -(-(count + max_tokens) // config.block_size)
    if blocks > config.num_blocks:
        most = config.num_blocks * config.block_size
        raise ValueError(
            f"prompt has {count} tokens, and with max_tokens={params.max_tokens} a beam needs up "
            f"to {blocks} blocks of {config.block_size}, but the pool has num_blocks="
            f"{config.num_blocks}: lower max_tokens to {max(1, most - count)}, shorten the "
            "prompt, or raise num_blocks."
        )
    return BeamPrompt(text, token_ids, salt, max_tokens)


def search_prompts(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[BeamPrompt],
    params: BeamSearchParams,
    stop_ids: tuple[int, ...],
    report: Callable[[int], Any],
) -> list[BeamSearchOutput]:
    """What is found for each of ``prompts``, in order; nobody else may use the engine meanwhile.

    ``report`` is told now and then how many are done.
    """
    outputs: list[BeamSearchOutput] = []
    for first in range(0, len(prompts), GROUPS[-1]):
        wave = prompts[first : first + GROUPS[-1]]
        tell = partial(_report_from, first, report)
        beams, cached = find_beams(engine, wave, params, stop_ids, tell)
        for group, prompt in enumerate(wave):
            sequences = _sequences(tokenizer, prompt, params, stop_ids, beams, group)
            usage = Usage(
                prompt_tokens=len(prompt.token_ids),
                completion_tokens=sum(len(sequence.token_ids) for sequence in sequences),
                cached_tokens=int(cached[group]),
            )
            outputs.append(BeamSearchOutput(prompt.text, prompt.token_ids, sequences, usage))
    return outputs


def find_beams(
    engine: Engine,
    prompts: Sequence[BeamPrompt],
    params: BeamSearchParams,
    stop_ids: tuple[int, ...],
    report: Callable[[int], Any],
) -> tuple[Beams, np.ndarray]:
    """``(beams, prompt tokens from the prefix cache i32[G])`` of up to 16 prompts, on the host.

    ``stop_ids`` are padded with -1 to as many as there are ever, for their number is compiled in.
    """
    width = params.beam_width
    groups = next(size for size in GROUPS if size >= len(prompts))
    longest = max(len(prompt.token_ids) + prompt.max_tokens for prompt in prompts)
    length = max(longest, _SHORTEST)
    length = min(engine.config.max_model_len, 1 << (length - 1).bit_length())
    config = search_config(engine.config, width, groups, length)
    rules = make_rules(params, stop_ids, length)
    new = _new_search(config, groups, prompts)
    scheduler, search = start_search(config, width, max(1, len(stop_ids)), new)
    results: list[Any] = []

    def borrow(state: EngineState) -> EngineState:
        lent, left = state.scheduler, search
        own = replace(scheduler, pool=lent.pool, totals=lent.totals, history=lent.history)
        state = replace(state, scheduler=own)
        while True:
            state, left = run_search(
                config, engine.model, engine.params, state, rules, left, np.int32(STEPS)
            )
            if engine.checks_invariants:
                invariants.check(state.scheduler)
            num_done = int(np.asarray(left.beams.done).sum()) - (groups - len(prompts))
            report(num_done)
            if num_done == len(prompts):
                break
        own = state.scheduler
        cached = own.requests.num_cached[::width]
        results.extend(jax.device_get((left.beams, cached, left.peak_blocks)))
        lent = replace(lent, pool=own.pool, totals=own.totals, history=own.history)
        return replace(state, scheduler=lent)

    engine.lend(borrow)
    beams, cached, peak = results
    engine.peak_blocks_used = max(engine.peak_blocks_used, int(peak))
    return beams, cached


def _report_from(first: int, report: Callable[[int], Any], done: int) -> None:
    report(first + done)


def _new_search(config: EngineConfig, groups: int, prompts: Sequence[BeamPrompt]) -> NewSearch:
    tokens = np.zeros((groups, config.max_model_len), np.int32)
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt.token_ids)] = prompt.token_ids

    def padded(values: Sequence[int]) -> jax.Array:
        return jnp.array([*values, *[0] * (groups - len(values))], np.int32)

    return NewSearch(
        tokens=jnp.asarray(tokens),
        prompt_len=padded([len(prompt.token_ids) for prompt in prompts]),
        max_tokens=padded([prompt.max_tokens for prompt in prompts]),
        salt=padded([prompt.salt for prompt in prompts]),
    )


def _sequences(
    tokenizer: Tokenizer,
    prompt: BeamPrompt,
    params: BeamSearchParams,
    stop_ids: tuple[int, ...],
    beams: Beams,
    group: int,
) -> tuple[BeamSearchSequence, ...]:
    sequences = []
    for nth, ids in enumerate(read_sequences(beams, group)):
        stopped = ids[-1] in stop_ids
        detokenizer = IncrementalDetokenizer(
            tokenizer, prompt.token_ids, params.skip_special_tokens
        )
        text = detokenizer.add(ids[:-1] if stopped else ids) + detokenizer.finish()
        sequences.append(
            BeamSearchSequence(
                text=text,
                token_ids=tuple(ids),
                cumulative_logprob=float(beams.ended.logprob[group, nth]),
                score=float(beams.ended.score[group, nth]),
                finish_reason="stop" if stopped else "length",
            )
        )
    return tuple(sequences)
