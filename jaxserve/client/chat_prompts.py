"""Conversations rendered to prompts by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.client.images import IMAGE, ImageUrl
from jaxserve.client.images import KEY as MULTI_MODAL
from jaxserve.errors import ValidationError
from jaxserve.params.prompts import TokensPrompt
from jaxserve.tokenization.control_tokens import unmarked
from jaxserve.tokenization.message_text import without_images
from jaxserve.tokenization.tokenizer import Tokenizer, check_template_variables

Message = Mapping[str, Any]
ALLOWED = "a list of messages such as {'role': 'user', 'content': 'text'}, or a list of such lists"


def chat_prompts(
    tokenizer: Tokenizer,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    variables: Mapping[str, Any] | None,
    *,
    chat_template: str | None,
    keep_control_tokens: bool,
    add_special_tokens: bool = False,
    **how: Any,
) -> list[TokensPrompt]:
    """Render each conversation to one prompt.

    Args:
        tokenizer: the model's; it has the chat template.
        messages: a conversation or a list of them.
        variables: further variables of the template.
        chat_template: replaces the tokenizer's; None: the tokenizer's.
        keep_control_tokens: whether names of control tokens in messages become control tokens.
        add_special_tokens: put the tokenizer's own around what the template has written.
        **how: other arguments of `Tokenizer.render_chat`.

    Raises:
        ValidationError: there are no messages, they are not messages, or the template refuses
            them.
    """
    if not _is_list(messages):
        raise ValidationError("messages", messages, ALLOWED)
    if not messages:
        raise ValidationError("messages", messages, "at least one message")
    conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        if not _is_list(conversation) or not all(isinstance(m, Mapping) for m in conversation):
            raise ValidationError("messages", messages, ALLOWED)
    check_template_variables(variables or {})
    prompts: list[TokensPrompt] = []
    for given in conversations:
        conversation, images = taken_apart(given)
        text = tokenizer.render_chat(
            conversation,
            chat_template=chat_template,
            mark=not keep_control_tokens,
            **how,
            **(variables or {}),
        )
        # as a rule the template has placed the special tokens already
        if keep_control_tokens:
            tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            special = add_special_tokens
            tokens = tokenizer.encode_chat(text, chat_template, add_special_tokens=special)
        prompt: TokensPrompt = {"prompt": unmarked(text), "prompt_token_ids": tokens}
        if images:
            prompt[MULTI_MODAL] = {IMAGE: images}
        prompts.append(prompt)
    return prompts


def taken_apart(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Messages as templates read them, and their images in order.

    Raises:
        ValidationError: an image that is not one.
    """
    found: list[Any] = []
    made = []
    for index, message in enumerate(messages):
        content = message.get("content")
        rest = without_images(content, f"messages[{index}].content", found)
        made.append(message if rest is content else {**message, "content": rest})
    return made, [ImageUrl(one) if isinstance(one, str) else one for one in found]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
