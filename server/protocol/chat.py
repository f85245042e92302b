"""`/v1/chat/completions`: the request and its messages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jaxserve.errors import ValidationError
from jaxserve.tokenization.messages import content_text
from jaxserve.tokenization.tokenizer import check_template_variables
from server.protocol.requests import GenerationRequest, ModelRequest, StrictModel


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
        variables = self.chat_template_kwargs or {}
        check_template_variables(variables)
        if "documents" in variables:  # a field of its own, which is refused
            raise ValidationError("chat_template_kwargs", "documents", "a variable of the template")

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
    rendered = {"role": message.role, "content": content_text(message.content, f"{where}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered
