"""What cannot be used is refused in OpenAI's shape, costs nothing and breaks nothing."""

from __future__ import annotations

import dataclasses
import json
import socket

import openai
import pytest
from serving import serving

from oxidize_jax.engine.engine import STEPS_PER_DISPATCH
from oxidize_jax.serve.settings import MAX_STEPS, ServeSettings

JSON = {"Content-Type": "application/json"}
PATH = "/v1/completions"
CHAT = [{"role": "user", "content": "hi"}]


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def post(http, body, path=PATH):
    return http.post(path, content=body, headers=JSON)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["ab", ""], ["ab", []]])
def test_sv01_an_empty_prompt(http, prompt):
    refused(http.post(PATH, json={"prompt": prompt}))
    assert http.post(PATH, json={"prompt": " ", "max_tokens": 1}).status_code == 200


def test_sv01_a_chat_with_empty_messages(http):
    assert refused(http.post("/v1/chat/completions", json={"messages": []}))["param"] is None
    body = {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("limit", "status"), [(0, 400), (-1, 400), (10**12, 400), (1, 200), (None, 200)]
)
def test_sv02_token_limits(http, limit, status):
    body = {"prompt": "ab", "max_tokens": limit, "temperature": 0, "ignore_eos": True}
    response = http.post(PATH, json=body)
    if status == 400:
        assert refused(response)["param"] == "max_tokens"
    else:
        made = response.json()["usage"]["completion_tokens"]
        assert made == (16 if limit is None else limit)


def test_sv02_both_fields_of_a_chat(http):
    path, body = "/v1/chat/completions", {"messages": CHAT, "temperature": 0, "ignore_eos": True}
    for name in ("max_tokens", "max_completion_tokens"):
        got = http.post(path, json={**body, name: 3}).json()
        assert got["usage"]["completion_tokens"] == 3
    refused(http.post(path, json={**body, "max_tokens": 3, "max_completion_tokens": 4}))


def test_sv02_prompts_as_long_as_the_model_allows(http, llm):
    longest = llm.config.max_model_len
    body = {"prompt": "a" * longest, "max_tokens": 5}
    refused(http.post(PATH, json=body))
    got = http.post(PATH, json={**body, "prompt": "a" * (longest - 1)}).json()
    assert got["usage"]["completion_tokens"] == 1
    assert got["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', b"\xff\xfe", b'{"prompt": "SECRET'])
def test_sv03_bytes_that_are_no_text(http, body):
    assert "SECRET" not in refused(post(http, body))["message"]


@pytest.mark.parametrize("path", [PATH, "/tokenize", "/v1/embeddings"])
def test_sv03_half_a_character(http, path):
    name = "input" if path.endswith("embeddings") else "prompt"
    refused(post(http, b'{"%s": "a\\ud800"}' % name.encode(), path))
    refused(post(http, b'{"\\ud800": 1, "%s": "a"}' % name.encode(), path))
    refused(post(http, b'{"model": "\\ud800", "%s": "a"}' % name.encode(), path))


def test_sv03_ids_that_form_no_text(http, llm):
    whole = llm.tokenizer.encode("ü")
    got = http.post("/detokenize", json={"tokens": whole[:1]}).json()
    assert got == {"prompt": "\N{REPLACEMENT CHARACTER}"}


@pytest.mark.parametrize(
    "more",
    [
        {"n": 10**6},
        {"best_of": 10**6},
        {"prompt_logprobs": -1},
        {"logprobs": 16384},
        {"logprobs": -1},
        {"stop": ["x"] * 10**5},
        {"max_tokens": 10**30},
        {"logit_bias": {str(i): 1 for i in range(1000)}},
        {"stop_token_ids": list(range(1000))},
        {"bad_words": ["ab"] * 300},
    ],
    ids=lambda more: next(iter(more)),
)
def test_sv07_limits(http, llm, more):
    refused(http.post(PATH, json={"prompt": "ab", **more}))


def test_sv07_limits_of_a_chat(http):
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 16384}
    refused(http.post("/v1/chat/completions", json=body))
    refused(http.post("/v1/chat/completions", json={"messages": CHAT, "top_logprobs": 1}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": "1"}',
        b'{"prompt": "a", "temperature": true}',
        b'{"prompt": "a", "seed": 1.5}',
        b'{"prompt": "a", "seed": -1}',
        b'{"prompt": "a", "n": 0}',
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": {"a": 1}}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [1.5]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [99999999]}',
        b'{"prompt": [true]}',
        b'{"prompt": "a", "stream": 1}',
        b'{"prompt": "a", "stream_options": {"include_usage": true}}',
        b'{"prompt": "a", "stream": true, "stream_options": {"x": 1}}',
        b'{"prompt": "a", "response_format": {"type": "xml"}}',
        b'{"prompt": "a", "response_format": {"type": "json_schema"}}',
        b'{"prompt": "a", "structured_outputs": {"json": {"type": "nothing"}}}',
        b'{"prompt": "a", "temprature": 1}',
        b'{"prompt": "a", "suffix": "b"}',
        b'{"prompt": "a", "stream": true, "best_of": 2}',
        b'{"temperature": 1}',
        b"[" * 10_000,
        b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt": "a", "structured_outputs": ' + b'{"json":' * 900 + b"{}" + b"}" * 901,
        b'{"prompt": "a", "structured_outputs": {"json": ' + b'{"not":' * 150 + b"{}" + b"}" * 152,
    ],
    ids=lambda body: body[:60].decode(),
)
def test_bodies_that_are_no_request(http, body):
    refused(post(http, body))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ["x"],
        "x",
    ],
)
def test_messages_that_are_none(http, messages):
    refused(http.post("/v1/chat/completions", json={"messages": messages}))


def test_fields_that_name_what_is_wrong(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="takes none"):
        client.chat.completions.create(
            model="tiny", messages=CHAT,
            tools=[{"type": "function", "function": {"name": "f"}}],
        )  # fmt: skip


def test_unknown_places_and_methods(http):
    refused(http.get("/nothing"), 404)
    refused(http.get(PATH), 405)
    refused(http.post(PATH, content=b'{"prompt": "a"}'), 415)
    page = {"Content-Type": "text/plain", "Origin": "http://example.com"}
    response = http.post(PATH, content=b'{"prompt": "a"}', headers=page)
    refused(response, 415)
    assert not any(name.startswith("access-control") for name in response.headers)


def test_a_long_body_is_refused_while_it_is_read(llm):
    with serving(llm, max_body_bytes=2048) as served, served.http() as http:
        refused(post(http, b'{"prompt": "' + b"a" * 3000 + b'"}'), 413)
        parts = (b" " * 1024 for _ in range(4))
        assert post(http, parts).status_code == 413
        # 50 MB are announced; the answer does not wait for them.
        with socket.create_connection(served.address, timeout=30) as sock:
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 50000000\r\n\r\n{{".encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 413")
        assert post(http, b'{"prompt": "a", "max_tokens": 1}').status_code == 200


def test_a_body_that_does_not_come(llm):
    with (
        serving(llm, body_timeout_s=0.2) as served,
        socket.create_connection(served.address, timeout=30) as sock,
    ):
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 408")


def test_an_api_key(llm):
    with serving(llm, api_key="k1") as served:
        with served.client(api_key="k1") as good:
            assert good.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        with (
            served.client(api_key="k2") as bad,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            bad.completions.create(model="tiny", prompt="a")
        assert caught.value.code == "invalid_api_key"
        with served.http() as http:
            for path in ("/metrics", "/version", "/v1/models", "/nothing"):
                refused(http.get(path), 401)
            assert http.get("/health").json() == {"status": "ok"}


def test_limits_of_the_server(llm):
    limits = {"max_n": 2, "max_tokens": 4, "max_prompts": 2, "max_stop": 1, "max_logprobs": 1}
    with serving(llm, **limits) as served, served.http() as http:
        for more in (
            {"n": 3}, {"best_of": 3}, {"max_tokens": 5}, {"stop": ["a", "b"]}, {"logprobs": 2},
            {"prompt": ["a"] * 3},
        ):  # fmt: skip
            refused(http.post(PATH, json={"prompt": "ab", **more}))
        body = {"messages": CHAT, "ignore_eos": True}
        got = http.post("/v1/chat/completions", json=body).json()
        assert got["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65_536),
        ("port", "80"),
        ("port", True),
        ("api_key", ""),
        ("max_body_bytes", 0),
        ("max_queue", -1),
        ("max_n", 65),
        ("max_stop", 17),
        ("max_tokens", 0),
        ("max_logprobs", -1),
        ("request_timeout_s", 0),
        ("write_timeout_s", float("nan")),
        ("drain_timeout_s", float("inf")),
        ("steps_per_dispatch", MAX_STEPS + 1),
    ],
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        ServeSettings(**{name: value})


def test_settings_agree_with_the_engine(llm):
    assert MAX_STEPS == STEPS_PER_DISPATCH
    assert ServeSettings().host == "127.0.0.1"
    assert dataclasses.is_dataclass(ServeSettings)
    with pytest.raises(ValueError, match="max_logprobs=4"), serving(llm, max_logprobs=4):
        pass


def test_errors_can_always_be_written(http):
    body = json.dumps({"prompt": "a", "bad": 1, "\ud800": 2}).encode()
    refused(post(http, body))
