"""`POST /invocations`: chats, completions, vectors and scores at one path (SageMaker)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import ValidationError
from server.endpoint import answer_as
from server.engine_route import EngineRoute
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.pooling import ClassifyRequest, EmbeddingRequest
from server.protocol.scoring import PAIRS, RerankRequest, ScoreRequest
from server.routes.chat import ChatCompletions
from server.routes.completions import Completions
from server.routes.pooling import Classes, Embeddings
from server.routes.scoring import Ranks, Scores
from server.service import Service

# field that a body has -> its type, and the class that answers it
_KINDS: dict[str, tuple[Any, Any]] = {
    "messages": (ChatCompletionRequest, ChatCompletions),
    "prompt": (CompletionRequest, Completions),
    "input": (EmbeddingRequest, Embeddings),
    "query": (RerankRequest, Ranks),
    **{first: (ScoreRequest, Scores) for first, _ in PAIRS},
}


async def invoke(request: Request) -> Response:
    """A chat where the body has `messages`, a completion for `prompt`, vectors for `input`, scores
    for `query`, `queries`, `data_1` or `text_1`; labels where the model classifies."""
    return await answer_as(request, _kind)


def _kind(service: Service, given: Mapping[str, Any]) -> tuple[Any, Any]:
    asked = [name for name in _KINDS if name in given]
    if len(asked) == 1:
        if asked[0] in ("messages", "input") and service.engine.model_config.labels:
            return ClassifyRequest, Classes
        return _KINDS[asked[0]]
    raise ValidationError("messages", "..." if asked else None, f"one of {', '.join(_KINDS)}")


ROUTES = [EngineRoute("/invocations", invoke)]
