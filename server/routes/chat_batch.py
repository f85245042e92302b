"""`POST /v1/chat/completions/batch`: several conversations in one request."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.outputs import CompletionOutput, RequestOutput
from server.answers import Piece
from server.endpoint import answer
from server.engine_route import EngineRoute
from server.protocol.body_errors import by_patterns, renamed
from server.protocol.chat import BatchChatRequest
from server.request_checks import check_batch, check_choices, check_response
from server.routes.chat import ChatCompletions
from server.service import Service


async def create_chat_batch(request: Request) -> Response:
    """Answer each of several conversations by one choice."""
    return await answer(request, BatchChatRequest, ChatBatch)


class ChatBatch(ChatCompletions):
    """A conversation is a prompt, which a chat completion of its own prepares and reads."""

    def __init__(self, service: Service, body: BatchChatRequest, request: Request):
        super().__init__(service, body, request)
        self._batch, self._request = body, request
        self._chats: list[ChatCompletions] = []

    async def prepare(self) -> None:
        service, count = self.service, len(self._batch.messages)
        check_choices(service, self.body, count)
        check_batch(service, count, "messages")
        self.check_room(count)
        for place, one in enumerate(self._batch.conversations()):
            chat = ChatCompletions(service, one, self._request)
            self._chats.append(chat)
            with renamed(by_patterns({r"messages(.*)": rf"messages[{place}]\1"})):
                await chat.check_and_prepare()
            chat.body.forget_prompt()
            self.requests += chat.requests
            check_batch(service, len(self.requests), "messages", self._prompt_tokens)
            check_response(service, self.body, self._prompt_tokens)

    def shown(self, completion: CompletionOutput) -> CompletionOutput:
        return completion

    def _whole(self, finals: list[RequestOutput]) -> dict[str, Any]:
        for chat, final in zip(self._chats, finals):
            chat.shown(final.outputs[0])
        return super()._whole(finals)

    def reasoning_tokens(self) -> int | None:
        counts = [chat.reasoning_tokens() for chat in self._chats]
        return None if None in counts else sum(count or 0 for count in counts)

    def choice(self, piece: Piece) -> dict[str, Any]:
        return self._chats[piece.position].choice(piece)

    def rest(self, finals: list[RequestOutput]) -> dict[str, Any]:
        return {}


ROUTES = [EngineRoute("/v1/chat/completions/batch", create_chat_batch)]
