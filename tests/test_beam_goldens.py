"""Beam searches that transformers made, with tiny checkpoints and with the real model."""

import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from oxidize_jax import LLM, BeamSearchParams, EngineConfig
from oxidize_jax.beam_search import check_beam_prompt, find_beams
from oxidize_jax.checkpoints import load_checkpoint
from oxidize_jax.engine.engine import Engine
from oxidize_jax.model.functional import build
from oxidize_jax.sampling.beams import read_sequences

GOLDENS = Path(__file__).parent / "goldens"
TINY = json.loads((GOLDENS / "beams_tiny.json").read_text())["cases"]
CONFIG = EngineConfig(
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_model_len=32,
    num_blocks=48,
    block_size=4,
    prefill_tile=4,
)


def params_of(case):
    names = ("beam_width", "max_tokens", "length_penalty", "early_stopping")
    return BeamSearchParams(**{name: case[name] for name in names})


def kind(case):
    """Searches of one kind run in one program."""
    return case["model"], case["beam_width"], max(1, len(case["stop_ids"]))


CASES = {name: list(group) for name, group in itertools.groupby(sorted(TINY, key=kind), key=kind)}
QUICK = [("gqa_tied", 4, 1), ("mha_biased", 2, 2)]
SHOWN = [*QUICK, ("gqa_tied", 8, 2), ("gqa_wide_heads", 2, 1)]
"""Each group compiles a program of its own; the oracle was held to all of them when they were
made."""


@pytest.fixture(scope="module")
def engines():
    """Of each checkpoint, made when it is first asked for."""
    made = {}

    def engine(name):
        if name not in made:
            checkpoint = load_checkpoint(GOLDENS / "llama_tiny" / name, jnp.float32)
            decoder, leaves = build(checkpoint.config, checkpoint.params)
            made[name] = Engine(CONFIG, decoder, leaves, check_invariants=True)
        return made[name]

    return engine


def test_the_goldens_are_many_and_clear():
    assert len(TINY) > 60
    assert all(case["margin"] >= 1e-3 for case in TINY)
    assert set(QUICK) <= set(CASES)
    lengths = [len(set(map(len, case["sequences"]))) for case in TINY]
    assert sum(n > 1 for n in lengths) > 20


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow, id=f"{n}") for n in SHOWN],
)
def test_tiny_checkpoints(engines, name):
    engine = engines(name[0])
    for case in CASES[name]:
        params, stop_ids = params_of(case), tuple(case["stop_ids"] or [-1])
        vocab = engine.model.vocab_size
        prompt = check_beam_prompt(CONFIG, vocab, params, None, tuple(case["prompt_ids"]), 0)
        beams, _ = find_beams(engine, [prompt], params, stop_ids, lambda _: None)
        assert read_sequences(beams, 0) == case["sequences"]
        np.testing.assert_allclose(beams.ended.score[0], case["scores"], rtol=1e-4)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return LLM(
        smollm2_path,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        progress=False,
        warm_up=False,
    )


def smollm2_cases(width):
    cases = json.loads((GOLDENS / "beams_smollm2.json").read_text())["cases"]
    return [case for case in cases if case["beam_width"] == width]


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 4, 8])
def test_smollm2(smollm2, width):
    """Each prompt with its own penalty and kind of stopping."""
    cases = smollm2_cases(width)
    assert len(cases) == 5
    for case in cases:
        (output,) = smollm2.beam_search([case["prompt_ids"]], params_of(case))
        assert [list(s.token_ids) for s in output.sequences] == case["sequences"]
        assert [s.score for s in output.sequences] == pytest.approx(
            case["scores"], rel=1e-4, abs=2e-3
        )


@pytest.mark.slow
def test_smollm2_side_by_side(smollm2):
    """Some prompts at once give the same as one by one."""
    cases = smollm2_cases(4)[:3]
    params, prompts = params_of(cases[0]), [case["prompt_ids"] for case in cases]
    together = smollm2.beam_search(prompts, params)
    assert [list(s.token_ids) for s in together[0].sequences] == cases[0]["sequences"]
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = smollm2.beam_search([prompt], params)
        assert [s.token_ids for s in alone.sequences] == [s.token_ids for s in output.sequences]
