"""The content of chat messages as text, or as parts of text."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ValidationError

# of parts of content; the later ones are what agents carry over from answers
KINDS = ("text", "input_text", "output_text", "refusal")
IMAGE_PART = {"type": "image"}  # stands for an image, as templates know it


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
    """The same as OpenAI's list of text parts, with each `IMAGE_PART` as it is; None stays None."""
    if content is None:
        return None
    given = content if isinstance(content, list) else [content_text(content, where)]
    return [
        IMAGE_PART
        if part == IMAGE_PART
        else {"type": "text", "text": _part_text(part, f"{where}[{i}]")}
        for i, part in enumerate(given)
    ]


def has_images(content: Any) -> bool:
    """Whether a message's content has an `IMAGE_PART`."""
    return isinstance(content, list) and IMAGE_PART in content


def without_images(content: Any, where: str, found: list[Any]) -> Any:
    """A message's content with `IMAGE_PART` in the place of each image, which is added to a list.

    Args:
        content: a string, or a list of parts: of text; OpenAI's `image_url`, whose address is
            added as text; transformers' `image` with what the caller has under that name.
        where: as for `content_text`.
        found: the images, in their order.

    Raises:
        ValidationError: an image that is not one.
    """
    if not isinstance(content, list):
        return content
    made = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("image_url", "image"):
            made.append(part)
            continue
        given = part.get(kind)
        if kind == "image_url":
            given = given.get("url") if isinstance(given, dict) else given
            if not isinstance(given, str):
                raise ValidationError(f"{where}[{place}].image_url.url", given, "an address")
        elif given is None or isinstance(given, str | dict):
            raise ValidationError(f"{where}[{place}].image", given, "a PIL image or an array")
        found.append(given)
        made.append(IMAGE_PART)
    return made


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
