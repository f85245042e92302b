"""`POST /v1/chat/completions`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.outputs import CompletionOutput, RequestOutput
from server.body import read_body
from server.protocol.chat import ChatCompletionRequest
from server.protocol.logprobs import TokenText, chat_logprobs, prompt_logprobs
from server.protocol.responses import ChunkWriter, response_body, usage
from server.service import Job, Service, engine_id, response_id, token_text
from server.streaming import EventStream, merge, until_disconnect

ROLE = "assistant"


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, streamed or not."""
    service = Service.of(request)
    service.require_ready()
    body = await read_body(request, ChatCompletionRequest, service.max_body_bytes)
    body.check()
    model = service.resolve_model(body.model)
    answer_id = response_id("chatcmpl", request, body.request_id)
    created = int(time.time())
    work = _prepare(service, body, answer_id, request.state.arrival_time)
    job = await until_disconnect(request.receive, work)
    answer = _Answer(
        body=body,
        job=job,
        echo=_echo(body),
        show=token_text(service, as_ids=bool(body.return_tokens_as_token_ids)),
        token_bytes=service.engine.tokenizer.byte_table.__getitem__,
    )
    if body.streams:
        writer = ChunkWriter(answer_id, "chat.completion.chunk", created, model)
        return EventStream(answer.events(service, writer))
    output = await until_disconnect(request.receive, _collect(service, job))
    content = response_body(
        answer_id, "chat.completion", created, model, answer.choices(output), answer.usage(output)
    )
    # Where vLLM puts them: on the response, because all choices share the prompt.
    shown = output.prompt_logprobs if body.prompt_logprobs is not None else None
    content["prompt_logprobs"] = None if shown is None else prompt_logprobs(shown)
    content["prompt_token_ids"] = job.token_ids if body.return_token_ids else None
    return JSONResponse(content)


async def _prepare(
    service: Service, body: ChatCompletionRequest, answer_id: str, arrival_time: float
) -> Job:
    service.check_choices(body, 1)
    service.check_token_lists(body)
    service.check_logprobs("top_logprobs", body.top_logprobs)
    service.check_logprobs("prompt_logprobs", body.prompt_logprobs)
    # Chat templates write the special tokens themselves, so none are added by default.
    token_ids = await service.encode_chat(body, add_special_tokens=bool(body.add_special_tokens))
    limit = service.max_tokens(
        body.requested_max_tokens,
        len(token_ids),
        prompt_field="messages",
        limit_field=body.max_tokens_field,
    )
    params = body.sampling_params(
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    return Job(token_ids, params, engine_id(answer_id, 0), body.priority or 0, arrival_time)


def _echo(body: ChatCompletionRequest) -> str:
    """With `echo`, an answer that continues the last message starts with that message."""
    if not body.echo or body.messages[-1].role != ROLE:
        return ""
    return str(body.render_messages()[-1]["content"])


async def _collect(service: Service, job: Job) -> RequestOutput:
    final: RequestOutput | None = None
    async with contextlib.aclosing(merge([service.generate(job)])) as outputs:
        async for _, output in outputs:
            final = output
    if final is None:
        raise RuntimeError("the engine ended a request without an output")
    return final


@dataclass
class _Answer:
    """The response of one HTTP request, whole or in chunks."""

    body: ChatCompletionRequest
    job: Job
    echo: str
    show: TokenText
    token_bytes: Callable[[int], bytes]

    def choices(self, output: RequestOutput) -> list[dict[str, Any]]:
        """All choices of a response that is not streamed."""
        return [
            {
                "index": one.index,
                "message": {"role": ROLE, "content": self.echo + one.text, "refusal": None},
                "logprobs": self._logprobs(one),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "token_ids": one.token_ids if self.body.return_token_ids else None,
            }
            for one in sorted(output.outputs, key=lambda one: one.index)
        ]

    def usage(self, output: RequestOutput) -> dict[str, Any]:
        """Token counts of a response that is not streamed."""
        generated = sum(len(one.token_ids) for one in output.outputs)
        return self._usage(generated, output)

    async def events(self, service: Service, writer: ChunkWriter) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed response: roles first, usage last."""
        counts = [0] * self.body.choices_per_prompt
        ended: set[int] = set()
        last: RequestOutput | None = None
        async with contextlib.aclosing(merge([service.generate(self.job)])) as outputs:
            async for _, output in outputs:
                events = [] if last is not None else self._first_chunks(output, writer)
                last = output
                for one in output.outputs:
                    if one.index in ended:
                        continue
                    if one.finished():
                        ended.add(one.index)
                    counts[one.index] += len(one.token_ids)
                    events.append(
                        writer.chunk(
                            [self._delta(one)],
                            usage=self._chunk_usage(counts[one.index], output),
                            fingerprint=one.finished() and not self.body.include_usage,
                        )
                    )
                if events:
                    yield b"".join(events)
        if self.body.include_usage and last is not None:
            yield writer.chunk([], usage=self._usage(sum(counts), last), fingerprint=True)

    def _first_chunks(self, output: RequestOutput, writer: ChunkWriter) -> list[bytes]:
        token_ids = self.job.token_ids if self.body.return_token_ids else None
        return [
            writer.chunk(
                [
                    {
                        "index": index,
                        "delta": {"role": ROLE, "content": self.echo},
                        "logprobs": None,
                        "finish_reason": None,
                        "prompt_token_ids": token_ids,
                    }
                ],
                usage=self._chunk_usage(0, output),
            )
            for index in range(self.body.choices_per_prompt)
        ]

    def _delta(self, one: CompletionOutput) -> dict[str, Any]:
        return {
            "index": one.index,
            "delta": {"content": one.text},
            "logprobs": self._logprobs(one),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            "token_ids": one.token_ids if self.body.return_token_ids else None,
        }

    def _logprobs(self, one: CompletionOutput) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(
            list(zip(one.token_ids, one.logprobs or [])),
            top=self.body.top_logprobs or 0,
            show=self.show,
            token_bytes=self.token_bytes,
        )

    def _chunk_usage(self, generated: int, output: RequestOutput) -> dict[str, Any] | None:
        return self._usage(generated, output) if self.body.continuous_usage else None

    def _usage(self, generated: int, output: RequestOutput) -> dict[str, Any]:
        return usage(len(self.job.token_ids), generated, output.num_cached_tokens)


ROUTES = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
