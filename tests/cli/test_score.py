"""oxidize-jax score, with a tiny model of random weights."""

from __future__ import annotations

import io
import json

import pytest

from oxidize_jax import LLM
from oxidize_jax.cli.score import line, record
from oxidize_jax.score_outputs import Perplexity


@pytest.fixture(scope="module")
def llm(config):
    return LLM.from_config(
        config, compile_cache=False, progress=False, warm_up=False, max_num_seqs=1
    )


@pytest.fixture
def score(run, config):
    return lambda *argv: run("score", "--config", config, *argv)


def test_a_text_on_the_command_line(score, llm):
    result = llm.perplexity("once upon")
    status, out, err = score("once upon")
    assert (status, err) == (0, "")
    mean = -result.nll / 8
    assert out == (
        f"8 tokens, mean log probability {mean:.4f}, perplexity {result.perplexity:.4f}\n"
    )


def test_files_whole_and_windows_and_json(score, llm, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("line one\n\nline two " * 9)
    argv = ["--window", "32", "--stride", "8", "--json", "ab", "--file", file]
    status, out, err = score(*argv)
    assert (status, err) == (0, "")
    first, second = (json.loads(text) for text in out.splitlines())
    expected = llm.perplexity(file.read_text(), window=32, stride=8)
    assert (first["index"], first["text"], first["tokens"], first["windows"]) == (0, "ab", 1, 1)
    assert second["tokens"] == expected.num_tokens == len(file.read_text()) - 1
    assert second["windows"] == expected.num_windows > 1
    assert second["text"] == str(file)
    assert second["perplexity"] == pytest.approx(expected.perplexity)
    assert second["mean_logprob"] == pytest.approx(-expected.nll / expected.num_tokens)


def test_several_texts_are_named(score, monkeypatch):
    status, out, _ = score("a\nb " * 30, "x")
    assert status == 0
    first, second = out.splitlines()
    assert first.startswith("a b a b")
    assert "…: 119 tokens, mean" in first
    assert second == "x: no tokens to score: the first of a text has nothing before it"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert score("--json")[1].startswith('{"index": 0, "text": "standard input", "tokens": 4')


def test_what_json_cannot_say_is_null():
    one = record(0, "x", Perplexity(float("inf"), 1, 1))
    assert (one["mean_logprob"], one["perplexity"]) == (None, None)
    assert line(one, named=False) == "1 tokens, mean log probability infinite, perplexity infinite"


def test_refusals(refused, config, tmp_path):
    assert "stride 9: is more than --window 8" in refused(
        "score", "--window", "8", "--stride", "9", "x"
    )
    assert "the text '' is empty" in refused("score", "")
    assert "absent" in refused("score", "--file", tmp_path / "absent")
    assert "window=65: must be a whole number, 2 to 64" in refused(
        "score", "--config", config, "--window", "65", "x"
    )


def test_prompt_logprobs_of_generate(run, config, refused, llm):
    argv = ["--raw", "once", "--max-tokens", "1", "--prompt-logprobs"]
    status, out, _ = run("generate", "--config", config, *argv, "2", "--json")
    assert status == 0
    (scores,) = llm.score("once", top_logprobs=2)
    first, *others = json.loads(out)["prompt_logprobs"]
    assert first is None
    for got, entry, token in zip(
        others, scores.prompt_logprobs[1:], scores.prompt_token_ids[1:], strict=True
    ):
        assert (got["token_id"], got["rank"]) == (token, entry[token].rank)
        assert got["logprob"] == pytest.approx(entry[token].logprob, abs=1e-5)
        assert {a["token_id"] for a in got["alternatives"]} == entry.keys()
        ranks = [a["rank"] for a in got["alternatives"]]
        assert ranks == sorted(ranks)
    assert refused("generate", *argv, "2").startswith("--prompt-logprobs: log probabilities are")
    message = refused("generate", "--config", config, *argv, "4", "--json")
    assert message.startswith("--prompt-logprobs 4: the limit is --max-logprobs 3; ")
