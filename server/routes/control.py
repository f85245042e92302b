"""`/health`, `/ping`, `/version` and `/metrics`."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jaxserve
from server.service import Service


async def health(request: Request) -> Response:
    """200 when the model is loaded and warmed up, also while it is paused or sleeps; else 503.

    503 while no engine serves, while the engine is silent though it has work, or the server ends.
    Of several engines the body says what each does.
    """
    service = Service.of(request)
    why, states = service.unready(), service.engine.states
    engines = {"engines": states} if states else {}
    if why is None:
        return JSONResponse({"status": "ok", **engines})
    status, error = why
    if status == "paused":
        # as asked: no reason to start another server
        return JSONResponse({"status": status, **engines})
    reason = {"reason": error.message} if status == "silent" else {}
    told = {"status": status, **reason, **engines}
    return JSONResponse(told, 503, headers=error.headers)


async def version(request: Request) -> Response:
    """The version of jaxserve."""
    return JSONResponse({"version": jaxserve.__version__})


async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    text = await run_in_threadpool(generate_latest, Service.of(request).engine.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


ROUTES = [
    Route("/health", health, methods=["GET"]),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
