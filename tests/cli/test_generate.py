"""oxidize-jax generate, with a tiny model of random weights."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
from write_checkpoints import random_params, write_gguf

from oxidize_jax import LLM, SamplingParams
from oxidize_jax.cli.generate import cut_notes, why_cut
from oxidize_jax.cli.generate import record as json_record
from oxidize_jax.engine import engine
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.outputs import CompletionOutput, Logprob, RequestOutput, Usage


@pytest.fixture(scope="module")
def llm(config):
    """The LLM that the command makes of the shared configuration."""
    return LLM.from_config(config, compile_cache=False, progress=False)


@pytest.fixture(scope="module")
def expected(llm):
    """``expected(prompt, **parameters)``: texts of the completions through the library."""

    def texts(prompt, **parameters):
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **parameters})
        return [c.text for c in llm.generate(prompt, params)[0].outputs]

    return texts


def cut(tokens, of=""):
    """What standard error says of texts that end at ``--max-tokens``."""
    return f"[{of}cut off: --max-tokens is {tokens}; a larger one gives more]\n"


def line(text):
    """``text`` as it is printed."""
    return text if text.endswith("\n") else text + "\n"


def test_lone_prompt_prints_the_text_and_nothing_else(generate, expected):
    (text,) = expected("once", max_tokens=9)
    assert generate("--raw", "once", "--max-tokens", "9") == (0, line(text), cut(9))


def test_text_streams_from_the_second_piece_on(generate, expected, monkeypatch):
    class Recorder(io.StringIO):
        pieces = ()

        def flush(self):
            self.pieces += (self.getvalue(),)

    recorder = Recorder()
    monkeypatch.setattr("sys.stdout", recorder)
    generate("--raw", "once", "--max-tokens", "12")
    (text,) = expected("once", max_tokens=12)
    assert recorder.getvalue() == line(text)
    lengths = sorted({len(piece) for piece in recorder.pieces})
    assert len(lengths) > 5
    assert 0 < lengths[0] < len(text)


def test_prompts_run_as_one_batch_under_headers(generate, expected, tmp_path, monkeypatch):
    (first,) = expected("over", max_tokens=6)
    (second,) = expected("ab " * 11, max_tokens=6)
    calls = []
    inner = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda *a: calls.append(len(a[1])) or inner(*a))
    file = tmp_path / "prompts.txt"
    file.write_text(f"over\n\n{'ab ' * 11}\n")
    status, out, err = generate("--raw", "--file", file, "--max-tokens", "6")
    assert out == (f"=== 1/2: over\n{line(first)}=== 2/2: {' '.join(['ab'] * 11)}\n{line(second)}")
    assert (status, err, calls) == (0, cut(6, "2 of 2 texts "), [2])


def test_completions_have_headers_and_differ(generate, expected):
    argv = ["--raw", "once", "--n", "2", "--temperature", "1", "--seed", "3", "--max-tokens", "6"]
    first, second = expected("once", n=2, temperature=1.0, seed=3, max_tokens=6)
    assert first != second
    assert generate(*argv) == (
        0,
        f"=== 1/1, completion 1/2: once\n{line(first)}"
        f"=== 1/1, completion 2/2: once\n{line(second)}",
        cut(6, "2 of 2 texts "),
    )


def test_header_of_a_long_prompt_is_one_short_line(generate):
    _, out, _ = generate("--raw", "a\nb " + "c" * 57, "x", "--max-tokens", "1")
    assert out.splitlines()[0] == "=== 1/2: a b " + "c" * 55 + "…"


def test_same_command_same_text_and_seeds_change_it(generate):
    def sample(*argv):
        return generate("--raw", "once", "--temperature", "1", "--max-tokens", "8", *argv)[1]

    assert sample() == sample()
    assert sample("--seed", "1") == sample("--seed", "1") != sample("--seed", "2")


def test_chat_template_is_used_where_there_is_one(generate, llm):
    def prompt_ids(*argv):
        _, out, _ = generate("hi", "--max-tokens", "1", "--json", *argv)
        return json.loads(out)["prompt_token_ids"]

    chat = [{"role": "user", "content": "hi"}]
    system = [{"role": "system", "content": "Be."}, *chat]
    assert prompt_ids() == prompt_ids("--chat") == llm.tokenizer.apply_chat_template(chat)
    assert prompt_ids("--system", "Be.") == llm.tokenizer.apply_chat_template(system)
    assert prompt_ids("--raw") == llm.tokenizer.encode("hi")


def test_model_without_a_template_goes_on_with_the_text(generate, refused, tiny_raw, config, llm):
    argv = ["--model", tiny_raw, "hi", "--max-tokens", "1"]
    _, out, _ = generate(*argv, "--json")
    assert json.loads(out)["prompt_token_ids"] == llm.tokenizer.encode("hi")
    argv = ["generate", "--config", config, *argv]
    assert "no chat template: pass --raw" in refused(*argv, "--chat")
    assert "--system: this model has no chat template" in refused(*argv, "--system", "Be.")


@pytest.mark.parametrize(("prompts", "n"), [(["né", "b"], 1), (["né"], 2)])
def test_json_has_all_of_the_result(generate, llm, prompts, n):
    argv = ["--json", "--raw", *prompts, "--n", n, "--logprobs", "2", "--max-tokens", "3"]
    status, out, err = generate(*argv)
    assert (status, err) == (0, "")
    records = [json.loads(text) for text in out.splitlines()]
    params = SamplingParams(n=n, temperature=0.0, logprobs=2, max_tokens=3, ignore_eos=True)
    for index, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
        result = llm.generate(prompt, params)[0]
        assert record["index"] == record["request_id"] == index
        assert record["prompt"] == prompt
        assert record["prompt_token_ids"] == list(result.prompt_token_ids)
        assert record["finished"] is True
        prompt_tokens = len(result.prompt_token_ids)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 3 * n, "cached_tokens": 0}
        assert record["usage"] == usage | {"total_tokens": prompt_tokens + 3 * n}
        for got, completion in zip(record["outputs"], result.outputs, strict=True):
            assert got["text"] == completion.text
            assert got["token_ids"] == list(completion.token_ids)
            assert got["finish_reason"] == "length"
            assert got["cumulative_logprob"] == pytest.approx(completion.cumulative_logprob)
            for token, entry in zip(got["logprobs"], completion.logprobs, strict=True):
                assert token["token_id"] in entry
                assert token["token"] == entry[token["token_id"]].decoded_token
                assert [a["rank"] for a in token["alternatives"]] == [1, 2]
                assert [a["token_id"] for a in token["alternatives"]] == list(entry)[:2]
    assert "né" in out


def test_json_ranks_a_token_outside_the_alternatives_behind_them():
    tokens = ({5: Logprob(-1.0, 1, "a"), 6: Logprob(-2.0, 2, "b"), 9: Logprob(-7.0, 40, "x")},)
    completion = CompletionOutput(0, "x", (9,), -7.0, tokens, "length")
    entry = json_record(0, "p", RequestOutput(0, None, (1,), (completion,), Usage(1, 1, 0)))
    (token,) = entry["outputs"][0]["logprobs"]
    assert (token["token_id"], token["rank"], token["logprob"]) == (9, 40, -7.0)
    assert [(a["token_id"], a["rank"]) for a in token["alternatives"]] == [(5, 1), (6, 2), (9, 40)]


def test_json_has_null_for_what_it_cannot_say():
    tokens = ({7: Logprob(float("-inf"), None, "x")},)
    completion = CompletionOutput(0, "x", (7,), float("-inf"), tokens, "length")
    entry = json_record(0, "p", RequestOutput(0, None, (1,), (completion,), Usage(1, 1, 0)))
    (output,) = entry["outputs"]
    assert output["cumulative_logprob"] is output["logprobs"][0]["logprob"] is None
    assert output["logprobs"][0]["alternatives"] == []
    json.dumps(entry, allow_nan=False)


def test_every_sampling_option_reaches_the_request(generate, monkeypatch):
    seen = []
    inner = LLM.generate

    def spy(self, prompts, params):
        seen.append(params)
        return inner(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", spy)
    argv = "--max-tokens 5 --min-tokens 2 --temperature 0.5 --top-k 9 --top-p 0.9 --seed 6 --n 2"
    generate(
        "x", "--raw", *argv.split(), "--stop", "##", "--stop", "!!", "--json", "--logprobs", "1"
    )
    generate("x", "--raw", "--max-tokens", "none", "--json")
    assert seen[0] == SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=9,
        seed=6,
        max_tokens=5,
        min_tokens=2,
        stop=("##", "!!"),
        ignore_eos=True,
        logprobs=1,
    )
    assert seen[1] == SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def test_stats_go_to_standard_error(generate, expected):
    (text,) = expected("once", max_tokens=9)
    status, out, err = generate("--raw", "once", "--max-tokens", "9", "--stats")
    assert (status, out) == (0, line(text))
    assert err.startswith(cut(9))
    rows = [re.split(" {2,}", row, maxsplit=1) for row in err.splitlines()[1:]]
    table = dict(rows)
    names = [
        "load",
        "compile",
        "first text",
        "tokens",
        "speed",
        "steps",
        "KV blocks",
        "peak memory",
    ]
    assert [name for name, _ in rows] == names
    assert table["tokens"] == "4 in the prompts, 9 generated"
    assert re.fullmatch(r"[\d.]+ tokens/s, after the first text, .*", table["speed"])
    _, _, err = generate("--raw", "once", "more", "--max-tokens", "9", "--stats")
    assert "first text" not in err
    assert "8 in the prompts, 18 generated" in err
    assert "tokens/s, prompts included" in err


def test_person_at_a_terminal_is_told_why_a_text_ends(generate, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _, out, err = generate("--raw", "once", "--max-tokens", "3")
    assert out
    assert err.endswith(cut(3))
    assert "starting ..." in err
    assert "compiles" in err
    _, _, err = generate("--raw", "once", "--max-tokens", "none")
    assert "[cut off: prompt and output have reached --max-model-len" in err
    assert "KV cache is full" in why_cut(SamplingParams(), 3, "kv_cache_exhausted")


def test_cut_texts_are_counted_by_reason():
    def text(index, finish_reason, stop_reason=None, tokens=3):
        return CompletionOutput(
            index, "x", (7,) * tokens, 0.0, None, finish_reason, stop_reason=stop_reason
        )

    cut_off, full = text(0, "length"), text(1, "length", "kv_cache_exhausted", 2)
    outputs = [
        RequestOutput(0, None, (1,), (cut_off, full), Usage(1, 5, 0)),
        RequestOutput(1, None, (1,), (text(0, "stop"), text(1, "length")), Usage(1, 6, 0)),
    ]
    first, second = cut_notes(SamplingParams(max_tokens=3), outputs)
    assert first == "[2 of 4 texts cut off: --max-tokens is 3; a larger one gives more]"
    assert second.startswith("[1 of 4 texts cut off: the KV cache is full; ")
    assert cut_notes(SamplingParams(max_tokens=3), []) == []


def test_bad_requests_are_one_line_each(refused, config, tiny, tmp_path):
    argv = ["generate", "--config", config]
    message = refused(*argv, "--raw", "a" * 64)
    assert "64 tokens" in message
    assert "max_model_len=64" in message
    message = refused(*argv, "--raw", "ok", "a" * 70)
    assert message.startswith("prompts[1]: ")
    assert "max_model_len=999" in refused(*argv, "x", "--max-model-len", "999")
    assert "warp" in refused(*argv, "x", "--attention", "warp")
    assert "no such file" in refused(*argv, "x", "--model", tmp_path / "nothing.gguf")
    assert "tokenizer=" in refused(*argv, "x", "--tokenizer", tmp_path / "nothing")


@pytest.mark.parametrize(
    ("argv", "limit"),
    [(["4", "--max-logprobs", "3"], 3), (["1000000", "--max-logprobs", "20"], 20), (["9"], 3)],
)
def test_too_many_logprobs_are_refused_before_the_model_is_loaded(
    refused, config, monkeypatch, argv, limit
):
    monkeypatch.setattr(LLM, "__init__", None)
    message = refused("generate", "--config", config, "x", "--json", "--logprobs", *argv)
    assert message.startswith(f"--logprobs {argv[0]}: the limit is --max-logprobs {limit}; ")


def test_damaged_and_unknown_models_are_one_line_each(refused, tmp_path):
    shape = ModelConfig(97, 24, 40, 2, 4, 2, 8)
    path = write_gguf(tmp_path / "m.gguf", shape, random_params(shape))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert "truncated" in refused("generate", "x", "--model", path)
    path.write_bytes(data.replace(b"llama", b"gemma"))
    message = refused("generate", "x", "--model", path)
    assert "'gemma' is not supported, only 'llama'," in message
    path.write_bytes(b"hello")
    assert "m.gguf" in refused("generate", "x", "--model", path)


def test_failed_step_has_its_own_status(refused, config, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(engine, "fetch", fail)
    message = refused("generate", "--config", config, "x", "--raw", status=1)
    assert message.startswith("a step failed and 1 running requests were lost (out of memory)")


def subprocess_run(config, tmp_path, *argv):
    """The command in a process of its own, compile cache and all."""
    environment = {**os.environ, "OXIDIZE_JAX_CACHE": str(tmp_path / "cache")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "oxidize_jax", "generate", "--config", str(config), *argv]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_second_start_is_as_quiet_and_compiles_nothing(config, tmp_path, expected):
    (text,) = expected("once", max_tokens=9)
    argv = [config, tmp_path, "--raw", "once", "--max-tokens", "9", "--ignore-eos"]
    first, second = subprocess_run(*argv), subprocess_run(*argv, "--stats")
    assert (first.returncode, first.stdout, first.stderr) == (0, line(text), cut(9))
    assert (second.returncode, second.stdout) == (0, line(text))
    assert [row[:11].rstrip() for row in second.stderr.splitlines()[1:]] == [
        "load", "compile", "first text", "tokens", "speed", "steps", "KV blocks", "peak memory",
    ]  # fmt: skip
    assert " with 0 programs" not in second.stderr


@pytest.mark.slow
def test_first_command_of_the_readme(run, smollm2_path):
    argv = ["--model", smollm2_path, "--max-model-len", "256"]
    status, out, err = run("generate", "--prompt", "What is the capital of France?", *argv)
    assert (status, out, err) == (0, "The capital of France is Paris.\n", "")
