"""`POST /v1/embeddings`: vectors of prompts."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.client.input_processor import PreparedRequest
from jaxserve.outputs import RequestOutput
from server.answers import QUICK_ENTRIES, check_served
from server.endpoint import answer
from server.engine_route import EngineRoute
from server.errors import ApiError
from server.event_stream import merge, until_disconnect
from server.protocol.body_errors import named
from server.protocol.embeddings import EmbeddingRequest
from server.service import Service, client_of, engine_id, entry_of, queueing_of, response_id
from server.whole_answer import whole_response

FIELDS = {"prompt": "input", "prompt_token_ids": "input"}


async def create_embeddings(request: Request) -> Response:
    """The vector of each prompt, as numbers or as base64 of little-endian float32."""
    return await answer(request, EmbeddingRequest, Embeddings)


class Embeddings:
    """The answer to one request for vectors.

    Attributes:
        body: the parsed body of the HTTP request.
    """

    def __init__(self, service: Service, body: EmbeddingRequest, request: Request):
        if not service.engine.config.asked.enable_embeddings:
            raise ApiError(
                400,
                "this server makes no embeddings: it was started without --enable-embeddings",
                param="model",
            )
        self.body = body
        self._service, self._request = service, request
        self._model = service.resolve_model(body.model)
        self._prepared: list[PreparedRequest] = []

    async def check_and_prepare(self) -> None:
        """Make requests of the body.

        Raises:
            ApiError, ValidationError: it cannot be served.
        """
        with named(FIELDS):
            await self._prepare()

    async def _prepare(self) -> None:
        service, body, prepared = self._service, self.body, self._prepared
        prompts, params = body.prompts(), body.pooling_params()
        service.check_batch(len(prompts), "input")
        client, turn = client_of(self._request), queueing_of(self._request, body)
        service.engine.check_room(turn.client, len(prompts) - (entry_of(self._request) is not None))
        salt = service.cache_salt(client, body.cache_salt)
        special, cut = body.add_special_tokens is not False, service.cut(body, 1)
        answer_id = response_id("embd", self._request, body.request_id)
        for index, prompt in enumerate(prompts):
            tokens = prompt
            if isinstance(prompt, str):
                tokens = await service.encode(
                    prompt, add_special_tokens=special, field="input", cut=cut
                )
            elif cut is not None:
                tokens = cut.of(prompt)
            given = {"prompt_token_ids": tokens, "cache_salt": salt}
            name = engine_id(answer_id, index)
            prepared.append(await service.engine.prepare(given, params, name, turn))
            total = sum(len(one.group.prompt_token_ids) for one in prepared)
            service.check_batch(len(prepared), "input", total)
            if client is not None:
                client.used(len(prepared[-1].group.prompt_token_ids))

    async def respond(self, request: Request) -> Response:
        """Compute and answer, once `check_and_prepare` has run."""
        service, prepared = self._service, self._prepared
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
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(output, self.body)}
            for index, output in enumerate(outputs)
        ]
        told = {"object": "list", "data": data, "model": self._model, "usage": usage}
        numbers = sum(len(one["embedding"]) for one in data if isinstance(one["embedding"], list))
        if numbers <= QUICK_ENTRIES:
            return JSONResponse(told)
        return await until_disconnect(request.receive, whole_response(request, lambda: told))


async def _collect(service: Service, prepared: list[PreparedRequest]) -> list[RequestOutput]:
    """The final output of each prompt, in order."""
    finals: dict[int, RequestOutput] = {}
    streams = [service.engine.stream(one) for one in prepared]
    async with contextlib.aclosing(merge(streams)) as outputs:
        async for position, output in outputs:
            check_served(output)
            finals[position] = output
    return [finals[position] for position in range(len(prepared))]


def _vector(output: RequestOutput, body: EmbeddingRequest) -> list[float] | str:
    vector = output.embedding
    if vector is None:
        # OpenAI's clients would send it again at once
        headers = {"x-should-retry": "false"}
        raise ApiError(504, "the request's time was over", param="timeout", headers=headers)
    if body.encoding_format != "base64":
        return vector
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")


ROUTES = [EngineRoute("/v1/embeddings", create_embeddings)]
