"""The application: routes, middleware, and the engine's life around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from jaxserve.boundary.messages import EngineStats
from jaxserve.boundary.united import united_stats
from server.client_limits import Limits
from server.counts import Counts
from server.engine_route import engine_paths
from server.errors import handle_http_exception
from server.keys import ApiKey
from server.load_report import LoadReportMiddleware
from server.middleware import (
    OPEN_PATHS,
    PROBE_PATHS,
    ApiKeyMiddleware,
    DoorMiddleware,
    ErrorMiddleware,
    LoadMiddleware,
    RequestIdMiddleware,
    RootPathMiddleware,
)
from server.options import NO_OPTIONS, Options
from server.request_spans import RequestTracer, TraceMiddleware
from server.routes import (
    chat,
    chat_batch,
    completions,
    control,
    documents,
    embed_v2,
    invocations,
    messages,
    models,
    optional,
    page,
    pooling,
    responses,
    scoring,
    stored_responses,
    tokens,
)
from server.routes import engine as watched
from server.service import NO_PARSERS, Service
from server.tools.choice import Parsers
from server.unread_answers import UnreadMiddleware

if TYPE_CHECKING:
    # only a type here: importing it would import jax
    from jaxserve.async_engine import AsyncEngine


def create_app(
    engine: AsyncEngine,
    *,
    api_keys: Sequence[ApiKey] = (),
    allowed_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    limits: Limits = Limits(),  # noqa: B008
    options: Options = NO_OPTIONS,
    parsers: Parsers = NO_PARSERS,
    tracer: RequestTracer | None = None,
    has_page: bool = True,
    counts: Counts | None = None,
    others: Sequence[tuple[AsyncEngine, Parsers]] = (),
) -> Starlette:
    """The HTTP application around an engine, which may still be loading.

    Args:
        engine: shut down when the application ends.
        api_keys: keys of which a request must bring one; empty: requests need none.
        allowed_origins: web origins that browsers may call from (CORS); empty means none.
        allowed_hosts: names in the Host header that are served; empty means any.
        limits: on what clients may ask for.
        options, parsers: see `Service`.
        tracer: makes spans of requests; None: there are none.
        has_page: serve the page at `/`, and what it shows of the engine.
        counts: see `Service`.
        others: engines of more models, with what reads their answers; shut down likewise.
    """

    service = Service(
        engine, limits, options=options, parsers=parsers, api_keys=api_keys, counts=counts
    )
    for other in others:
        service.add_model(*other)
    engines = [one.engine for one in service.models]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.responses.close()
        for one in engines:
            await one.shutdown()
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)

    routes = [
        *completions.ROUTES,
        *chat.ROUTES,
        *chat_batch.ROUTES,
        *responses.ROUTES,
        *stored_responses.ROUTES,
        *messages.ROUTES,
        *pooling.ROUTES,
        *embed_v2.ROUTES,
        *scoring.ROUTES,
        *models.ROUTES,
        *tokens.ROUTES,
        *control.ROUTES,
        *([*page.page_routes(), *watched.ROUTES] if has_page else []),
        *optional.routes(options),
        *invocations.ROUTES,
        *documents.ROUTES,
    ]
    middleware = [
        Middleware(UnreadMiddleware, answers=service.unread),
        Middleware(DoorMiddleware, allowed_hosts=allowed_hosts),
    ]
    if options.root_path:
        middleware.append(Middleware(RootPathMiddleware, root_path=options.root_path))
    middleware.append(Middleware(RequestIdMiddleware, tells=options.sends_request_ids))
    if tracer is not None:
        for one in engines:
            one.on_ended = tracer.ended
        middleware.append(Middleware(TraceMiddleware, tracer=tracer))
    if allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    if service.keys is not None:
        opened = PROBE_PATHS if options.guards_metrics else OPEN_PATHS
        opened |= page.OPEN_PATHS if has_page else frozenset()
        middleware.append(Middleware(ApiKeyMiddleware, keys=service.keys, open_paths=opened))
    middleware.append(Middleware(LoadReportMiddleware, stats=_stats_of(engines)))
    if options.tracks_load:
        waiting = engine_paths(routes).values()
        middleware.append(Middleware(LoadMiddleware, load=service.load, paths=frozenset(waiting)))
    middleware.append(Middleware(ErrorMiddleware))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: handle_http_exception},
        lifespan=lifespan,
    )
    # A redirect would be built from the Host header, which the client chooses.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _stats_of(engines: Sequence[AsyncEngine]) -> Callable[[], EngineStats]:
    return lambda: united_stats([one.client.stats() for one in engines])
