"""Messages of a chat completion, made from what other APIs call items or blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import ValidationError
from server.protocol.chat import MAX_PARTS, ChatCompletionRequest
from server.protocol.requests import ModelRequest
from server.protocol.tool_messages import MAX_CALLS

MAX_MESSAGES = 2048  # as of `messages` of a body
SYSTEM, ASSISTANT = "system", "assistant"
Content = str | list[dict[str, Any]]


class Conversation:
    """Collects messages, in the order in which they come.

    Args:
        messages: those that have come before; they are not changed.
        reads_images: whether messages of the user may have images.

    Attributes:
        messages: as a chat completion has them.
    """

    def __init__(self, messages: Sequence[dict[str, Any]] = (), *, reads_images: bool = True):
        self.messages = list(messages)
        self.reads_images = reads_images
        self._open: dict[str, Any] | None = None  # of the assistant, to which more may belong

    def say(self, role: str, text: Content) -> None:
        """A message; what the assistant has thought just before is of the same one."""
        if role == ASSISTANT:
            self._message("content", "tool_calls")["content"] = text
            return
        self._open = None
        self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """What the assistant has thought."""
        message = self._message("content", "tool_calls")
        message["reasoning"] = message.get("reasoning", "") + text

    def call(self, call_id: str, name: str, arguments: str, where: str) -> None:
        """A call that the assistant has made, in the message of what it has just said.

        Raises:
            ValidationError: there are too many in one message.
        """
        calls = self._message().setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise ValidationError(where, "one more call", f"at most {MAX_CALLS} one after another")
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def answer(self, call_id: str, text: str) -> None:
        """What came of a call."""
        self._open = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def end_turn(self) -> None:
        """What the assistant says next is another message."""
        self._open = None

    def _message(self, *ends: str) -> dict[str, Any]:
        """The assistant's message; another one where it has a field that ends it."""
        if self._open is None or not self._open.keys().isdisjoint(ends):
            self._open = {"role": ASSISTANT}
            self.messages.append(self._open)
        return self._open


class PartCounter:
    """Bounds the parts of content in one request."""

    def __init__(self) -> None:
        self._count = 0

    def count(self, parts: Sequence[Any], where: str) -> None:
        """Raises ValidationError when there are too many."""
        self._count += len(parts)
        if self._count > MAX_PARTS:
            raise ValidationError(where, f"{self._count} parts", f"at most {MAX_PARTS} in all")


def with_system(
    messages: Sequence[dict[str, Any]], text: str | None, *, merges: bool = False
) -> list[dict[str, Any]]:
    """The messages behind a system message.

    Those of the system that begin them are joined to one: most templates take no second one.

    Args:
        text: that of the message.
        merges: later ones are joined to it too.
    """
    texts = [] if text is None else [text]
    rest = list[dict[str, Any]]()
    for message in messages:
        if message["role"] == SYSTEM and (merges or not rest):
            texts.append(message["content"])
        else:
            rest.append(message)
    head = [{"role": SYSTEM, "content": "\n\n".join(texts)}] if texts else []
    return [*head, *rest]


def check_foreign(body: ModelRequest) -> None:
    """Refuse fields of chat completions that this API has under another name, or not at all.

    Raises:
        ValidationError: names the first one.
    """
    for name, value in (body.model_extra or {}).items():
        if name in ChatCompletionRequest.model_fields and value not in (None, False):
            raise ValidationError(name, value, "null: it is a field of chat completions")


def joined_text(
    given: Any, where: str, parts: PartCounter, kinds: Mapping[str, str], what: str, allowed: str
) -> str:
    """Text, or the texts of a list of parts joined by lines.

    Args:
        given: the text, or the list.
        where: what it is called in errors.
        parts: counts those of the request.
        kinds: type of a part -> its field with the text.
        what, allowed: the list and its types in words.

    Raises:
        ValidationError: names what is no text, or too much.
    """
    made = joined_parts(given, where, parts, kinds, what, allowed, {})
    assert isinstance(made, str)
    return made


def joined_parts(
    given: Any,
    where: str,
    parts: PartCounter,
    kinds: Mapping[str, str],
    what: str,
    allowed: str,
    images: Mapping[str, Callable[[dict[str, Any], str], str]],
) -> Content:
    """Like `joined_text`; where images are among the parts, parts of a chat completion.

    Args:
        images: type of a part that is an image -> what reads its address.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValidationError(where, type(given).__name__, f"text or a list of {what}")
    parts.count(given, where)
    made: list[dict[str, Any]] = []
    for place, part in enumerate(given):
        kind, at = part_kind(part), f"{where}[{place}]"
        if kind in images:
            made.append(image_part(images[kind](part, at)))
            continue
        if kind not in kinds:
            raise ValidationError(f"{at}.type", kind, allowed)
        field = kinds[kind]
        made.append(text_part(text_of(part.get(field), f"{at}.{field}")))
    return joined(made)


def part_kind(part: Any) -> str:
    """The type of a part; of what is none, that of the value."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    return kind if isinstance(kind, str) else str(kind)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """An image of a chat completion."""
    return {"type": "image_url", "image_url": {"url": url}}


def joined(parts: list[dict[str, Any]]) -> Content:
    """Parts, or where all are texts these joined by lines."""
    if all("text" in part for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def functions_of(
    given: Any, read: Callable[[Any, str], dict[str, Any]], what: str
) -> list[dict[str, Any]] | None:
    """Tools as chat completions have them; None where the list is empty.

    Args:
        read: makes the function of a tool and its place.
        what: they are, in words.

    Raises:
        ValidationError: it is no list.
    """
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise ValidationError("tools", type(given).__name__, f"a list of {what}")
    tools = enumerate(given)
    return [{"type": "function", "function": read(one, f"tools[{at}]")} for at, one in tools]


def text_of(given: Any, where: str) -> str:
    """A field that must be text. Raises ValidationError."""
    if not isinstance(given, str):
        raise ValidationError(where, type(given).__name__, "text")
    return given
