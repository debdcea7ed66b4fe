"""Metrics in Prometheus' format. Names and buckets follow vLLM's ``v1/metrics/loggers.py``."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "oxidize_jax:"
# fmt: off
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
_BETWEEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
# fmt: on
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """The metrics of one server. The engine thread writes them; anyone reads them."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name

        def gauge(name: str, text: str) -> Gauge:
            made = Gauge(_PREFIX + name, text, ["model_name"], registry=self.registry)
            return made.labels(model_name)

        def counter(name: str, text: str) -> Counter:
            made = Counter(_PREFIX + name, text, ["model_name"], registry=self.registry)
            return made.labels(model_name)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(
                _PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
            )
            return made.labels(model_name)

        self.running = gauge("num_requests_running", "Sequences in a row of the batch.")
        self.waiting = gauge("num_requests_waiting", "Sequences that wait for a row.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.")
        self.prefix_queries = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter("num_preemptions", "Sequences that lost their row.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.step_failures = counter("engine_step_failures", "Steps that failed.")
        self.refused = counter("requests_refused", "Requests refused because the queue was full.")
        self._success = Counter(
            _PREFIX + "request_success",
            "Sequences that came to their end.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between tokens of a sequence.", _BETWEEN
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "From arrival to a row, as the host sees it.", _WHOLE
        )

    def ended(self, reason: str) -> None:
        """A sequence finished for ``reason``."""
        self._success.labels(self._model_name, reason).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)
