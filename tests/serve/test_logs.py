"""What a server writes of its requests: lines, ids and traces; nothing of prompts or texts."""

from __future__ import annotations

import io
import itertools
import json
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from serving import PATH, eventually, serving

from oxidize_jax.cli import main
from oxidize_jax.completion import Completion
from oxidize_jax.serve.logs import FORMATS, JsonLines, TextLines, logging_to
from oxidize_jax.serve.tracing import otlp_provider

SECRET = "the words of a client"


@pytest.fixture
def lines(request):
    """What is logged from now on, in the format of the test's parameter."""
    stream = io.StringIO()
    with logging_to(stream, getattr(request, "param", "json")):
        yield lambda: stream.getvalue().splitlines()


def of_path(lines, path=PATH):
    """The JSON of the lines of a path, once there is one."""
    eventually(lambda: any(json.loads(line).get("path") == path for line in lines()))
    return [entry for line in lines() if (entry := json.loads(line)).get("path") == path]


@pytest.mark.parametrize("stream", [False, True])
def test_one_json_line_for_a_request(http, lines, stream):
    body = {"prompt": SECRET, "max_tokens": 5, "n": 2, "ignore_eos": True, "stream": stream}
    answer = http.post(PATH, json=body, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    (entry,) = of_path(lines)
    assert entry.pop("time").endswith("Z")
    assert 0 < entry.pop("duration") < 300
    assert entry == {
        "level": "info",
        "event": "request",
        "request_id": "abc-1",
        "method": "POST",
        "path": PATH,
        "status": 200,
        "prompt_tokens": len(SECRET),
        "generated_tokens": 10,
        "finish_reasons": ["length", "length"],
    }
    assert SECRET not in "".join(lines())


def test_requests_without_tokens_have_a_line_too(http, lines):
    assert http.get("/health").status_code == 200
    (entry,) = of_path(lines, "/health")
    assert (entry["method"], entry["status"]) == ("GET", 200)
    assert "prompt_tokens" not in entry
    http.post(PATH, json={"prompt": SECRET, "temperature": -1})
    http.get("/nothing")
    assert [e["status"] for e in of_path(lines) + of_path(lines, "/nothing")] == [400, 404]
    assert SECRET not in "".join(lines())


@pytest.mark.parametrize("lines", FORMATS, indirect=True)
def test_paths_and_ids_make_no_lines(http, lines):
    path = '/x%0a{"level"%3a "info"}%0d%0a level=error'
    answer = http.get(path, headers={"X-Request-Id": "x level=error"})
    assert answer.headers["x-request-id"] != "x level=error"
    eventually(lines)
    (line,) = lines()
    assert line.count(" level=error") <= 1
    if line.startswith("{"):
        assert json.loads(line)["level"] == "info"


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "ä".encode(), "-a", None])
def test_ids_that_are_not_sane_are_replaced(http, given):
    headers = {} if given is None else {"X-Request-Id": given}
    made = [http.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(len(one) == 32 and one.isalnum() for one in made)


def test_two_requests_of_one_id_are_two_requests(served):
    got = {}

    def ask(seed):
        with served.http(headers={"X-Request-Id": "same"}) as http:
            body = {"prompt": "ab", "seed": seed, "max_tokens": 30, "ignore_eos": True}
            got.setdefault(seed, []).append(http.post(PATH, json=body).json()["choices"])

    for _ in range(2):
        threads = [threading.Thread(target=ask, args=[seed]) for seed in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert all(first == second for first, second in got.values())
    assert got[1] != got[2]


def test_a_failed_request_is_logged_with_its_id(llm, lines, monkeypatch):
    def fail(self):
        raise RuntimeError("injected")

    with serving(llm) as served, served.http() as http:
        monkeypatch.setattr(Completion, "output", fail)
        answer = http.post(PATH, json={"prompt": SECRET, "max_tokens": 1})
        assert answer.status_code == 500
        (entry,) = of_path(lines)
    assert entry["status"] == 500
    (error,) = [e for e in map(json.loads, lines()) if e["level"] == "error"]
    assert error["request_id"] == entry["request_id"] == answer.headers["x-request-id"]
    assert "RuntimeError: injected" in error["exception"]


def test_a_client_that_leaves_has_a_line(served, lines):
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True, "n": 4}
    with served.http() as http, http.stream("POST", PATH, json=body) as answer:
        next(answer.iter_lines())
    (entry,) = of_path(lines)
    assert "abort" in entry["finish_reasons"]
    assert entry["generated_tokens"] < 240


@pytest.mark.parametrize("form", [JsonLines, TextLines])
def test_an_exception_is_in_the_line(form):
    try:
        raise ValueError("no\nway")
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "it %s", ("broke",), info)
    record.fields = {"path": 'a"b c', "list": ["x", "y z"]}
    text = form().format(record)
    assert "it broke" in text
    assert "ValueError" in text
    if form is JsonLines:
        assert len(text.splitlines()) == 1
        assert json.loads(text)["path"] == 'a"b c'
    else:
        assert text.splitlines()[0].endswith(r'it broke path="a\"b c" list=x,"y z"')


def test_a_span_for_each_request_that_generates(llm, monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(llm, tracer_provider=provider) as served, served.http() as http:
        headers = {"X-Request-Id": "r1", "traceparent": parent}
        body = {"prompt": SECRET, "max_tokens": 4, "n": 2, "ignore_eos": True, "stream": True}
        http.post(PATH, json=body, headers=headers)
        http.get("/health")
        eventually(exporter.get_finished_spans)
        (span,) = exporter.get_finished_spans()
        monkeypatch.setattr(Completion, "output", lambda self: 1 / 0)
        assert http.post(PATH, json={"prompt": "a", "max_tokens": 1}).status_code == 500
        eventually(lambda: len(exporter.get_finished_spans()) == 2)
        failed = exporter.get_finished_spans()[1]
    assert span.name == "llm_request"
    assert span.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert span.parent.span_id == 0xB7AD6B7169203331
    assert [event.name for event in span.events] == ["queue", "prefill", "decode"]
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    slack = 1_000_000  # of the two clocks, nanoseconds
    assert all(before <= after + slack for before, after in itertools.pairwise(times))
    attributes = dict(span.attributes)
    assert attributes["gen_ai.request.id"] == "r1"
    assert attributes["gen_ai.usage.prompt_tokens"] == len(SECRET)
    assert attributes["gen_ai.usage.completion_tokens"] == 8
    assert attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    wait = attributes["gen_ai.latency.time_in_queue"]
    assert 0 <= wait <= attributes["gen_ai.latency.time_to_first_token"]
    assert span.status.status_code is not StatusCode.ERROR
    assert failed.status.status_code is StatusCode.ERROR
    assert SECRET not in span.to_json()


class Collector(BaseHTTPRequestHandler):
    got: list[tuple[str, int]] = []  # noqa: RUF012

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, len(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("path", "want"), [("", "/v1/traces"), ("/own", "/own")])
def test_spans_are_sent_to_a_collector(path, want):
    Collector.got.clear()
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        provider = otlp_provider(f"http://127.0.0.1:{collector.server_port}{path}")
        provider.get_tracer("x").start_span("y").end()
        provider.shutdown()
        collector.shutdown()
        thread.join()
    ((where, length),) = Collector.got
    assert where == want
    assert length > 10


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--log-format", "xml"], "--log-format"),
        (["--otlp-endpoint", "nowhere"], "--otlp-endpoint: otlp_endpoint: must be an address"),
    ],
)
def test_options_that_are_refused(argv, said, capsys, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    assert main(["serve", *argv]) == 2
    assert said in capsys.readouterr().err


def test_nothing_imports_opentelemetry_unless_it_is_asked_for():
    """FastAPI imports its interface, where that is installed; the SDK nobody."""
    code = "import sys, oxidize_jax.serve.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules = done.stdout.split()
    assert "oxidize_jax.serve.app" in modules
    assert "oxidize_jax.serve.tracing" not in modules
    assert "opentelemetry.sdk" not in modules
