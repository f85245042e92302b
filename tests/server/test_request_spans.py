"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from http.server import HTTPServer
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.boundary.messages import AddGroup
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.errors import ValidationError
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.request.stop_rule import StopRule
from server.app import create_app
from server.request_spans import RequestTracer
from tests.http_serving import QuietHandler, answering
from tests.server.fake_engine import FakeEngine
from tests.server.server_process import httpx, running_server

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")

ENDPOINT = "http://localhost:4318/v1/traces"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def prepared(arrival: float) -> PreparedRequest:
    params = SamplingParams(temperature=0.5, max_tokens=7)
    rule = StopRule(frozenset(), frozenset(), 0, 7)
    group = AddGroup(["0.0"], [1], [3, 4, 5], params, rule, [], Queueing(arrival))
    return PreparedRequest("cmpl-1", "abc", params, group)


def memory() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def test_a_span_says_where_the_time_of_a_request_went() -> None:
    exporter = memory()
    tracer = RequestTracer(ENDPOINT, "tiny", exporter)
    times = RequestMetrics(10.0, 10.5, None, 11.0, 13.0, 13.25, 2)
    done = CompletionOutput(0, "x", [1], finish_reason="stop")
    output = RequestOutput("cmpl-1", "abc", [3, 4, 5], [done], True, None, times, 2)
    tracer.ended(prepared(10.0), output)
    tracer.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.name == "llm_request" and span.parent is None
    assert span.end_time - span.start_time == pytest.approx(3.25e9, abs=1000)
    told = dict(span.attributes)
    assert told == {
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.cached_tokens": 2,
        "gen_ai.latency.e2e": 3.25,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.response.finish_reasons": ("stop",),
        "jaxserve.num_preemptions": 2,
    }


def test_the_callers_span_is_the_parent() -> None:
    exporter, engine = memory(), FakeEngine()
    tracer = RequestTracer(ENDPOINT, "tiny", exporter)
    app = create_app(engine, tracer=tracer)

    async def end_one(request: Any) -> Any:
        from starlette.responses import Response

        engine.on_ended(prepared(0.0), None)
        return Response()

    app.add_route("/end", end_one)
    with TestClient(app) as client:
        client.get("/end", headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
        client.get("/end")
        client.get("/end", headers={"traceparent": "nonsense"})
        client.get("/end", headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})  # not sampled
    first, *others = exporter.get_finished_spans()
    assert format(first.context.trace_id, "032x") == TRACE
    assert format(first.parent.span_id, "016x") == SPAN
    assert len(others) == 2 and all(span.parent is None for span in others)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost", ""])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="--otlp-traces-endpoint"):
        RequestTracer(endpoint, "tiny")


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValidationError, match=r"\.\[otel\]"):
        RequestTracer(ENDPOINT, "tiny")


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A collector over HTTP, and the bodies that it was sent."""
    bodies: list[bytes] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            zipped = self.headers.get("Content-Encoding") == "gzip"
            bodies.append(gzip.decompress(data) if zipped else data)
            self.send_response(200)
            self.end_headers()

    with answering(HTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}/v1/traces", bodies


@pytest.mark.slow
def test_a_server_sends_a_span_a_request(collector: tuple[str, list[bytes]]) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url, bodies = collector
    with running_server("none", "--otlp-traces-endpoint", url) as server:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "X-Request-Id": "mine"}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True})
        httpx.get(f"{server.url}/v1/models")
        server.process.terminate()
        server.process.wait(60)
    spans = [
        span
        for data in bodies
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert len(spans) == 2
    (first,) = [span for span in spans if span.trace_id.hex() == TRACE]
    assert first.parent_span_id.hex() == SPAN
    told = {one.key: one.value for one in first.attributes}
    assert told["gen_ai.request.id"].string_value.startswith("cmpl-mine-")
    assert told["gen_ai.latency.time_in_model_decode"].double_value > 0
    assert told["gen_ai.latency.time_in_queue"].double_value > 0
    assert first.end_time_unix_nano > first.start_time_unix_nano
