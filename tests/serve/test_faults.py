"""What breaks in the engine: who is told, who goes on, and what /health and /metrics say."""

from __future__ import annotations

import re
import threading

import openai
import pytest
from serving import eventually, serving

from oxidize_jax import SamplingParams
from oxidize_jax.engine import programs

PATH = "/v1/completions"


def failures(served):
    with served.http() as http:
        (line,) = re.findall(r"engine_step_failures_total\{.*\} (.*)", http.get("/metrics").text)
    return float(line)


def test_a_failed_step_fails_what_was_on_the_device_and_no_more(llm, served, monkeypatch):
    run, failed = programs.run, []

    def fail_once(*args):
        if not failed and len(served.service.thread._live) == 1:
            failed.append(True)
            raise RuntimeError("injected")
        return run(*args)

    before = failures(served)
    with served.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(programs, "run", fail_once)
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="abc", max_tokens=8, seed=3)
        assert failed
        assert caught.value.code == "engine_step_failed"
        assert "injected" not in str(caught.value)
        got = client.completions.create(model="tiny", prompt="abc", max_tokens=8, seed=3)
    (want,) = llm.generate(["abc"], SamplingParams(max_tokens=8, seed=3))
    assert got.choices[0].text == want.outputs[0].text
    with served.http() as http:
        assert http.get("/health").status_code == 200
    assert failures(served) == before + 1


def test_a_stream_is_told_of_a_failed_step(llm, served, monkeypatch):
    run, calls = programs.run, []

    def fail_later(*args):
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("injected")
        return run(*args)

    monkeypatch.setattr(programs, "run", fail_later)
    with served.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=60, seed=3, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        with pytest.raises(openai.APIError, match="send it again"):
            list(stream)
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_health_tells_of_a_stall_and_of_its_end(llm, gate):
    with serving(llm, stall_s=0.2) as served, served.http() as http:
        gate.clear()

        def ask():
            with served.http() as other:
                other.post(PATH, json={"prompt": "a", "max_tokens": 3})

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(lambda: http.get("/health").status_code == 503)
        assert "no progress" in http.get("/health").json()["reason"]
        gate.set()
        thread.join(120)
        assert http.get("/health").json() == {"status": "ok"}


def test_health_tells_of_steps_that_all_fail(llm, monkeypatch):
    def fail(*args):
        raise RuntimeError("injected")

    with serving(llm) as served, served.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(programs, "run", fail)
            for _ in range(3):
                body = {"prompt": "a", "max_tokens": 3}
                assert http.post(PATH, json=body).status_code == 500
            eventually(served.is_idle)
            assert "steps failed" in http.get("/health").json()["reason"]
        assert http.post(PATH, json={"prompt": "a", "max_tokens": 3}).status_code == 200
        assert http.get("/health").status_code == 200


def test_an_engine_thread_that_has_ended_is_not_healthy(llm):
    with serving(llm) as served, served.http() as http:
        assert served.service.thread.stop()
        assert http.get("/health").status_code == 503
        assert http.post(PATH, json={"prompt": "a"}).status_code == 503


def test_metrics_count_what_was_served(llm):
    with serving(llm) as served, served.client() as client, served.http() as http:
        client.completions.create(
            model="tiny", prompt="abcd", max_tokens=5, n=2, extra_body={"ignore_eos": True}
        )
        eventually(served.is_idle)
        text = http.get("/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    label = '{model_name="tiny"}'
    assert values[f"oxidize_jax:prompt_tokens_total{label}"] == 4
    assert values[f"oxidize_jax:generation_tokens_total{label}"] == 10
    assert values[f"oxidize_jax:time_to_first_token_seconds_count{label}"] == 1
    assert values[f"oxidize_jax:inter_token_latency_seconds_count{label}"] == 8
    assert values[f"oxidize_jax:e2e_request_latency_seconds_count{label}"] == 2
    assert values[f"oxidize_jax:request_queue_time_seconds_count{label}"] == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert values[f"oxidize_jax:{name}{label}"] == 0
    ended = 'oxidize_jax:request_success_total{finished_reason="length",model_name="tiny"}'
    assert values[ended] == 2
