"""Flags of `jaxserve serve` that say what is logged and traced, in which form."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jaxserve.errors import ValidationError
from jaxserve.observability.json_log import JSON, TEXT

if TYPE_CHECKING:
    from server.request_spans import RequestTracer

UNLOGGED = "/health,/metrics"


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Logs and traces."""
    add = parser.add_argument_group("logs and traces").add_argument
    add(
        "--uvicorn-log-level",
        default="info",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        help="log level of the HTTP server (default: info)",
    )
    add(
        "--log-format",
        default=TEXT,
        choices=(TEXT, JSON),
        help="json: an object a line, with the request's id (default: text)",
    )
    add(
        "--disable-uvicorn-access-log",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no line a request",
    )
    add(
        "--disable-access-log-for-endpoints",
        default=UNLOGGED,
        metavar="PATHS",
        help="no line for requests of these paths, separated by commas; '' logs all (default: "
        f"{UNLOGGED})",
    )
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span a request to this collector of OpenTelemetry, as OTLP over HTTP; needs "
        "the extra otel",
    )
    add(
        "--record-trace",
        metavar="FILE",
        help="write arrival, lengths and keys of each request, and what each step took, without "
        "text: `jaxserve simulate` and `jaxserve bench serve` replay it",
    )


def unlogged_paths(args: argparse.Namespace) -> list[str]:
    """Paths of which the access log says nothing.

    Raises:
        ValidationError: one is no path.
    """
    paths = [path.strip() for path in args.disable_access_log_for_endpoints.split(",")]
    paths = [path for path in paths if path]
    for path in paths:
        if not path.startswith("/"):
            allowed = "paths that begin with /, separated by commas"
            raise ValidationError("--disable-access-log-for-endpoints", path, allowed)
    return paths


def tracer(args: argparse.Namespace, model_name: str) -> RequestTracer | None:
    """The maker of spans of requests; None where no endpoint for them is given.

    Raises:
        ValidationError: the endpoint is no URL, or the extra is not installed.
    """
    if args.otlp_traces_endpoint is None:
        return None
    from server.request_spans import RequestTracer

    return RequestTracer(args.otlp_traces_endpoint, model_name)
