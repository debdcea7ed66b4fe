"""One request breaks, or was made to break the server: the others get the text of each alone."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import quick_jit
from serving import (
    PATH,
    body_of,
    bystanders,
    check_clean,
    crowd,
    eventually,
    serving,
    solo_text,
    solo_texts,
)
from tiny_model import SIZES, write_tiny_model

from oxidize_jax import LLM
from oxidize_jax.engine import programs, step
from oxidize_jax.serve.engine_thread import LOST
from oxidize_jax.text.detokenizer import IncrementalDetokenizer

JSON = {"Content-Type": "application/json"}
BLOCKS = 19


class Broken:
    """A sampler that fails when it is told to, on the device and in mid-program."""

    def __init__(self, sample):
        self.sample = sample
        self.fails = False

    def __call__(self, logits, *rest):
        zero = jax.pure_callback(self._judge, jax.ShapeDtypeStruct((), jnp.float32))
        return self.sample(logits + zero, *rest)

    def _judge(self):
        if self.fails:
            raise RuntimeError("injected")
        return np.float32(0)


@pytest.fixture(scope="module")
def broken():
    return Broken(step.sample)


@pytest.fixture(scope="module")
def tight(tmp_path_factory, broken):
    """A pool for one sequence of full length and a little; with the sampler that can fail."""
    path = write_tiny_model(tmp_path_factory.mktemp("tight") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "sample", broken)
        quick = quick_jit(step.run_steps, static_argnums=(0, 1), donate_argnums=3)
        as_ever = programs.traced_run

        def traced(config, *rest):
            return (quick if config.num_blocks == BLOCKS else as_ever)(config, *rest)

        patch.setattr(programs, "traced_run", traced)
        llm = LLM(path, **SIZES, num_blocks=BLOCKS, check_invariants=True)
        llm.generate(["a"], use_tqdm=False)
        yield llm


def post(http, body):
    return http.post(PATH, content=body, headers=JSON)


def healthy(http):
    return http.get("/health").json() == {"status": "ok"}


def test_a_step_that_fails_leaves_those_in_line(llm, served, gate, monkeypatch):
    """All slots belong to one request when the step fails; the others had none yet."""
    run, calls = programs.run, []

    def fail_once(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("injected")
        return run(*args)

    slots = llm.config.max_num_requests
    bodies = [body_of(i, max_tokens=30, ignore_eos=True) for i in range(5)]
    want, got, bad = solo_texts(llm, bodies), [], []
    gate.clear()

    def ask():
        with served.http() as http:
            many = {"prompt": ["a"] * slots, "max_tokens": 40, "ignore_eos": True}
            bad.append(http.post(PATH, json=many))

    threads = [threading.Thread(target=ask)]
    threads[0].start()
    eventually(lambda: served.service.thread.num_reserved == slots)
    others = threading.Thread(target=lambda: got.extend(asyncio.run(crowd(served, bodies, {}))))
    others.start()
    eventually(lambda: served.service.thread.num_reserved == slots + len(bodies))
    monkeypatch.setattr(programs, "run", fail_once)
    gate.set()
    for thread in (*threads, others):
        thread.join(300)
    assert (bad[0].status_code, bad[0].json()["error"]["code"]) == (500, "engine_step_failed")
    assert got == want
    with served.http() as http:
        assert healthy(http)


@pytest.mark.filterwarnings("ignore")  # of the callback that fails
def test_a_sampler_that_fails_on_the_device(tight, broken):
    body = {"prompt": "abc", "seed": 3, "max_tokens": 12, "ignore_eos": True}
    want = solo_text(tight, body)
    with serving(tight) as served, served.http() as http:
        for stream in (False, True):
            broken.fails = True
            got = http.post(PATH, json={**body, "stream": stream})
            broken.fails = False
            assert got.status_code == 500  # before the first text of a stream too
            assert got.json()["error"]["message"] == LOST
            assert http.post(PATH, json=body).json()["choices"][0]["text"] == want
            assert healthy(http)
        broken.fails = True
        for _ in range(3):
            assert http.post(PATH, json=body).status_code == 500
        eventually(served.is_idle)
        unhealthy = http.get("/health")
        assert unhealthy.status_code == 503
        assert "steps failed" in unhealthy.json()["reason"]
        broken.fails = False
        with bystanders(tight, served):
            pass
        assert healthy(http)
    check_clean(tight)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_cannot_be_made_fails_alone(llm, served, gate, monkeypatch, stream):
    add, prompt = IncrementalDetokenizer.add, "spoilt"
    spoilt = tuple(llm.tokenizer.encode(prompt))
    init = IncrementalDetokenizer.__init__

    def marked(self, tokenizer, prompt_token_ids, *rest):
        init(self, tokenizer, prompt_token_ids, *rest)
        if tuple(prompt_token_ids) == spoilt:
            self.calls = 0

    def fail(self, ids):
        if hasattr(self, "calls"):
            self.calls += 1
            if self.calls == 5:
                raise UnicodeError("injected")
        return add(self, ids)

    monkeypatch.setattr(IncrementalDetokenizer, "__init__", marked)
    monkeypatch.setattr(IncrementalDetokenizer, "add", fail)
    body = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True, "stream": stream}
    with served.http() as http:
        with bystanders(llm, served):
            got = http.post(PATH, json=body)
        assert got.status_code == (200 if stream else 500)
        assert LOST in got.text
        assert "injected" not in got.text
        assert got.text.endswith("[DONE]\n\n") == stream
        assert healthy(http)


HOSTILE = {
    "nested": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "nested objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "schema": b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": '
    b'{"schema": ' + b'{"items":' * 200 + b"{}" + b"}" * 203,
    "UTF-8": b'{"prompt": "\xc3\x28"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "top_p": 1e400}',
    "unknown": b'{"prompt": "a", "max_new_tokens": 5}',
    "twice": b'{"prompt": "a", "prompt": ["a", 1]}',
}


def test_bodies_made_to_break_it_stop_nobody(llm, served, gate):
    """Asked while streams stand in the middle of their texts."""
    with served.http() as http, bystanders(llm, served):
        gate.clear()
        for name, body in HOSTILE.items():
            answer = post(http, body)
            assert answer.status_code == 400, name
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert healthy(http)
        gate.set()


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_50_mb(llm, served, gate, announced):
    """What has been sent when it is refused may take the answer with it: TCP's, not ours."""
    whole = b'{"prompt": "' + b"a" * 50_000_000 + b'"}'
    parts = [whole[i : i + 2**16] for i in range(0, len(whole), 2**16)]
    taken = 0

    def body():
        nonlocal taken
        for part in parts:
            taken += len(part)
            yield part

    headers = {**JSON, "Content-Length": str(len(whole))} if announced else JSON
    with served.http() as http, bystanders(llm, served):
        gate.clear()
        try:
            status = http.post(PATH, content=body(), headers=headers).status_code
        except httpx.TransportError:
            status = None
        assert status in (413, None)
        assert taken < len(whole), "the rest was never read"
        assert healthy(http)
        gate.set()


def test_a_client_that_never_reads_changes_no_text(llm):
    body = {"prompt": "a", "n": 16, "stream": True, "logprobs": 3, "ignore_eos": True}
    data = json.dumps({**body, "max_tokens": 60}).encode()
    with serving(llm, send_buffer=4096, write_timeout_s=1.0) as served:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with sock, served.http() as http:
            sock.connect(served.address)
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            eventually(lambda: served.service.thread.num_reserved == 16)
            with bystanders(llm, served):
                pass
            assert healthy(http)
            eventually(lambda: served.service.thread.num_reserved == 0)
    check_clean(llm)


def test_out_of_blocks_storm(tight):
    """Forty sequences of up to 15 blocks in a pool of 19: rows are lost over and over."""
    bodies = [body_of(i, max_tokens=30 + i % 12, ignore_eos=True) for i in range(40)]
    want = solo_texts(tight, bodies)
    before = int(tight.engine.state.scheduler.totals.preemptions)
    leaving = {i: 3 + i % 5 for i in range(0, 40, 7)}
    with serving(tight) as served, served.http() as http:
        got = asyncio.run(crowd(served, bodies, leaving))
        assert healthy(http)
        eventually(served.is_idle)
        preempted = 'num_preemptions_total{model_name="tiny"}'
        (line,) = [x for x in http.get("/metrics").text.splitlines() if preempted in x]
    for i, text in enumerate(got):
        assert text == (None if i in leaving else want[i])
    assert int(tight.engine.state.scheduler.totals.preemptions) > before + 10
    assert float(line.split()[-1]) > 10
    check_clean(tight)
