"""`GET /engine/facts` and `GET /engine/stream`: the engine's data for the page."""

from __future__ import annotations

import importlib.util
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jaxserve
from server.event_stream import EventStream
from server.service import Service, client_of


async def facts(request: Request) -> Response:
    """What stays as it is: the model's names, what it can do, and the engine's sizes."""
    service = Service.of(request)
    service.require_ready()
    engine = service.engine
    config, has_tokenizer = engine.config, not engine.config.asked.skip_tokenizer_init
    is_chat = has_tokenizer and engine.tokenizer.chat_template is not None
    engines = config.asked.data_parallel_size
    constrains = has_tokenizer and importlib.util.find_spec("llguidance") is not None
    told: dict[str, Any] = {
        "version": jaxserve.__version__,
        "models": [*service.model_names],
        "context": engine.max_model_len,
        "chat": is_chat,
        "images": config.asked.max_images if service.reads_images else 0,
        "structured_outputs": constrains,
        "max_logprobs": config.asked.max_logprobs,
        "slots": engines * config.scheduler.max_num_seqs,
        "page_size": config.cache.page_size,
        "policy": config.asked.scheduling_policy,
        "length_classes": [*config.asked.length_classes],
        "device_flops": engines * (config.asked.device_flops_per_second or 0.0),
        "device_bytes": engines * (config.asked.device_bytes_per_second or 0.0),
        "has_keys": client_of(request) is not None,
    }
    return JSONResponse(told, headers={"Cache-Control": "no-store"})


async def stream(request: Request) -> Response:
    """Server-sent events: the pool, slots, queues, steps and counts, a few times a second."""
    service = Service.of(request)
    events = service.watch.events(client_of(request))
    return EventStream(events, service.limits.keep_alive_interval)


ROUTES = [
    Route("/engine/facts", facts, methods=["GET"]),
    Route("/engine/stream", stream, methods=["GET"]),
]
