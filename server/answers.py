"""The code that all generating endpoints share: from a body to a response, whole or in chunks.

An endpoint is a subclass of `Answer`: it makes prompts of its body, and JSON of a choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.client.images import image_data
from jaxserve.client.input_processor import Params, PreparedRequest
from jaxserve.errors import PausedError, ValidationError
from jaxserve.grammars.grammar_checks import RETRY_S
from jaxserve.outputs import (
    ERROR,
    GRAMMAR,
    NOT_COMPILED,
    TIMEOUT,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
)
from jaxserve.params.sampling_params import SamplingParams
from server.errors import ApiError
from server.event_stream import EventStream, merge, until_disconnect
from server.protocol.body_errors import named
from server.protocol.requests import GenerationRequest
from server.protocol.responses import ChunkWriter, finite, response_body, timings, usage
from server.request_checks import check_batch, check_response, check_token_lists
from server.service import (
    Service,
    client_of,
    engine_id,
    entry_of,
    queueing_of,
    response_id,
    token_text,
)
from server.unread_answers import unread_of
from server.whole_answer import whole_response

PROMPT_END = 16  # tokens of a prompt that may open thoughts
PROMPTS_AT_A_TIME = 8  # of one request, before the loop turns to others
NOT_AGAIN = {"x-should-retry": "false"}  # OpenAI's clients would send it again at once
QUICK_ENTRIES = 1024  # of a response, which the event loop makes in about a millisecond
GRAMMAR_FAILED = (
    "the constraint allows no token any more, or has become too complex, before the text is "
    "complete; the server's log says which"
)

Body = TypeVar("Body", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Piece:
    """The new part of one choice."""

    index: int  # of the choice
    position: int  # of its prompt
    first: bool  # nothing of the choice has been sent yet
    output: RequestOutput
    new: CompletionOutput

    @property
    def reports(self) -> dict[str, Any]:
        """The reports of features on the choice, as a field of it."""
        return {} if self.new.reports is None else {"reports": finite(self.new.reports)}


@dataclass(slots=True)
class _Progress:
    """The part of one choice that has been sent."""

    tokens: int = 0
    started: bool = False
    finished: bool = False


COMMON_FIELDS = {"extra_args": "vllm_xargs"}


class Answer(ABC, Generic[Body]):
    """The response to one HTTP request.

    Attributes:
        body: the parsed body of the HTTP request.
        requests: one for each prompt, once `prepare` has run.
        show: how logprobs show a token.
    """

    prefix: ClassVar[str]  # of the response's id
    kind: ClassVar[str]  # the `object` field of a whole response
    chunk_kind: ClassVar[str]  # and of a chunk

    def __init__(self, service: Service, body: Body, request: Request):
        self.service = service
        self.body = body
        self.requests: list[PreparedRequest] = []
        as_ids = body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = service.options.shows_token_ids
        self.show = token_text(service, as_ids=as_ids)
        model, created = service.resolve_model(body.model), int(time.time())
        self._id = response_id(self.prefix, request, body.request_id)
        self._head = (created, model)
        # arrived when the body was complete
        self._client = client_of(request)
        self._unread = unread_of(request)
        self._entry = entry_of(request)
        self._queueing = queueing_of(request, body)
        self._progress: dict[int, _Progress] = {}

    @abstractmethod
    async def prepare(self) -> None:
        """Fill `requests`, by `add_prompt`."""

    def fields(self) -> Mapping[str, str]:
        """Parameter -> field of the body that it comes from, where they differ."""
        return COMMON_FIELDS

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of a whole response."""

    @abstractmethod
    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """A choice of a chunk; None for no chunk."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice of a chunk before the first token of any; None for no such chunk."""
        return None

    def opening_fields(self) -> dict[str, Any]:
        """More fields of the first such chunk."""
        return {}

    def shown(self, completion: CompletionOutput) -> CompletionOutput:
        """The part of the engine's output that the client gets."""
        return completion

    def rest(self, finals: list[RequestOutput]) -> dict[str, Any]:
        """More fields of a whole response."""
        return {}

    async def with_tags(self, params: Params, prompt: list[int]) -> Params:
        """Parameters with the tags of thoughts, where the body bounds thoughts.

        Raises:
            ValidationError: the server has no reasoning parser, so there are no tags.
        """
        if not isinstance(params, SamplingParams):
            return params
        budget = params.thinking_token_budget
        if budget is None or budget == -1:
            return params
        parsers = self.service.parsers
        if parsers.reasoning is None:
            allowed = "-1 or null: this server was started without --reasoning-parser"
            raise ValidationError("thinking_token_budget", budget, allowed)
        told = params.clone()
        told.thoughts = parsers.thoughts(await self.prompt_end(prompt))
        if told.thoughts is None:  # the template has closed them
            told.thinking_token_budget = None
        return told

    async def prompt_end(self, prompt: list[int]) -> str:
        """The last tokens of a prompt as text, which may open thoughts or close them."""
        return await self.service.decode(prompt[-PROMPT_END:], skip_special_tokens=False)

    def check_room(self, prompts: int) -> None:
        """Refuse a body of so many prompts before they are tokenised.

        Raises:
            QueueFullError: there is no room for so many to wait.
        """
        counted = 0 if self._entry is None else 1
        self.service.engine.check_room(self._queueing.client, prompts - counted)

    async def add_prompt(
        self, token_ids: list[int], params: Params, images: Sequence[str] = ()
    ) -> None:
        """Check the next prompt.

        Args:
            token_ids: one for each image among them.
            params: of the request.
            images: their addresses.

        Raises:
            ValidationError: names the field of the body that cannot be served.
        """
        name = engine_id(self._id, len(self.requests))
        salt = self.service.cache_salt(self._client, self.body.cache_salt)
        extras = self.body.prompt_extras() | {"cache_salt": salt}
        prompt = {"prompt_token_ids": token_ids, **extras, **image_data(images)}
        prepared = await self.service.engine.prepare(prompt, params, name, self._queueing)
        self.requests.append(prepared)
        if len(self.requests) % PROMPTS_AT_A_TIME == 0:
            await asyncio.sleep(0)
        if self._client is not None:
            self._client.used(len(token_ids))
        check_batch(self.service, len(self.requests), "prompt", self._prompt_tokens)
        check_response(self.service, self.body, self._prompt_tokens)

    async def respond(self, request: Request) -> Response:
        """Generate and answer, once `check_and_prepare` has run."""
        if self.body.streams:
            return EventStream(self._events(), self.service.limits.keep_alive_interval)
        finals = await until_disconnect(request.receive, self._collect())
        self._check_time(finals)
        if self._entries(finals) <= QUICK_ENTRIES:
            return JSONResponse(self._whole(finals))
        making = whole_response(request, partial(self._whole, finals))
        return await until_disconnect(request.receive, making)

    def _whole(self, finals: list[RequestOutput]) -> dict[str, Any]:
        pieces = [
            piece for position, output in enumerate(finals) for piece in self._new(position, output)
        ]
        pieces.sort(key=lambda piece: piece.index)
        counts = self._usage(
            self._prompt_tokens,
            sum(progress.tokens for progress in self._progress.values()),
            sum(output.num_cached_tokens for output in finals),
        )
        choices = [self.choice(piece) for piece in pieces]
        whole = response_body(self._id, self.kind, *self._head, choices, counts)
        if self._tells_timings:
            whole["metrics"] = timings(finals[0].metrics, counts["completion_tokens"])
        return whole | self.rest(finals)

    @property
    def _tells_timings(self) -> bool:
        """Whether a response tells its times: with several choices they would be ambiguous."""
        alone = len(self.requests) == self.body.choices_per_prompt == 1
        return self.service.options.tells_timings and alone

    def reasoning_tokens(self) -> int | None:
        """Generated tokens that were thoughts; None where no parser tells them from others."""
        return None

    def _entries(self, finals: list[RequestOutput]) -> int:
        """Roughly the number of entries of a response."""
        vocab_size = self.service.engine.model_config.vocab_size
        asked = sum(self.body.shown_of_prompt(vocab_size).values())
        generated = 0
        for completion in (one for output in finals for one in output.outputs):
            alternatives = completion.logprobs[:1] if completion.logprobs else ()
            generated += len(completion.token_ids) * (1 + sum(map(len, alternatives)))
            generated += QUICK_ENTRIES if completion.reports else 8
        return self._prompt_tokens * asked + generated

    async def check_and_prepare(self) -> None:
        """Make requests of the body.

        Raises:
            ApiError, ValidationError: it cannot be served.
        """
        check_token_lists(self.service, self.body)
        with named(self.fields()), named(self.body.constraint_fields()):
            await self.prepare()
        if self._client is not None:
            groups = [one.group for one in self.requests]
            counts = [len(one.sequence_ids) for one in groups]
            most = sum(n * one.stop_rule.max_tokens for n, one in zip(counts, groups))
            self._client.check_choices(sum(counts), self._prompt_tokens + most)

    async def _collect(self) -> list[RequestOutput]:
        """The final output of each prompt, in order."""
        finals: dict[int, RequestOutput] = {}
        async with self._outputs() as outputs:
            async for position, output in outputs:
                check_served(output)
                finals[position] = output
                if self._client is not None:
                    self._client.used(sum(len(one.token_ids) for one in output.outputs))
        return [finals[position] for position in range(len(self.requests))]

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed response: openings first, usage last."""
        writer = ChunkWriter(self._id, self.chunk_kind, *self._head)
        include_usage = self.body.include_usage or self.service.options.includes_usage
        per_prompt, cached = self.body.choices_per_prompt, dict[int, int]()
        times: RequestMetrics | None = None
        async with self._outputs() as outputs:
            async for position, output in outputs:
                events, times = [], output.metrics
                check_served(output)
                if not self._progress:
                    self._check_time([output])
                if position not in cached:
                    for index in range(position * per_prompt, (position + 1) * per_prompt):
                        opening = self.opening(index)
                        if opening is not None:
                            told = self._usage_so_far(position, 0, output)
                            more = self.opening_fields() if index == 0 else None
                            events.append(writer.chunk([opening], usage=told, more=more))
                cached[position] = output.num_cached_tokens
                for piece in self._new(position, output):
                    progress = self._progress[piece.index]
                    delta = self.delta(piece)
                    if delta is None:
                        continue
                    events.append(
                        writer.chunk(
                            [delta],
                            usage=self._usage_so_far(position, progress.tokens, output),
                            fingerprint=progress.finished and not include_usage,
                        )
                    )
                if events:
                    yield b"".join(events)
        if include_usage:
            generated = sum(progress.tokens for progress in self._progress.values())
            counts = self._usage(self._prompt_tokens, generated, sum(cached.values()))
            told = timings(times, generated) if self._tells_timings else None
            yield writer.chunk([], usage=counts, fingerprint=True, metrics=told)

    def _check_time(self, outputs: list[RequestOutput]) -> None:
        """Raises ApiError if time was over before there was any output."""
        told = [completion for output in outputs for completion in output.outputs]
        if any(one.token_ids or one.stop_reason != TIMEOUT for one in told):
            return
        raise ApiError(
            504,
            f"timeout={self._queueing.timeout:g} s were over before the first token",
            param="timeout",
            headers=NOT_AGAIN,
        )

    @contextlib.asynccontextmanager
    async def _outputs(self) -> AsyncIterator[AsyncIterator[tuple[int, RequestOutput]]]:
        told: dict[str, Any] = {}
        if self._client is not None and not self.body.streams:  # a stream counts what it sends
            told["on_drop"] = self._client.used
        streams = [self.service.engine.stream(one, **told) for one in self.requests]
        ids = [prepared.request_id for prepared in self.requests]
        unread_bytes = self.service.engine.unread_bytes
        self._unread.queued = lambda: sum(map(unread_bytes, ids))
        if self._entry is not None:
            self._entry.leave()
        holding = self.service.holders.holding(ids, self._client)
        with self.service.engine.admitted(self.requests), holding, named(self.fields()):
            async with contextlib.aclosing(merge(streams)) as outputs:
                yield outputs

    def _new(self, position: int, output: RequestOutput) -> Iterator[Piece]:
        """The pieces that an output adds to the choices of a prompt."""
        for completion in output.outputs:
            index = position * self.body.choices_per_prompt + completion.index
            progress = self._progress.setdefault(index, _Progress())
            if progress.finished:
                continue  # an aborted request reports all its choices once more
            new, first = self.shown(completion), not progress.started
            progress.tokens += len(new.token_ids)
            if self._client is not None and self.body.streams:
                self._client.used(len(new.token_ids))
            progress.started, progress.finished = True, new.finished()
            yield Piece(index, position, first, output, new)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prepared.group.prompt_token_ids) for prepared in self.requests)

    def _usage_so_far(
        self, position: int, generated: int, output: RequestOutput
    ) -> dict[str, Any] | None:
        if not (self.body.continuous_usage or self.service.options.includes_usage):
            return None
        prompt = self.requests[position].group.prompt_token_ids
        return self._usage(len(prompt), generated, output.num_cached_tokens)

    def _usage(self, prompt_tokens: int, generated: int, cached: int) -> dict[str, Any]:
        told = cached if self.service.tells_cached_tokens else None
        return usage(prompt_tokens, generated, told, self.reasoning_tokens())


def check_served(output: RequestOutput) -> None:
    """Raises ApiError if an error has ended the request."""
    failed = [one for one in output.outputs if one.finish_reason == ERROR]
    if any(one.stop_reason == GRAMMAR for one in failed):
        raise ApiError(400, GRAMMAR_FAILED, param="structured_outputs")
    if any(one.stop_reason == NOT_COMPILED for one in failed):
        text = "the constraint could not be compiled yet: the server is busy; try again later"
        raise ApiError(503, text, headers={"Retry-After": f"{RETRY_S:.0f}"})
    if failed:
        raise ApiError(500, "internal error; the server's log has the details")


def check_complete(completion: CompletionOutput) -> None:
    """Refuse what was ended early and is of no use in part.

    Raises:
        ApiError: its time was over.
        PausedError: the engine was paused.
    """
    if completion.finish_reason != "abort":
        return
    if completion.stop_reason != TIMEOUT:
        raise PausedError("the engine was paused before the answer was complete")
    text = "timeout was over before the answer was complete"
    raise ApiError(504, text, param="timeout", headers=NOT_AGAIN)
