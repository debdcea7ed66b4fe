"""LLM.beam_search: text in and out, beside other work, and what is refused. And best_of."""

import dataclasses
import re
import threading

import jax
import numpy as np
import pytest
from reference_beams import beam_search

from oxidize_jax import BeamSearchParams, SamplingParams
from oxidize_jax.model.reference import reference_forward

BEAMS = BeamSearchParams(beam_width=4, max_tokens=8)
PROMPTS = ["The sea", "a", "Hello there, how is the weather"]


def expected(llm, output, params):
    """What the dense model's search finds behind the prompt of ``output``."""
    leaves = {name: np.asarray(leaf) for name, leaf in llm.engine.params.items()}
    dense = jax.jit(reference_forward, static_argnums=0)

    def logits(tokens):
        padded = np.zeros(64, np.int32)  # one shape compiles once; what follows is not seen
        padded[: len(tokens)] = tokens
        return np.asarray(dense(llm.model_config, leaves, padded))[len(tokens) - 1]

    ends = () if params.ignore_eos else llm.tokenizer.eos_token_ids
    found, margin = beam_search(
        logits,
        output.prompt_token_ids,
        params.beam_width,
        params.max_tokens,
        stop_ids=ends,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    assert margin > 1e-5
    return found


def search(llm, prompt, params=BEAMS):
    """Two prompts at least, as in the other tests: that is one program."""
    return llm.beam_search([prompt, "b"], params)[0]


def tokens_of(output):
    """Of each sequence; scores may differ in their last bit by what else is in a step."""
    return [sequence.token_ids for sequence in output.sequences]


def test_sequences_text_and_scores(llm):
    outputs = llm.beam_search(PROMPTS, BEAMS)
    assert [output.prompt for output in outputs] == PROMPTS
    ends = llm.tokenizer.eos_token_ids
    for output in outputs:
        found = expected(llm, output, BEAMS)
        assert tokens_of(output) == [f.tokens for f in found]
        for sequence, other in zip(output.sequences, found, strict=True):
            assert sequence.score == pytest.approx(other.score, rel=1e-4)
            assert sequence.cumulative_logprob == pytest.approx(other.logprob, rel=1e-4)
            stopped = sequence.token_ids[-1] in ends
            assert sequence.finish_reason == ("stop" if stopped else "length")
            shown = sequence.token_ids[:-1] if stopped else sequence.token_ids
            assert sequence.text == llm.tokenizer.decode(shown)
        assert output.usage.prompt_tokens == len(output.prompt_token_ids)
        assert output.usage.completion_tokens == sum(len(s.token_ids) for s in output.sequences)


def test_every_form_of_prompt_and_none(llm):
    ids = llm.tokenizer.encode("a")
    forms = ["a", ids, {"prompt": "a"}, {"prompt_token_ids": ids, "cache_salt": "x"}]
    outputs = llm.beam_search(forms, BEAMS)
    assert [tokens_of(output) for output in outputs] == [tokens_of(outputs[0])] * 4
    assert llm.beam_search([], BEAMS) == []


def test_nothing_is_compiled_again_for_other_prompts_and_values(llm):
    llm.beam_search(PROMPTS, BEAMS)
    compiled = llm.num_compiles
    for params in (
        dataclasses.replace(BEAMS, max_tokens=3, length_penalty=-1.0),
        dataclasses.replace(BEAMS, early_stopping="never"),
        dataclasses.replace(BEAMS, ignore_eos=True),
    ):
        llm.beam_search([*PROMPTS[::-1], "b"], params)
    assert llm.num_compiles == compiled


def test_the_prefix_cache_is_shared_with_sampling(llm):
    text = "a prompt that nobody else has, 1234567890"
    first = search(llm, text)
    assert first.usage.cached_tokens == 0
    (sampled,) = llm.generate(text, SamplingParams(max_tokens=4, temperature=0))
    assert sampled.usage.cached_tokens >= 36
    llm.reset_prefix_cache()
    again = search(llm, text)
    assert again.usage.cached_tokens == 0
    assert tokens_of(again) == tokens_of(first)
    third = search(llm, text)
    assert third.usage.cached_tokens >= 36
    assert tokens_of(third) == tokens_of(first)


def test_streams_and_other_threads_go_on_around_a_search(llm):
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    (alone,) = llm.generate("The sun", params)
    found = search(llm, "The sea")
    texts, results = [], []
    stream = llm.stream("The sun", params)
    texts.append(next(stream).text)
    worker = threading.Thread(
        target=lambda: results.extend(llm.generate(["The sun", "The sun"], params))
    )
    worker.start()
    assert tokens_of(search(llm, "The sea")) == tokens_of(found)
    texts += [delta.text for delta in stream]
    worker.join()
    assert "".join(texts) == alone.outputs[0].text
    assert [r.outputs[0].token_ids for r in results] == [alone.outputs[0].token_ids] * 2


def test_the_longest_is_bounded_by_max_model_len(llm):
    prompt = list(range(5, 62))
    output = search(llm, prompt, dataclasses.replace(BEAMS, max_tokens=99))
    assert max(len(s.token_ids) for s in output.sequences) == 64 - 57
    assert len(output.sequences) == 4


def test_a_failed_search_loses_what_ran_and_the_engine_goes_on(llm, monkeypatch):
    stream = llm.stream("The sun", SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("oxidize_jax.beam_search.run_search", fail)
        with pytest.raises(RuntimeError, match=r"a step failed and 1 running .* \(no memory\)"):
            search(llm, "a")
    with pytest.raises(RuntimeError, match="was lost in a failed step of another caller"):
        list(stream)
    assert len(search(llm, "a").sequences) == 4


def test_a_deterministic_engine_takes_no_blocks_from_a_search(make_llm):
    llm = make_llm(deterministic=True, warm_up=False)
    prompt = list(range(5, 30))
    search(llm, prompt)
    assert llm.generate(prompt, SamplingParams(max_tokens=2))[0].usage.cached_tokens == 0
    assert llm.generate(prompt, SamplingParams(max_tokens=2))[0].usage.cached_tokens == 24
    assert search(llm, prompt).usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        ("a", {"beam_width": 5}, "beam_width=5 is above max_num_seqs=4"),
        (["a", ""], {}, "prompts[1]: prompt is empty"),
        ([[1, 259]], {}, "prompt_token_ids[1]=259: token ids must be in 0 to 258"),
        ([[1] * 64], {}, "prompt has 64 tokens, but max_model_len=64"),
    ],
)
def test_what_is_refused(llm, prompts, changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        llm.beam_search(prompts, dataclasses.replace(BEAMS, **changes))
    assert llm.engine.num_unfinished == 0


def test_other_parameters_and_a_trace_are_refused(llm, make_llm, tmp_path):
    with pytest.raises(ValueError, match="params is SamplingParams: give a BeamSearchParams"):
        llm.beam_search("a", SamplingParams())
    traced = make_llm(trace=str(tmp_path / "trace.jsonl"))
    with pytest.raises(ValueError, match="cannot be recorded: make the LLM without trace"):
        traced.beam_search("a", BEAMS)


def test_a_beam_that_outgrows_the_pool_is_refused_with_the_numbers(make_llm):
    tight = make_llm(num_blocks=5)
    words = "prompt has 7 tokens, and with max_tokens=14 a beam needs up to 6 blocks of 4, but"
    with pytest.raises(ValueError, match=words + ".* lower max_tokens to 13"):
        tight.beam_search("The sea", dataclasses.replace(BEAMS, max_tokens=14))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beam_width": 0}, "beam_width=0: must be a whole number, 1 to 64"),
        ({"beam_width": 65}, "beam_width=65"),
        ({"max_tokens": None}, "max_tokens=None: must be a whole number"),
        ({"temperature": 0.7}, "temperature=0.7: must be 0 or 1; a beam search draws nothing"),
        ({"length_penalty": 5.1}, "length_penalty=5.1: must be from -5 to 5"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"early_stopping": "always"}, "early_stopping='always': must be True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping=1: must be True, False or 'never'"),
        ({"ignore_eos": 1}, "ignore_eos=1: must be true or false"),
    ],
)
def test_parameters_are_checked(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **changes})


def test_temperature_0_and_1_say_the_same(llm):
    hot = dataclasses.replace(BEAMS, temperature=1)
    assert tokens_of(search(llm, "a", hot)) == tokens_of(search(llm, "a"))


def test_best_of_returns_the_likeliest_of_all(llm):
    params = SamplingParams(n=6, temperature=1.5, seed=8, max_tokens=7)
    (every,) = llm.generate("The sea", params)
    (best,) = llm.generate("The sea", dataclasses.replace(params, n=2, best_of=6))
    ranked = sorted(every.outputs, key=lambda output: -output.cumulative_logprob)
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best.outputs] == [0, 1]
    assert [o.cumulative_logprob for o in best.outputs] == [
        o.cumulative_logprob for o in ranked[:2]
    ]
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert [o.index for o in every.outputs] == list(range(6))


def test_best_of_is_checked_and_cannot_be_streamed(llm):
    with pytest.raises(ValueError, match="best_of=2 is below n=3: raise best_of or lower n"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(ValueError, match="best_of=65: must be a whole number, 1 to 64"):
        SamplingParams(best_of=65)
    with pytest.raises(ValueError, match="best_of=2: which 1 are the best is known at the end"):
        llm.stream("a", SamplingParams(best_of=2))
    params = SamplingParams(n=2, best_of=2, seed=1, max_tokens=3)
    assert {delta.index for delta in llm.stream("a", params)} == {0, 1}
    in_order = [
        o.token_ids for o in llm.generate("a", dataclasses.replace(params, best_of=None))[0].outputs
    ]
    assert [o.token_ids for o in llm.generate("a", params)[0].outputs] == in_order
    with pytest.raises(ValueError, match="sampling_params is BeamSearchParams: give a Sampling"):
        llm.stream("a", BEAMS)
