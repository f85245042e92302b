"""`POST /v2/embed`: vectors of texts, as Cohere's clients read them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.outputs import RequestOutput
from jaxserve.params.pooling_params import EMBED
from jaxserve.tokenization.truncation import FIELD
from server.endpoint import answer
from server.engine_route import EngineRoute
from server.protocol.embed_v2 import EmbedV2Request, typed_vectors
from server.routes.pooled import Pooled, vector_of


async def embed(request: Request) -> Response:
    """The vector of each text, in one or several types."""
    return await answer(request, EmbedV2Request, TypedEmbeddings)


class TypedEmbeddings(Pooled):
    """The answer of `/v2/embed`."""

    prefix = "embd"
    task = EMBED
    field = "texts"
    renamed: Mapping[str, str] = {
        "prompt": "texts",
        "prompt_token_ids": "texts",
        "dimensions": "output_dimension",
        FIELD: "max_tokens",
    }

    def tokens(self) -> tuple[int, AsyncIterator[list[int]]]:
        texts = self.body.prompts()
        self.body.check_size(self.service.engine.model_config.hidden_size)
        return len(texts), self._tokens(texts)

    async def _tokens(self, texts: list[str]) -> AsyncIterator[list[int]]:
        service, body = self.service, self.body
        cut = body.cut(service.engine.max_model_len)
        for text in texts:
            tokens = await service.encode(text, add_special_tokens=True, field=self.field, cut=cut)
            body.check_length(len(tokens))
            yield tokens

    def told(self, outputs: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        vectors = [vector_of(output) for output in outputs]
        kinds = dict.fromkeys(self.body.embedding_types or ["float"])  # each is made once
        counts = {"input_tokens": usage["prompt_tokens"], "image_tokens": 0}
        return {
            "id": self.answer_id,
            "embeddings": {kind: typed_vectors(kind, vectors) for kind in kinds},
            "texts": self.body.texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": counts},
            "response_type": "embeddings_by_type",
        }


ROUTES = [EngineRoute("/v2/embed", embed)]
