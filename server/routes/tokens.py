"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

import pydantic_core
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.errors import ValidationError
from server.body import read_body, read_bytes
from server.protocol.chat import ChatTokenizeRequest
from server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from server.service import Service


async def tokenize(request: Request) -> Response:
    """Token ids of a text (`prompt`) or of a conversation (`messages`)."""
    service = Service.of(request)
    service.require_ready()
    raw = await read_bytes(request, service.max_body_bytes)
    body: TokenizeRequest | ChatTokenizeRequest
    if _has_messages(raw):
        body = ChatTokenizeRequest.model_validate_json(raw)
        body.check_template()
    else:
        body = TokenizeRequest.model_validate_json(raw)
    body.check_extras()
    service.resolve_model(body.model)
    if isinstance(body, ChatTokenizeRequest):
        tokens = await service.encode_chat(body, add_special_tokens=body.add_special_tokens)
    else:
        tokens = await service.encode(
            body.prompt, add_special_tokens=body.add_special_tokens, field="prompt"
        )
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": service.engine.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = service.engine.tokenizer.convert_ids_to_tokens(tokens)
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    service = Service.of(request)
    service.require_ready()
    body = await read_body(request, DetokenizeRequest, service.max_body_bytes)
    body.check_extras()
    service.resolve_model(body.model)
    service.check_token_ids(body.tokens, "tokens")
    return JSONResponse({"prompt": await service.decode(body.tokens, skip_special_tokens=False)})


def _has_messages(raw: bytes) -> bool:
    try:
        parsed = pydantic_core.from_json(raw)
    except ValueError:
        # Not JSON at all: validation of the body says so in its own words.
        return False
    if isinstance(parsed, dict) and "messages" in parsed and "prompt" in parsed:
        raise ValidationError("messages", "...", "either messages or prompt")
    return isinstance(parsed, dict) and "messages" in parsed


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
