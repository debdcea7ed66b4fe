"""Structured output with a real model: do the texts keep to their schemas, and what does it cost?

    python benchmarks/structured.py --generations 500 --rows 64

Generates JSON at temperature 1 by the schemas of ``data/schemas.json``, parses every finished
text and validates it with ``jsonschema``. Then free texts are generated alone, beside
other free ones and beside structured ones, to see what these cost their neighbours. Prints a
JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from collections import Counter
from pathlib import Path

import jsonschema

from oxidize_jax import LLM, SamplingParams, StructuredOutputsParams

SCHEMAS = json.loads((Path(__file__).parent / "data" / "schemas.json").read_text())
MAX_TOKENS = 200


def structured(name: str, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        seed=seed,
        max_tokens=MAX_TOKENS,
        structured_outputs=StructuredOutputsParams(json=SCHEMAS[name]),
    )


def prompt_for(llm: LLM, name: str) -> dict:
    text = f"Write an example of a JSON object of the kind {name!r}."
    return llm.chat_prompt([{"role": "user", "content": text}])


def judge(name: str, text: str, finish_reason: str | None) -> str:
    """What has become of one text."""
    if finish_reason != "stop":
        return str(finish_reason)
    try:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"{name}: {text!r}: {error}")
        return "invalid"
    return "valid"


def validity(llm: LLM, count: int) -> dict:
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(count)]
    prompts = [prompt_for(llm, name) for name in names]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, [structured(name, i) for i, name in enumerate(names)])
    seconds = time.perf_counter() - begin
    judged = Counter()
    for name, output in zip(names, outputs, strict=True):
        (completion,) = output.outputs
        judged[judge(name, completion.text, completion.finish_reason)] += 1
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "generations": count,
        **judged,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
    }


def neighbours(llm: LLM, rows: int) -> dict:
    """Tokens a second of free texts: alone, with as many free ones more, and with structured ones
    in the place of those."""
    half = rows // 2
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=64, ignore_eos=True)
    result = {"free_rows": half, "structured_rows": half}
    more = dataclasses.replace(free, max_tokens=MAX_TOKENS)
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(half)]
    neighbours = {
        "alone": [],
        "with_free": [more] * half,
        "with_structured": [structured(name, i) for i, name in enumerate(names)],
    }
    for label, beside in neighbours.items():
        prompts = [f"Story number {i}:" for i in range(half)]
        prompts += [prompt_for(llm, name) for name in names[: len(beside)]]
        params = [free] * half + beside
        begin = time.perf_counter()
        groups = llm._groups(prompts, params)
        for group in groups:
            llm._runner.start(group)
        while not all(group.finished for group in groups[:half]):
            llm._runner.advance(groups[:half])
        seconds = time.perf_counter() - begin
        for group in groups:
            llm._runner.abandon(group)
        result[f"free_tokens_per_s_{label}"] = round(64 * half / seconds, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--generations", type=int, default=500)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(args.model, max_num_seqs=args.rows, max_model_len=384, progress=False)
    found = {
        "model": args.model,
        "machine": platform.processor() or platform.machine(),
        "rows": args.rows,
        "validity": validity(llm, args.generations),
        "neighbours": neighbours(llm, args.rows),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
