"""Routes that a server has only if it was started with their flags."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.errors import ValidationError
from server.errors import ApiError
from server.options import Options
from server.routes import profile
from server.service import Service


def _ready(request: Request) -> list[Service]:
    """The services that a request of control is for. Raises ApiError 503: one does not serve."""
    services = Service.of(request).chosen(request)
    for service in services:
        service.require_ready()
    return services


def _with_engines(request: Request) -> list[Service]:
    """The same. Raises ApiError 503: one has no engine that could sleep or wake."""
    services = Service.of(request).chosen(request)
    for service in services:
        service.require_engine()
    return services


async def load(request: Request) -> Response:
    """How many requests for the model's work are being answered."""
    return JSONResponse({"server_load": Service.of(request).load.num_running})


async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's configuration, its chat template among it."""
    service, *_ = Service.of(request).chosen(request)
    service.require_ready()
    return JSONResponse(service.engine.tokenizer.info())


async def reset_prefix_cache(request: Request) -> Response:
    """Have nothing found any more that was computed so far; requests that run go on."""
    for service in _ready(request):
        await service.engine.reset_prefix_cache()
    return Response(status_code=200)


async def reset_mm_cache(request: Request) -> Response:
    """Have images encoded again that come again; there is one cache of them."""
    for service in _ready(request):
        await service.controls.reset_mm_cache()
    return Response(status_code=200)


async def release_kv_cache_memory(request: Request) -> Response:
    """Free the pages of an engine that `/sleep?level=0` has paused, until `/wake_up`."""
    for service in _with_engines(request):
        await service.controls.release_kv_cache_memory()
    return JSONResponse({"status": "kv_cache_released"})


async def sleep(request: Request) -> Response:
    """End all requests, or wait for them, and free pages and weights until `/wake_up`."""
    services = _with_engines(request)
    given = request.query_params
    level, mode = given.get("level", "1"), given.get("mode", "abort")
    if level not in ("0", "1", "2"):
        raise ValidationError("level", level, "0, 1 or 2")
    work = (one.controls.sleep(int(level), mode) for one in services)
    for error in await asyncio.gather(*work, return_exceptions=True):  # once all are done
        if error is not None:
            raise error
    return JSONResponse({"status": "sleeping", "level": int(level)})


async def wake_up(request: Request) -> Response:
    """Take the memory again that `/sleep` has freed, or the parts that `tags` name."""
    services = _with_engines(request)
    tags = request.query_params.getlist("tags") or None
    is_awake = all([await one.controls.wake_up(tags) for one in services])
    return JSONResponse({"status": "awake" if is_awake else "sleeping", "tags": tags})


async def is_sleeping(request: Request) -> Response:
    """Whether the engine's memory is freed; of several models: that of all."""
    services = Service.of(request).chosen(request)
    asleep = [await one.controls.is_sleeping() for one in services]
    return JSONResponse({"is_sleeping": all(asleep)})


# field of `Options` -> its flag, and the routes
_ROUTES = {
    "tracks_load": ("--enable-server-load-tracking", [Route("/load", load, methods=["GET"])]),
    "tells_tokenizer": (
        "--enable-tokenizer-info-endpoint",
        [Route("/tokenizer_info", tokenizer_info, methods=["GET"])],
    ),
    "has_control_routes": (
        "--enable-control-routes",
        [
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/reset_mm_cache", reset_mm_cache, methods=["POST"]),
            Route("/reset_encoder_cache", reset_mm_cache, methods=["POST"]),
            Route("/release_kv_cache_memory", release_kv_cache_memory, methods=["POST"]),
            Route("/sleep", sleep, methods=["POST"]),
            Route("/wake_up", wake_up, methods=["POST"]),
            Route("/is_sleeping", is_sleeping, methods=["GET"]),
        ],
    ),
    "profile_folder": ("--profiler-config", profile.ROUTES),
}


def routes(options: Options) -> list[Route]:
    """Those that the flags ask for; the others say which flag they need."""
    return [
        route if getattr(options, name) else _missing(route, flag)
        for name, (flag, found) in _ROUTES.items()
        for route in found
    ]


def _missing(route: Route, flag: str) -> Route:
    """A route that is not there."""

    async def refuse(request: Request) -> Response:
        text = f"no such route: {route.path}; this server was started without {flag}"
        raise ApiError(404, text)

    return Route(route.path, refuse, methods=route.methods, include_in_schema=False)
