"""`/v1/chat/completions`: the request and its messages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jaxserve.errors import ValidationError
from jaxserve.tokenization.tokenizer import RESERVED_TEMPLATE_NAMES
from server.protocol.requests import GenerationRequest, ModelRequest, StrictModel

# Variables of the template that have a field of their own; a request must not set them behind that
# field's back (CVE-2025-62426).
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "documents", "tools"}
)


class Message(StrictModel):
    """One turn; `content` is checked by `render_messages`."""

    role: str
    content: Any = None
    name: str | None = None


Messages = Annotated[list[Message], Field(fail_fast=True)]


class TemplateFields(StrictModel):
    """How messages become one prompt: shared by chat completions and `/tokenize`."""

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def check_template(self) -> None:
        """Rules of the template fields.

        Raises:
            ValidationError: names the field.
        """
        if not self.messages:
            raise ValidationError("messages", [], "at least one message")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValidationError(
                "continue_final_message", True, "only with add_generation_prompt=false"
            )
        for name in self.chat_template_kwargs or {}:
            if name in _RESERVED_TEMPLATE_KWARGS or name in RESERVED_TEMPLATE_NAMES:
                raise ValidationError("chat_template_kwargs", name, "a variable of the template")

    def render_messages(self) -> list[dict[str, Any]]:
        """The messages as the template reads them: role and text.

        Raises:
            ValidationError: content that is no text, or tools.
        """
        return [_render(message, index) for index, message in enumerate(self.messages)]


class ChatCompletionRequest(TemplateFields, GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    def check(self) -> None:
        super().check()
        self.check_template()
        if self.top_logprobs and not self.logprobs:
            raise ValidationError("top_logprobs", self.top_logprobs, "only with logprobs=true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValidationError(
                "max_completion_tokens",
                self.max_completion_tokens,
                f"the same as max_tokens={self.max_tokens}, or only one of them",
            )

    @property
    def max_tokens_field(self) -> str:
        """The name under which the request gave its limit, for messages."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def requested_max_tokens(self) -> int | None:
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given


class ChatTokenizeRequest(TemplateFields, ModelRequest):
    """Body of `POST /tokenize` that holds messages."""

    add_special_tokens: bool = False
    return_token_strs: bool | None = None


def _render(message: Message, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if (message.model_extra or {}).get(name):
            raise ValidationError(f"{where}.{name}", "...", "no tools and no audio")
    if message.role in ("tool", "function"):
        raise ValidationError(f"{where}.role", message.role, "no tools")
    rendered = {"role": message.role, "content": _text(message.content, where)}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(
            f"{where}.content", type(content).__name__, "a string or a list of text parts"
        )
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ValidationError(where, type(part).__name__, "a text part")
    if part.get("type") != "text":
        raise ValidationError(f"{where}.type", part.get("type"), "'text'")
    if not isinstance(part.get("text"), str):
        raise ValidationError(f"{where}.text", type(part.get("text")).__name__, "a string")
    return str(part["text"])
