import dataclasses
import itertools
import math

import numpy as np
import pytest

from oxidize_jax.sampling.params import MAX_N, MAX_STOP_STRINGS, SamplingParams


def refused(**fields) -> str:
    (name,) = fields
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "best_of": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "allowed_token_ids": None,
        "banned_token_ids": (),
        "bad_words": (),
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop_token_ids": (),
        "stop": (),
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "structured_outputs": None,
    }


NOT_NUMBERS = [math.nan, math.inf, -math.inf, "0.5", None, True, [1], 1j]


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1, -1e-9, 1e9])
def test_sm08_temperature_refuses(value):
    assert repr(value) in refused(temperature=value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1, 0, 1.0000001])
def test_sm08_top_p_refuses(value):
    assert repr(value) in refused(top_p=value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1, 0, 1.0000001])
def test_sm08_typical_p_refuses(value):
    assert repr(value) in refused(typical_p=value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1e-9, 1.0000001])
def test_sm08_min_p_refuses(value):
    assert repr(value) in refused(min_p=value)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [*NOT_NUMBERS, -2.0001, 2.0001])
def test_sm08_penalties_refuse(name, value):
    assert repr(value) in refused(**{name: value})


@pytest.mark.parametrize("value", [*NOT_NUMBERS, -1, 0, 1e-4, 1001])
def test_sm08_repetition_penalty_refuses(value):
    assert repr(value) in refused(repetition_penalty=value)


@pytest.mark.parametrize("bias", [*NOT_NUMBERS, 100.1, -101])
def test_sm08_logit_bias_refuses_values(bias):
    assert "logit_bias[7]" in refused(logit_bias={7: bias})


@pytest.mark.parametrize(
    "key", [-1, "-1", 2**31, "99999999999", "x", "", "1.0", " 1", 1.0, True, None, "\u0663"]
)
def test_sm16_logit_bias_refuses_ids(key):
    refused(logit_bias={key: 5})


@pytest.mark.parametrize("value", ["5", 5, True, [5], [(5,)], {7: 1, "7": 2}, [[1, 2, 3]]])
def test_logit_bias_refuses_what_is_no_dict(value):
    refused(logit_bias=value)


@pytest.mark.parametrize("name", ["allowed_token_ids", "banned_token_ids"])
@pytest.mark.parametrize("value", [[97, -1], "5", 5, [1.0], [True], [2**31 + 5], [None]])
def test_sm16_allowed_and_banned_ids_refuse(name, value):
    refused(**{name: value})


def test_nothing_allowed_is_refused():
    assert "None for all" in refused(allowed_token_ids=[])


@pytest.mark.parametrize("value", ["", " ", [""], ["a", "  "], [1], 5, [["a"]], ["a"] * 257])
def test_bad_words_refuse(value):
    refused(bad_words=value)


def test_lists_are_kept_as_tuples():
    params = SamplingParams(
        logit_bias={"5": 1, np.int64(7): np.float32(-100)},
        allowed_token_ids=range(3),
        banned_token_ids=np.array([1, 2]),
        bad_words="bad",
    )
    assert params.logit_bias == ((5, 1.0), (7, -100.0))
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.banned_token_ids == (1, 2)
    assert params.bad_words == ("bad",)
    again = dataclasses.replace(params)
    assert again == params
    assert hash(again) == hash(params)


@pytest.mark.parametrize("value", [2.0, 1.5, math.nan, "4", None, True, -2, 2**31])
def test_sm08_top_k_refuses(value):
    refused(top_k=value)


@pytest.mark.parametrize("value", [0, -1, 1.0, "16", True, 2**31])
def test_sm08_max_tokens_refuses(value):
    assert "None" in refused(max_tokens=value)


@pytest.mark.parametrize("value", [0, MAX_N + 1, 10**6, 1.0, None, False])
def test_n_refuses(value):
    assert f"1 to {MAX_N}" in refused(n=value)


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, "7", True])
def test_sm04_seed_refuses_what_is_outside_64_bits(value):
    assert str(2**64 - 1) in refused(seed=value)


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_sm04_seed_keeps_every_64_bit_value(value):
    assert SamplingParams(seed=value).seed == value


@pytest.mark.parametrize("value", [-1, 1.0, None, True])
def test_min_tokens_refuses(value):
    refused(min_tokens=value)


def test_min_tokens_above_max_tokens_is_refused_with_both_numbers():
    message = refused(min_tokens=17)
    assert "17" in message
    assert "16" in message
    assert SamplingParams(min_tokens=17, max_tokens=None).max_tokens is None


@pytest.mark.parametrize("value", [[97, -1], "5", 5, None, [1.0], [True], [2**31 + 5]])
def test_sm16_stop_token_ids_refuses(value):
    refused(stop_token_ids=value)


@pytest.mark.parametrize("value", ["", [""], ["a", ""], [1], 5, ["a"] * (MAX_STOP_STRINGS + 1)])
def test_stop_refuses(value):
    refused(stop=value)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_a_lone_surrogate_is_refused_for_no_text_has_one(name):
    for value in ("\ud800", ["a", "b\udfffc"]):
        assert "lone surrogate" in refused(**{name: value})
    assert getattr(SamplingParams(**{name: "\U0001f600"}), name) == ("\U0001f600",)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "banned_token_ids"])
def test_ids_without_end_and_things_that_are_no_list_are_refused(name):
    assert "over 1000000 ids" in refused(**{name: itertools.repeat(5)})
    for value in ({5: 1.0}, bytearray(b"a"), memoryview(b"a")):
        assert "must be a list of token ids" in refused(**{name: value})
    assert getattr(SamplingParams(**{name: iter([5, 6])}), name) == (5, 6)


def test_sv07_many_stop_strings_are_not_echoed():
    assert len(refused(stop=["x" * 100] * 10**5)) < 200


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, -2, 1.0, "3", True, 2**31])
def test_logprobs_refuse_with_the_limit_and_how_to_raise_it(name, value):
    message = refused(**{name: value})
    assert f"{name}={value!r}: " in message
    assert "0 to max_logprobs" in message
    assert "LLM(max_logprobs=...)" in message
    assert ("vLLM's for the whole vocabulary" in message) == (value == -1)


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens"])
@pytest.mark.parametrize("value", [None, 1, "true"])
def test_flags_refuse(name, value):
    refused(**{name: value})


def test_values_are_kept_in_python_types():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=1,
        top_k=np.int64(3),
        stop="end",
        stop_token_ids=[np.int32(2), 5],
    )
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 1.0, 3)
    assert [type(v) for v in (params.temperature, params.top_p, params.top_k)] == [
        float,
        float,
        int,
    ]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (2, 5)
    assert hash(params) == hash(dataclasses.replace(params))


@pytest.mark.parametrize("value", [-1, 0, 9999999])
def test_sm09_top_k_off_and_beyond_any_vocabulary_are_accepted(value):
    assert SamplingParams(top_k=value).top_k == value
