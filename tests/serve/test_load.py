"""Many clients at a time, and clients that leave, do not read, or come when there is no room."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from serving import (
    PATH,
    body_of,
    check_clean,
    crowd,
    eventually,
    read_stream,
    serving,
    solo_texts,
)

from oxidize_jax.completion import Completion, Group
from oxidize_jax.serve.job import Job

LONG = {"max_tokens": 500, "ignore_eos": True}


def test_sixteen_streams_with_disconnects_give_solo_texts(llm, served):
    bodies = [body_of(i) for i in range(16)]
    want = solo_texts(llm, bodies)
    leaving = {i: i % 3 for i in (2, 5, 9, 12)}
    got = asyncio.run(crowd(served, bodies, leaving))
    for i, text in enumerate(got):
        assert text == want[i] or (i in leaving and text is None)
    assert sum(text is not None for text in got) >= 12


@pytest.mark.slow
def test_two_hundred_streams_and_two_thousand_requests(llm, monkeypatch):
    """Always 200 under way; a fifth leave at some chunk. Nothing of them is left afterwards."""
    monkeypatch.setattr(llm.engine._device, "check_invariants", False)  # which takes half the time
    rng, count = random.Random(0), 2000
    bodies = [body_of(i) for i in range(200)]
    want = solo_texts(llm, bodies)
    leaving = [rng.randrange(1, 9) if rng.random() < 0.2 else None for _ in range(count)]
    threads = set(threading.enumerate())
    with serving(llm, max_queue=1000) as served:

        async def load(first, last):
            places = asyncio.Semaphore(200)
            limits = httpx.Limits(max_connections=None)

            async def one(i):
                async with places:
                    return await read_stream(http, bodies[i % 200], leaving[i])

            async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as http:
                return await asyncio.gather(*map(one, range(first, last)))

        def tasks():
            with served.http() as http:
                eventually(served.is_idle)
                return http.get("/_tasks").json()["tasks"]

        got = asyncio.run(load(0, 400))  # what grows once has grown then
        tasks_then, memory_then = tasks(), resident_bytes()
        got += asyncio.run(load(400, count))
        assert tasks() <= tasks_then
        assert resident_bytes() - memory_then < 64 * 2**20
        assert not [one for one in gc.get_objects() if isinstance(one, Job | Group | Completion)]
        with served.http() as http:
            assert http.get("/health").json() == {"status": "ok"}
    for i, text in enumerate(got):
        assert text == want[i % 200] or (text is None and leaving[i] is not None)
    assert sum(text is not None for text in got) >= 0.75 * count
    assert sum(text is None for text in got) >= 0.1 * count
    check_clean(llm)
    eventually(lambda: set(threading.enumerate()) <= threads)


def resident_bytes():
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def test_sv09_mixed_options_at_once(llm, served):
    options = [
        {"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 5}, {"seed": 3, "logprobs": 3},
        {"seed": 4, "repetition_penalty": 1.3}, {"seed": 5, "stop": ["e"]},
        {"seed": 6, "min_p": 0.1},
        {"seed": 7, "presence_penalty": 1.0, "logit_bias": {"5": 3.0}}, {"temperature": -1},
    ]  # fmt: skip
    bodies = [{"prompt": "abc", "max_tokens": 10, **one} for one in options]
    want = solo_texts(llm, bodies[:-1])

    async def all_of_them():
        async with httpx.AsyncClient(base_url=served.url, timeout=300) as http:
            return await asyncio.gather(*(http.post(PATH, json=b) for b in bodies))

    *good, bad = asyncio.run(all_of_them())
    assert [r.json()["choices"][0]["text"] for r in good] == want
    assert bad.status_code == 400


def test_sv05_disconnect_after_two_chunks(llm, served, monkeypatch):
    step, jobs, after = llm.engine.step, [], []

    def slow(max_steps):
        after.extend(job.cancelled for job in jobs if job.cancelled)
        time.sleep(0.03)
        return step(max_steps)

    monkeypatch.setattr(llm.engine, "step", slow)
    with served.http() as http:
        with http.stream("POST", PATH, json={"prompt": "a", "stream": True, **LONG}) as response:
            chunks = response.iter_lines()
            next(chunks), next(chunks)
            (job,) = served.service.thread._live
            jobs.append(job)
            assert not job.cancelled
        eventually(served.is_idle)
    assert job.cancelled
    assert not job.finished
    assert len(after) <= 2, "its row is gone within two steps"
    check_clean(llm)


@pytest.mark.parametrize("stream", [False, True])
def test_sv05_disconnect_before_the_first_chunk(llm, served, gate, stream):
    gate.clear()
    thread = served.service.thread
    sock = socket.create_connection(served.address)
    body = json.dumps({"prompt": "a", "stream": stream, **LONG}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    eventually(lambda: thread._live)
    sock.close()
    eventually(lambda: thread.num_reserved == 0)
    gate.set()
    eventually(served.is_idle)
    check_clean(llm)


def test_sv05_disconnect_while_queued(llm, served, gate):
    """Four rows are taken by others; those go on."""
    gate.clear()
    results = []

    def complete():
        with served.http() as http:
            body = {"prompt": "xy", "n": 4, "max_tokens": 20, "seed": 1}
            results.append(http.post(PATH, json=body).json())

    other = threading.Thread(target=complete)
    other.start()
    eventually(lambda: served.service.thread.num_reserved == 4)
    with served.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post(PATH, json={"prompt": "a", **LONG}, timeout=0.5)
    eventually(lambda: served.service.thread.num_reserved == 4)
    gate.set()
    other.join(120)
    assert len(results[0]["choices"]) == 4


def test_a_full_queue_says_when_to_come_again(llm, gate):
    with serving(llm, max_queue=1) as served, served.client() as client:
        gate.clear()
        rest = threading.Thread(
            target=lambda: client.completions.create(model="tiny", prompt="a", n=5, max_tokens=4)
        )
        rest.start()
        eventually(lambda: served.service.thread.num_reserved == 5)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="b")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
        gate.set()
        rest.join(120)
        assert client.completions.create(model="tiny", prompt="b", max_tokens=1).choices
        # What can never fit is no matter of waiting.
        with pytest.raises(openai.BadRequestError, match="room for 5"):
            client.completions.create(model="tiny", prompt="b", n=6)
        with served.http() as http:
            assert 'requests_refused_total{model_name="tiny"} 1.0' in http.get("/metrics").text


def test_a_client_that_never_reads_holds_nobody_up(llm):
    body = {"prompt": "a", "n": 16, "stream": True, "logprobs": 3, **LONG}
    data = json.dumps(body).encode()
    with serving(llm, send_buffer=4096, write_timeout_s=1.0) as served:
        thread = served.service.thread
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with sock:
            sock.connect(served.address)
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            eventually(lambda: thread.num_reserved == 16)
            with served.http() as http:
                got = http.post(PATH, json={"prompt": "b", "max_tokens": 20, "seed": 1}).json()
                assert got["choices"][0]["text"]
            eventually(lambda: thread.num_reserved == 0)
        eventually(served.is_idle)
        check_clean(llm)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(llm, gate, stream):
    with serving(llm, request_timeout_s=0.3) as served, served.http() as http:
        gate.clear()
        opener = threading.Timer(1.0, gate.set)
        opener.start()
        response = http.post(PATH, json={"prompt": "a", "stream": stream, **LONG})
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        opener.join()
        eventually(served.is_idle)


def test_a_stream_that_takes_too_long_ends_with_an_error(llm, monkeypatch):
    step = llm.engine.step

    def slow(n):
        time.sleep(0.05)
        return step(n)

    with serving(llm, request_timeout_s=0.7) as served, served.client() as client:
        monkeypatch.setattr(llm.engine, "step", slow)
        stream = client.completions.create(model="tiny", prompt="a", stream=True, extra_body=LONG)
        with pytest.raises(openai.APIError, match="longer than"):
            list(stream)
        eventually(served.is_idle)


def test_no_thread_and_no_task_is_left(llm):
    before = set(threading.enumerate())
    with serving(llm) as served:
        asyncio.run(crowd(served, [body_of(i) for i in range(6)], {1: 0, 4: 2}))
        eventually(served.is_idle)
        with served.http() as http:
            # uvicorn's main task and lifespan, this request's own, and no more.
            first = http.get("/_tasks").json()["tasks"]
            assert first <= 4
            for i in range(3):
                http.post(PATH, json=body_of(i))
            assert http.get("/_tasks").json()["tasks"] <= first
    eventually(lambda: set(threading.enumerate()) <= before)


def test_shutting_down_lets_streams_end(llm):
    bodies = [body_of(i, max_tokens=40, ignore_eos=True) for i in range(3)]
    want = solo_texts(llm, bodies)
    results = []
    with serving(llm) as served:
        thread = threading.Thread(
            target=lambda: results.extend(asyncio.run(crowd(served, bodies, {})))
        )
        thread.start()
        eventually(lambda: served.service.thread.num_reserved == 3)
    thread.join(120)
    assert results == want


def test_shutting_down_ends_what_does_not_end(llm, gate):
    answers = []

    def ask(served):
        with served.http() as http:
            answers.append(http.post(PATH, json={"prompt": "a", **LONG}))

    with serving(llm, drain_timeout_s=1) as served:
        gate.clear()
        thread = threading.Thread(target=ask, args=[served])
        thread.start()
        eventually(lambda: served.service.thread._live)
        threading.Timer(2.5, gate.set).start()
    thread.join(60)
    (answer,) = answers
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    check_clean(llm)
