"""The application: routes, middleware, and the engine's life around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from server.body import DEFAULT_MAX_BODY_BYTES
from server.errors import handle_http_exception
from server.middleware import ApiKeyMiddleware, ErrorMiddleware, RequestIdMiddleware
from server.routes import chat, completions, control, models, tokens
from server.service import Service

if TYPE_CHECKING:
    # only a type here: importing it would import jax
    from jaxserve.async_engine import AsyncEngine


def create_app(
    engine: AsyncEngine,
    *,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> Starlette:
    """The HTTP application around an engine, which may still be loading.

    Args:
        engine: shut down when the application ends.
        api_keys: keys of which a request must bring one; empty lets everybody in.
        allowed_origins: web origins that browsers may call from (CORS); empty means none.
        max_body_bytes: larger request bodies are refused with 413.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await engine.shutdown()

    middleware = [Middleware(RequestIdMiddleware)]
    if allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    if api_keys:
        middleware.append(Middleware(ApiKeyMiddleware, keys=list(api_keys)))
    middleware.append(Middleware(ErrorMiddleware))
    app = Starlette(
        routes=[
            *completions.ROUTES,
            *chat.ROUTES,
            *models.ROUTES,
            *tokens.ROUTES,
            *control.ROUTES,
        ],
        middleware=middleware,
        exception_handlers={HTTPException: handle_http_exception},
        lifespan=lifespan,
    )
    # A redirect would be built from the Host header, which the client chooses.
    app.router.redirect_slashes = False
    app.state.service = Service(engine, max_body_bytes)
    return app
