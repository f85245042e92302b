"""`POST /v1/embeddings`, `/pooling` and `/classify`: vectors of prompts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import ValidationError
from jaxserve.outputs import RequestOutput
from jaxserve.params.pooling_params import CLASSIFY, EMBED
from server.endpoint import answer
from server.engine_route import EngineRoute
from server.protocol.pooling import ClassifyRequest, EmbeddingRequest, PoolingRequest
from server.routes.pooled import Pooled, vector_of


async def create_embeddings(request: Request) -> Response:
    """The vector of each prompt, as numbers or as bytes."""
    return await answer(request, EmbeddingRequest, Embeddings)


async def pool(request: Request) -> Response:
    """What the model makes of each prompt: its vector, or probabilities of its labels."""
    return await answer(request, PoolingRequest, Pooling)


async def classify(request: Request) -> Response:
    """The probabilities of the model's labels for each prompt."""
    return await answer(request, ClassifyRequest, Classes)


# Python's http.client reads header lines of 64 KiB; a vector takes 120 bytes of one
MAX_DESCRIBED = 256


class _OfInput(Pooled):
    """An answer to prompts, or to a conversation."""

    def tokens(self) -> tuple[int, AsyncIterator[list[int]]]:
        prompts = [None] if self.body.is_chat else self.body.prompts()
        return len(prompts), self._tokens(prompts)

    async def _tokens(self, prompts: list[Any]) -> AsyncIterator[list[int]]:
        service, body = self.service, self.body
        cut, special = service.cut(body, 1), body.add_special_tokens
        for prompt in prompts:
            if prompt is None:
                yield await service.encode_chat(body, add_special_tokens=bool(special), cut=cut)
            elif isinstance(prompt, str):
                yield await service.encode(
                    prompt, add_special_tokens=special is not False, field=self.field, cut=cut
                )
            else:
                yield prompt if cut is None else cut.of(prompt)


class Pooling(_OfInput):
    """The answer of `/pooling`."""

    prefix = "pool"
    object: ClassVar[str] = "pooling"
    key: ClassVar[str] = "data"

    def tokens(self) -> tuple[int, AsyncIterator[list[int]]]:
        count, prompts = super().tokens()
        if self.body.encoding_format == "bytes" and count > MAX_DESCRIBED:
            allowed = f"bytes_only for more than {MAX_DESCRIBED} prompts: a header describes each"
            raise ValidationError("encoding_format", "bytes", allowed)
        return count, prompts

    def told(self, outputs: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        data = [
            {"object": self.object, "index": i, self.key: self.body.told(vector_of(output))}
            for i, output in enumerate(outputs)
        ]
        return self.listed(data, usage)

    def sent(self, outputs: list[RequestOutput], usage: dict[str, Any]) -> Response | None:
        if not self.body.tells_bytes:
            return None
        parts = [self.body.packed(vector_of(output)) for output in outputs]
        headers: Mapping[str, str] | None = None
        if self.body.encoding_format == "bytes":
            items, start = [], 0
            for index, (part, output) in enumerate(zip(parts, outputs, strict=True)):
                how = {
                    "embed_dtype": self.body.embed_dtype or "float32",
                    "endianness": self.body.endianness or "native",
                }
                place = {"start": start, "end": start + len(part)}
                shape = {"shape": [len(vector_of(output))]}
                items.append({"index": index, **how, **place, **shape})
                start += len(part)
            headers = {"metadata": json.dumps(self.listed(items, usage))}
        return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)


class Embeddings(Pooling):
    """The answer of `/v1/embeddings`."""

    prefix = "embd"
    task = EMBED
    object = key = "embedding"


class Classes(_OfInput):
    """The answer of `/classify`."""

    prefix = "classify"
    task = CLASSIFY

    def told(self, outputs: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        labels, data = self.service.engine.model_config.labels, []
        for index, output in enumerate(outputs):
            probs = vector_of(output)
            best = max(range(len(probs)), key=probs.__getitem__)
            found = {"label": labels[best], "probs": probs, "num_classes": len(probs)}
            data.append({"index": index, **found})
        return self.listed(data, usage)


ROUTES = [
    EngineRoute("/v1/embeddings", create_embeddings),
    EngineRoute("/pooling", pool),
    EngineRoute("/classify", classify),
]
