"""oxidize-jax generate --beam-width, with the tiny model."""

import json
import re

import pytest

from oxidize_jax import LLM, BeamSearchParams

WIDE = ("--raw", "--max-tokens", "6", "--beam-width", "4")


@pytest.fixture(scope="module")
def found(config):
    """``found(**parameters)``: what the library finds behind ``once``."""
    llm = LLM.from_config(config, compile_cache=False, progress=False, warm_up=False)

    def search(**parameters):
        params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True, **parameters)
        return llm.beam_search("once", params)[0].sequences

    return search


def test_the_best_is_written_alone_and_the_best_n_under_headers(generate, found):
    texts = [sequence.text for sequence in found()]
    status, out, err = generate("once", *WIDE)
    assert (status, out.rstrip("\n")) == (0, texts[0].rstrip("\n"))
    assert err == "[1 of 1 texts cut off: --max-tokens is 6; a larger one gives more]\n"
    _, out, _ = generate("once", *WIDE, "--n", "3")
    assert out.count("=== 1/1, completion") == 3
    assert out.index(texts[0]) < out.index(texts[2])


def test_json_has_the_scores_and_options_reach_the_search(generate, found):
    _, out, _ = generate("once", *WIDE, "--n", "4", "--json", "--length-penalty", "0.5")
    sequences = found(length_penalty=0.5)
    outputs = json.loads(out)["outputs"]
    assert [o["token_ids"] for o in outputs] == [list(s.token_ids) for s in sequences]
    assert [o["score"] for o in outputs] == pytest.approx([s.score for s in sequences])
    assert [o["index"] for o in outputs] == [0, 1, 2, 3]


def test_early_stopping_reaches_the_search(generate, monkeypatch):
    seen = []
    inner = LLM.beam_search
    monkeypatch.setattr(LLM, "beam_search", lambda *a: seen.append(a[2]) or inner(*a))
    generate("once", *WIDE, "--early-stopping")
    generate("once", *WIDE, "--length-penalty", "-1")
    assert [p.early_stopping for p in seen] == [True, False]
    assert [p.length_penalty for p in seen] == [1.0, -1.0]


def test_stats_tell_of_the_search(generate):
    _, _, err = generate("once", *WIDE, "--stats")
    assert re.search(r"tokens +4 in the prompts, 24 generated", err)
    assert re.search(r"steps +[6-8], which computed (2[4-9]|3\d) tokens", err)
    assert re.search(r"KV blocks +[1-9]\d* of \d+ at peak", err)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--beam-width", "0"], "beam_width=0: must be a whole number, 1 to 64"),
        (["--beam-width", "2", "--n", "3"], "--n 3: a beam search of --beam-width 2 finds"),
        (["--beam-width", "2", "--top-k", "3"], "--top-k: a beam search does not sample"),
        (["--beam-width", "2", "--temperature", "1"], "--temperature: a beam search does not"),
        (["--beam-width", "2", "--regex", "x"], "--regex: a beam search does not sample"),
        (["--beam-width", "2", "--stop", "x"], "--stop: a beam search does not sample"),
        (["--beam-width", "2", "--bad-word", "x"], "--bad-word: a beam search does not sample"),
        (["--beam-width", "2", "--best-of", "4"], "--best-of: a beam search does not sample"),
        (["--length-penalty", "2"], "--length-penalty: belongs to a beam search"),
        (["--early-stopping"], "--early-stopping: belongs to a beam search"),
        (["--beam-width", "2", "--length-penalty", "9"], "length_penalty=9.0: must be from -5"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(refused, argv, words):
    assert words in refused("generate", "x", "--model", "no-such-model", *argv)


def test_best_of_is_not_streamed(generate):
    argv = ["once", "--raw", "--max-tokens", "5", "--temperature", "1", "--seed", "3", "--json"]
    _, out, _ = generate(*argv, "--n", "4")
    every = json.loads(out)["outputs"]
    _, out, _ = generate(*argv, "--best-of", "4")
    (best,) = json.loads(out)["outputs"]
    assert best["token_ids"] == max(every, key=lambda o: o["cumulative_logprob"])["token_ids"]
    _, text, _ = generate(*argv[:-1], "--best-of", "4")
    assert text.rstrip("\n") == best["text"].rstrip("\n")
