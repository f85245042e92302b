"""Blocks of Anthropic's API: a request's become messages, an answer's parts become blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic_core import from_json

from jaxserve.errors import ValidationError
from server.answer_parts import AnswerPart, Kind
from server.protocol.conversation import (
    ASSISTANT,
    SYSTEM,
    Conversation,
    PartCounter,
    image_part,
    joined,
    joined_text,
    part_kind,
    text_of,
    text_part,
)

_TEXTS: Mapping[str, str] = MappingProxyType({"text": "text"})
ROLES = ("user", ASSISTANT, SYSTEM)
_MEDIA_TYPE = re.compile("image/[a-z0-9.+-]+")
_OF_ROLE = {
    "user": ("text", "image", "tool_result"),
    ASSISTANT: ("text", "tool_use", "thinking", "redacted_thinking"),
    SYSTEM: ("text",),
}


# Claude Code's, whose hash is another one with each request: no cached page would be found
_ATTRIBUTION = "x-anthropic-billing-header"


def system_text(given: Any) -> str | None:
    """The text of `system`: text or blocks of it. Raises ValidationError."""
    if isinstance(given, list):
        given = [block for block in given if not _is_attribution(block)] or None
    return None if given is None else _text(given, "system", PartCounter())


def _is_attribution(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(_ATTRIBUTION)


def add_message(conversation: Conversation, message: Any, at: str, parts: PartCounter) -> None:
    """Add one message of a request to a conversation.

    Raises:
        ValidationError: names the block that is none, or whose kind is not supported.
    """
    if not isinstance(message, dict):
        raise ValidationError(at, type(message).__name__, "a message")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValidationError(f"{at}.role", role, f"one of {', '.join(ROLES)}")
    conversation.end_turn()
    if isinstance(content, str):
        conversation.say(role, content)
        return
    if not isinstance(content, list):
        raise ValidationError(f"{at}.content", type(content).__name__, "text or a list of blocks")
    parts.count(content, f"{at}.content")
    kinds = [one for one in _OF_ROLE[role] if one != "image" or conversation.reads_images]
    said: list[dict[str, Any]] = []
    for place, block in enumerate(content):
        where = f"{at}.content[{place}]"
        kind = part_kind(block)
        if kind not in kinds:
            allowed = f"one of {', '.join(kinds)} in a message of the {role}"
            raise ValidationError(f"{where}.type", kind, allowed)
        if kind == "text":
            said.append(text_part(text_of(block.get("text"), f"{where}.text")))
            continue
        if kind == "image":
            said.append(image_part(_image_url(block.get("source"), f"{where}.source")))
            continue
        if said and kind == "tool_use":
            conversation.say(role, joined(said))
            said = []
        _add(conversation, kind, block, where, parts)
    if said:
        conversation.say(role, joined(said))


def _add(
    conversation: Conversation, kind: str, block: dict[str, Any], at: str, parts: PartCounter
) -> None:
    match kind:
        case "thinking":
            conversation.think(text_of(block.get("thinking"), f"{at}.thinking"))
        case "redacted_thinking":
            pass  # another server's cipher
        case "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise ValidationError(f"{at}.input", type(given).__name__, "an object")
            call_id, name = (text_of(block.get(key), f"{at}.{key}") for key in ("id", "name"))
            conversation.call(call_id, name, json.dumps(given, ensure_ascii=False), at)
        case "tool_result":
            call_id = text_of(block.get("tool_use_id"), f"{at}.tool_use_id")
            content, kinds = block.get("content") or "", {**_TEXTS, "tool_reference": "tool_name"}
            text = _text(content, f"{at}.content", parts, kinds)
            conversation.answer(call_id, f"Error: {text}" if block.get("is_error") else text)


def _image_url(source: Any, at: str) -> str:
    """The address of an image, whose bytes may be in it."""
    if not isinstance(source, dict):
        raise ValidationError(at, type(source).__name__, "an object")
    match source.get("type"):
        case "url":
            return text_of(source.get("url"), f"{at}.url")
        case "base64":
            kind = text_of(source.get("media_type"), f"{at}.media_type")
            if not _MEDIA_TYPE.fullmatch(kind):
                raise ValidationError(f"{at}.media_type", kind, "image/png, for example")
            return f"data:{kind};base64,{text_of(source.get('data'), f'{at}.data')}"
        case other:
            raise ValidationError(f"{at}.type", other, "base64 or url")


def _text(given: Any, at: str, parts: PartCounter, kinds: Mapping[str, str] = _TEXTS) -> str:
    return joined_text(given, at, parts, kinds, "text blocks", f"one of {', '.join(kinds)}")


def block(part: AnswerPart) -> dict[str, Any]:
    """The block of a part as it is now."""
    match part.kind:
        case Kind.TEXT:
            return {"type": "text", "text": part.text}
        case Kind.THOUGHT:
            # nothing is signed: thoughts that come back are read as they are
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case Kind.CALL:
            given = _arguments(part)
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": given}


def _arguments(part: AnswerPart) -> dict[str, Any]:
    """The object that a call's arguments are; of one that was cut off as much as there is."""
    text = part.text.strip()
    try:
        given = from_json(
            text, allow_inf_nan=False, allow_partial="off" if part.whole else "trailing-strings"
        )
    except ValueError:
        given = text
    if isinstance(given, dict):
        return given
    return {"arguments": text} if text else {}


def delta(part: AnswerPart, text: str) -> dict[str, Any]:
    """What a block's event says of more text."""
    match part.kind:
        case Kind.TEXT:
            return {"type": "text_delta", "text": text}
        case Kind.THOUGHT:
            return {"type": "thinking_delta", "thinking": text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": text}
