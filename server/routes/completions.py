"""`POST /v1/completions`: texts that continue prompts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.outputs import CompletionOutput
from server.answers import COMMON_FIELDS, Answer, Piece
from server.endpoint import answer
from server.engine_route import EngineRoute
from server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from server.protocol.logprobs import Position, completion_logprobs, prompt_logprobs
from server.protocol.responses import RepeatedList
from server.request_checks import check_batch, check_choices


async def create_completion(request: Request) -> Response:
    """Complete one or more prompts, streamed or not."""
    return await answer(request, CompletionRequest, Completions)


class Completions(Answer[CompletionRequest]):
    """A choice is a text."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def fields(self) -> dict[str, str]:
        return COMMON_FIELDS | {"prompt_token_ids": "prompt", "beam_width": "n"}

    async def prepare(self) -> None:
        body, service = self.body, self.service
        prompts = body.prompts()
        check_choices(service, body, len(prompts))
        check_batch(service, len(prompts), "prompt")
        self.check_room(len(prompts))
        self._texts: list[str] = []  # of the prompts, for echo
        self._scored: dict[int, RepeatedList] = {}  # by prompt
        self._echoed: dict[int, dict[str, list[Any]]] = {}  # logprobs of each prompt
        self._offsets = Counter[int]()  # characters of each choice with logprobs sent so far
        # With echo and max_tokens=0 one token is generated and dropped: the prompt is scored.
        limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling_params(
            max_tokens=limit or 1,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs
            if body.echo and body.prompt_logprobs is None
            else body.prompt_logprobs,
            defaults=service.sampling_defaults,
        )
        cut, special = service.cut(body, limit), body.add_special_tokens is not False
        for prompt in prompts:
            if isinstance(prompt, str):
                token_ids = await service.encode(
                    prompt, add_special_tokens=special, field="prompt", cut=cut
                )
            else:
                token_ids = prompt if cut is None else cut.of(prompt)
            await self.add_prompt(token_ids, await self.with_tags(params, token_ids))
            text = ""
            if body.echo and cut is None and isinstance(prompt, str):
                text = prompt
            elif body.echo:
                text = await service.decode(token_ids, skip_special_tokens=False)
            self._texts.append(text)

    def shown(self, completion: CompletionOutput) -> CompletionOutput:
        if self.body.max_tokens != 0:
            return completion
        reports = completion.reports
        return CompletionOutput(completion.index, "", [], finish_reason="length", reports=reports)

    def choice(self, piece: Piece) -> dict[str, Any]:
        scored = piece.output.prompt_logprobs if self.body.prompt_logprobs is not None else None
        if scored is not None and piece.position not in self._scored:
            # the same for all its choices
            self._scored[piece.position] = RepeatedList(prompt_logprobs(scored))
        return self.delta(piece) | {"prompt_logprobs": self._scored.get(piece.position)}

    def delta(self, piece: Piece) -> dict[str, Any]:
        new, prompt_ids = piece.new, self.requests[piece.position].group.prompt_token_ids
        text = new.text
        logprobs = self._logprobs(piece)
        if self.body.echo and piece.first:
            text = self._texts[piece.position] + text
        with_ids = self.body.return_token_ids
        return {
            "index": piece.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
            "prompt_token_ids": prompt_ids if with_ids and piece.first else None,
            "token_ids": new.token_ids if with_ids else None,
            **piece.reports,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        echoed = self._echoed_logprobs(piece) if self.body.echo and piece.first else None
        if echoed is not None:
            self._offsets[piece.index] = sum(map(len, echoed["tokens"]))
        shown = self._shown_logprobs(
            list(zip(piece.new.token_ids, piece.new.logprobs or [])),
            self._offsets[piece.index],
            -1 if self.body.logprob_token_ids else self.body.logprobs,
        )
        self._offsets[piece.index] += sum(map(len, shown["tokens"]))
        if echoed is None:
            return shown
        return {name: echoed[name] + shown[name] for name in shown}

    def _echoed_logprobs(self, piece: Piece) -> dict[str, list[Any]]:
        """The prompt's logprobs; all its choices begin with them."""
        found = self._echoed.get(piece.position)
        if found is None:
            prompt_ids = self.requests[piece.position].group.prompt_token_ids
            scored = list(zip(prompt_ids, piece.output.prompt_logprobs or []))
            found = self._echoed[piece.position] = self._shown_logprobs(
                scored, 0, self.body.logprobs
            )
        return found

    def _shown_logprobs(
        self, positions: list[Position], offset: int, top: int | None
    ) -> dict[str, list[Any]]:
        return completion_logprobs(positions, top=top or 0, first_offset=offset, show=self.show)


ROUTES = [EngineRoute("/v1/completions", create_completion)]
