"""Conversations whose answers are told as parts: what the Responses and the Messages API share."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.client.images import image_data
from jaxserve.errors import ValidationError
from jaxserve.outputs import CompletionOutput, RequestOutput
from server.answer_parts import AnswerParts, Step
from server.answers import Piece, check_served
from server.errors import ApiError
from server.event_stream import EventStream, until_disconnect
from server.protocol.body_errors import renamed
from server.protocol.chat import ChatCompletionRequest
from server.routes.chat import ChatCompletions
from server.service import Service
from server.whole_answer import coalesced

QUICK_TOKENS = 32  # whose logprobs the event loop encodes in about a millisecond


class PartsAnswer(ChatCompletions):
    """A chat completion with one choice, told in the words of another API.

    Args:
        chat: what the API's body asks for, as a chat completion.
        api_field: the API's name of a field of a chat completion.

    Attributes:
        parts: of the answer, as far as it has been read.
        final: its newest output, None before the first.
    """

    stream_end = b""

    def __init__(
        self,
        service: Service,
        chat: ChatCompletionRequest,
        request: Request,
        api_field: Callable[[str], str],
    ):
        with renamed(api_field):
            chat.check()
        if chat.choices_per_prompt != 1:
            raise ValidationError("n", chat.n, "1")
        if chat.use_beam_search:
            raise ValidationError("use_beam_search", True, "false")
        super().__init__(service, chat, request)
        self.parts: AnswerParts
        self._api_field = api_field
        self.final: CompletionOutput | None = None

    # -- for subclasses -------------------------------------------------------------------------

    def see(self, piece: Piece) -> None:
        """Look at what is new, before its steps; in a thread where it has much to say."""

    def has_seen(self) -> None:
        """Count what was seen, in the event loop."""

    @abstractmethod
    def begin_events(self) -> list[bytes]:
        """Events before the first of a part, in pieces."""

    @abstractmethod
    def step_events(self, step: Step) -> list[bytes]:
        """Events of one step, in pieces."""

    @abstractmethod
    async def end_events(self) -> list[bytes]:
        """Events behind the last of a part, in pieces."""

    @abstractmethod
    def failed_events(self, error: ApiError) -> bytes:
        """Events of an error in the middle of a stream."""

    @abstractmethod
    def body_of_answer(self) -> dict[str, Any]:
        """The whole response, once everything has been read."""

    # -- counts ---------------------------------------------------------------------------------

    @property
    def num_generated(self) -> int:
        return sum(progress.tokens for progress in self._progress.values())

    @property
    def num_cached(self) -> int | None:
        """Prompt tokens that the prefix cache had; None: not told."""
        return self._cached if self.service.tells_cached_tokens else None

    # -- the answer -----------------------------------------------------------------------------

    async def check_and_prepare(self) -> None:
        with renamed(self._api_field):
            await super().check_and_prepare()
        self.parts = AnswerParts(self._reader(0))
        self._cached = 0

    async def respond(self, request: Request) -> Response:
        if not self.body.streams:
            return await super().respond(request)
        interval = self.service.limits.keep_alive_interval
        return EventStream(self._events(), interval, failed=self.failed_events, end=self.stream_end)

    async def _collect(self) -> list[RequestOutput]:
        finals = await super()._collect()
        await asyncio.to_thread(self._read_whole, finals[0])
        return finals

    def _whole(self, finals: list[RequestOutput]) -> dict[str, Any]:
        return self.body_of_answer()

    def _read_whole(self, output: RequestOutput) -> None:
        for piece in self._new(0, output):
            self._steps(piece)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        async with self._outputs() as outputs:
            async for position, output in outputs:
                check_served(output)
                events = list[bytes]()
                if not self._progress:
                    self._check_time([output])
                    events += self.begin_events()
                for piece in self._new(position, output):
                    if self.body.logprobs and len(piece.new.token_ids) > QUICK_TOKENS:
                        events += await asyncio.to_thread(self._told_of, piece)
                    else:
                        events += self._told_of(piece)
                    self.has_seen()
                for part in coalesced(events):
                    yield part
        for part in coalesced(await self.end_events()):
            yield part

    def _told_of(self, piece: Piece) -> list[bytes]:
        return [event for step in self._steps(piece) for event in self.step_events(step)]

    def _steps(self, piece: Piece) -> list[Step]:
        new = piece.new
        self.final, self._cached = new, piece.output.num_cached_tokens
        self.see(piece)
        last = new.finished()
        return self.parts.feed(new.text, last=last, cut=last and new.finish_reason != "stop")


async def count_prompt(
    service: Service, chat: ChatCompletionRequest, request: Request, api_field: Callable[[str], str]
) -> int:
    """How many tokens the prompt of a chat completion would have.

    Args:
        chat: what the API's body asks for.
        api_field: the API's name of a field of a chat completion.

    Raises:
        ApiError, ValidationError: it cannot be served.
    """
    with renamed(api_field):
        chat.check()
        service.resolve_model(chat.model)
        tools = chat.asked_tools().tools
        return await until_disconnect(request.receive, _count(service, chat, tools))


async def _count(service: Service, chat: ChatCompletionRequest, tools: Any) -> int:
    images: list[str] = []
    tokens = await service.encode_chat(chat, add_special_tokens=False, tools=tools, images=images)
    if images:
        tokens = await service.engine.with_places(tokens, image_data(images))
    return len(tokens)
