"""Values that Python cannot print are refused like others: by a ValueError that names the field."""

import dataclasses
import re
from functools import partial

import numpy as np
import pytest
from fake_model import FakeModel

from oxidize_jax import BeamSearchParams, SamplingParams, StructuredOutputsParams
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.generate import GenerateConfig
from oxidize_jax.engine.request import EngineRequest, check_request
from oxidize_jax.engine.tracefields import Limits
from oxidize_jax.engine.tracefile import loads
from oxidize_jax.messages import short_repr
from oxidize_jax.options import Options, load_options
from oxidize_jax.prompts import CacheSalts, as_ids, single_text_or_ids
from oxidize_jax.text.chat import render_chat


def nested():
    """Lists in lists, 100,000 deep: no ``repr`` comes to its end."""
    value = []
    for _ in range(100_000):
        value = [value]
    return value


class Broken:
    def __repr__(self):
        raise RuntimeError("no")


DEEP = nested()
HUGE = 10**5000
VALUES = {"deep": DEEP, "huge": HUGE, "negative": -HUGE, "broken": Broken(), "pair": [DEEP, HUGE]}
unprintable = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)


def refused(make, field):
    """Its message: of one line, of bearable length, in words of ours."""
    with pytest.raises(ValueError, match=re.escape(field)) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert "set_int_max_str_digits" not in message
    return message


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        ("a" * 10, repr("a" * 10)),
        ("x" * 10**6, "'" + "x" * 39 + "..."),
        (DEEP, "a value of type list that cannot be shown"),
        (Broken(), "a value of type Broken that cannot be shown"),
        ("a\n  b", "'a\\n  b'"),
        (np.eye(2), "array([[1., 0.], [0., 1.]])"),
        ("\ud800", "'\\ud800'"),
    ],
    ids=range(8),
)
def test_a_value_is_shown_in_short_and_in_one_line(value, text):
    assert short_repr(value) == text


@pytest.mark.parametrize("digits", [4301, 5000, 10**5])
def test_a_number_too_long_to_print_is_told_by_its_digits(digits):
    for number in (10**digits - 1, 1 - 10**digits):
        said = short_repr(number)
        assert said.startswith("a number of over ")
        assert digits - 10 <= int(said.split()[4]) <= digits


def fields_of(cls):
    return [field.name for field in dataclasses.fields(cls)]


# Whole numbers that a field takes, whatever their size.
_ANY_SIZE = {("seed", "huge"), ("kv_cache_gib", "huge")}


@unprintable
@pytest.mark.parametrize("name", fields_of(SamplingParams))
def test_every_field_of_sampling_params_refuses_it_by_name(name, value):
    refused(lambda: SamplingParams(**{name: value}), name)


@unprintable
@pytest.mark.parametrize("name", fields_of(BeamSearchParams))
def test_every_field_of_beam_search_params_refuses_it_by_name(name, value):
    given = {"beam_width": 2, "max_tokens": 4, name: value}
    refused(lambda: BeamSearchParams(**given), name)


@unprintable
@pytest.mark.parametrize("name", fields_of(StructuredOutputsParams))
def test_every_field_of_structured_outputs_refuses_it_by_name(name, value):
    for given in (value, [value], {"minimum": value}):
        message = f"structured_outputs.{name}"
        refused(lambda given=given: StructuredOutputsParams(**{name: given}), message)
        params = {"structured_outputs": {name: given}}
        refused(lambda params=params: SamplingParams(**params), message)


@unprintable
@pytest.mark.parametrize(
    "name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids", "banned_token_ids"]
)
def test_a_list_of_sampling_params_refuses_it_among_others(name, value):
    refused(lambda: SamplingParams(**{name: [value]}), name)


@unprintable
def test_logit_bias_refuses_it_as_id_and_as_bias(value):
    refused(lambda: SamplingParams(logit_bias=[(value, 1.0)]), "logit_bias")
    refused(lambda: SamplingParams(logit_bias={7: value}), "logit_bias[7]")
    refused(lambda: SamplingParams(logit_bias=[value]), "logit_bias")


def test_logit_bias_refuses_a_text_of_many_digits():
    refused(lambda: SamplingParams(logit_bias={"9" * 5000: 1.0}), "logit_bias")
    refused(lambda: SamplingParams(logit_bias={HUGE: 1.0}), "logit_bias")


def test_a_schema_says_what_of_it_is_too_long():
    schema = '{"minimum": ' + "1" * 5000 + "}"
    said = refused(lambda: StructuredOutputsParams(json=schema), "structured_outputs.json")
    assert "a number in it has too many digits" in said


@unprintable
def test_prompts_refuse_it_by_name(value):
    refused(lambda: as_ids([1, value]), "prompt_token_ids[1]")
    refused(lambda: CacheSalts().number({"prompt": "a", "cache_salt": value}), "cache_salt")


@pytest.mark.parametrize("key", [HUGE, "x" * 10**6, ("a",) * 10**4], ids=range(3))
def test_keys_of_prompts_that_are_none_are_refused(key):
    refused(lambda: single_text_or_ids({"prompt": "a", key: 1}), "is not a key of a prompt")
    refused(lambda: single_text_or_ids({key: 1}), "exactly one of")


IN_A_REQUEST = {
    **dict.fromkeys(
        ("prompt_token_ids", "stop_token_ids", "held_token_ids", "allowed_token_ids"),
        lambda value: [value],
    ),
    "banned_token_ids": lambda value: [value],
    "bad_words": lambda value: [[value]],
    "logit_bias": lambda value: [(value, 1.0)],
    "key": lambda value: (value, 0),
}
"""How a value that must be refused stands in a field that is no number by itself."""


@unprintable
@pytest.mark.parametrize("name", fields_of(EngineRequest))
def test_every_field_of_an_engine_request_refuses_it_by_name(name, value):
    config = EngineConfig(max_num_seqs=1, max_model_len=8, num_blocks=4, token_mask_size=9)
    counts = ("max_new_tokens", "min_new_tokens", "top_k")  # as large as they like
    if name in ("grammar", "use_cache") or (name in counts and value is HUGE):
        return
    given = {"prompt_token_ids": [1], "max_new_tokens": 4}
    given[name] = IN_A_REQUEST.get(name, lambda value: value)(value)
    field = name.removeprefix("num_")
    refused(lambda: check_request(config, 9, EngineRequest(**given)), field)
    if name == "logit_bias":
        given[name] = [(1, value)]
        refused(lambda: check_request(config, 9, EngineRequest(**given)), "logit_bias[1]")


@unprintable
def test_every_field_of_a_trace_refuses_it_by_name(value):
    config = EngineConfig(max_num_seqs=1, max_model_len=8, num_blocks=4)
    limits = Limits(config, 9)
    for name in limits._kinds:
        refused(partial(limits.read, f"submit.{name}", name, value), f"submit.{name}")
        for item in ([value], [[value, value]], {"0": value}, {"9" * 5000: 1}):
            if item == {"9" * 5000: 1} and name == "digests":
                continue  # any text may be a name there
            refused(partial(limits.read, f"submit.{name}", name, item), "submit.")


@unprintable
@pytest.mark.parametrize("name", ["max_num_seqs", "num_blocks", "policy", "model"])
def test_a_compiled_generate_refuses_it_by_name(name, value):
    given = {"model": FakeModel(), "max_new_tokens": 4, name: value}
    refused(lambda: GenerateConfig(**given), name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("9" * 5000, "too many digits"),
        ('{"oxidize_jax_trace": [[[[[[[[[[[[[[[1, 2, 3]]]]]]]]]]]]]]]}', "line 1"),
        ('{"' + "x" * 10**6 + '": 1}', "line 1"),
    ],
    ids=["digits", "lists", "key"],
)
def test_a_trace_that_cannot_be_read_is_named(text, words):
    assert words in refused(lambda: loads(text + "\n{}\n"), "line 1")


@unprintable
@pytest.mark.parametrize("name", fields_of(Options))
def test_every_option_refuses_it_by_name(name, value):
    kinds = {key for key, known in VALUES.items() if known is value}
    whole = Options.__dataclass_fields__[name].type.startswith("int")
    if whole and kinds & {"huge", "negative"} and name != "seed":
        # Options asks for a whole number; how large it may be is for the engine to say.
        if name in fields_of(EngineConfig):
            config = {"max_num_seqs": 1, "max_model_len": 8, "num_blocks": 4}
            refused(lambda: EngineConfig(**{**config, name: value}), name)
    elif (name, *kinds) not in _ANY_SIZE:
        refused(lambda: Options(**{name: value}), name)


@unprintable
def test_the_path_of_a_preset_refuses_it(value):
    refused(lambda: load_options(value), "config=")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seqs = " + "9" * 5000, "too many digits"),
        ("max_num_seqs = " + "[" * 10_000, "nested too deeply"),
        (".".join("a" * 3_000) + " = 1", "nested too deeply"),
        ("x" * 10_000 + " = 1", "unknown key 'xxx"),
    ],
    ids=["digits", "lists", "tables", "key"],
)
def test_a_preset_that_cannot_be_read_is_named(tmp_path, text, words):
    path = tmp_path / "p.toml"
    path.write_text(text)
    message = refused(lambda: load_options(path), "p.toml")
    assert words in message


@unprintable
def test_messages_of_a_chat_refuse_it_by_name(value):
    def render(message):
        return render_chat("{{ messages }}", [message], bos_token="", eos_token="")

    refused(lambda: render({"role": value, "content": "a"}), "messages[0].role")
    refused(lambda: render({"role": "user", "content": [{"type": value}]}), "messages[0].content")
    if value is DEEP:
        refused(lambda: render({"role": "user", "content": "a", "more": value}), "messages[0]")
