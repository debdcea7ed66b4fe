"""oxidize-jax bench: what is refused, and what is in the table and the JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from fake_model import quick_jit

from oxidize_jax.bench import scheduler
from oxidize_jax.engine import programs
from oxidize_jax.engine.step import run_steps

# Names may be indented and have single blanks in them.
TABLE_ROW = re.compile(r"( *\S+(?: \S+)*|)  +(.*)")
KINDS = ("throughput", "latency", "prefix", "scheduler")
_QUICK_RUN = quick_jit(run_steps, static_argnums=(0, 1), donate_argnums=3)


@pytest.fixture(autouse=True)
def quick_run(monkeypatch):
    monkeypatch.setattr(programs, "run", _QUICK_RUN)


@pytest.fixture
def bench(run, config):
    """``bench(kind, *argv) -> (JSON, table)`` with the tiny model."""

    def call(kind, *argv):
        status, out, err = run("bench", kind, "--config", config, "--json", "-", *argv)
        assert status == 0, err
        return json.loads(out), dict(TABLE_ROW.match(line).groups() for line in err.splitlines())

    return call


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "name what to measure: throughput, latency, prefix or scheduler"),
        (["throughput", "--repeat", "0"], "'0': must be a whole number, 1 or more"),
        (["throughput", "--input-len", "5:3"], "LOW at most HIGH"),
        (["throughput", "--input-len", "a"], "'a': must be a whole number"),
        (["throughput", "--output-len", "0:3"], "'0:3'"),
        (["throughput", "--workload", "w.json", "--seed", "1"], "--seed: the workload comes from"),
        (["throughput", "--workload", "no/such.json"], "no/such.json: No such file"),
        (["throughput", "--json", "no/such/out.json"], "--json: 'no/such/out.json'"),
        (["throughput", "7"], "there is no use for the argument '7'"),
        (["prefix", "--no-prefix-caching"], "--no-prefix-caching: it is run with and without"),
        (["prefix", "--prefix-lem", "7"], "did you mean --prefix-len?"),
        (["latency", "--input-len", "5:6"], "'5:6': must be a whole number"),
        (["latency", "--input-len", "60", "--output-len", "5"], "65 tokens .*max_model_len=64"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(refused, config, argv, words):
    if argv[:1] == ["latency"]:
        argv = [*argv, "--config", config]
    message = refused("bench", *argv)
    if ".*" in words:
        before, after = words.split(".*")
        assert before in message
        assert after in message
    else:
        assert words in message


@pytest.mark.parametrize("kind", KINDS)
def test_help_does_not_wait_for_jax(kind):
    code = (
        "import sys; sys.modules['jax'] = None; from oxidize_jax.cli import main; "
        f"main(['bench', {kind!r}, '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in ("--repeat", "--json", "--model", "--max-num-seqs"):
        assert option in done.stdout


def test_throughput_counts_the_whole_workload(bench):
    argv = ["--num-prompts", 6, "--input-len", "4:20", "--output-len", "3:9", "--repeat", 2]
    result, table = bench("throughput", *argv)
    assert result["benchmark"] == "throughput"
    assert {"oxidize_jax", "jax", "device", "cpu", "cpus"} <= result["environment"].keys()
    assert result["options"]["max_num_seqs"] == result["engine"]["max_num_seqs"] == 4
    load = result["workload"]
    assert load["requests"] == 6
    assert len(result["runs"]) == 2
    for run in [*result["runs"], result["median"]]:
        assert run["prompt_tokens"] == load["prompt_tokens"]
        assert run["output_tokens"] == load["output_tokens"]
        assert run["seconds"] > 0
        assert run["output_tokens_per_second"] < run["total_tokens_per_second"]
        assert run["cached_tokens"] == run["preemptions"] == 0
        assert 0 < run["peak_blocks"] <= result["num_blocks"]
        assert run["steps"] >= 9
    tokens = load["prompt_tokens"] + load["output_tokens"]
    for run in result["runs"]:
        assert run["total_tokens_per_second"] == pytest.approx(tokens / run["seconds"])
    assert result["compile_seconds"] >= 0
    assert result["load"]["seconds"] >= result["load"]["compile_seconds"] >= 0
    assert table["workload"].startswith("6 requests")
    assert table["output"].endswith("tokens/s")


def test_a_tight_pool_shows_in_the_figures(bench, tmp_path):
    file = tmp_path / "work.json"
    entry = {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12], "max_tokens": 20}
    file.write_text(json.dumps([entry] * 4))
    out = bench("throughput", "--workload", file, "--num-blocks", 12, "--repeat", 1)[0]
    assert out["median"]["preemptions"] > 0
    assert out["median"]["cached_tokens"] > 0
    assert out["median"]["peak_blocks"] == 12
    assert out["median"]["output_tokens"] == 80


def test_a_pool_that_cannot_hold_a_request_is_a_failed_run(refused, config):
    argv = ["--num-prompts", "1", "--input-len", "8", "--output-len", "50", "--num-blocks", "12"]
    message = refused("bench", "throughput", "--config", config, *argv, status=1)
    assert "gave 41 of 50 tokens" in message
    assert "raise num_blocks" in message


def test_latency_tells_the_first_token_from_the_others(bench):
    result, table = bench("latency", "--input-len", 40, "--output-len", 20, "--repeat", 2)
    assert len(result["time_to_first_token"]["runs"]) == 2
    assert result["time_per_token_streamed"]["count"] == 2 * 19
    streamed = result["time_per_token_streamed"]
    assert 0 < streamed["median"] <= streamed["p99"]
    assert len(result["time_per_token_batched"]["runs"]) == 2
    assert result["compile_seconds"] >= 0
    assert "p99" in table["time per token"]


def test_latency_of_one_token_has_no_time_between_tokens(bench):
    result, table = bench("latency", "--input-len", 4, "--output-len", 1, "--repeat", 1)
    assert result["time_per_token_streamed"] == {"median": None, "p99": None, "count": 0}
    assert result["time_per_token_batched"]["median"] is None
    assert "time per token" not in table


def test_prefix_hits_all_that_can_hit(bench):
    sizes = ["--groups", 2, "--prompts-per-group", 3, "--prefix-len", 18, "--suffix-len", 3]
    result, table = bench("prefix", *sizes, "--output-len", 2, "--repeat", 1)
    assert result["shareable_rate"] == pytest.approx(2 * 2 * 16 / (6 * 21))
    assert result["hit_rate"] == pytest.approx(result["shareable_rate"])
    assert result["off"]["median"]["cached_tokens"] == 0
    assert result["on"]["median"]["output_tokens"] == 12
    expected = result["on"]["runs"][0]["seconds"] / result["off"]["runs"][0]["seconds"]
    assert result["time_ratio"] == pytest.approx(expected)
    assert table["hit rate"].startswith("50.8 %")


def test_scheduler_has_its_costs_and_its_share(bench, monkeypatch):
    monkeypatch.setattr(scheduler, "measure", lambda config, dispatches: (5.0, 6.0, 8.0, 4.5))
    result, table = bench("scheduler", "--context", 4, "--repeat", 1)
    assert result["scheduler"]["decode_us"] == 5.0
    assert result["scheduler"]["rows"] == 256
    share = result["share"]
    assert share["rows"] == 4
    assert share["share"] == pytest.approx(share["without_model_ms"] / share["step_ms"])
    assert len(share["step_ms_runs"]) == 1
    assert table["  share"].endswith("% at most")
    alone, _ = bench("scheduler", "--no-model")
    assert alone["share"] is None


def test_rows_that_cannot_decode_throughout_are_refused(refused, config, monkeypatch):
    monkeypatch.setattr(scheduler, "measure", lambda config, dispatches: (5.0, 6.0, 8.0, 4.5))
    message = refused("bench", "scheduler", "--config", config, "--context", "40")
    assert "max_model_len=64" in message
    assert "no room for 4 rows" in message


def test_a_file_gets_the_json_and_standard_output_the_table(run, config, tmp_path):
    file = tmp_path / "out.json"
    argv = ["--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--repeat", "1"]
    status, out, err = run("bench", "throughput", "--config", config, *argv, "--json", file)
    assert (status, err) == (0, "")
    assert json.loads(file.read_text())["workload"]["requests"] == 1
    assert out.splitlines()[0].startswith("machine")
