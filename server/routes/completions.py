"""`POST /v1/completions`."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.outputs import CompletionOutput, RequestOutput
from server.body import read_body
from server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from server.protocol.logprobs import Position, TokenText, completion_logprobs, prompt_logprobs
from server.protocol.responses import ChunkWriter, response_body, usage
from server.service import Job, Service, engine_id, response_id, token_text
from server.streaming import EventStream, merge, until_disconnect

KIND = "text_completion"


async def create_completion(request: Request) -> Response:
    """Complete one or more prompts, streamed or not."""
    service = Service.of(request)
    service.require_ready()
    body = await read_body(request, CompletionRequest, service.max_body_bytes)
    body.check()
    model = service.resolve_model(body.model)
    answer_id = response_id("cmpl", request, body.request_id)
    created = int(time.time())
    work = _prepare(service, body, answer_id, request.state.arrival_time)
    prompts, jobs = await until_disconnect(request.receive, work)
    answer = _Answer(
        body=body,
        prompts=prompts,
        jobs=jobs,
        show=token_text(service, as_ids=bool(body.return_tokens_as_token_ids)),
        writer=ChunkWriter(answer_id, KIND, created, model),
    )
    if body.streams:
        return EventStream(answer.events(service))
    finals = await until_disconnect(request.receive, _collect(service, jobs))
    choices, counts = answer.choices(finals)
    return JSONResponse(response_body(answer_id, KIND, created, model, choices, counts))


async def _prepare(
    service: Service, body: CompletionRequest, answer_id: str, arrival_time: float
) -> tuple[list[str], list[Job]]:
    """The prompts' texts (for echo, otherwise empty) and the engine's jobs."""
    prompts = body.prompts()
    service.check_choices(body, len(prompts))
    service.check_token_lists(body)
    service.check_logprobs("logprobs", body.logprobs)
    service.check_logprobs("prompt_logprobs", body.prompt_logprobs)
    requested = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    texts: list[str] = []
    jobs: list[Job] = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            token_ids = await service.encode(prompt, add_special_tokens=special, field="prompt")
        else:
            token_ids = prompt
        limit = service.max_tokens(
            requested, len(token_ids), prompt_field="prompt", limit_field="max_tokens"
        )
        # After the length: what does not fit is refused without looking at each id.
        service.check_token_ids(token_ids, "prompt")
        text = ""
        if body.echo:
            text = (
                prompt
                if isinstance(prompt, str)
                else await service.decode(token_ids, skip_special_tokens=False)
            )
        texts.append(text)
        # With echo and max_tokens=0 one token is generated and dropped: the prompt is scored.
        limit = max(limit, 1)
        if jobs:
            # the others differ in their room only: validated once, lists shared
            params = copy.copy(jobs[0].params)
            params.max_tokens = limit
        else:
            params = body.sampling_params(
                max_tokens=limit,
                logprobs=body.logprobs,
                prompt_logprobs=_wanted_prompt_logprobs(body),
            )
        one_id = engine_id(answer_id, index)
        jobs.append(Job(token_ids, params, one_id, body.priority or 0, arrival_time))
    return texts, jobs


def _wanted_prompt_logprobs(body: CompletionRequest) -> int | None:
    return body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs


async def _collect(service: Service, jobs: list[Job]) -> list[RequestOutput]:
    """The final output of each job, in order."""
    finals: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(merge([service.generate(job) for job in jobs])) as outputs:
        async for index, output in outputs:
            finals[index] = output
    return [finals[index] for index in range(len(jobs))]


@dataclass
class _Progress:
    """What has been sent of one choice."""

    tokens: int = 0
    offset: int = 0
    echoed: bool = False
    finished: bool = False


@dataclass
class _Answer:
    """The response of one HTTP request, whole or in chunks."""

    body: CompletionRequest
    prompts: list[str]
    jobs: list[Job]
    show: TokenText
    writer: ChunkWriter
    progress: dict[int, _Progress] = field(default_factory=dict)

    @property
    def scores_only(self) -> bool:
        return self.body.max_tokens == 0

    def choices(self, finals: list[RequestOutput]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """All choices and the usage of a response that is not streamed."""
        choices = []
        generated = 0
        for prompt_index, output in enumerate(finals):
            for completion in output.outputs:
                choice = self._choice(prompt_index, output, completion)
                tokens = output.prompt_logprobs if self.body.prompt_logprobs is not None else None
                choice["prompt_logprobs"] = None if tokens is None else prompt_logprobs(tokens)
                choices.append(choice)
                generated += 0 if self.scores_only else len(completion.token_ids)
        choices.sort(key=lambda choice: choice["index"])
        return choices, usage(
            sum(len(job.token_ids) for job in self.jobs),
            generated,
            sum(output.num_cached_tokens for output in finals),
        )

    async def events(self, service: Service) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed response."""
        generated = 0
        cached: dict[int, int] = {}
        streams = merge([service.generate(job) for job in self.jobs])
        async with contextlib.aclosing(streams) as outputs:
            async for prompt_index, output in outputs:
                cached[prompt_index] = output.num_cached_tokens
                events = []
                for completion in output.outputs:
                    if self._ended(prompt_index, completion):
                        continue
                    choice = self._choice(prompt_index, output, completion)
                    new = 0 if self.scores_only else len(completion.token_ids)
                    generated += new
                    progress = self.progress[choice["index"]]
                    progress.tokens += new
                    events.append(
                        self.writer.chunk(
                            [choice],
                            usage=self._chunk_usage(prompt_index, progress, output),
                            fingerprint=progress.finished and not self.body.include_usage,
                        )
                    )
                if events:
                    yield b"".join(events)
        if self.body.include_usage:
            prompt_tokens = sum(len(job.token_ids) for job in self.jobs)
            counts = usage(prompt_tokens, generated, sum(cached.values()))
            yield self.writer.chunk([], usage=counts, fingerprint=True)

    def _chunk_usage(
        self, prompt_index: int, progress: _Progress, output: RequestOutput
    ) -> dict[str, Any] | None:
        if not self.body.continuous_usage:
            return None
        prompt_tokens = len(self.jobs[prompt_index].token_ids)
        return usage(prompt_tokens, progress.tokens, output.num_cached_tokens)

    def _index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self.body.choices_per_prompt + completion.index

    def _ended(self, prompt_index: int, completion: CompletionOutput) -> bool:
        """An aborted request reports all its choices once more, also those that had ended."""
        progress = self.progress.get(self._index(prompt_index, completion))
        return progress is not None and progress.finished

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        """One choice: what is new in it since the last call."""
        index = self._index(prompt_index, completion)
        progress = self.progress.setdefault(index, _Progress())
        text, token_ids, logprobs = completion.text, completion.token_ids, completion.logprobs
        if self.scores_only:
            text, token_ids, logprobs = "", [], []
        positions: list[Position] = list(zip(token_ids, logprobs or []))
        first = not progress.echoed
        progress.echoed = True
        if self.body.echo and first:
            text = self.prompts[prompt_index] + text
            prompt_ids = self.jobs[prompt_index].token_ids
            positions = [*zip(prompt_ids, output.prompt_logprobs or []), *positions]
        finish_reason = "length" if self.scores_only else completion.finish_reason
        progress.finished = finish_reason is not None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(positions, progress),
            "finish_reason": finish_reason,
            "stop_reason": None if self.scores_only else completion.stop_reason,
            "prompt_token_ids": self.jobs[prompt_index].token_ids
            if self.body.return_token_ids and first
            else None,
            "token_ids": token_ids if self.body.return_token_ids else None,
        }

    def _logprobs(self, positions: list[Position], progress: _Progress) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        shown = completion_logprobs(
            positions, top=self.body.logprobs, first_offset=progress.offset, show=self.show
        )
        progress.offset += sum(len(token) for token in shown["tokens"])
        return shown


ROUTES = [Route("/v1/completions", create_completion, methods=["POST"])]
