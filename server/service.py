"""What every route needs of the engine: readiness, model names, prompts as token ids, limits."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

from jaxserve.errors import ValidationError
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from server.body import DEFAULT_MAX_BODY_BYTES
from server.errors import ApiError
from server.protocol.chat import TemplateFields
from server.protocol.logprobs import TokenText
from server.protocol.requests import GenerationRequest

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine

# The most completions that one HTTP request may start: prompts times n.
MAX_CHOICES = 16384


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of an HTTP request, ready for the engine.

    `arrival_time` is when the body was complete, by `time.monotonic()`.
    """

    token_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    arrival_time: float


class Service:
    """The engine as the routes see it.

    Args:
        engine: the engine, perhaps still loading.
        max_body_bytes: largest request body.
    """

    def __init__(self, engine: AsyncEngine, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> None:
        self.engine = engine
        self.max_body_bytes = max_body_bytes
        self.created = int(time.time())
        self.model_names = engine.config.served_model_name or (engine.config.model,)

    @staticmethod
    def of(request: Request) -> Service:
        """The service of the application that handles this request."""
        service: Service = request.app.state.service
        return service

    def require_ready(self) -> None:
        """Raises ApiError 503 while the model loads and after the engine has died."""
        if self.engine.is_dead:
            raise ApiError(503, "the engine has stopped; the server must be restarted")
        if not self.engine.is_ready:
            raise ApiError(503, "the model is still loading", headers={"Retry-After": "5"})

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with: the default one when the request gives none.

        Raises:
            ApiError: 404, no model has this name.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404, f"The model `{name[:200]}` does not exist; it can be {known}", param="model"
            )
        return name

    async def encode(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """Token ids of a text, tokenised off the event loop.

        Raises:
            ValidationError: the text cannot fit into the context.
        """

        def encode() -> list[int]:
            self._check_text_length(text, field)
            return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await asyncio.to_thread(encode)

    async def encode_chat(self, request: TemplateFields, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a conversation, through the model's chat template.

        Raises:
            ValidationError: the template refuses the messages, or they cannot fit.
        """
        messages = request.render_messages()

        def render() -> str:
            text = self.engine.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **(request.chat_template_kwargs or {}),
            )
            return str(text)

        text = await asyncio.to_thread(render)
        return await self.encode(text, add_special_tokens=add_special_tokens, field="messages")

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids, decoded off the event loop."""
        return await asyncio.to_thread(
            self.engine.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    def check_token_ids(self, token_ids: list[int], field: str) -> None:
        """Raises ValidationError unless all ids are tokens of the model."""
        vocab_size = self.engine.model_config.vocab_size
        for edge in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= edge < vocab_size:
                raise ValidationError(field, edge, f"token ids from 0 to {vocab_size - 1}")

    def max_tokens(
        self, requested: int | None, prompt_length: int, *, prompt_field: str, limit_field: str
    ) -> int:
        """How many tokens may be generated after a prompt: what was asked for, cut to the context.

        Raises:
            ValidationError: the prompt fills the context, or more was asked for than the context.
        """
        context = self.engine.max_model_len
        if prompt_length == 0:
            raise ValidationError(prompt_field, "", "a prompt of at least one token")
        if prompt_length >= context:
            raise ValidationError(
                prompt_field,
                f"{prompt_length} tokens",
                f"the context is {context} tokens and at least one must be left for the output",
            )
        if requested is None:
            return context - prompt_length
        if requested < 0 or requested > context:
            raise ValidationError(limit_field, requested, f"1 to the context of {context} tokens")
        return min(requested, context - prompt_length)

    def check_choices(self, request: GenerationRequest, num_prompts: int) -> None:
        """Raises ValidationError when prompts times n is more than the server starts at once."""
        most = MAX_CHOICES // num_prompts
        if request.choices_per_prompt > most:
            raise ValidationError(
                "n", request.choices_per_prompt, f"1 to {most} for {num_prompts} prompt(s)"
            )

    def check_token_lists(self, request: GenerationRequest) -> None:
        """Raises ValidationError for a parameter that names more tokens than the model has.

        Before each of them is looked at: a body may hold millions.
        """
        vocab_size = self.engine.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            count = len(getattr(request, name) or ())
            if count > vocab_size:
                raise ValidationError(name, f"{count} tokens", f"at most {vocab_size} tokens")

    def check_logprobs(self, field: str, value: int | None) -> None:
        """Raises ValidationError when more logprobs are asked for than the engine gives."""
        most = self.engine.config.max_logprobs
        if value is not None and most != -1 and not 0 <= value <= most:
            raise ValidationError(field, value, f"0 to {most}")

    def generate(self, job: Job) -> AsyncIterator[RequestOutput]:
        """Start one prompt; closing the iterator aborts it."""
        return self.engine.generate(
            {"prompt_token_ids": job.token_ids},
            job.params,
            job.request_id,
            priority=job.priority,
            arrival_time=job.arrival_time,
        )

    def _check_text_length(self, text: str, field: str) -> None:
        """Refuse a text that no tokenisation could fit, before any work is spent on it."""
        context = self.engine.max_model_len
        if len(text) <= context:
            return
        least = len(text) // self._longest_token
        if least >= context:
            raise ValidationError(
                field,
                f"a text of {len(text)} characters, at least {least} tokens",
                f"the context is {context} tokens",
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token in the vocabulary's spelling."""
        tokenizer = self.engine.tokenizer
        spelled = tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))
        return max(len(token) for token in spelled if token)


def response_id(prefix: str, request: Request, body_id: str | None) -> str:
    """The id of a response: `<prefix>-<client's request id or 16 hex digits>`."""
    given = getattr(request.state, "client_request_id", None) or body_id
    return f"{prefix}-{given or secrets.token_hex(8)}"


def engine_id(answer_id: str, index: int) -> str:
    """The id of one prompt in the engine: unique even when clients repeat their request ids."""
    return f"{answer_id}-{index}-{secrets.token_hex(4)}"


def token_text(service: Service, *, as_ids: bool) -> TokenText:
    """How logprobs show a token: its text, or `token_id:<id>`."""
    if as_ids:
        return "token_id:{}".format
    return service.engine.tokenizer.token_text
