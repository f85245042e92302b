"""`/v1/messages`: the request of Anthropic's API, and the chat completion that it asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from jaxserve.errors import ValidationError
from server.protocol.anthropic_blocks import add_message, system_text
from server.protocol.body_errors import by_patterns
from server.protocol.chat import ChatCompletionRequest
from server.protocol.conversation import (
    MAX_MESSAGES,
    Conversation,
    PartCounter,
    check_foreign,
    functions_of,
    with_system,
)
from server.protocol.requests import INT64, ModelRequest, QueuedRequest, Strings
from server.protocol.tools import AUTO, NONE, REQUIRED

# Anthropic's choices of tools, as chat completions have them
_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}
SHARED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "cache_salt",
    "priority",
    "timeout",
    "vllm_xargs",
)
EFFORTS = ("low", "medium", "high", "xhigh", "max")
# Edits of the prompt that begin beyond some length: the answer says that none was made.
EDITS = ("clear_tool_uses_20250919", "clear_thinking_20251015")
# the name here of a chat completion's field
api_field = by_patterns(
    {
        r"messages\[.*": "messages",
        r"(tools\[\d+\])\.function\.parameters(.*)": r"\1.input_schema\2",
        r"(tools\[\d+\])\.function\.(.*)": r"\1.\2",
        r"tool_choice\.function\.name": "tool_choice.name",
        r"response_format\.json_schema\.(.*)": r"output_config.format.\1",
        r"response_format(.*)": r"output_config.format\1",
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
    }
)
# Fields that ask for what only Anthropic's own servers do: field -> values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "compaction": (),
    "container": (),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "inference_geo": (),
    "output_format": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}


class CountTokensRequest(ModelRequest):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: Any
    system: Any = None
    tools: Any = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None  # of a cache that finds prefixes by itself

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of thoughts; None: any number."""
        given = self.thinking or {}
        return given.get("budget_tokens") if given.get("type") == "enabled" else None

    @property
    def tells_thoughts(self) -> bool:
        return (self.thinking or {}).get("type") != "disabled"

    def forget_prompt(self) -> None:
        """Let go of what has become messages of a chat completion."""
        self.messages = []

    def check(self) -> None:
        """Rules that need nothing but the body.

        Raises:
            ValidationError: names the field, its value and what is allowed.
        """
        for name, value in (self.model_extra or {}).items():
            neutral = _NEUTRAL.get(name)
            if neutral is not None and value is not None and value not in neutral:
                allowed = " or ".join(["null", *map(json.dumps, neutral)])
                raise ValidationError(name, value, f"this server accepts only {allowed}")
        check_foreign(self)
        self.check_extras()
        _check_thinking(self.thinking)
        _check_edits(self.context_management or {})
        _check_output(self.output_config or {})

    def chat(self, *, merges_system: bool, reads_images: bool) -> ChatCompletionRequest:
        """The chat completion that the request asks for.

        Args:
            merges_system: messages of the system are at the head of the prompt, wherever they were.
            reads_images: whether messages of the user may have images.

        Raises:
            ValidationError: names the field.
        """
        return ChatCompletionRequest.model_validate(self._chat_fields(merges_system, reads_images))

    def _chat_fields(self, merges_system: bool, reads_images: bool) -> dict[str, Any]:
        messages = self._messages(reads_images)
        continues = messages[-1]["role"] == "assistant"
        if continues and "tool_calls" in messages[-1]:
            raise ValidationError("messages", "a last tool_use", "a tool_result behind it")
        choice = self.tool_choice or {}
        return {
            "model": self.model,
            "messages": with_system(messages, system_text(self.system), merges=merges_system),
            # an answer goes on from what the assistant has begun to say
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
            "tools": functions_of(self.tools, _function, "tools"),
            "tool_choice": _tool_choice(self.tool_choice),
            "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True,
            "include_reasoning": self.tells_thoughts,
            "response_format": _response_format((self.output_config or {}).get("format")),
            "reasoning_effort": (self.output_config or {}).get("effort"),
            "chat_template_kwargs": self._variables(),
        }

    def _variables(self) -> dict[str, Any]:
        kind = (self.thinking or {}).get("type")
        # how much is thought is the template's to say where it is "adaptive"
        thinks = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}}
        return {**thinks.get(str(kind), {}), **(self.chat_template_kwargs or {})}

    def _messages(self, reads_images: bool) -> list[dict[str, Any]]:
        given = self.messages
        if not isinstance(given, list) or not 0 < len(given) <= MAX_MESSAGES:
            shown = f"{len(given)} messages" if isinstance(given, list) else type(given).__name__
            raise ValidationError("messages", shown, f"a list of 1 to {MAX_MESSAGES} messages")
        conversation, parts = Conversation(reads_images=reads_images), PartCounter()
        for place, message in enumerate(given):
            add_message(conversation, message, f"messages[{place}]", parts)
        if not conversation.messages:
            raise ValidationError("messages", "no content", "content in one of them at least")
        if len(conversation.messages) > MAX_MESSAGES:
            shown = f"{len(conversation.messages)} messages and results"
            raise ValidationError("messages", shown, f"at most {MAX_MESSAGES}")
        return conversation.messages


class MessagesRequest(CountTokensRequest, QueuedRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    def _chat_fields(self, merges_system: bool, reads_images: bool) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in SHARED}
        return {
            **super()._chat_fields(merges_system, reads_images),
            **{name: value for name, value in shared.items() if value is not None},
            "stream": self.stream,
            "stop": self.stop_sequences or None,
            "max_tokens": self.max_tokens,
            "thinking_token_budget": self.thinking_budget,
        }


def _check_thinking(given: dict[str, Any] | None) -> None:
    kind = (given or {}).get("type")
    if given is not None and kind not in ("enabled", "adaptive", "disabled"):
        raise ValidationError("thinking.type", kind, "enabled, adaptive or disabled")
    budget = (given or {}).get("budget_tokens")
    is_number = isinstance(budget, int) and not isinstance(budget, bool)
    if budget is not None and not (is_number and 1 <= budget < INT64):
        raise ValidationError("thinking.budget_tokens", budget, "an integer >= 1")


def _check_edits(given: dict[str, Any]) -> None:
    edits = given.get("edits") or []
    if not isinstance(edits, list):
        raise ValidationError("context_management.edits", type(edits).__name__, "a list of edits")
    for place, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, dict) else type(edit).__name__
        if kind not in EDITS:
            at = f"context_management.edits[{place}].type"
            raise ValidationError(at, kind, f"one of {', '.join(EDITS)}")


def _check_output(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in ("format", "effort") and value is not None:
            raise ValidationError(f"output_config.{name}", value, "format and effort")
    effort = given.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise ValidationError("output_config.effort", effort, f"one of {', '.join(EFFORTS)}")


def _response_format(form: Any) -> dict[str, Any] | None:
    """`output_config.format` as `response_format` has it. Raises ValidationError."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else type(form).__name__
    if not isinstance(form, dict) or kind != "json_schema":
        raise ValidationError("output_config.format.type", kind, "json_schema")
    return {"type": kind, "json_schema": {"name": "answer", "schema": form.get("schema")}}


def _function(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ValidationError(at, type(tool).__name__, "a tool")
    if tool.get("type") not in (None, "custom"):
        allowed = "'custom': this server runs no tools itself"
        raise ValidationError(f"{at}.type", tool["type"], allowed)
    told = ("name", "description", "strict", "input_schema")
    given = {name: tool[name] for name in told if tool.get(name) is not None}
    schema = given.pop("input_schema", None)
    return given if schema is None else {**given, "parameters": schema}


def _tool_choice(given: dict[str, Any] | None) -> Any:
    if given is None:
        return None
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    if kind not in _CHOICES:
        raise ValidationError("tool_choice.type", kind, f"one of {', '.join([*_CHOICES, 'tool'])}")
    return _CHOICES[kind]
