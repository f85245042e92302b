"""`POST /invocations`: chats, completions and embeddings at one path, as SageMaker has them."""

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
from server.protocol.embeddings import EmbeddingRequest
from server.routes.chat import ChatCompletions
from server.routes.completions import Completions
from server.routes.embeddings import Embeddings

# field that a body has -> its type, and the class that answers it
_KINDS: dict[str, tuple[Any, Any]] = {
    "messages": (ChatCompletionRequest, ChatCompletions),
    "prompt": (CompletionRequest, Completions),
    "input": (EmbeddingRequest, Embeddings),
}


async def invoke(request: Request) -> Response:
    """A chat where the body has `messages`, a completion for `prompt`, vectors for `input`."""
    return await answer_as(request, _kind)


def _kind(given: Mapping[str, Any]) -> tuple[Any, Any]:
    asked = [name for name in _KINDS if name in given]
    if len(asked) == 1:
        return _KINDS[asked[0]]
    raise ValidationError("messages", "..." if asked else None, f"one of {', '.join(_KINDS)}")


ROUTES = [EngineRoute("/invocations", invoke)]
