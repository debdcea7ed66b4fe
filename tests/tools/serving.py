"""A server of an LLM on a real port, in a thread, for tests and their clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time

import httpx
import openai

from oxidize_jax import SamplingParams
from oxidize_jax.serve.app import create_app, make_server
from oxidize_jax.serve.service import Service
from oxidize_jax.serve.settings import ServeSettings

PATH = "/v1/completions"


def eventually(condition, seconds=300.0):
    """Wait until ``condition()``; for what another thread does soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@dataclasses.dataclass
class Served:
    """A server that runs."""

    url: str
    service: Service

    def client(self, **options):
        options = {"api_key": "none", "max_retries": 0, "timeout": 600, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def http(self, **options):
        return httpx.Client(base_url=self.url, timeout=600, **options)

    @property
    def address(self):
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def is_idle(self):
        return self.service.thread.is_idle


@contextlib.contextmanager
def serving(llm, *, send_buffer=None, tracer_provider=None, **settings):
    """A server of ``llm`` on a port of its own; at the end nothing of it is left."""
    app = create_app(llm, ServeSettings(**settings), tracer_provider=tracer_provider)

    async def tasks():
        return {"tasks": len(asyncio.all_tasks())}

    app.add_api_route("/_tasks", tasks)
    server = make_server(app)
    with socket.socket() as sock:
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        sock.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            eventually(lambda: server.started or not thread.is_alive())
            assert server.started
            yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", app.state.service)
        finally:
            server.should_exit = True
            thread.join(120)
            assert not thread.is_alive()


def check_clean(llm):
    """No request is left, and every block is free or cached."""
    eventually(lambda: llm.engine.num_unfinished == 0)
    pool = llm.engine.state.scheduler.pool
    assert int(pool.num_free) + int(pool.num_cached) == llm.config.num_blocks


def body_of(i, **more):
    return {"prompt": "ab" * (1 + i % 9), "seed": i, "max_tokens": 8 + i % 20, **more}


def solo_texts(llm, bodies):
    """The text of each, with nobody else in its batches."""
    return [solo_text(llm, body) for body in bodies]


def solo_text(llm, body):
    params = SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})
    (output,) = llm.generate([body["prompt"]], params, use_tqdm=False)
    return output.outputs[0].text


async def read_stream(http, body, leave_after=None):
    """The text of a stream, or None for one that was left after so many chunks."""
    text, count = "", 0
    async with http.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                if count == leave_after:
                    return None
                text += json.loads(line[6:])["choices"][0]["text"]
                count += 1
    raise AssertionError("a stream without an end")


async def crowd(served, bodies, leaving):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as http:
        return await asyncio.gather(
            *(read_stream(http, b, leaving.get(i)) for i, b in enumerate(bodies))
        )


@contextlib.contextmanager
def bystanders(llm, served, count=3):
    """Streams that run meanwhile; at the end their texts are those of each alone."""
    bodies = [body_of(i, max_tokens=40, ignore_eos=True) for i in range(count)]
    want, got = solo_texts(llm, bodies), []
    thread = threading.Thread(target=lambda: got.extend(asyncio.run(crowd(served, bodies, {}))))
    thread.start()
    try:
        eventually(lambda: served.service.thread.num_reserved >= count)
        yield
    finally:
        thread.join(300)
    assert got == want
