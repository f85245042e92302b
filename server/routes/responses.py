"""`/v1/responses`: OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.errors import ValidationError
from jaxserve.outputs import CompletionOutput
from server.answer_parts import AnswerPart, Kind, PartBegin, PartEnd, PartGrowth, Step
from server.answers import Piece
from server.body_reader import QUICK_BYTES
from server.endpoint import answer, given_body
from server.engine_route import EngineRoute
from server.errors import ApiError, as_api_error
from server.event_stream import until_disconnect
from server.parts_answer import PartsAnswer, count_prompt
from server.protocol.conversation import Conversation
from server.protocol.response_items import add_items, item_id, output_content, output_item
from server.protocol.responses import PIECE, EncodedList, dumped_in_pieces, dumps, finite
from server.protocol.responses_request import Echo, InputTokensRequest, ResponsesRequest, api_field
from server.response_store import Owner, StoredResponse, with_tools
from server.routes.stored_responses import unknown_response
from server.service import Service, client_of
from server.whole_answer import WholeResponse, coalesced


async def create_response(request: Request) -> Response:
    """Answer a conversation: whole, streamed, or in the background."""
    return await answer(request, ResponsesRequest, Responses)


class Responses(PartsAnswer):
    """A part is an item of the output.

    Args:
        asked: the body, which goes on from an earlier response where it says so.

    Raises:
        ApiError: 404, there is no such earlier response.
        ValidationError: names the field that cannot be served.
    """

    prefix = "resp"

    def __init__(self, service: Service, asked: ResponsesRequest, request: Request):
        earlier = _earlier(service, asked.previous_response_id, request)
        messages = _messages(service, earlier, asked.input)
        super().__init__(service, asked.chat(messages), request, api_field)
        self._asked, self._messages = asked, messages
        self._echoed: Echo
        self._json = b""  # of the whole response, but for its tools and the last brace
        self._body_bytes: int = request.state.body_bytes
        self._earlier_bytes = len(earlier)  # of the conversation that it has ended
        # never the client's own: it names what is kept
        self.name = f"resp_{secrets.token_hex(24)}"
        self._owner: Owner = client_of(request)
        self._status = "in_progress"
        self._error: ApiError | None = None
        self._sequence = 0
        self._ids: list[str] = []  # of the items
        # told with each token, and three times more at the end
        self._all_logprobs = EncodedList() if asked.tells_logprobs else None
        self._new_logprobs = EncodedList()  # that no event has told
        self._uncounted = 0  # bytes of them
        self._written = CompletionOutput(0, "", [])  # as the model has written it

    async def check_and_prepare(self) -> None:
        await super().check_and_prepare()
        is_large = self._body_bytes > QUICK_BYTES
        make = self._asked.echoed
        self._echoed = await asyncio.to_thread(make) if is_large else make()
        self._asked.forget_prompt()
        self._asked.forget_echo()
        self.body.tools, self._tools = None, replace(self._tools, tools=[])
        if not self._asked.keeps:
            self._messages = []

    async def respond(self, request: Request) -> Response:
        if self._asked.background:
            return await self._respond_at_once()
        if self.body.streams:
            return await super().respond(request)
        await until_disconnect(request.receive, self._collect())
        return WholeResponse([*coalesced(with_tools(self._json, self._echoed.tools))])

    # -- in the background ----------------------------------------------------------------------

    async def _respond_at_once(self) -> Response:
        self._status = "queued"  # told once: OpenAI's first answer, whose clients ask again
        self._encode()
        told = with_tools(self._json, self._echoed.tools)
        self._status = "in_progress"
        self._encode()
        kept = self._kept(b"", is_made=False)
        store = self.service.responses
        kept.task = asyncio.ensure_future(self._work())
        if not store.put(self._owner, self.name, kept):
            kept.task.cancel()
            limits = "--max-stored-responses and --max-stored-bytes, divided by the number of keys"
            if kept.num_bytes + len(kept.tools) > store.share_bytes:
                allowed = f"false: it needs more than the {store.share_bytes} bytes ({limits})"
                raise ValidationError("background", True, allowed)
            text = (
                f"{store.share} responses or {store.share_bytes} bytes of one client may be in the "
                f"making ({limits}); this would be more"
            )
            raise ApiError(503, text, param="background", headers={"Retry-After": "5"})
        return WholeResponse([*coalesced(told)])

    async def _work(self) -> None:
        try:
            await self._collect()
        except asyncio.CancelledError:
            self._status = "cancelled"
            await self._finish()
            raise
        except Exception as error:
            self._fail(as_api_error(error))
            await self._finish()

    # -- a whole response -----------------------------------------------------------------------

    async def _collect(self) -> Any:
        finals = await super()._collect()
        if not self._asked.background:  # no client waits for that one
            self.has_seen()
        self._check_time(finals)
        self._end()
        await self._finish()
        return finals

    def body_of_answer(self) -> dict[str, Any]:
        created, model = self._head
        sampled = self.requests[0].params
        parts = self.parts.parts if self._status not in ("queued", "in_progress") else []
        reports = None if self.final is None else self.final.reports
        return {
            "id": self.name,
            "object": "response",
            "created_at": created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": bool(self._asked.background),
            "error": None if self._error is None else _error(self._error),
            "incomplete_details": self._incomplete(),
            "model": model,
            "output": [self._item(part) for part in parts],
            "temperature": getattr(sampled, "temperature", None),
            "top_p": getattr(sampled, "top_p", None),
            "usage": self._counts() if self._status in ("completed", "incomplete") else None,
            **({} if reports is None else {"reports": finite(reports)}),
            **(self._raw_messages() if self._asked.enable_response_messages else {}),
        }

    def _raw_messages(self) -> dict[str, Any]:
        """The prompt and the answer as vLLM tells them: text and tokens."""
        prompt, written = self.requests[0].group.prompt_token_ids, self._written
        told = {
            "input_messages": (self._prompt_text, prompt),
            "output_messages": (written.text, written.token_ids),
        }
        kind = {"type": "raw_message_tokens"}
        return {
            name: [{"message": text, "tokens": [*tokens], **kind}] if tokens else []
            for name, (text, tokens) in told.items()
        }

    def _incomplete(self) -> dict[str, str] | None:
        if self._status != "incomplete" or self.final is None:
            return None
        if self.final.finish_reason == "length":
            return {"reason": "max_output_tokens"}
        return {"reason": str(self.final.stop_reason or self.final.finish_reason)}

    def _counts(self) -> dict[str, Any]:
        read, written = self._prompt_tokens, self.num_generated
        return {
            "input_tokens": read,
            "input_tokens_details": {
                "cached_tokens": self.num_cached or 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens() or 0},
            "total_tokens": read + written,
        }

    def _item(self, part: AnswerPart, status: str | None = None) -> dict[str, Any]:
        while len(self._ids) <= part.index:
            self._ids.append(item_id(self.parts.parts[len(self._ids)]))
        return output_item(part, self._ids[part.index], self._logprobs_of(part), status=status)

    def _logprobs_of(self, part: AnswerPart) -> EncodedList | None:
        """All of them are with the first text."""
        if self._all_logprobs is None:
            return None
        first = next((one for one in self.parts.parts if one.kind is Kind.TEXT), None)
        return self._all_logprobs if part is first else EncodedList()

    def _end(self) -> None:
        assert self.final is not None
        self._status = "completed" if self.final.finish_reason == "stop" else "incomplete"

    def _fail(self, error: ApiError) -> None:
        self._status, self._error = "failed", error

    async def _finish(self) -> None:
        """Encode what there is, and keep it with the conversation that it ends."""
        reports = self.final is not None and self.final.reports is not None
        if not self._asked.keeps and not self._all_logprobs and not reports:
            self._encode()
            return
        kept = await asyncio.to_thread(self._made)
        if reports:
            self._unread.keep(len(self._json))
        if self._asked.keeps:
            self.service.responses.put(self._owner, self.name, kept)

    def _made(self) -> StoredResponse:
        body = self._encode()
        messages: list[dict[str, Any]] = []
        if self._status in ("completed", "incomplete"):
            conversation = Conversation(self._messages)
            conversation.end_turn()
            # more calls than a conversation may have: nothing can go on from them
            with contextlib.suppress(ValidationError):
                add_items(conversation, body["output"], "output")
                messages = conversation.messages
        past = b"".join(dumped_in_pieces(messages)) if messages else b""
        return self._kept(past, is_made=True)

    def _kept(self, messages: bytes, *, is_made: bool) -> StoredResponse:
        asked, echo = self._asked, self._echoed
        needed = 0 if is_made else max(0, self._body_bytes - len(echo.tools)) + self._earlier_bytes
        return StoredResponse(self._json, echo.tools, messages, needed, bool(asked.background))

    def _encode(self) -> dict[str, Any]:
        """The response as it is now, which becomes `_json`."""
        body = self.body_of_answer()
        pieces = [*dumped_in_pieces(body)]
        self._json = b"".join([*pieces[:-1], b",", self._echoed.fields[1:-1]])
        return body

    # -- a stream -------------------------------------------------------------------------------

    def see(self, piece: Piece) -> None:
        if self._asked.enable_response_messages:
            self._written.text += piece.new.text
            self._written.token_ids += piece.new.token_ids
        if self._all_logprobs is None:
            return
        new = piece.new
        for start in range(0, len(new.token_ids), PIECE):  # as objects they are ten times as large
            some, given = slice(start, start + PIECE), new.logprobs or []
            part = replace(new, token_ids=new.token_ids[some], logprobs=given[some])
            told = self._logprobs(part)
            if told is not None and told["content"]:
                added = self._all_logprobs.add(told["content"])
                self._new_logprobs.append(added)
                self._uncounted += len(added)

    def has_seen(self) -> None:
        if self._uncounted:
            self._unread.keep(self._uncounted)
            self._uncounted = 0

    def begin_events(self) -> list[bytes]:
        self._encode()
        return [*self._whole_event("created"), *self._whole_event("in_progress")]

    def step_events(self, step: Step) -> list[bytes]:
        part = step.part
        at = {"output_index": part.index}
        if isinstance(step, PartBegin):
            item = self._item(part.begun(), "in_progress")
            begun = self._event("response.output_item.added", **at, item=item)
            if part.kind is Kind.CALL:
                return begun
            content = output_content(part.begun(), None)
            where = self._where(part)
            return begun + self._event("response.content_part.added", **where, part=content)
        if isinstance(step, PartGrowth):
            more = self._take_logprobs() if part.kind is Kind.TEXT else {}
            where = self._where(part)
            return self._event(
                f"response.{_TEXT[part.kind]}.delta", **where, delta=step.text, **more
            )
        assert isinstance(step, PartEnd)
        item = self._item(part)
        events = self._text_done(part)
        if part.kind is not Kind.CALL:
            content = output_content(part, self._logprobs_of(part))
            where = self._where(part)
            events += self._event("response.content_part.done", **where, part=content)
        return events + self._event("response.output_item.done", **at, item=item)

    async def end_events(self) -> list[bytes]:
        self._end()
        await self._finish()
        self._all_logprobs = None  # the response has them
        return self._whole_event(self._status)

    def failed_events(self, error: ApiError) -> bytes:
        self._fail(error)
        self._encode()
        return b"".join(self._whole_event("failed"))

    def _whole_event(self, name: str) -> list[bytes]:
        """An event that tells the whole response, in pieces."""
        head = f"event: response.{name}\ndata: " + (
            f'{{"type":"response.{name}","sequence_number":{self._sequence},"response":'
        )
        self._sequence += 1
        return [head.encode(), *with_tools(self._json, self._echoed.tools), b"}\n\n"]

    def _text_done(self, part: AnswerPart) -> list[bytes]:
        name = f"response.{_TEXT[part.kind]}.done"
        if part.kind is Kind.CALL:
            return self._event(name, **self._where(part), name=part.name, arguments=part.text)
        more: dict[str, Any] = {}
        if part.kind is Kind.TEXT:
            more["logprobs"] = self._logprobs_of(part) or []
        return self._event(name, **self._where(part), text=part.text, **more)

    def _take_logprobs(self) -> dict[str, Any]:
        told, self._new_logprobs = self._new_logprobs, EncodedList()
        return {"logprobs": told}

    def _where(self, part: AnswerPart) -> dict[str, Any]:
        where = {"item_id": self._ids[part.index], "output_index": part.index}
        return where if part.kind is Kind.CALL else {**where, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> list[bytes]:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        if not self._all_logprobs:
            return [f"event: {kind}\ndata: {dumps(data)}\n\n".encode()]
        return [f"event: {kind}\ndata: ".encode(), *dumped_in_pieces(data), b"\n\n"]


_TEXT = {
    Kind.TEXT: "output_text",
    Kind.THOUGHT: "reasoning_text",
    Kind.CALL: "function_call_arguments",
}


def _error(error: ApiError) -> dict[str, Any]:
    code = "invalid_prompt" if error.status == 400 else "server_error"
    return {"code": code, "message": error.message}


def _earlier(service: Service, name: str | None, request: Request) -> bytes:
    """JSON of the conversation that an earlier response has ended."""
    if name is None:
        return b"[]"
    kept = service.responses.get(client_of(request), name)
    if kept is None:
        raise unknown_response(name, "previous_response_id")
    if not kept.messages:
        allowed = "a response that has come to its end, with calls that a request may have"
        raise ValidationError("previous_response_id", name, allowed)
    return kept.messages


def _messages(service: Service, earlier: bytes, items: Any) -> list[dict[str, Any]]:
    """The conversation that a request goes on with. Raises ValidationError."""
    conversation = Conversation(json.loads(earlier), reads_images=service.reads_images)
    add_items(conversation, items)
    return conversation.messages


async def count_input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response would have."""
    async with given_body(request) as (service, given):
        body = await service.bodies.made(request, partial(InputTokensRequest.model_validate, given))
        body.check()
        earlier = _earlier(service, body.previous_response_id, request)
        chat = body.chat(_messages(service, earlier, body.input or []))
        count = await count_prompt(service, chat, request, api_field)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


ROUTES = [
    EngineRoute("/v1/responses", create_response),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
]
