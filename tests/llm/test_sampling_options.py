"""Sampling options as a caller sees them: each does what it says, alone and in any company."""

import dataclasses
import functools

import numpy as np
import pytest
import reference_sampler as reference
from fake_model import quick_jit

from oxidize_jax import SamplingParams
from oxidize_jax.model.reference import reference_forward

WIDTH = 40
PROMPT = "The sea"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LETTERS = tuple(range(64, 72))  # of the tiny tokenizer: a to h


@functools.cache
def dense_model(config):
    """One program for sequences of up to WIDTH tokens."""
    return quick_jit(functools.partial(reference_forward, config))


def logits_after(llm, tokens):
    leaves = {n: np.asarray(a) for n, a in llm.engine.params.items()}
    padded = np.zeros(WIDTH, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(dense_model(llm.model_config)(leaves, padded))[len(tokens) - 1]


def edits_of(llm, params):
    words = [llm.tokenizer.encode(word, add_special_tokens=False) for word in params.bad_words]
    return {
        "allowed": params.allowed_token_ids,
        "banned": params.banned_token_ids,
        "bad_words": [*words, *[llm.tokenizer.encode(" " + w) for w in params.bad_words]],
        "logit_bias": dict(params.logit_bias),
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
    }


def check(llm, prompt, params, output):
    """Every token is one that the dense model and the slow sampler may give."""
    prompt = list(llm.tokenizer.encode(prompt))
    for i, token in enumerate(output):
        edits = edits_of(llm, params) | {"prompt": prompt, "output": output[:i]}
        if i < params.min_tokens:
            edits["suppress"] = params.stop_token_ids
        x = reference.edited_logits(logits_after(llm, [*prompt, *output[:i]]), **edits)
        if params.temperature == 0:
            assert x[token] >= x.max() - 1e-3, (i, token)
            continue
        names = ("temperature", "min_p", "top_k", "top_p", "typical_p")
        # A little wider than asked for: the dense model rounds otherwise.
        filters = {name: getattr(params, name) for name in names}
        filters["min_p"] *= 0.99
        for name in ("top_p", "typical_p"):
            filters[name] = min(1.0, filters[name] * 1.02)
        assert reference.probabilities(x, **filters)[token] > 0, (i, token)


def ids(output, index=0):
    return list(output.outputs[index].token_ids)


def split(tokens, at):
    return tokens[:at], tokens[at:]


def alone(llm, params, prompt=PROMPT):
    return ids(llm.generate(prompt, params)[0])


LETTER = dataclasses.replace(GREEDY, allowed_token_ids=LETTERS)
WARM = SamplingParams(temperature=3.0, seed=3, max_tokens=8, ignore_eos=True)
OPTIONS = {
    "allowed_token_ids": (GREEDY, {"allowed_token_ids": LETTERS}),
    "banned_token_ids": (LETTER, {"banned_token_ids": LETTERS[:4]}),
    "logit_bias": (LETTER, {"logit_bias": {LETTERS[1]: 1.0, LETTERS[2]: -1.0, LETTERS[5]: 0.5}}),
    "repetition_penalty": (GREEDY, {"repetition_penalty": 3.0}),
    "presence_penalty": (LETTER, {"presence_penalty": 2.0}),
    "frequency_penalty": (LETTER, {"frequency_penalty": 0.5}),
    "min_p": (WARM, {"min_p": 0.9}),
    "typical_p": (WARM, {"typical_p": 0.05}),
    "top_k": (WARM, {"top_k": 2}),
    "top_p": (WARM, {"top_p": 0.05}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_sm14_an_option_acts_from_the_first_batch_that_has_it(llm, name):
    base, change = OPTIONS[name]
    plain = alone(llm, base)
    compiles = llm.num_compiles
    changed = dataclasses.replace(base, **change)
    output = alone(llm, changed)
    assert output != plain, "the test would pass if the option were ignored"
    assert alone(llm, base) == plain
    assert llm.num_compiles == compiles
    check(llm, PROMPT, changed, output)


def test_sm09_a_top_k_of_minus_one_keeps_all(llm):
    assert alone(llm, dataclasses.replace(WARM, top_k=-1)) == alone(llm, WARM)


def test_sm14_bad_words_of_several_tokens_are_not_completed(llm):
    plain = alone(llm, LETTER)
    word = llm.tokenizer.decode(plain[2:5])
    assert len(word) == 3
    assert word in llm.tokenizer.decode(plain)
    params = dataclasses.replace(LETTER, bad_words=[word, llm.tokenizer.decode(plain[:1])])
    output = alone(llm, params)
    assert plain[0] not in output
    assert word not in llm.tokenizer.decode(output)
    check(llm, PROMPT, params, output)
    params = dataclasses.replace(LETTER, bad_words=word)
    output = alone(llm, params)
    assert output[:4] == plain[:4]
    assert output[4] != plain[4]
    check(llm, PROMPT, params, output)


def test_logprobs_stay_those_of_the_model(llm):
    """Penalties and bias change what is taken, not what is told of it."""
    params = dataclasses.replace(
        LETTER, logprobs=1, logit_bias={LETTERS[0]: 50.0}, presence_penalty=1.0
    )
    (output,) = llm.generate(PROMPT, params)
    tokens = list(output.prompt_token_ids)
    for token, entry in zip(ids(output), output.outputs[0].logprobs, strict=True):
        x = logits_after(llm, tokens).astype(np.float64)
        assert entry[token].logprob == pytest.approx(
            x[token] - x.max() - np.log(np.exp(x - x.max()).sum()), abs=1e-4
        )
        tokens.append(token)


ALL = [
    GREEDY,
    LETTER,
    dataclasses.replace(LETTER, frequency_penalty=0.5, presence_penalty=0.5),
    dataclasses.replace(WARM, repetition_penalty=1.5, min_p=0.2),
    dataclasses.replace(WARM, typical_p=0.5, logit_bias={LETTERS[3]: 3.0}),
    dataclasses.replace(WARM, banned_token_ids=LETTERS, top_k=20, top_p=0.8),
    dataclasses.replace(LETTER, repetition_penalty=2.0, bad_words=["Q", "x y"]),
    dataclasses.replace(WARM, seed=9, frequency_penalty=-2.0, allowed_token_ids=range(100, 140)),
]
PROMPTS = ["The sea", "a", "Hello there", "xyz" * 5, "The sea", "0123456789", "b", "aaaa"]


def test_sv09_unlike_options_in_one_batch_are_each_as_alone(llm, make_llm):
    solo = [alone(llm, params, prompt) for prompt, params in zip(PROMPTS, ALL, strict=True)]
    for prompt, params, output in zip(PROMPTS, ALL, solo, strict=True):
        check(llm, prompt, params, output)
    assert [ids(output) for output in llm.generate(PROMPTS, ALL)] == solo
    back = llm.generate(PROMPTS[::-1], ALL[::-1])
    assert [ids(output) for output in back][::-1] == solo
    # Blocks for one sequence and a half: rows are preempted and resumed.
    tight = make_llm(num_blocks=6, max_model_len=24, check_invariants=True)
    assert [ids(output) for output in tight.generate(PROMPTS, ALL)] == solo
    assert int(tight.engine.state.scheduler.totals.preemptions) > 0


def test_completions_of_one_prompt_count_their_own_tokens(llm):
    params = dataclasses.replace(
        WARM, n=3, frequency_penalty=2.0, repetition_penalty=2.0, allowed_token_ids=LETTERS
    )
    (output,) = llm.generate(PROMPT, params)
    children = [ids(output, i) for i in range(3)]
    assert len(set(map(tuple, children))) == 3
    for child in children:
        check(llm, PROMPT, params, child)
    assert children[0] == alone(llm, dataclasses.replace(params, n=1))


def test_sm15_ends_of_sequence_are_ignored_held_back_or_asked_for(llm, monkeypatch):
    monkeypatch.setattr(llm, "_eos", (2, 5))
    wins = dataclasses.replace(GREEDY, logit_bias={5: 60.0, 2: 50.0})
    assert alone(llm, wins) == [5] * 8
    held = dataclasses.replace(wins, ignore_eos=False, min_tokens=3)
    (output,) = llm.generate(PROMPT, held)
    assert not {2, 5} & set(ids(output)[:3])
    assert ids(output)[3:] == [5]
    assert output.outputs[0].finish_reason == "stop"
    (output,) = llm.generate(PROMPT, dataclasses.replace(wins, stop_token_ids=[5]))
    assert ids(output) == [5]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 5)
    held = dataclasses.replace(wins, stop_token_ids=[5], min_tokens=3)
    # 2 ends nothing here, but is an end of sequence: held back like 5, as in vLLM.
    first, *rest = split(alone(llm, held), 3)
    assert not {2, 5} & set(first)
    assert rest == [[5]]
    # Without stop ids too; then there are as many as may be.
    first, rest = split(alone(llm, dataclasses.replace(wins, min_tokens=3)), 3)
    assert not {2, 5} & set(first)
    assert rest == [5] * 5
    # It is the ids of the model that are held back, with ignore_eos and without min_tokens none.
    assert alone(llm, dataclasses.replace(wins, logit_bias={2: 60.0})) == [2] * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_bias": {259: 5}}, r"logit_bias\[0\]=259: token ids must be in 0 to 258"),
        ({"allowed_token_ids": [1, 259]}, r"allowed_token_ids\[1\]=259"),
        ({"banned_token_ids": [2**31 - 1]}, r"banned_token_ids\[0\]=2147483647"),
        ({"bad_words": ["q" * 17]}, r"bad_words\[0\] has 17 tokens.*max_bad_word_tokens=16"),
        ({"bad_words": [chr(33 + i) for i in range(40)]}, "max_bad_words=32"),
        ({"allowed_token_ids": [70], "banned_token_ids": [70]}, "leaves no token: allow another"),
    ],
)
def test_sm16_what_the_model_or_the_engine_has_no_room_for_is_refused(llm, change, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPT, dataclasses.replace(GREEDY, **change))
    assert llm.engine.num_unfinished == 0


def test_more_biases_than_the_engine_has_room_for(make_llm):
    small = make_llm(max_logit_bias=2)
    with pytest.raises(ValueError, match="logit_bias has 3 ids; the limit is max_logit_bias=2"):
        small.generate(PROMPT, SamplingParams(logit_bias={1: 1, 2: 1, 3: 1}))
