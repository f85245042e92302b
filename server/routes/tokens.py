"""`POST /tokenize` and `POST /detokenize`: text to token ids and back."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.boundary.processor_kwargs import FIELD as PROCESSOR_KWARGS
from jaxserve.client.images import image_data
from jaxserve.client.prompt_reader import check_token_ids
from jaxserve.errors import ValidationError
from server.endpoint import given_body
from server.protocol.chat import ChatTokenizeRequest
from server.protocol.tokens import DetokenizeRequest, TokenizeRequest


async def tokenize(request: Request) -> Response:
    """Token ids of a text (`prompt`) or of a conversation (`messages`)."""
    async with given_body(request) as (service, given):
        if "messages" in given and "prompt" in given:
            raise ValidationError("messages", "...", "either messages or prompt")
        body: TokenizeRequest | ChatTokenizeRequest
        if "messages" in given:
            validate = partial(ChatTokenizeRequest.model_validate, given)
            body = await service.bodies.made(request, validate)
            body.check_template()
        else:
            body = TokenizeRequest.model_validate(given)
        body.check_extras()
        service.resolve_model(body.model)
        if isinstance(body, ChatTokenizeRequest):
            images: list[str] = []
            tokens = await service.encode_chat(
                body,
                add_special_tokens=body.add_special_tokens,
                tools=body.rendered_tools(),
                images=images,
            )
            if images:
                prompt = image_data(images) | {PROCESSOR_KWARGS: body.mm_processor_kwargs}
                tokens = await service.engine.with_places(tokens, prompt)
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
    async with given_body(request) as (service, given):
        body = await service.bodies.made(request, partial(DetokenizeRequest.model_validate, given))
        body.check_extras()
        service.resolve_model(body.model)
        most = service.engine.max_model_len
        if len(body.tokens) > most:
            raise ValidationError("tokens", f"{len(body.tokens)} tokens", f"the context is {most}")
        check_token_ids(body.tokens, service.engine.model_config.vocab_size, "tokens")
    return JSONResponse({"prompt": await service.decode(body.tokens, skip_special_tokens=False)})


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
