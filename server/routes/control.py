"""`/health`, `/ping`, `/version` and `/metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jaxserve
from jaxserve.observability.united_metrics import united_registry
from server.service import Service


async def health(request: Request) -> Response:
    """200 when the model is loaded and warmed up, also while it is paused or sleeps; else 503.

    503 while no engine serves, while the engine is silent though it has work, or the server ends.
    Of several engines, and of several models, the body says what each does. Of several models the
    first counts that does not serve, and one that is paused only if all others serve.
    """
    service = Service.of(request)
    reasons = {one.model_names[0]: one.unready() for one in service.models}
    found = sorted(filter(None, reasons.values()), key=lambda one: one[0] == "paused")
    why, states = found[0] if found else None, service.engine.states
    engines: dict[str, Any] = {"engines": states} if states else {}
    if len(reasons) > 1:
        engines = {"models": {name: one[0] if one else "ok" for name, one in reasons.items()}}
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
    told = [one.engine.metrics for one in Service.of(request).models]
    registry = told[0].registry if len(told) == 1 else united_registry(lambda: told)
    text = await run_in_threadpool(generate_latest, registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


ROUTES = [
    Route("/health", health, methods=["GET"]),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
