"""`POST /v1/chat/completions`: conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.client.prompt_reader import check_token_ids
from jaxserve.errors import ValidationError
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.tokenization.message_text import without_images
from server.answers import COMMON_FIELDS, Answer, Piece
from server.endpoint import answer
from server.engine_route import EngineRoute
from server.protocol.chat import PROMPT_IDS, ChatCompletionRequest
from server.protocol.logprobs import chat_logprobs, prompt_logprobs
from server.reasoning.thought_counter import ThoughtCounter
from server.request_checks import check_choices
from server.tools.message import MessageReader

ROLE = "assistant"


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    return await answer(request, ChatCompletionRequest, ChatCompletions)


class ChatCompletions(Answer[ChatCompletionRequest]):
    """A choice is a message."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def fields(self) -> dict[str, str]:
        return COMMON_FIELDS | {
            "prompt": self._prompt_field,
            "prompt_token_ids": self._prompt_field,
            "max_tokens": self.body.max_tokens_field,
            "logprobs": "top_logprobs",
            "beam_width": "n",
        }

    @property
    def _prompt_field(self) -> str:
        """The field that the prompt's tokens come from."""
        given = self.body.given_prompt_ids
        return "messages" if given is None else f"kv_transfer_params.{PROMPT_IDS}"

    async def _prompt(self, images: list[str]) -> list[int]:
        """Token ids; `images` takes the addresses of those in the messages."""
        body, service = self.body, self.service
        cut, given = service.cut(body, body.requested_max_tokens), body.given_prompt_ids
        if given is not None:
            field = self._prompt_field
            if not isinstance(given, list):
                raise ValidationError(field, given, "a list of token ids")
            check_token_ids(given, service.engine.model_config.vocab_size, field)
            for place, message in enumerate(body.messages):
                without_images(message.content, f"messages[{place}].content", images)
            if images:
                raise ValidationError(field, "token ids", "messages without images beside them")
            return given if cut is None else cut.of(given)
        # Chat templates write the special tokens themselves, so none are added by default.
        special = bool(body.add_special_tokens)
        return await service.encode_chat(
            body, add_special_tokens=special, tools=self._tools.tools, cut=cut, images=images
        )

    async def prepare(self) -> None:
        body, service = self.body, self.service
        check_choices(service, body, 1)
        self._tools = body.asked_tools()
        service.parsers.check(self._tools)
        self._readers: dict[int, MessageReader] = {}
        self._counters: dict[int, ThoughtCounter | None] = {}
        params = body.sampling_params(
            max_tokens=body.requested_max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            defaults=service.sampling_defaults,
        )
        self._reads = service.parsers.reads(self._tools)
        asked = body.constraint()
        self._thinks = asked is None or asked.params.structural_tag is not None
        if isinstance(params, SamplingParams) and service.parsers.reads_special_tokens(self._tools):
            params.skip_special_tokens = False  # calls and thoughts may be marked by them
        # With `echo`, an answer that continues the last message starts with that message.
        continues = body.echo and body.messages[-1].role == ROLE
        self._echo = str(body.render_messages([])[-1]["content"]) if continues else ""
        images: list[str] = []
        prompt = await self._prompt(images)
        self._prompt_text: str | None = None
        if body.return_prompt_text:
            self._prompt_text = await service.decode(prompt, skip_special_tokens=False)
        self._prompt_end = ""
        if self._reads:
            self._prompt_end = await self.prompt_end(prompt)
        if not self._thinks and not isinstance(params, PoolingParams):
            assert params.structured_outputs is not None
            thoughts = service.parsers.thoughts(self._prompt_end)
            self._thinks = thoughts is not None
            params.structured_outputs = replace(params.structured_outputs, thoughts=thoughts)
        await self.add_prompt(prompt, await self.with_tags(params, prompt), images)

    def choice(self, piece: Piece) -> dict[str, Any]:
        said: dict[str, Any] = {"content": piece.new.text}
        if self._reads:
            cut = piece.new.finish_reason != "stop"
            said = self._reader(piece.index).message(piece.new.text, cut=cut)
        if self._echo:
            said["content"] = self._echo + (said["content"] or "")
        return self._choice(
            piece, "message", {"role": ROLE, "reasoning": None, **said, "refusal": None}
        )

    def _reader(self, index: int) -> MessageReader:
        found = self._readers.get(index)
        if found is None:
            found = self._readers[index] = self.service.parsers.reader(
                self._tools,
                self._prompt_end,
                thinks=self._thinks,
                tells_reasoning=self.body.include_reasoning is not False,
            )
        return found

    def shown(self, completion: CompletionOutput) -> CompletionOutput:
        if self.service.parsers.reasoning is not None:
            self._count(completion)
        return completion

    def _count(self, completion: CompletionOutput) -> None:
        index = completion.index
        if index not in self._counters:
            self._counters[index] = self.service.parsers.counter(
                self._prompt_end, self.service.engine.tokenizer.token_text, thinks=self._thinks
            )
        counter = self._counters[index]
        if counter is not None:
            counter.feed(completion.token_ids)

    def reasoning_tokens(self) -> int | None:
        if self.service.parsers.reasoning is None:
            return None
        return sum(one.count for one in self._counters.values() if one is not None)

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": ROLE, "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }

    def opening_fields(self) -> dict[str, Any]:
        prompt_ids = self.requests[0].group.prompt_token_ids
        told = {"prompt_token_ids": prompt_ids} if self.body.return_token_ids else {}
        return told | self._told_prompt()

    def _told_prompt(self) -> dict[str, str]:
        return {} if self._prompt_text is None else {"prompt_text": self._prompt_text}

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        if not self._reads:
            return self._choice(piece, "delta", {"content": piece.new.text})
        new, last = piece.new, piece.new.finished()
        cut = last and new.finish_reason != "stop"
        delta = self._reader(piece.index).feed(new.text, last=last, cut=cut)
        if delta or last or self.body.logprobs or self.body.return_token_ids:
            return self._choice(piece, "delta", delta)
        return None

    def rest(self, finals: list[RequestOutput]) -> dict[str, Any]:
        # Where vLLM puts them: on the response, because all choices share the prompt.
        scored = finals[0].prompt_logprobs if self.body.prompt_logprobs is not None else None
        prompt_ids = self.requests[0].group.prompt_token_ids
        return {
            "prompt_logprobs": None if scored is None else prompt_logprobs(scored),
            "prompt_token_ids": prompt_ids if self.body.return_token_ids else None,
            **self._told_prompt(),
        }

    def _choice(self, piece: Piece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        new = piece.new
        return {
            "index": piece.index,
            name: content,
            "logprobs": self._logprobs(new),
            "finish_reason": self._finish_reason(piece),
            "stop_reason": new.stop_reason,
            "token_ids": new.token_ids if self.body.return_token_ids else None,
            **piece.reports,
        }

    def _finish_reason(self, piece: Piece) -> str | None:
        reason, reader = piece.new.finish_reason, self._readers.get(piece.index)
        # as OpenAI's: of a function that was named it is "stop"
        calls = reader is not None and reader.num_calls and self._tools.name is None
        return "tool_calls" if calls and reason == "stop" else reason

    def _logprobs(self, new: CompletionOutput) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(
            list(zip(new.token_ids, new.logprobs or [])),
            top=-1 if self.body.logprob_token_ids else self.body.top_logprobs or 0,
            show=self.show,
            token_bytes=self.service.engine.tokenizer.byte_table.__getitem__,
        )


ROUTES = [EngineRoute("/v1/chat/completions", create_chat_completion)]
