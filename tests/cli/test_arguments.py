"""Everything that is decided before jax is imported."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from oxidize_jax import __version__, cli
from oxidize_jax.cli import BROKEN_PIPE, generate, main, models
from oxidize_jax.cli.parser import DTYPES, KV_DTYPES, POLICIES, parse, sampling_params
from oxidize_jax.cli.prompts import read_prompts
from oxidize_jax.config import POLICIES as ALL_POLICIES
from oxidize_jax.options import DTYPES as ALL_DTYPES
from oxidize_jax.options import KV_DTYPES as ALL_KV_DTYPES
from oxidize_jax.options import Options
from oxidize_jax.sampling.params import SamplingParams

WITHOUT_JAX = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "numpy", "flax"):
            raise RuntimeError(f"imports {name}")
sys.meta_path.insert(0, Refuse())
from oxidize_jax.cli import main
try:
    sys.exit(main(sys.argv[1:]))
except SystemExit as end:
    sys.exit(end.code)
"""


def without_jax(*argv):
    command = [sys.executable, "-c", WITHOUT_JAX, *argv]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture
def stdin(monkeypatch):
    """``stdin(data)``: give these bytes as piped standard input."""

    def give(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--help"], 0),
        (["generate", "--help"], 0),
        (["serve", "--help"], 0),
        (["score", "--help"], 0),
        (["score", ""], 2),
        (["models", "--help"], 0),
        (["fetch", "--help"], 0),
        (["generate", "--max-tokens", "0", "x"], 2),
        (["generate", "--frobnicate", "x"], 2),
        (["generate", ""], 2),
        (["generate"], 2),
        ([], 2),
    ],
)
def test_help_and_bad_arguments_do_not_wait_for_jax(argv, status):
    done = without_jax(*argv)
    assert done.returncode == status, done.stderr
    assert "imports" not in done.stderr
    assert ("example" in done.stdout) == (status == 0)


def sampling_of(*argv):
    return sampling_params(parse(cli._parser(), ["generate", *argv, "x"]))


def test_every_sampling_option_has_its_flag():
    params = sampling_of(
        *("--min-p", "0.1", "--typical-p", "0.9", "--repetition-penalty", "1.2"),
        *("--presence-penalty=-0.5", "--frequency-penalty", "0.25"),
        *("--logit-bias", "5:-2.5, 17:100", "--allowed-token-ids", "5,17,3"),
        *("--banned-token-ids", "3", "--bad-word", "bad", "--bad-word", "worse"),
    )
    assert (params.min_p, params.typical_p) == (0.1, 0.9)
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, -0.5)
    assert params.frequency_penalty == 0.25
    assert params.logit_bias == ((5, -2.5), (17, 100.0))
    assert params.allowed_token_ids == (5, 17, 3)
    assert params.banned_token_ids == (3,)
    assert sampling_of("--n", "2", "--best-of", "5").best_of == 5
    assert params.bad_words == ("bad", "worse")
    assert sampling_of() == SamplingParams(max_tokens=256, temperature=0.0)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--min-p", "2", "must be from 0 to 1"),
        ("--presence-penalty", "x", "'x': must be a number"),
        ("--logit-bias", "5", "token ids and numbers, as in 5:-2.5"),
        ("--logit-bias", "a:5", "must be a whole number"),
        ("--logit-bias", "5:x", "token ids and numbers"),
        ("--logit-bias", "5:101", "must be from -100 to 100"),
        ("--allowed-token-ids", "5;6", "token ids, as in 5,17"),
        ("--banned-token-ids", "2147483648", "must be a whole number"),
        ("--best-of", "65", "must be a whole number, 1 to 64"),
    ],
)
def test_sampling_flags_refuse_in_words(flag, value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        sampling_of(flag, value)


def test_python_m_oxidize_jax_is_the_command():
    command = [sys.executable, "-m", "oxidize_jax", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: oxidize-jax ")


def test_version_names_ours_jax_and_the_device(run):
    status, out, err = run("--version")
    assert (status, err) == (0, "")
    lines = [f"oxidize-jax {__version__}", f"jax {jax.__version__}"]
    assert out.splitlines()[:2] == lines
    assert out.splitlines()[2].startswith(f"device {len(jax.devices())} x ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-tokens", "0"], ["--max-tokens", "0: must be", "1 to"]),
        (["--max-tokens", "-1"], ["--max-tokens", "-1: must be", "1 to"]),
        (["--max-tokens", "many"], ["--max-tokens", "'many'", "whole number"]),
        (["--temperature", "nan"], ["--temperature", "nan: must be a finite number"]),
        (["--temperature", "-1"], ["--temperature", "-1.0: must be from 0"]),
        (["--temperature", "hot"], ["--temperature", "'hot'", "must be a number"]),
        (["--top-p", "0"], ["--top-p", "0.0: must be above 0"]),
        (["--n", "65"], ["--n", "65: must be", "1 to 64"]),
        (["--seed", "-3"], ["--seed", "-3: must be", "None for a random"]),
        (["--stop", ""], ["stop=''", "non-empty"]),
        (["--min-tokens", "9", "--max-tokens", "5"], ["min_tokens=9", "max_tokens=5"]),
        (["--logprobs", "2"], ["--logprobs", "--json"]),
        (["--raw", "--system", "Be brief."], ["--system", "--raw"]),
        (["--raw", "--chat"], ["--chat", "--raw"]),
        (["--dtype", "float16"], ["--dtype", "float16", "bfloat16"]),
        (["--num-blocks", "0"], ["--num-blocks", "'0'", "1 or more"]),
        (["--max-model-len", "1"], ["--max-model-len", "'1'", "2 or more"]),
        (["--kv-cache-gib", "inf"], ["--kv-cache-gib", "'inf'", "above 0"]),
        (["--max-token", "5"], ["--max-token;", "did you mean --max-tokens?"]),
        (["--temperature", "-inf"], ["--temperature: expected one", "as in --temperature=-x"]),
        (["--prompt", "-x"], ["--prompt: expected one", "as in --prompt=-x"]),
        (["--file", ""], ["--file: is empty"]),
        (["--model", ""], ["--model: is empty"]),
        (["--tokenizer", " "], ["--tokenizer: is empty"]),
        (["--config", ""], ["--config: is empty"]),
        (["--qqqqqqq"], ["no option --qqqqqqq (see"]),
    ],
)
def test_bad_value_is_one_line_that_names_it(refused, argv, words):
    message = refused("generate", "x", *argv)
    for word in words:
        assert word in message


def parsed(*argv):
    return parse(cli._parser(), ["generate", *argv])


def test_words_after_options_are_prompts_too():
    args = parsed("a", "--n", "2", "b", "--prompt", "c", "--", "-d")
    assert [*args.words, *args.prompt] == ["a", "b", "-d", "c"]
    assert args.n == 2


def test_stray_argument_of_another_command(refused):
    assert "'two'" in refused("models", "one", "two")
    assert "generat" in refused("generat", "x")
    assert "MODEL: is empty" in refused("models", "")


def test_value_that_starts_with_a_dash():
    assert parsed("--prompt=-x").prompt == ["-x"]


def test_every_option_and_parameter_is_an_argument():
    args = vars(parsed())
    not_needed = {"stop_token_ids", "skip_special_tokens", "structured_outputs"}
    for cls in (Options, SamplingParams):
        for field in dataclasses.fields(cls):
            assert field.name in args or field.name in not_needed
    assert DTYPES == ALL_DTYPES
    assert KV_DTYPES == ALL_KV_DTYPES
    assert POLICIES == ALL_POLICIES


def options(*argv, count=1):
    args = parsed(*argv)
    return generate.llm_options(args, count, sampling_params(args))


def test_command_line_wins_over_the_preset(tmp_path):
    preset = tmp_path / "p.toml"
    preset.write_text(
        "[model]\nmodel = 'm'\nseed = 4\n[engine]\nmax_num_seqs = 3\nblock_size = 8\n"
    )
    given = ["--config", str(preset), "--max-num-seqs", "5", "--no-prefix-caching", "--seed", "9"]
    assert options(*given) == {
        "model": "m",
        "seed": 4,
        "max_num_seqs": 5,
        "block_size": 8,
        "enable_prefix_caching": False,
    }


@pytest.mark.parametrize(
    ("count", "n", "expected"),
    [(1, 1, 1), (1, 3, 4), (2, 2, 4), (4, 1, 4), (5, 1, None), (3, 2, None)],
)
def test_few_completions_get_a_small_cache(count, n, expected):
    assert options("--n", str(n), count=count).get("max_num_seqs") == expected
    assert options("--n", str(n), "--max-num-seqs", "7", count=count)["max_num_seqs"] == 7


def test_room_for_the_alternatives_that_are_asked_for():
    def room(*argv):
        return options("--json", *argv).get("max_logprobs")

    assert room() is None
    assert room("--logprobs", "5") is None
    assert room("--logprobs", "8") == 8
    assert room("--logprobs", "999") == 20
    assert room("--logprobs", "8", "--max-logprobs", "6") == 6


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("max_num_sequences = 3", "Did you mean 'max_num_seqs'?"),
        ("max_num_seqs = '3'", "max_num_seqs='3': must be a whole number"),
        ("max_num_seqs = ", "not valid TOML"),
        ("attention = 'warp'", "warp"),
    ],
)
def test_bad_preset_is_one_line(refused, tmp_path, tiny, text, word):
    preset = tmp_path / "p.toml"
    preset.write_text(text)
    assert word in refused("generate", "x", "--model", tiny, "--config", preset)


def test_missing_preset(refused, tmp_path):
    message = refused("generate", "x", "--config", tmp_path / "no.toml")
    assert "no.toml" in message
    assert "No such file" in message


def test_error_at_a_terminal_has_a_line_of_its_own(run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status, out, err = run("generate", "x", "--config", tmp_path / "no.toml")
    assert (status, out) == (2, "")
    assert "\r\x1b[Kstarting ...\r\x1b[Koxidize-jax: error: " in err


def test_prompts_of_all_sources_in_order(tmp_path, stdin):
    stdin(b"four\n\nfive\n")
    file = tmp_path / "p.txt"
    file.write_bytes("\ufefftwo \r\n\n   \nthr\u2028ee".encode())
    assert read_prompts(["one"], [str(file), "-"]) == ["one", "two ", "thr\u2028ee", "four", "five"]


def test_piped_text_is_one_prompt_unless_one_is_given(stdin):
    stdin(b"Dear Sir,\n\nhello\n")
    assert read_prompts(["x"], []) == ["x"]
    assert read_prompts([], []) == ["Dear Sir,\n\nhello"]


def test_terminal_without_a_prompt(refused, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert "there is no prompt: give one" in refused("generate")


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_empty_standard_input(refused, stdin, data):
    stdin(data)
    assert refused("generate").startswith("standard input (read because no prompt was given) is")


def test_empty_prompts_are_numbered(refused):
    assert refused("generate", " ").startswith("the prompt is empty")
    assert refused("generate", "a", "--prompt", "").startswith("prompt 2 is empty")


def test_prompt_file_that_cannot_be_used(refused, tmp_path, stdin):
    bad, blank = tmp_path / "latin1.txt", tmp_path / "blank.txt"
    bad.write_bytes("caf\xe9".encode("latin1"))
    blank.write_text("\n\n")
    assert "latin1.txt: byte 3 (0xe9) is not UTF-8; convert it" in refused(
        "generate", "--file", bad
    )
    assert "blank.txt: there is no prompt in it" in refused("generate", "--file", blank)
    message = refused("generate", "--file", tmp_path / "none.txt")
    assert message.startswith("--file ")
    assert "none.txt: No such file or directory; give a text file" in message
    assert "Is a directory; give a text file" in refused("generate", "--file", tmp_path)
    stdin(b"\xff")
    assert "standard input: byte 0 (0xff)" in refused("generate", "--file", "-")


def test_argument_that_is_not_utf8(refused):
    assert "the prompt is not UTF-8" in refused("generate", os.fsdecode(b"caf\xe9"))


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\n lines"), 2, "two lines"),
        (ImportError("pip install x"), 2, "pip install x"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (RuntimeError("a step failed"), 1, "a step failed"),
        (RuntimeError(), 1, "RuntimeError"),
    ],
)
def test_errors_are_one_line_and_a_traceback_on_request(
    refused, run, monkeypatch, error, status, line
):
    def fail(args):
        raise error

    monkeypatch.setattr(models, "run_models", fail)
    assert refused("models", status=status) == line
    monkeypatch.setenv("OXIDIZE_JAX_TRACEBACK", "1")
    got, _, err = run("models")
    assert got == status
    assert err.startswith("Traceback")
    assert err.endswith(f"oxidize-jax: error: {line}\n")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: 9 bytes")])
def test_out_of_memory_says_what_takes_less(refused, monkeypatch, error):
    def fail(args):
        raise error

    monkeypatch.setattr(models, "run_models", fail)
    assert "--num-blocks or --kv-cache-gib takes less memory" in refused("models", status=1)


@pytest.mark.parametrize(("before", "after"), [(None, "3"), ("0", "0")])
def test_xla_logs_are_off_unless_the_user_wants_them(run, monkeypatch, before, after):
    if before is None:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    else:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", before)
    run("models")
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == after


def test_programming_error_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(models, "run_models", lambda args: 1 + "")
    with pytest.raises(TypeError):
        main(["models"])


def test_interrupt_is_quiet(run, monkeypatch):
    def interrupt(args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr(models, "run_models", interrupt)
    assert run("models") == (130, "", "")


def script(body):
    """Run main(["models"]) with ``body`` as the command, in a process of its own."""
    lines = ["import os, sys, threading, hashlib, signal", "from oxidize_jax import cli", body]
    lines += ["cli.models.run_models = command", "sys.exit(cli.main(['models']))"]
    return [sys.executable, "-c", "\n".join(lines)]


def test_interrupt_does_not_wait_for_compiled_code():
    # A minute in C, with no way for Python to run a signal handler.
    busy = """
def command(args):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    hashlib.pbkdf2_hmac("sha256", b"x", b"x", 100_000_000)
"""
    start = time.time()
    done = subprocess.run(script(busy), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert time.time() - start < 10


def test_broken_pipe_is_silent():
    writer = subprocess.Popen(
        script("command = lambda args: print('x' * 200_000) or 0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert writer.stdout.read(5) == b"xxxxx"
    writer.stdout.close()
    assert writer.wait() == BROKEN_PIPE
    assert writer.stderr.read() == b""
    writer.stderr.close()
