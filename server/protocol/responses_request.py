"""`/v1/responses`: the request, and the chat completion that it asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from jaxserve.errors import ValidationError
from server.protocol.body_errors import by_patterns
from server.protocol.chat import ChatCompletionRequest
from server.protocol.conversation import (
    ASSISTANT,
    MAX_MESSAGES,
    check_foreign,
    functions_of,
    with_system,
)
from server.protocol.requests import ModelRequest, QueuedRequest, SamplingRequest, StreamOptions
from server.protocol.responses import dumps

LOGPROBS = "message.output_text.logprobs"
# Thoughts come as they are, in `content`, and can be sent back so.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
MAX_METADATA = 16
MAX_METADATA_CHARACTERS = 512  # of a value, 64 of a name
_ID = re.compile(r"resp_[0-9a-f]{1,64}")
# What a request has under the same name as a chat completion, beside sampling parameters.
SHARED = (
    "model",
    "stream",
    "parallel_tool_calls",
    "structured_outputs",
    "cache_salt",
    "prompt_cache_key",
    "priority",
    "timeout",
    "request_id",
    "include_reasoning",
    "vllm_xargs",
)
# the name here of a chat completion's field
api_field = by_patterns(
    {
        r"messages(\[.*)?": "input",
        r"(tools\[\d+\])\.function\.(.*)": r"\1.\2",
        r"tool_choice\.function\.name": "tool_choice.name",
        r"response_format\.json_schema\.(.*)": r"text.format.\1",
        r"response_format(.*)": r"text.format\1",
        "max_tokens": "max_output_tokens",
        "return_(prompt_text|token_ids)": "enable_response_messages",
    }
)


class Echo(NamedTuple):
    """What a response repeats of its request: JSON, made once however often it is told.

    Attributes:
        fields: an object of all fields but `tools`.
        tools: their list.
    """

    fields: bytes
    tools: bytes


class ResponsesRequest(QueuedRequest, SamplingRequest):
    """Body of `POST /v1/responses`; sampling parameters are those of chat completions."""

    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that a server runs, of which there are none
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    top_logprobs: int | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    conversation: Any = None
    prompt: Any = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    structured_outputs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    enable_response_messages: bool | None = None
    request_id: str | None = None

    @property
    def keeps(self) -> bool:
        """Whether the response is to be kept, which is so unless it is said."""
        return self.store is not False

    @property
    def tells_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def forget_prompt(self) -> None:
        """Let go of what has become messages."""
        self.input = []

    def forget_echo(self) -> None:
        """Let go of what is large and in `echoed`."""
        self.instructions = self.text = self.tools = self.tool_choice = None

    def check(self) -> None:
        """Rules that need nothing but the body.

        Raises:
            ValidationError: names the field, its value and what is allowed.
        """
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise ValidationError(name, "...", "null: this server keeps none")
        check_foreign(self)
        self.check_extras()
        if self.stream_options is not None and not self.stream:
            given = self.stream_options.model_dump()
            raise ValidationError("stream_options", given, "only with stream=true")
        for name in self.include or ():
            if name not in INCLUDED:
                raise ValidationError("include", name, f"one of {', '.join(INCLUDED)}")
        if self.background and self.stream:
            raise ValidationError("background", True, "false beside stream=true")
        if self.background and not self.keeps:
            raise ValidationError(
                "background", True, "background can only be used when `store` is true"
            )
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ValidationError("max_output_tokens", self.max_output_tokens, "1 or more")
        self._check_metadata()
        _check_reasoning(self.reasoning or {})
        _check_text(self.text or {})

    def _check_metadata(self) -> None:
        given = self.metadata or {}
        if len(given) > MAX_METADATA:
            raise ValidationError("metadata", f"{len(given)} pairs", f"at most {MAX_METADATA}")
        for name, value in given.items():
            if len(name) > 64 or len(value) > MAX_METADATA_CHARACTERS:
                allowed = f"at most {MAX_METADATA_CHARACTERS} characters, 64 of a name"
                raise ValidationError(f"metadata.{name[:64]}", value, allowed)

    def chat(self, messages: Sequence[dict[str, Any]]) -> ChatCompletionRequest:
        """The chat completion that the request asks for.

        Args:
            messages: the conversation, without `instructions`.

        Raises:
            ValidationError: names the field.
        """
        if len(messages) > MAX_MESSAGES:
            allowed = f"at most {MAX_MESSAGES} in all"
            raise ValidationError("input", f"{len(messages)} messages", allowed)
        names = (*SHARED, *(SamplingRequest.model_fields.keys() - ModelRequest.model_fields.keys()))
        fields = {name: getattr(self, name) for name in names}
        variables, effort = self.chat_template_kwargs or {}, (self.reasoning or {}).get("effort")
        if effort is not None:
            thinks = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            variables = thinks | variables
        continues = isinstance(self.input, list) and any(map(_is_cut_off, self.input[-1:]))
        given: dict[str, Any] = {name: v for name, v in fields.items() if v is not None} | {
            "messages": with_system(messages, self.instructions),
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
            "max_tokens": self.max_output_tokens,
            "tools": functions_of(self.tools, _function, "functions"),
            "tool_choice": _tool_choice(self.tool_choice),
            "response_format": _response_format((self.text or {}).get("format")),
            "chat_template_kwargs": variables or None,
        }
        if self.tells_logprobs:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.enable_response_messages:
            given |= {"return_prompt_text": True, "return_token_ids": True}
        return ChatCompletionRequest.model_validate(given)

    def echoed(self) -> Echo:
        """JSON of what the response repeats of the request."""
        told = {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **(self.reasoning or {})},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.keeps,
            "text": {"format": {"type": "text"}, **(self.text or {})},
            "tool_choice": self.tool_choice or "auto",
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "user": self.user,
        }
        return Echo(dumps(told).encode(), dumps(self.tools or []).encode())


class InputTokensRequest(ResponsesRequest):
    """Body of `POST /v1/responses/input_tokens`."""

    input: Any = None


def is_response_id(text: str) -> bool:
    """Whether a response of this server may have this id."""
    return _ID.fullmatch(text) is not None


def _is_cut_off(item: Any) -> bool:
    """Whether an answer goes on from an item: what the assistant has begun to say."""
    if not isinstance(item, dict) or item.get("role") != ASSISTANT:
        return False
    return item.get("status") in ("in_progress", "incomplete")


def _check_reasoning(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        at = f"reasoning.{name}"
        if name == "effort":
            if not isinstance(value, str | None) or len(value or "") > 64:
                raise ValidationError(at, value, "a word that the model's template knows")
        elif value is not None and (name not in ("summary", "generate_summary") or value != "auto"):
            allowed = "null or auto: no summaries are written, thoughts are told as they are"
            raise ValidationError(at, value, allowed)


def _check_text(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name == "verbosity" and value in (None, "low", "medium", "high"):
            continue
        if name != "format":
            raise ValidationError(f"text.{name}", value, "format, and verbosity low to high")


def _response_format(given: Any) -> dict[str, Any] | None:
    """`text.format` as `response_format` has it. Raises ValidationError."""
    if given is None:
        return None
    kinds = ("text", "json_object", "json_schema")
    kind = given.get("type") if isinstance(given, dict) else type(given).__name__
    if not isinstance(given, dict) or kind not in kinds:
        raise ValidationError("text.format.type", kind, f"one of {', '.join(kinds)}")
    if kind != "json_schema":
        return {"type": kind}
    described = {name: value for name, value in given.items() if name != "type"}
    return {"type": kind, "json_schema": described}


def _function(tool: Any, at: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if kind != "function":
        raise ValidationError(f"{at}.type", kind, "'function': this server runs no tools itself")
    told = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in told if tool.get(name) is not None}


def _tool_choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise ValidationError("tool_choice.type", given.get("type"), "'function'")
    return {"type": "function", "function": {"name": given.get("name")}}
