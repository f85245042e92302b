"""Spans of requests, sent to a collector of OpenTelemetry; needs the extra `otel`.

The span of a request begins when its body was there and ends with its last token. What called the
server names its own span in the headers `traceparent` and `tracestate`, which becomes the parent.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.client.input_processor import PreparedRequest
from jaxserve.errors import ValidationError
from jaxserve.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

FLAG = "--otlp-traces-endpoint"
SPAN = "llm_request"
FLUSH_MS = 2000

_PARENT: ContextVar[Context | None] = ContextVar("parent_span", default=None)


class RequestTracer:
    """Makes a span of each request that has ended.

    Args:
        endpoint: URL of the collector, OTLP over HTTP: http://localhost:4318/v1/traces.
        model_name: the attribute `gen_ai.request.model`.
        exporter: in the place of one to the endpoint.

    Raises:
        ValidationError: the endpoint is no URL of HTTP, or the extra is not installed.
    """

    def __init__(self, endpoint: str, model_name: str, exporter: SpanExporter | None = None):
        if urlsplit(endpoint).scheme not in ("http", "https"):
            allowed = "an http or https URL, such as http://localhost:4318/v1/traces"
            raise ValidationError(FLAG, endpoint, allowed)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            allowed = f"nothing unless pip install '.[otel]' was run in a clone ({error})"
            raise ValidationError(FLAG, endpoint, allowed) from error
        self._kind = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        resource = Resource.create({"service.name": "jaxserve"})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint) if exporter is None else exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxserve")

    def parent(self, headers: Headers) -> Context:
        """The caller's span, if the headers name one."""
        return self._propagator.extract(headers)

    def ended(self, prepared: PreparedRequest, output: RequestOutput | None) -> None:
        """A request has ended; `output` is its last one, None where there was none."""
        times = RequestMetrics(prepared.group.queueing.arrival_time)
        if output is not None and output.metrics is not None:
            times = output.metrics
        now, wall = time.monotonic(), time.time_ns()

        def moment(seconds: float) -> int:
            return wall - int((now - seconds) * 1e9)

        end = now if times.finished_time is None else times.finished_time
        span = self._tracer.start_span(
            SPAN,
            context=_PARENT.get(),
            kind=self._kind,
            start_time=moment(times.arrival_time),
            attributes=self._attributes(prepared, output, times, end),
        )
        span.end(end_time=moment(end))

    def shutdown(self) -> None:
        """Send what has not been sent, and end."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _attributes(
        self,
        prepared: PreparedRequest,
        output: RequestOutput | None,
        times: RequestMetrics,
        end: float,
    ) -> dict[str, Any]:
        params, arrival = prepared.params, times.arrival_time
        begun, first = times.first_scheduled_time, times.first_token_time
        found: dict[str, Any] = {
            "gen_ai.request.id": prepared.request_id,
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.n": len(prepared.group.sequence_ids),
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.usage.prompt_tokens": len(prepared.group.prompt_token_ids),
            "gen_ai.latency.e2e": end - arrival,
            "gen_ai.latency.time_in_queue": _between(arrival, begun),
            "gen_ai.latency.time_to_first_token": _between(arrival, first),
            "gen_ai.latency.time_in_model_prefill": _between(begun, first),
            "gen_ai.latency.time_in_model_decode": _between(first, times.last_token_time),
            "jaxserve.num_preemptions": times.num_preemptions,
        }
        if output is not None:
            found["gen_ai.usage.cached_tokens"] = output.num_cached_tokens
            reasons = [one.finish_reason or "abort" for one in output.outputs]
            found["gen_ai.response.finish_reasons"] = reasons
        return {name: value for name, value in found.items() if value is not None}


def _between(begin: float | None, end: float | None) -> float | None:
    """Seconds; None: one of them has not happened."""
    return None if begin is None or end is None else end - begin


class TraceMiddleware:
    """Remembers the caller's span while a request is served.

    Args:
        tracer: reads the headers.
    """

    def __init__(self, app: ASGIApp, tracer: RequestTracer) -> None:
        self.app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _PARENT.set(self._tracer.parent(Headers(scope=scope)))
        await self.app(scope, receive, send)
