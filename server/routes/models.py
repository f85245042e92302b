"""`GET /v1/models` and `GET /v1/models/{name}`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.protocol.model_cards import anthropic_card, anthropic_page, is_anthropic, openai_card
from server.service import Service


async def list_models(request: Request) -> Response:
    """All names that the server answers to, of several models those of the ones that serve."""
    serving = [one for one in Service.of(request).models if one.serves()]
    if not serving:
        Service.of(request).require_ready()
    known = [
        (name, one.created, one.engine.max_model_len) for one in serving for name in one.model_names
    ]
    if is_anthropic(request.headers):
        return JSONResponse(anthropic_page([anthropic_card(*one) for one in known]))
    cards = [openai_card(*one) for one in known]
    return JSONResponse({"object": "list", "data": cards})


async def get_model(request: Request) -> Response:
    """One of the models; names may have slashes."""
    asked = request.path_params["name"]
    service = Service.of(request).of_model(asked)
    name = service.resolve_model(asked)
    service.require_ready()
    card = anthropic_card if is_anthropic(request.headers) else openai_card
    return JSONResponse(card(name, service.created, service.engine.max_model_len))


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
]
