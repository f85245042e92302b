"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.answer_parts import Kind, PartBegin, PartGrowth, Step
from server.answers import check_complete
from server.endpoint import answer, given_body
from server.engine_route import EngineRoute
from server.errors import ApiError
from server.parts_answer import PartsAnswer, count_prompt
from server.protocol.anthropic_blocks import block, delta
from server.protocol.anthropic_errors import anthropic_error
from server.protocol.anthropic_request import CountTokensRequest, MessagesRequest, api_field
from server.protocol.chat import ChatCompletionRequest
from server.protocol.responses import dumps
from server.service import Service


async def create_message(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    return await answer(request, MessagesRequest, Messages)


class Messages(PartsAnswer):
    """A part is a block of the content."""

    prefix = "msg"

    def __init__(self, service: Service, asked: MessagesRequest, request: Request):
        chat = _chat(service, asked)
        if service.parsers.reasoning is None:
            chat.thinking_token_budget = None  # nothing is a thought
        super().__init__(service, chat, request, api_field)
        asked.forget_prompt()
        self._name = f"msg_{secrets.token_hex(12)}"
        self._edits: dict[str, Any] = {}
        if asked.context_management is not None:
            self._edits = {"context_management": {"applied_edits": []}}

    def body_of_answer(self) -> dict[str, Any]:
        content = [block(part) for part in self.parts.parts]
        ending = self._ending()
        return self._message(content, ending) | {"usage": self._counts()} | self._edits

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._head[1],
            "content": content,
            **ending,
        }

    def _ending(self) -> dict[str, Any]:
        """Why the answer has ended. Raises as `check_complete` if it was ended early."""
        assert self.final is not None
        check_complete(self.final)
        reason, at = self.final.finish_reason, self.final.stop_reason
        if reason == "length":
            told = "max_tokens"
        elif any(part.kind is Kind.CALL for part in self.parts.parts):
            told = "tool_use"
        else:
            told = "stop_sequence" if isinstance(at, str) else "end_turn"
        return {"stop_reason": told, "stop_sequence": at if told == "stop_sequence" else None}

    def _counts(self) -> dict[str, Any]:
        """Counts so far: at the beginning of a stream the whole prompt is input."""
        cached, size = self.num_cached, self._prompt_tokens
        made = None
        if cached is not None:
            config = self.service.engine.config
            keeps = self.final is not None and config.asked.enable_prefix_caching
            made = max(0, size - size % config.cache.page_size - cached) if keeps else 0
        return {
            "input_tokens": size - (cached or 0) - (made or 0),
            "output_tokens": self.num_generated,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": made,
        }

    # -- a stream -------------------------------------------------------------------------------

    def begin_events(self) -> list[bytes]:
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        begun = _event("message_start", message=message | {"usage": self._counts()})
        return [begun, _event("ping")]

    def step_events(self, step: Step) -> list[bytes]:
        part = step.part
        if isinstance(step, PartBegin):
            empty = block(part.begun())
            return [_event("content_block_start", index=part.index, content_block=empty)]
        if isinstance(step, PartGrowth):
            told = delta(part, step.text)
            return [_event("content_block_delta", index=part.index, delta=told)]
        return [_event("content_block_stop", index=part.index)]

    async def end_events(self) -> list[bytes]:
        ending, usage = self._ending(), self._counts()
        return [
            _event("message_delta", delta=ending, usage=usage, **self._edits),
            _event("message_stop"),
        ]

    def failed_events(self, error: ApiError) -> bytes:
        data = anthropic_error(error.status, error.message)
        return f"event: error\ndata: {dumps(data)}\n\n".encode()


def _chat(service: Service, body: CountTokensRequest) -> ChatCompletionRequest:
    merges = not service.engine.tokenizer.takes_late_system
    return body.chat(merges_system=merges, reads_images=service.reads_images)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {dumps({'type': kind, **fields})}\n\n".encode()


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a message would have."""
    async with given_body(request) as (service, given):
        body = await service.bodies.made(request, partial(CountTokensRequest.model_validate, given))
        body.check()
        chat = _chat(service, body)
        count = await count_prompt(service, chat, request, api_field)
    counted: dict[str, Any] = {"input_tokens": count}
    if body.context_management is not None:
        counted["context_management"] = {"original_input_tokens": count}
    return JSONResponse(counted)


ROUTES = [
    EngineRoute("/v1/messages", create_message),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
