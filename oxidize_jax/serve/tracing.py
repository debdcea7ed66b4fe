"""Traces for OpenTelemetry: a span for each request that generates.

Name and attributes are vLLM's (``vllm/tracing``). Needs the extra ``otel``; nothing else imports
this module before a trace is asked for.
"""

from __future__ import annotations

import time
from urllib.parse import urlsplit

try:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(
        f"{error.name} is not installed: pip install 'oxidize-jax[otel]'", name=error.name
    ) from None

from oxidize_jax import __version__
from oxidize_jax.serve.access import Seen
from oxidize_jax.serve.job import now

_PATH = "/v1/traces"


def otlp_provider(endpoint: str) -> TracerProvider:
    """Sends spans to the collector at ``endpoint``, by HTTP, in a thread of its own.

    An address without a path gets ``/v1/traces``. Shut it down at the end: it sends what is left.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ImportError(
            f"{error.name} is not installed: pip install 'oxidize-jax[otel]'", name=error.name
        ) from None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("otlp_endpoint: must be an address, as in http://127.0.0.1:4318.")
    if parts.path in ("", "/"):
        endpoint = parts._replace(path=_PATH).geturl()
    resource = Resource.create({"service.name": "oxidize_jax", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Tracing:
    """Makes the spans, once a request has ended: all its times are known then."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._tracer = provider.get_tracer("oxidize_jax.serve", __version__)
        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, seen: Seen) -> None:
        """A span for a request, under the one that its ``traceparent`` names."""
        job = seen.job
        if job is None:
            return
        ended = now() if seen.ended is None else seen.ended
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(seen.headers),
            kind=SpanKind.SERVER,
            start_time=_wall(seen.begun),
            attributes={
                "gen_ai.request.id": seen.request_id,
                "gen_ai.response.model": self._model_name,
                "gen_ai.request.n": sum(len(group.keys) for group in job.groups),
                "gen_ai.usage.prompt_tokens": seen.num_prompt_tokens or 0,
                "gen_ai.usage.completion_tokens": seen.num_generated_tokens or 0,
                "gen_ai.response.finish_reasons": seen.finish_reasons or [],
                "gen_ai.latency.e2e": ended - seen.begun,
                "http.request.method": seen.method,
                "url.path": seen.path,
                **({} if seen.status is None else {"http.response.status_code": seen.status}),
            },
        )
        span.add_event("queue", timestamp=_wall(job.arrival))
        if (scheduled := job.scheduled_at) is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", scheduled - job.arrival)
            span.add_event("prefill", timestamp=_wall(scheduled))
        if (first := job.first_token_at) is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", first - job.arrival)
            span.add_event("decode", timestamp=_wall(first))
        if job.error is not None or (seen.status or 500) >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end_time=_wall(ended))


def _wall(moment: float) -> int:
    """Nanoseconds since 1970 of a moment on the server's clock."""
    return time.time_ns() - round((now() - moment) * 1e9)
