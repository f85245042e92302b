"""The content of chat messages as text, or as parts of text."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ValidationError

# of parts of content; the later ones are what agents carry over from answers
KINDS = ("text", "input_text", "output_text", "refusal")


def content_text(content: Any, where: str) -> str:
    """The text of a message's content: a string, or OpenAI's list of text parts, joined by lines.

    Args:
        content: None is the empty text.
        where: what the content is called in errors, such as "messages[0].content".

    Raises:
        ValidationError: a part that is no text, such as an image, or content of another type.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(where, type(content).__name__, "a string or a list of text parts")
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def content_parts(content: Any, where: str) -> list[dict[str, str]] | None:
    """The same as OpenAI's list of text parts; None stays None."""
    if content is None:
        return None
    given = content if isinstance(content, list) else [content_text(content, where)]
    texts = (_part_text(part, f"{where}[{i}]") for i, part in enumerate(given))
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ValidationError(where, type(part).__name__, "a text part")
    kind = part.get("type")
    if kind not in KINDS:
        allowed = f"one of {', '.join(KINDS)}: this model reads text alone"
        raise ValidationError(f"{where}.type", kind, allowed)
    field = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(field), str):
        raise ValidationError(f"{where}.{field}", type(part.get(field)).__name__, "a string")
    return str(part[field])
