"""`/v1/chat/completions`: the request and its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from jaxserve.errors import ValidationError
from jaxserve.tokenization.message_text import content_text, has_images, without_images
from jaxserve.tokenization.tokenizer import check_template_variables
from server.protocol.prompts import MAX_PROMPTS
from server.protocol.requests import GenerationRequest, ModelRequest, SessionName, StrictModel
from server.protocol.response_format import FormatFields
from server.protocol.tool_messages import rendered_calls
from server.protocol.tools import AskedTools, asked_tools

MAX_PARTS = 2048  # of content, in all messages
MAX_VARIABLES = 64
MAX_TEMPLATE = 65_536  # characters
PROMPT_IDS = "prompt_token_ids"  # the key of `kv_transfer_params` that is served


class Message(StrictModel):
    """One turn; `content` is checked by `render_messages`."""

    role: Annotated[str, Field(max_length=64)]
    content: Any = None
    name: Annotated[str, Field(max_length=1024)] | None = None


Messages = Annotated[list[Message], Field(fail_fast=True)]


class TemplateFields(StrictModel):
    """How messages become one prompt: shared by chat completions and `/tokenize`."""

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
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
        size = len(self.chat_template or "")
        if size > MAX_TEMPLATE:
            allowed = f"at most {MAX_TEMPLATE} characters"
            raise ValidationError("chat_template", f"{size} characters", allowed)
        check_variables(self.chat_template_kwargs or {})

    def template_variables(self) -> dict[str, Any]:
        """Further variables of the template."""
        return dict(self.chat_template_kwargs or {})

    def render_messages(self, images: list[str] | None = None) -> list[dict[str, Any]]:
        """The messages as the template reads them: role, text, calls, thoughts.

        Args:
            images: takes the addresses of images, in their order; None: text alone is read.

        Raises:
            ValidationError: content that is no text, or calls that are none.
        """
        parts = sum(len(m.content) for m in self.messages if isinstance(m.content, list))
        if parts > MAX_PARTS:
            raise ValidationError(
                "messages", f"{parts} parts", f"at most {MAX_PARTS} parts of content"
            )
        return [_render(message, index, images) for index, message in enumerate(self.messages)]


def check_variables(variables: Mapping[str, Any]) -> None:
    """Rules of `chat_template_kwargs`. Raises ValidationError."""
    if len(variables) > MAX_VARIABLES:
        count = f"{len(variables)} variables"
        raise ValidationError("chat_template_kwargs", count, f"at most {MAX_VARIABLES}")
    check_template_variables(variables)
    if "documents" in variables:  # a field of its own, which is refused
        raise ValidationError("chat_template_kwargs", "documents", "a variable of the template")


class ChatCompletionRequest(TemplateFields, GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    request_kind: ClassVar[str] = "chat"

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    return_prompt_text: bool | None = None
    prompt_cache_key: SessionName | None = None
    kv_transfer_params: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @property
    def session(self) -> str:
        return self.session_id or self.prompt_cache_key or ""

    def check(self) -> None:
        super().check()
        self.check_template()
        self.asked_tools()
        for name, value in (self.kv_transfer_params or {}).items():
            if name != PROMPT_IDS and value is not None and value is not False:
                allowed = f"null beside {PROMPT_IDS}: pages stay in their engine"
                raise ValidationError(f"kv_transfer_params.{name}", value, allowed)
        if self.top_logprobs and not self.logprobs:
            raise ValidationError("top_logprobs", self.top_logprobs, "only with logprobs=true")

    def template_variables(self) -> dict[str, Any]:
        effort, variables = self.reasoning_effort, super().template_variables()
        if effort is None:
            return variables
        # templates ask for either; what the request says of them itself wins
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | variables

    @property
    def given_prompt_ids(self) -> Any:
        """The prompt, where another engine has made it of the messages; None: this one does."""
        return (self.kv_transfer_params or {}).get(PROMPT_IDS)

    def forget_prompt(self) -> None:
        super().forget_prompt()
        self.kv_transfer_params = None

    def shown_of_prompt(self, vocab_size: int) -> dict[str, int]:
        shown = super().shown_of_prompt(vocab_size)
        if self.return_prompt_text:
            shown["return_prompt_text"] = 1
        if self.streams:  # each choice has a first chunk, which says it all
            shown = {name: count * self.choices_per_prompt for name, count in shown.items()}
        if self.echo:
            shown["echo"] = self.choices_per_prompt
        return shown

    def asked_tools(self) -> AskedTools:
        """What is said of tools. Raises ValidationError."""
        return asked_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def constraint(self) -> FormatFields | None:
        asked, demanded = super().constraint(), self.asked_tools().constraint()
        if self.structured_outputs and demanded is not None:
            raise ValidationError(
                "tool_choice", self.tool_choice, "none or auto beside a constraint of the text"
            )
        return demanded or asked  # a format is that of texts, which a demanded call is not

    @property
    def max_tokens_field(self) -> str:
        """The name under which the request gave its limit, for messages."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def requested_max_tokens(self) -> int | None:
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given


class BatchChatRequest(ChatCompletionRequest):
    """Body of `POST /v1/chat/completions/batch`: each of the messages is a conversation."""

    messages: Annotated[  # type: ignore[assignment]
        list[Messages], Field(fail_fast=True, max_length=MAX_PROMPTS)
    ]

    def check(self) -> None:
        super().check()
        for place, turns in enumerate(self.messages):
            if not turns:
                raise ValidationError(f"messages[{place}]", [], "at least one message")
        for name in ("stream", "tools", "use_beam_search", "prompt_logprobs", "return_prompt_text"):
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ValidationError(name, value, "null in a batch")
        if self.choices_per_prompt != 1:
            raise ValidationError("n", self.n, "1 in a batch")
        if (given := self.given_prompt_ids) is not None:
            raise ValidationError(f"kv_transfer_params.{PROMPT_IDS}", given, "null in a batch")

    def conversations(self) -> Iterator[ChatCompletionRequest]:
        """A chat completion of each, made when it is asked for."""
        for turns in self.messages:
            yield self.model_copy(update={"messages": turns})


class ChatTokenizeRequest(TemplateFields, ModelRequest):
    """Body of `POST /tokenize` that holds messages."""

    add_special_tokens: bool = False
    return_token_strs: bool | None = None
    tools: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def rendered_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools as the template is given them. Raises ValidationError."""
        return asked_tools(self.tools, None, None).tools


def _without_images(content: Any, where: str, images: list[str]) -> Any:
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") == "image":  # only code has such images
            raise ValidationError(f"{where}[{place}].type", "image", "image_url for images")
    return without_images(content, where, images)


def _render(message: Message, index: int, images: list[str] | None) -> dict[str, Any]:
    where = f"messages[{index}]"
    extras = message.model_extra or {}
    for name in ("function_call", "audio"):
        if extras.get(name):
            raise ValidationError(f"{where}.{name}", "...", "no functions and no audio")
    if message.role == "function":
        raise ValidationError(f"{where}.role", message.role, "tool for what a call has given")
    content: Any = message.content
    if images is not None:
        content = _without_images(content, f"{where}.content", images)
    if images is None or not has_images(content):
        content = content_text(content, f"{where}.content")
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    if extras.get("tool_calls"):
        rendered["tool_calls"] = rendered_calls(extras["tool_calls"], f"{where}.tool_calls")
    for name in ("tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(extras.get(name), str | None):
            raise ValidationError(f"{where}.{name}", type(extras[name]).__name__, "text")
    if extras.get("tool_call_id") is not None:
        rendered["tool_call_id"] = extras["tool_call_id"]
    thought = extras.get("reasoning") or extras.get("reasoning_content")
    if thought:  # templates know it by either name
        rendered["reasoning"] = rendered["reasoning_content"] = thought
    if message.name is not None:
        rendered["name"] = message.name
    return rendered
