"""``/openapi.json`` says what the server does."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jsonschema
import pytest
from serving import serving

from oxidize_jax.serve.app import _ENDPOINTS as ENDPOINTS
from oxidize_jax.serve.app import _PAGE as PAGE

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def document(served):
    with served.http() as http:
        return http.get("/openapi.json").json()


def schema_of(document, name):
    return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}


def resolved(document, schema):
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def test_the_document_is_whole(document, http):
    assert document["openapi"] == "3.1.0"
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert "title" not in schema, name
    told = {(path, method) for path, item in document["paths"].items() for method in item}
    table = {(one.path.replace(":path", ""), one.method.lower()) for one in ENDPOINTS + PAGE}
    assert told == table | {("/openapi.json", "get")}
    operations = [op for item in document["paths"].values() for op in item.values()]
    assert len({op["operationId"] for op in operations}) == len(operations)
    for path, method in told:
        assert http.request(method, path).status_code not in (404, 405) or "{" in path


def bounds(document):
    """``(path, field, key, limit)`` of every limit of a number."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        properties = resolved(document, content["application/json"]["schema"])["properties"]
        for name, field in properties.items():
            for key in ("minimum", "maximum", "exclusiveMinimum"):
                if key in field:
                    yield path, name, key, field[key]


def test_limits_of_numbers_are_those_that_are_judged(document, http):
    limits = list(bounds(document))
    assert len(limits) > 40
    for path, name, key, limit in limits:
        short = "max_tokens" if path == "/v1/completions" else "max_completion_tokens"
        body = {short: 1, **({"prompt": "a"} if short == "max_tokens" else {"messages": CHAT})}
        if name == "top_logprobs":
            body["logprobs"] = True
        if name in ("max_tokens", "min_tokens"):
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = max(1, limit)
        at = limit if key != "exclusiveMinimum" else 1e-3
        good = http.post(path, json={**body, name: at})
        assert good.status_code == 200, (name, at, good.text)
        beyond = {"minimum": limit - 1, "maximum": limit + 1, "exclusiveMinimum": limit}[key]
        bad = http.post(path, json={**body, name: beyond})
        assert bad.status_code == 400, (name, beyond)
        # The engine's name of top_logprobs is logprobs.
        named = {name, name.removeprefix("top_"), "max_tokens"}
        assert bad.json()["error"]["param"] in named, (name, beyond)


@pytest.mark.parametrize(
    ("path", "body", "status", "name"),
    [
        ("/v1/completions", {"prompt": "ab", "logprobs": 2, "echo": True}, 200, "Completion"),
        ("/v1/completions", {"prompt": "ab", "n": 2, "stop": "a"}, 200, "Completion"),
        ("/v1/completions", {"prompt": ""}, 400, "Error"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "logprobs": True, "top_logprobs": 2},
            200,
            "Chat",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "model": "x"}, 404, "Error"),
        ("/v1/embeddings", {"input": ["a", "b"]}, 200, "Embeddings"),
        ("/tokenize", {"prompt": "a"}, 200, "Tokens"),
        ("/detokenize", {"tokens": [1]}, 200, "Text"),
        ("/tokenizer_info", None, 200, "TokenizerInfo"),
        ("/v1/models", None, 200, "Models"),
        ("/v1/models/tiny", None, 200, "Model"),
        ("/v1/models/x", None, 404, "Error"),
        ("/health", None, 200, "Health"),
        ("/version", None, 200, "Version"),
        ("/engine", None, 200, "Engine"),
    ],
)
def test_answers_are_as_told(document, http, path, body, status, name):
    answer = http.get(path) if body is None else http.post(path, json=body)
    assert answer.status_code == status
    jsonschema.validate(answer.json(), schema_of(document, name))
    at = path if path in document["paths"] else "/v1/models/{name}"
    operation = document["paths"][at]["get" if body is None else "post"]
    schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
    assert schema == {"$ref": f"#/components/schemas/{name}"}


def test_the_document_has_the_limits_and_the_key_of_its_server(llm):
    with serving(llm, max_n=2, max_tokens=5, api_key="k") as served, served.http() as http:
        assert http.get("/openapi.json").status_code == 401
        document = http.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    schema = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert schema["n"]["maximum"] == 2
    assert schema["max_tokens"]["maximum"] == schema["max_completion_tokens"]["maximum"] == 5
    assert schema["model"]["enum"] == ["tiny", None]
    paths = document["paths"]
    assert "401" in paths["/engine"]["get"]["responses"]
    assert "security" not in paths["/health"]["get"]
    assert "security" not in paths["/"]["get"]


CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)


@pytest.mark.slow
def test_schemathesis_finds_nothing(served):
    command = shutil.which("schemathesis", path=sysconfig.get_path("scripts"))
    if command is None:
        pytest.skip("pip install schemathesis")
    run = subprocess.run(
        [command, "run", f"{served.url}/openapi.json", "--checks", CHECKS, "--max-examples", "30",
         "--seed", "1", "--request-timeout", "120", "--generation-database", "none"],
        capture_output=True, text=True, timeout=1500, cwd=Path(sys.prefix),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
