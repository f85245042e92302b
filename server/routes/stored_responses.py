"""`/v1/responses/{id}`: stored responses are read again, deleted, cancelled."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.errors import ValidationError
from server.errors import ApiError
from server.protocol.responses_request import is_response_id
from server.response_store import Owner, StoredResponse
from server.service import Service, client_of
from server.whole_answer import WholeResponse, coalesced


def unknown_response(name: str, param: str) -> ApiError:
    """The error for a response that is not stored."""
    text = f"Response with id '{name[:100]}' not found; what is kept: docs/apis.md"
    return ApiError(404, text, param=param)


def _found(request: Request) -> tuple[Service, Owner, str, StoredResponse]:
    service, owner = Service.of(request), client_of(request)
    name = request.path_params["response_id"]
    kept = service.responses.get(owner, name) if is_response_id(name) else None
    if kept is None:
        raise unknown_response(name, "response_id")
    return service, owner, name, kept


async def get_response(request: Request) -> Response:
    """A stored response."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise ValidationError("stream", request.query_params["stream"], "false: it is told whole")
    return WholeResponse([*coalesced(_found(request)[3].pieces)])


async def delete_response(request: Request) -> Response:
    """Delete a stored response; one that is being made is aborted."""
    service, owner, name, kept = _found(request)
    if kept.task is not None:
        await _ended(kept.task)
    service.responses.remove(owner, name)
    return JSONResponse({"id": name, "object": "response.deleted", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """Abort a background response; a finished one stays as it is."""
    service, owner, name, kept = _found(request)
    if not kept.background:
        text = f"Cannot cancel a synchronous response; '{name}' was not made in the background"
        raise ApiError(400, text, param="response_id")
    if kept.task is not None:
        await _ended(kept.task)
        kept = service.responses.get(owner, name) or kept
    return WholeResponse([*coalesced(kept.pieces)])


async def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelling():  # a second cancel would end it while it stores its result
        task.cancel()
    await asyncio.wait([task])


ROUTES = [
    Route("/v1/responses/{response_id}", get_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/cancel", cancel_response, methods=["POST"]),
]
