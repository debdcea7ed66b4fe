"""oxidize-jax replay, on traces of the real LLM with the tiny model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from fake_model import quick_jit

from oxidize_jax import LLM, SamplingParams
from oxidize_jax.engine import replay as replaying
from oxidize_jax.engine.engine import Engine
from oxidize_jax.engine.recorder import Recorder
from oxidize_jax.engine.trace import Fork, Restart, Run, Submit, Trace
from oxidize_jax.engine.tracefile import read_trace, write_trace
from oxidize_jax.options import load_options
from oxidize_jax.scheduler.invariants import InvariantError


@pytest.fixture(scope="session")
def recorded(tiny, config, tmp_path_factory):
    """The trace of a few prompts, sampled and greedy, through the LLM."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    llm = LLM(**load_options(config), compile_cache=False, progress=False)
    about = {"name": "tiny", "dtype": "float32"}
    recorder = Recorder(path, model=about)
    llm.engine = Engine(llm.config, llm.engine.model, llm.engine.params, recorder=recorder)
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, n=2, logprobs=2)
    outputs = llm.generate(["abcabcabc", "abcabcxyz"], params)
    outputs += llm.generate("abcabc", SamplingParams(max_tokens=5, temperature=0.0))
    recorder.close()
    return path, outputs


STEP = quick_jit(replaying.scripted_step, static_argnums=0, donate_argnums=1)


@pytest.fixture(autouse=True)
def quick_step(monkeypatch):
    monkeypatch.setattr("oxidize_jax.compile_cache.enable_compile_cache", lambda: None)
    monkeypatch.setattr(replaying, "_jitted_step", STEP)


def rows(out):
    return dict(line.partition(" ")[::2] for line in out.splitlines())


def test_a_run_of_the_llm_is_replayed_without_its_model(run, recorded):
    path, outputs = recorded
    status, out, err = run("replay", path)
    assert (status, err) == (0, "")
    count = sum(len(completion.token_ids) for o in outputs for completion in o.outputs)
    assert f"{count} tokens" in rows(out)["replayed"]
    assert "5 requests" in rows(out)["trace"]
    assert "model tiny" in rows(out)["trace"]
    assert out.splitlines()[-1] == "identical"


def test_and_with_it_to_the_last_bit_of_the_logprobs(run, recorded, tiny, tmp_path):
    path, _ = recorded
    assert run("replay", path, "--model", tiny)[::2] == (0, "")
    changed = tmp_path / "changed.jsonl"
    trace = read_trace(path)
    last = max(i for i, event in enumerate(trace.events) if isinstance(event, Run))
    outcome = trace.events[last].outcome
    digests = outcome.digests | {"requests.logprobs": outcome.digests["requests.logprobs"] ^ 1}
    other = Run(16, dataclasses.replace(outcome, digests=digests))
    write_trace(
        changed,
        dataclasses.replace(trace, events=(*trace.events[:last], other, *trace.events[last + 1 :])),
    )
    status, out, _ = run("replay", changed, "--model", tiny)
    assert status == 1
    assert "requests.logprobs" in rows(out)["differs"]
    assert f"event {last} (run" in rows(out)["differs"]
    assert "in logprobs alone" in out
    assert run("replay", changed)[0] == 0  # only the model knows logprobs


def test_the_first_difference_is_printed(run, recorded, tmp_path):
    lines = recorded[0].read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith('{"ran"'))
    record = json.loads(lines[number])
    record["ran"]["digests"]["rows.kv_len"] ^= 5
    lines[number] = json.dumps(record)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join(lines))
    status, out, err = run("replay", bad)
    assert (status, err) == (1, "")
    assert rows(out)["differs"].strip().endswith("arrays that differ: rows.kv_len")


def test_a_trace_that_ends_in_the_middle(run, recorded, tmp_path):
    text = recorded[0].read_text()
    torn = tmp_path / "torn.jsonl"
    torn.write_text(text[:-20])  # within the outcome of the last run
    status, out, _ = run("replay", torn)
    assert status == 0
    assert "last line is torn" in out
    assert "has no outcome" in out
    assert "whose outcome is on record" in out.splitlines()[-1]


@pytest.fixture
def fault(monkeypatch):
    """Steps fail while a request that ends in token 66 and another one run together."""
    step = replaying._jitted_step

    def broken(config, state, script):
        state = step(config, state, script)
        rows = [r for r in state.rows.request.tolist() if r < config.max_num_requests]
        requests = state.requests
        ends = [requests.tokens[r, requests.prompt_len[r] - 1].item() for r in rows]
        if 66 in ends and len(ends) > 1:
            raise InvariantError(f"two at once: {rows}")
        return state

    monkeypatch.setattr(replaying, "_jitted_step", broken)


def test_a_fault_is_cut_down_and_written_as_a_test(run, recorded, tmp_path, fault):
    config = read_trace(recorded[0]).config
    requests = [
        Submit(slot, (1, slot, end), 6, arrival=slot) for slot, end in enumerate([5, 6, 66, 7])
    ]
    events = (*requests[:2], Run(2), requests[2], Run(3), requests[3], Run(9))
    path, small, test = (tmp_path / name for name in ("run.jsonl", "small.jsonl", "test_small.py"))
    write_trace(path, Trace(config, 259, events))
    status, out, err = run("replay", path, "--shrink", small, "--test", test)
    assert (status, err) == (1, "")
    assert "InvariantError: two at once" in rows(out)["fault"]
    assert "in step 1 of event 4" in rows(out)["fault"]
    assert rows(out)["cut"].strip().startswith("down  to 3 events, 2 requests")
    assert len(read_trace(small).events) == 3
    assert run("replay", small)[0] == 1
    made: dict = {}
    exec(compile(test.read_text(), str(test), "exec"), made)
    with pytest.raises(InvariantError, match="two at once"):
        made["test_replay"]()


def test_there_is_nothing_to_cut_down_in_a_sound_trace(run, recorded, tmp_path):
    out = tmp_path / "small.jsonl"
    status, _, err = run("replay", recorded[0], "--shrink", out)
    assert status == 2
    assert "--shrink: the trace replays without a fault: there is nothing to cut down." in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.jsonl"], ["nowhere.jsonl", "No such file"]),
        (["--model", "x", "t", "--shrink", "o"], ["--model", "without the model"]),
        (["--no-check", "t", "--test", "o"], ["--no-check", "leave it out"]),
        (["t", "--dtype", "float16"], ["--dtype", "float16"]),
        (["", "--model", "x"], ["TRACE: is empty"]),
        (["t", "--dtype", "bfloat16"], ["--dtype", "--model"]),
        (["t", "--shrink", "no/such/folder/o"], ["--shrink", "folder that exists"]),
        (["t", "--test", "."], ["--test", "folder that exists"]),
        ([], ["TRACE"]),
    ],
)
def test_bad_arguments_are_one_line(refused, argv, words):
    message = refused("replay", *argv)
    for word in words:
        assert word in message


def test_a_bad_file_and_nonsense_are_one_line(refused, recorded, tmp_path, run):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    message = refused("replay", bad)
    assert "bad.jsonl: line 1" in message
    config = read_trace(recorded[0]).config
    fork = Fork(0, (1,), ((0, 0),), (0,), (None,), (0.0,))
    write_trace(bad, Trace(config, 259, (Restart(), fork)))
    status, _, err = run("replay", bad)
    assert status == 2
    assert "event 1 (fork of slot 0): the parent is not alive" in err


def test_help_does_not_wait_for_jax():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from oxidize_jax.cli import main; main(['replay', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "example" in done.stdout
