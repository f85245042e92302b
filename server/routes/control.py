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
    """200 when the model is loaded and warmed up, else 503.

    503 while no engine serves, while the engine is silent though it has work, or the server ends.
    """
    engine = Service.of(request).engine
    if engine.is_draining:
        return JSONResponse({"status": "draining"}, status_code=503)
    if engine.is_dead:
        return JSONResponse({"status": "dead"}, status_code=503)
    if engine.is_restarting:
        return JSONResponse({"status": "restarting"}, 503, headers={"Retry-After": "2"})
    if not engine.is_ready:
        return JSONResponse({"status": "loading"}, status_code=503, headers={"Retry-After": "5"})
    silence = engine.silence
    if silence is not None:
        body = {"status": "silent", "reason": silence}
        return JSONResponse(body, 503, headers={"Retry-After": "2"})
    return JSONResponse({"status": "ok"})


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
