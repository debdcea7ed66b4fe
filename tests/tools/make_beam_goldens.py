"""Make the beam searches that the tests compare with: what transformers finds.

Run once, where torch and transformers 5 are installed (neither is needed by the tests)::

    python tests/tools/make_beam_goldens.py tiny
    python tests/tools/make_beam_goldens.py smollm2 FOLDER  # config.json and model.safetensors

``tests/goldens/beams_tiny.json`` holds searches of the checkpoints in ``llama_tiny``, with ids
that end a sequence chosen among their likeliest tokens. ``beams_smollm2.json`` holds searches of
the real model behind prompts of ``smollm2_greedy.json``. Each has the sequences without the
prompt, best first, their scores, and ``margin``: the least distance of what the search told
apart, by ``reference_beams``, which must find the same from the same log probabilities. Those
below 0.001 are left out.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from reference_beams import beam_search

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
LEAST_MARGIN = 1e-3
PENALTIES = (1.0, 0.0, -1.0, 2.0)
EARLY = (False, True, "never")


def main(kind: str, folder: str | None = None) -> None:
    torch.manual_seed(0)
    cases = make_tiny() if kind == "tiny" else make_smollm2(pathlib.Path(folder or "."))
    reference = f"transformers {transformers.__version__}, torch {torch.__version__}, fp32 CPU"
    lines = ",\n".join(json.dumps(case) for case in cases)
    text = f'{{"reference": {json.dumps(reference)}, "cases": [\n{lines}\n]}}\n'
    (GOLDENS / f"beams_{kind}.json").write_text(text)


def make_tiny() -> list[dict[str, Any]]:
    """For each checkpoint every width, penalty and kind of early stopping, in turn."""
    cases = []
    for folder in sorted((GOLDENS / "llama_tiny").iterdir()):
        model = load(folder)
        likely = likely_tokens(model)
        settings = list(itertools.product((2, 4, 8), PENALTIES, EARLY))
        for index, (width, penalty, early) in enumerate(settings):
            ends = [(), likely[:1], likely[:2]][(index // 2) % 3]
            for _ in range(10):
                prompt = torch.randint(0, model.config.vocab_size, (3 + index % 7,)).tolist()
                case = run(model, prompt, width, 12, ends, penalty, early)
                if case["margin"] >= LEAST_MARGIN:
                    cases.append({"model": folder.name, **case})
                    break
        print(folder.name, len(cases), flush=True)
    return cases


def make_smollm2(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Five prompts with each width."""
    model = load(folder)
    greedy = json.loads((GOLDENS / "smollm2_greedy.json").read_text())["cases"]
    cases = []
    settings = itertools.cycle(itertools.product(EARLY, PENALTIES))
    for width in (2, 4, 8):
        found = 0
        for entry in greedy:
            penalty, early = (s := next(settings))[1], s[0]
            case = run(model, entry["prompt_ids"], width, 16, [2], penalty, early)
            print(entry["prompt"][:40], width, case["margin"], flush=True)
            if case["margin"] >= LEAST_MARGIN:
                cases.append(case)
                found += 1
            if found == 5:
                break
    return cases


def load(folder: pathlib.Path) -> transformers.LlamaForCausalLM:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def likely_tokens(model: transformers.LlamaForCausalLM) -> list[int]:
    """Tokens by their mean probability behind random ones."""
    tokens = torch.randint(0, model.config.vocab_size, (64, 12))
    mean = model(tokens).logits.softmax(-1).mean((0, 1))
    return mean.argsort(descending=True).tolist()


@torch.no_grad()
def run(
    model: transformers.LlamaForCausalLM,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    ends: Sequence[int],
    penalty: float,
    early: bool | str,
) -> dict[str, Any]:
    """One search by transformers, checked against the reference."""
    ids = torch.tensor([list(prompt)])
    # The search itself needs an id to fill up with; none of these is read.
    fill = ends[0] if ends else 0
    config = transformers.GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        length_penalty=penalty,
        early_stopping=early,
        eos_token_id=list(ends) or None,
        pad_token_id=fill,
    )
    model.generation_config = transformers.GenerationConfig()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [cut(row[len(prompt) :].tolist(), ends) for row in out.sequences]
    scores = out.sequences_scores.tolist()

    # The reference asks for the beams in their order, of which there is one in the first step.
    rows = itertools.chain(out.scores[0][:1], *out.scores[1:])
    found, margin = beam_search(
        lambda _: next(rows).numpy(),
        prompt,
        width,
        max_tokens,
        stop_ids=ends,
        length_penalty=penalty,
        early_stopping=early,
    )
    if margin >= LEAST_MARGIN:
        assert [list(f.tokens) for f in found] == sequences
    return {
        "prompt_ids": list(prompt),
        "beam_width": width,
        "max_tokens": max_tokens,
        "stop_ids": list(ends),
        "length_penalty": penalty,
        "early_stopping": early,
        "margin": round(margin, 6),
        "sequences": sequences,
        "scores": [round(score, 6) for score in scores],
    }


def cut(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Without what stands behind the first id that ends a sequence."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


if __name__ == "__main__":
    main(*sys.argv[1:])
