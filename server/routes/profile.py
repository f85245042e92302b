"""`POST /start_profile` and `POST /stop_profile`: a trace of the engine's process."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.protocol.profile import StartProfileRequest
from server.service import Service


async def start_profile(request: Request) -> Response:
    """Begin to record the work of host and device, into the folder that the server was given."""
    service = Service.of(request)
    service.require_engine()
    asked = StartProfileRequest()
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        async with service.bodies.reading(request, StartProfileRequest) as body:
            asked = body
    await service.controls.start_profile(**dict(asked))
    return Response(status_code=200)


async def stop_profile(request: Request) -> Response:
    """End the record; a file of the server's for https://ui.perfetto.dev."""
    service = Service.of(request)
    service.require_engine()
    return JSONResponse({"trace": str(await service.controls.stop_profile())})


ROUTES = [
    Route("/start_profile", start_profile, methods=["POST"]),
    Route("/stop_profile", stop_profile, methods=["POST"]),
]
