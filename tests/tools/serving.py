"""A server of an LLM on a real port, in a thread, for tests and their clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time

import httpx
import openai

from oxidize_jax.serve.app import create_app, make_server
from oxidize_jax.serve.service import Service
from oxidize_jax.serve.settings import ServeSettings

SIZES = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "max_logprobs": 3,
    "progress": False,
    "warm_up": False,
}


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
def serving(llm, *, send_buffer=None, **settings):
    """A server of ``llm`` on a port of its own; at the end nothing of it is left."""
    app = create_app(llm, ServeSettings(**settings))

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
