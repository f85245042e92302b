"""`POST /score` and `/rerank`: how well texts go together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.client.input_processor import check_text_fits
from jaxserve.client.pair_prompts import PairText
from jaxserve.client.similarity import check_scores, cosine, pair_up
from jaxserve.errors import ValidationError
from jaxserve.outputs import RequestOutput
from server.endpoint import answer
from server.engine_route import EngineRoute
from server.protocol.scoring import RerankRequest, ScoreRequest
from server.routes.pooled import Pooled, vector_of
from server.service import CUT_CONTEXTS, Service


async def score(request: Request) -> Response:
    """A score of each pair of texts."""
    return await answer(request, ScoreRequest, Scores)


async def rerank(request: Request) -> Response:
    """Documents by their scores with a query, the best first."""
    return await answer(request, RerankRequest, Ranks)


class Scores(Pooled):
    """The answer of `/score`: a prompt a pair where the model scores pairs, else one a text."""

    prefix = "score"

    def __init__(self, service: Service, body: Any, request: Request):
        super().__init__(service, body, request)
        self._by_head = check_scores(service.engine.model_config.labels)
        self.field = body.fields[1]
        self.renamed = dict.fromkeys(("prompt", "prompt_token_ids"), self.field)
        self._pairs: list[tuple[int, int]] = []
        self._num_first = 0

    def tokens(self) -> tuple[int, AsyncIterator[list[int]]]:
        service, body = self.service, self.body
        first, second = body.texts()
        self._pairs = pair_up(len(first), len(second), body.fields)
        self._num_first = len(first)
        limits = body.limits(service.engine.max_model_len)
        if not self._by_head:
            if variables := body.variables():
                name = "instruction" if body.instruction is not None else "chat_template_kwargs"
                allowed = "none: this model makes a vector of each text"
                raise ValidationError(name, variables, allowed)
            return len(first) + len(second), self._tokens_of_texts(first, second)
        together = PairText(
            service.engine.config.asked.chat_template is not None,
            None,
            body.variables(),
            limits,
            service.cut(body, 1),
            body.add_special_tokens is not False,
        )
        return len(self._pairs), self._tokens_of_pairs(together, first, second)

    async def _tokens_of_pairs(
        self, together: PairText, first: list[str], second: list[str]
    ) -> AsyncIterator[list[int]]:
        tokenizer, most = self.service.engine.tokenizer, self.service.engine.max_model_len
        if together.cut is not None:
            most *= CUT_CONTEXTS

        def tokens(query: str, document: str) -> list[int]:
            for text, limit, field in (
                (query, together.limits.max_tokens_per_query, self.body.fields[0]),
                (document, together.limits.max_tokens_per_doc, self.body.fields[1]),
            ):
                if not limit:
                    check_text_fits(text, tokenizer, most, field)
            return together.prompt(tokenizer, query, document)["prompt_token_ids"]

        for i, j in self._pairs:
            yield await asyncio.to_thread(tokens, first[i], second[j])

    async def _tokens_of_texts(
        self, first: list[str], second: list[str]
    ) -> AsyncIterator[list[int]]:
        service, body = self.service, self.body
        limits, tokenizer = body.limits(service.engine.max_model_len), service.engine.tokenizer
        special, cut = body.add_special_tokens is not False, service.cut(body, 1)
        for texts, shortened, field in (
            (first, limits.query, body.fields[0]),
            (second, limits.document, body.fields[1]),
        ):
            for text in texts:
                kept = await asyncio.to_thread(shortened, tokenizer, text)
                yield await service.encode(kept, add_special_tokens=special, field=field, cut=cut)

    def scores(self, outputs: list[RequestOutput]) -> list[float]:
        """Of each pair."""
        vectors = [vector_of(output) for output in outputs]
        if self._by_head:
            return [score for (score,) in vectors]
        behind = self._num_first
        return [cosine(vectors[i], vectors[behind + j]) for i, j in self._pairs]

    def told(self, outputs: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(self.scores(outputs))
        ]
        return self.listed(data, usage)


class Ranks(Scores):
    """The answer of `/rerank`."""

    prefix = "rerank"

    def __init__(self, service: Service, body: RerankRequest, request: Request):
        super().__init__(service, body, request)
        self._documents: list[str] = []

    def tokens(self) -> tuple[int, AsyncIterator[list[int]]]:
        _, self._documents = self.body.texts()
        return super().tokens()

    def told(self, outputs: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        found = sorted(enumerate(self.scores(outputs)), key=lambda one: one[1], reverse=True)
        results = [
            {
                "index": index,
                "document": {"text": self._documents[index], "multi_modal": None},
                "relevance_score": score,
            }
            for index, score in found[: self.body.top_n or None]
        ]
        return {"id": self.answer_id, "model": self.model, "usage": usage, "results": results}


ROUTES = [
    *(EngineRoute(path, score) for path in ("/score", "/v1/score")),
    *(EngineRoute(path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
]
