"""StructuredOutputsParams: what is refused before anything compiles."""

import json

import pytest

from oxidize_jax import SamplingParams, StructuredOutputsParams
from oxidize_jax.sampling.structured import MAX_CHOICES, MAX_GRAMMAR_CHARS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has none: give exactly one of json, regex, choice, grammar"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice: give exactly one"),
        ({"json": "{"}, "structured_outputs.json='{': not a JSON schema"),
        ({"json": "[]"}, "must be a JSON object"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json=.*not a JSON schema"),
        ({"json": '{"maximum": Infinity}'}, "structured_outputs.json=.*not a JSON schema"),
        ({"json": {"a": {1, 2}}}, "not a JSON schema"),
        ({"json": "[" * 100_000}, "nested too deeply"),
        ({"regex": ""}, "structured_outputs.regex='': must be text, not empty"),
        ({"regex": 5}, "structured_outputs.regex=5: must be text"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "has 65537 characters: at most 65536"),
        ({"regex": "\ud800"}, "lone surrogate at index 0"),
        ({"choice": []}, "must be a list of strings, one at least"),
        ({"choice": "abc"}, "must be a list of strings"),
        ({"choice": ["a", ""]}, "structured_outputs.choice='': must be a string, not empty"),
        ({"choice": ["a", 3]}, "structured_outputs.choice=3: must be a string"),
        ({"choice": ["\udc00"]}, "structured_outputs.choice.*lone surrogate"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "has 1025 strings: at most 1024"),
        ({"grammar": "x" * (MAX_GRAMMAR_CHARS + 1)}, "structured_outputs.grammar has 65537"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message) as refused:
        StructuredOutputsParams(**fields)
    assert "\n" not in str(refused.value)


def test_values_are_kept_in_one_form():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert json.loads(StructuredOutputsParams(json=schema).text) == schema
    assert StructuredOutputsParams(json=json.dumps(schema)) == StructuredOutputsParams(json=schema)
    assert list(json.loads(StructuredOutputsParams(json=schema).text)["properties"]) == ["b", "a"]
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    assert StructuredOutputsParams(regex="a+").kind == "regex"


def test_sampling_params_take_a_dict_and_refuse_what_contradicts_it():
    params = SamplingParams(structured_outputs={"regex": "a+"})
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")
    with pytest.raises(ValueError, match="structured_outputs='a': must be Struct"):
        SamplingParams(structured_outputs="a")
    with pytest.raises(ValueError, match="must be Struct"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(ValueError, match="ignore_eos=True: structured_outputs ends with"):
        SamplingParams(structured_outputs={"regex": "a+"}, ignore_eos=True)
