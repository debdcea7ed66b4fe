"""SmolLM2 keeps to JSON schemas at temperature 1 (``benchmarks/structured.py`` makes hundreds)."""

import json
from pathlib import Path

import jsonschema
import pytest

from oxidize_jax import LLM, SamplingParams, StructuredOutputsParams

SCHEMAS = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "data" / "schemas.json").read_text()
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m-instruct", max_num_seqs=16, max_model_len=384, progress=False)


def params(name, seed, max_tokens=220):
    structured = StructuredOutputsParams(json=SCHEMAS[name])
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=structured)


def prompt(llm, name):
    text = f"Write an example of a JSON object of the kind {name!r}."
    return llm.chat_prompt([{"role": "user", "content": text}])


def test_every_finished_text_is_json_of_its_schema(llm):
    names = [name for name in SCHEMAS for _ in range(15)]
    prompts = [prompt(llm, name) for name in names]
    compiles = llm.num_compiles
    outputs = llm.generate(prompts, [params(name, i) for i, name in enumerate(names)])
    assert llm.num_compiles == compiles
    finished = 0
    for name, output in zip(names, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason in ("stop", "length"), completion.stop_reason
        if completion.finish_reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(completion.text), SCHEMAS[name])
    assert finished >= 0.9 * len(names)


def test_what_is_cut_off_is_the_beginning_of_what_the_grammar_accepts(llm):
    for name in SCHEMAS:
        (output,) = llm.generate([prompt(llm, name)], params(name, 3, max_tokens=6))
        (completion,) = output.outputs
        grammar = llm._grammars.compile(StructuredOutputsParams(json=SCHEMAS[name]))
        assert grammar.accept(completion.token_ids)


def test_beside_free_text_both_are_as_alone(llm):
    free = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    asked = params("shape", 2)
    together = llm.generate(["Once upon a time", prompt(llm, "shape")], [free, asked])
    (alone,) = llm.generate(["Once upon a time"], free)
    assert alone.outputs[0].token_ids == together[0].outputs[0].token_ids
    (alone,) = llm.generate([prompt(llm, "shape")], asked)
    assert alone.outputs[0].token_ids == together[1].outputs[0].token_ids
