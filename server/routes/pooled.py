"""What endpoints have in common whose prompts become vectors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.client.input_processor import PreparedRequest
from jaxserve.outputs import RequestOutput
from jaxserve.params.pooling_params import CLASSIFY, EMBED
from server.answers import QUICK_ENTRIES, check_complete, check_served
from server.errors import ApiError
from server.event_stream import merge, until_disconnect
from server.protocol.body_errors import named
from server.request_checks import check_batch
from server.service import Service, client_of, engine_id, entry_of, queueing_of, response_id
from server.whole_answer import whole_response

NO_VECTORS = "this server makes no embeddings: it was started without --enable-embeddings"


class Pooled(ABC):
    """The answer to one request for vectors, of which an endpoint's class says the rest.

    Attributes:
        prefix: of the response's id.
        task: what the model has to do; None: either.
        field: of the body, which has the prompts.
        renamed: the engine's name of a field -> the body's.
        body: the parsed body of the HTTP request.
        model: the name to answer with.
        answer_id: the response's.
    """

    prefix: ClassVar[str]
    task: ClassVar[str | None] = None
    field: str = "input"
    renamed: Mapping[str, str] = {"prompt": "input", "prompt_token_ids": "input"}

    def __init__(self, service: Service, body: Any, request: Request):
        if not service.engine.config.asked.enable_embeddings:
            raise ApiError(400, NO_VECTORS, param="model")
        does = CLASSIFY if service.engine.model_config.labels else EMBED
        if self.task not in (None, does):
            told = f"this model's task is {does}, and {request.url.path} is of {self.task}"
            raise ApiError(400, told, param="model")
        self.body = body
        self.service, self.request = service, request
        self.model = service.resolve_model(body.model)
        self.answer_id = response_id(self.prefix, request, body.request_id)
        self._prepared: list[PreparedRequest] = []

    @abstractmethod
    def tokens(self) -> tuple[int, AsyncIterator[list[int]]]:
        """How many prompts there are, and the tokens of each.

        Raises:
            ApiError, ValidationError: the body's cannot be served.
        """

    @abstractmethod
    def told(self, outputs: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        """The response. Of many numbers it is made in a thread."""

    def listed(self, data: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A response whose `data` has an entry for each prompt or pair."""
        told = {"id": self.answer_id, "object": "list", "created": int(time.time())}
        return {**told, "model": self.model, "data": data, "usage": usage}

    def sent(self, outputs: list[RequestOutput], usage: dict[str, Any]) -> Response | None:
        """The response where it is no JSON, made likewise; None: `told` says it."""
        return None

    async def check_and_prepare(self) -> None:
        """Make requests of the body.

        Raises:
            ApiError, ValidationError: it cannot be served.
        """
        with named(self.renamed):
            await self._prepare()

    async def _prepare(self) -> None:
        service, body, prepared = self.service, self.body, self._prepared
        params = body.pooling_params()
        count, prompts = self.tokens()
        check_batch(service, count, self.field)
        client, turn = client_of(self.request), queueing_of(self.request, body)
        service.engine.check_room(turn.client, count - (entry_of(self.request) is not None))
        extras = body.prompt_extras() | {"cache_salt": service.cache_salt(client, body.cache_salt)}
        total = 0
        async for tokens in prompts:
            given = {"prompt_token_ids": tokens, **extras}
            name = engine_id(self.answer_id, len(prepared))
            prepared.append(await service.engine.prepare(given, params, name, turn))
            total += len(tokens)
            check_batch(service, len(prepared), self.field, total)
            if client is not None:
                client.used(len(tokens))

    async def respond(self, request: Request) -> Response:
        """Compute and answer, once `check_and_prepare` has run."""
        service, prepared = self.service, self._prepared
        ids = [one.request_id for one in prepared]
        if (entry := entry_of(request)) is not None:
            entry.leave()
        holding = service.holders.holding(ids, client_of(request))
        with service.engine.admitted(prepared), holding:
            outputs = await until_disconnect(request.receive, _collect(service, prepared))
        num_tokens = sum(len(one.prompt_token_ids) for one in outputs)
        usage: dict[str, Any] = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        if service.tells_cached_tokens:
            cached = sum(one.num_cached_tokens for one in outputs)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if sum(len(one.embedding or ()) for one in outputs) <= QUICK_ENTRIES:
            return self.sent(outputs, usage) or JSONResponse(self.told(outputs, usage))
        if (sent := await asyncio.to_thread(self.sent, outputs, usage)) is not None:
            return sent
        making = whole_response(request, partial(self.told, outputs, usage))
        return await until_disconnect(request.receive, making)


async def _collect(service: Service, prepared: list[PreparedRequest]) -> list[RequestOutput]:
    """The final output of each prompt, in order.

    Raises:
        ApiError, PausedError: one has none, because its time was over or the engine was paused.
    """
    finals: dict[int, RequestOutput] = {}
    streams = [service.engine.stream(one) for one in prepared]
    async with contextlib.aclosing(merge(streams)) as outputs:
        async for position, output in outputs:
            check_served(output)
            check_complete(output.outputs[0])
            finals[position] = output
    return [finals[position] for position in range(len(prepared))]


def vector_of(output: RequestOutput) -> list[float]:
    """The vector of a prompt, which `respond` has seen to be there."""
    assert output.embedding is not None
    return output.embedding
