"""Items of the Responses API: a request's become messages, an answer's parts become items."""

from __future__ import annotations

import secrets
from typing import Any

from jaxserve.errors import ValidationError
from server.answer_parts import AnswerPart, Kind
from server.protocol.conversation import (
    ASSISTANT,
    MAX_MESSAGES,
    SYSTEM,
    Content,
    Conversation,
    PartCounter,
    joined_parts,
    joined_text,
    text_of,
)
from server.protocol.responses import EncodedList

ROLES = {"user": "user", "assistant": ASSISTANT, "system": SYSTEM, "developer": SYSTEM}
TEXTS = ("input_text", "output_text", "text")
IMAGE = "input_image"
_KINDS = {**dict.fromkeys(TEXTS, "text"), "refusal": "refusal"}
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_PREFIXES = {Kind.THOUGHT: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


def add_items(conversation: Conversation, items: Any, field: str = "input") -> None:
    """Add the items of a request to a conversation.

    Args:
        items: text, which is a message of the user, or a list of items.
        field: what they are called in errors.

    Raises:
        ValidationError: names the item that is none, or whose kind is not supported.
    """
    if isinstance(items, str):
        conversation.say("user", items)
        return
    if not isinstance(items, list):
        raise ValidationError(field, type(items).__name__, "text or a list of items")
    if len(items) > MAX_MESSAGES:
        raise ValidationError(field, f"{len(items)} elements", f"at most {MAX_MESSAGES}")
    parts = PartCounter()
    for place, item in enumerate(items):
        _add(conversation, item, f"{field}[{place}]", parts)


def _add(conversation: Conversation, item: Any, at: str, parts: PartCounter) -> None:
    if not isinstance(item, dict):
        raise ValidationError(at, type(item).__name__, "an item")
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            role = ROLES.get(text_of(item.get("role"), f"{at}.role"))
            if role is None:
                allowed = f"one of {', '.join(ROLES)}"
                raise ValidationError(f"{at}.role", item["role"], allowed)
            takes_images = role == "user" and conversation.reads_images
            read = _content_with_images if takes_images else _content
            conversation.say(role, read(item.get("content"), f"{at}.content", parts))
        case "function_call":
            conversation.call(
                text_of(item.get("call_id"), f"{at}.call_id"),
                text_of(item.get("name"), f"{at}.name"),
                text_of(item.get("arguments"), f"{at}.arguments"),
                at,
            )
        case "function_call_output":
            text = _content(item.get("output"), f"{at}.output", parts)
            conversation.answer(text_of(item.get("call_id"), f"{at}.call_id"), text)
        case "reasoning":
            thought = _thought(item, at, parts)
            if thought:
                conversation.think(thought)
        case _:
            raise ValidationError(f"{at}.type", kind, f"one of {', '.join(ITEMS)}")


def _content(content: Any, at: str, parts: PartCounter) -> str:
    """The text of a message's content, or of what a function gave."""
    allowed = f"one of {', '.join(TEXTS)}"
    return joined_text(content, at, parts, _KINDS, "text parts", allowed)


def _content_with_images(content: Any, at: str, parts: PartCounter) -> Content:
    """The content of a user's message: text, or parts with images among them."""
    allowed = f"one of {', '.join((*TEXTS, IMAGE))}"
    images = {IMAGE: _image_url}
    return joined_parts(content, at, parts, _KINDS, "parts", allowed, images)


def _image_url(part: dict[str, Any], at: str) -> str:
    if part.get("file_id") is not None:
        raise ValidationError(f"{at}.file_id", part["file_id"], "null: this server keeps no files")
    return text_of(part.get("image_url"), f"{at}.image_url")


def _thought(item: dict[str, Any], at: str, parts: PartCounter) -> str:
    """What an item says was thought; its summary where that is all there is."""
    if item.get("encrypted_content") is not None:
        allowed = "null: this server encrypts no thoughts, so it can read none"
        raise ValidationError(f"{at}.encrypted_content", "...", allowed)
    for name in ("content", "summary"):
        given = item.get(name) or []
        if not isinstance(given, list):
            raise ValidationError(f"{at}.{name}", type(given).__name__, "a list of texts")
        parts.count(given, f"{at}.{name}")
        texts = []
        for place, part in enumerate(given):
            where = f"{at}.{name}[{place}]"
            if not isinstance(part, dict):
                raise ValidationError(where, type(part).__name__, "an object with a text")
            texts.append(text_of(part.get("text"), f"{where}.text"))
        if texts:
            return "\n".join(texts)
    return ""


def item_id(part: AnswerPart) -> str:
    """A new id for a part's item."""
    return f"{_PREFIXES[part.kind]}_{secrets.token_hex(12)}"


def output_item(
    part: AnswerPart, part_id: str, logprobs: EncodedList | None, *, status: str | None = None
) -> dict[str, Any]:
    """The item of a part.

    Args:
        logprobs: of its tokens; None where they are not asked for.
        status: where it is not that of what has ended.
    """
    told = status or ("completed" if part.whole else "incomplete")
    content = [] if told == "in_progress" else [output_content(part, logprobs)]
    head = {"id": part_id, "status": told}
    match part.kind:
        case Kind.TEXT:
            return {**head, "type": "message", "role": ASSISTANT, "content": content}
        case Kind.THOUGHT:
            return {
                **head,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
            }
        case Kind.CALL:
            call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {**head, "type": "function_call", **call}


def output_content(part: AnswerPart, logprobs: EncodedList | None) -> dict[str, Any]:
    """The content of a text's or a thought's item."""
    if part.kind is Kind.THOUGHT:
        return {"type": "reasoning_text", "text": part.text}
    text = {"type": "output_text", "text": part.text, "annotations": []}
    return text if logprobs is None else {**text, "logprobs": logprobs}
