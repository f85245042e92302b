"""`GET /v1/models` and `GET /v1/models/{name}`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.protocol.model_cards import anthropic_card, anthropic_page, is_anthropic, openai_card
from server.service import Service


async def list_models(request: Request) -> Response:
    """All names that the server answers to."""
    service = Service.of(request)
    service.require_ready()
    known = service.created, service.engine.max_model_len
    if is_anthropic(request.headers):
        page = anthropic_page([anthropic_card(name, *known) for name in service.model_names])
        return JSONResponse(page)
    cards = [openai_card(name, *known) for name in service.model_names]
    return JSONResponse({"object": "list", "data": cards})


async def get_model(request: Request) -> Response:
    """One of the models; names may have slashes."""
    service = Service.of(request)
    service.require_ready()
    name = service.resolve_model(request.path_params["name"])
    card = anthropic_card if is_anthropic(request.headers) else openai_card
    return JSONResponse(card(name, service.created, service.engine.max_model_len))


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
]
