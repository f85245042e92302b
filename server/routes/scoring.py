"""`POST /score` and `/rerank`: how well texts go together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.client.pair_prompts import PairLimits, PairText
from jaxserve.client.prompt_reader import check_text_fits
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
            return len(first) + len(second), self._tokens_of_texts(limits, first, second)
        together = PairText(
            service.engine.config.asked.chat_template is not None,
            None,
            {**service.options.template_variables, **body.variables()},
            service.cut(body, 1),
            body.add_special_tokens is not False,
            service.limits.allow_control_tokens,
        )
        return len(self._pairs), self._tokens_of_pairs(together, limits, first, second)

    async def _tokens_of_pairs(
        self, together: PairText, limits: PairLimits, first: list[str], second: list[str]
    ) -> AsyncIterator[list[int]]:
        tokenizer, most = self.service.engine.tokenizer, self.service.engine.max_model_len
        queries, documents = self.body.fields
        if together.cut is not None:
            most *= CUT_CONTEXTS

        # a query is tokenised with each of its documents, all of it
        most_of_query = most if len(first) == len(second) else self.service.engine.max_model_len

        def query(text: str) -> str:
            if not limits.max_tokens_per_query:
                check_text_fits(text, tokenizer, most_of_query, queries)
            return limits.query(tokenizer, text)

        def document(text: str) -> str:
            if not limits.max_tokens_per_doc:
                check_text_fits(text, tokenizer, most, documents)
            return limits.document(tokenizer, text)

        first = [await asyncio.to_thread(query, text) for text in first]
        second = [await asyncio.to_thread(document, text) for text in second]
        for i, j in self._pairs:
            prompt = await asyncio.to_thread(together.prompt, tokenizer, first[i], second[j])
            yield prompt["prompt_token_ids"]

    async def _tokens_of_texts(
        self, limits: PairLimits, first: list[str], second: list[str]
    ) -> AsyncIterator[list[int]]:
        service, body, tokenizer = self.service, self.body, self.service.engine.tokenizer
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
        if self._by_head:
            return [score for (score,) in map(vector_of, outputs)]
        # once each: a query is in many pairs
        vectors = [np.asarray(vector_of(output), np.float64) for output in outputs]
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
        results = []
        for index, score in found[: self.body.top_n or None]:
            document = {"text": self._documents[index], "multi_modal": None}
            shown = {"document": document} if self.body.return_documents else {}
            results.append({"index": index, **shown, "relevance_score": score})
        return {"id": self.answer_id, "model": self.model, "usage": usage, "results": results}


ROUTES = [
    *(EngineRoute(path, score) for path in ("/score", "/v1/score")),
    *(EngineRoute(path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
]
