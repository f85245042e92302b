"""The routes that a server has only if it was started with their flags."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.errors import ApiError
from server.options import Options
from server.service import Service


async def load(request: Request) -> Response:
    """How many requests for the model's work are being answered."""
    return JSONResponse({"server_load": Service.of(request).load.num_running})


async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's configuration, its chat template among it."""
    service = Service.of(request)
    service.require_ready()
    return JSONResponse(service.engine.tokenizer.info())


async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache; running requests go on."""
    service = Service.of(request)
    service.require_ready()
    await service.engine.reset_prefix_cache()
    return Response(status_code=200)


def routes(options: Options) -> list[Route]:
    """The routes that the flags ask for; the other routes answer with the flag they need."""
    found = []
    for path, method, endpoint, is_there, flag in (
        ("/load", "GET", load, options.tracks_load, "--enable-server-load-tracking"),
        (
            "/tokenizer_info",
            "GET",
            tokenizer_info,
            options.tells_tokenizer,
            "--enable-tokenizer-info-endpoint",
        ),
        (
            "/reset_prefix_cache",
            "POST",
            reset_prefix_cache,
            options.has_control_routes,
            "--enable-control-routes",
        ),
    ):
        if is_there:
            found.append(Route(path, endpoint, methods=[method]))
        else:
            found.append(
                Route(path, _Missing(path, flag), methods=[method], include_in_schema=False)
            )
    return found


class _Missing:
    """The answer of a route without its flag."""

    def __init__(self, path: str, flag: str) -> None:
        self._text = f"no such route: {path}; this server was started without {flag}"

    async def __call__(self, scope: object, receive: object, send: object) -> None:
        raise ApiError(404, self._text)
