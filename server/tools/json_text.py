"""JSON read character by character: values, and calls that are written as objects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Sequence

from server.tools.reader import Reader

MAX_DEPTH = 128
MAX_NAME = 256  # characters
_LITERALS = ("true", "false", "null")
_NUMBER = set("0123456789+-.eE")
_CLOSING = {"{": "}", "[": "]"}

Take = Callable[[str], None]
Validity = Generator[None, str | None, bool]


def read_value(reader: Reader, take: Take) -> Validity:
    """Read one value from the current character on.

    Args:
        reader: stands behind it afterwards, or where it is found to be no JSON.
        take: told of each character as it is read.

    Returns:
        Whether it is one; at the end of the text, in the middle of it, it is not.
    """
    stack: list[str] = []  # what closes the objects and lists that are open
    while True:
        yield from _space(reader, take)
        char = reader.char
        if char is None:
            return False
        if char in _CLOSING:
            if len(stack) == MAX_DEPTH:
                return False
            stack.append(_CLOSING[char])
            yield from _step(reader, take)
            yield from _space(reader, take)
            if reader.char != stack[-1]:
                if stack[-1] == "}" and not (yield from _key(reader, take)):
                    return False
                continue
        elif char == '"':
            if not (yield from read_string(reader, take)):
                return False
        elif not (yield from _scalar(reader, take)):
            return False
        # behind a value, or before what closes an empty object or list
        while stack:
            yield from _space(reader, take)
            if reader.char == stack[-1]:
                stack.pop()
                yield from _step(reader, take)
            elif reader.char == ",":
                yield from _step(reader, take)
                if stack[-1] == "}":
                    yield from _space(reader, take)
                    if not (yield from _key(reader, take)):
                        return False
                break
            else:
                return False
        if not stack:
            return True


def read_string(reader: Reader, take: Take) -> Validity:
    """Read a string from its quotation mark on."""
    yield from _step(reader, take)
    while (char := reader.char) is not None:
        if char < " ":
            return False
        yield from _step(reader, take)
        if char == '"':
            return True
        if char == "\\":
            escape = reader.char
            if escape is None or escape not in '"\\/bfnrtu':
                return False
            yield from _step(reader, take)
            for _ in range(4 if escape == "u" else 0):
                if reader.char is None or reader.char not in "0123456789abcdefABCDEF":
                    return False
                yield from _step(reader, take)
    return False


def read_call(
    reader: Reader,
    arguments: Sequence[str] = ("arguments", "parameters"),
    *,
    may_have_none: bool = True,
) -> Validity:
    """Read a call `{"name": ..., "arguments": {...}}`, whose arguments are told as they come.

    Args:
        reader: its current character is the opening brace; stands behind the object afterwards.
        arguments: keys under which arguments may be, as an object or as the text of one.
        may_have_none: whether an object with a name alone is a call.

    Returns:
        Whether it was a call. If it was none, its text was said; if it has ended too early, what
        there is of its arguments was told.
    """
    call = _Call(reader)
    whole = yield from _read_members(reader, call, arguments)
    if whole and may_have_none and call.name is not None and call.index is None:
        call.index = reader.begin_call(call.name)
        reader.add_arguments(call.index, "{}")
    if call.index is None:
        reader.say("".join(call.raw))
        return False
    return whole


def read_calls(reader: Reader, separator: str, *, may_have_none: bool = True) -> Validity:
    """Read calls from the opening brace of the first on, with a separator between them.

    `may_have_none` is that of `read_call`.

    Returns:
        Whether all that was read were calls.
    """
    while reader.char == "{":
        if not (yield from read_call(reader, may_have_none=may_have_none)):
            return False
        space = yield from reader.skip_space()
        if reader.char not in (separator, "{", "]"):
            reader.say(space)
        if reader.char == separator:
            yield from reader.next()
            yield from reader.skip_space()
    return True


class _Call:
    """What is known of a call. Until it is one its text is kept."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self.raw: list[str] = []
        self.name: str | None = None
        self.held: list[str] = []  # arguments that came before the name
        self.index: int | None = None

    def take(self, char: str) -> None:
        if self.index is None:
            self.raw.append(char)

    def take_argument(self, char: str) -> None:
        """A character of the arguments, which are an object."""
        if self.index is None and self.name is not None:
            self.index = self._reader.begin_call(self.name)
        if self.index is None:
            self.raw.append(char)
            self.held.append(char)
        else:
            self._reader.add_arguments(self.index, char)

    def set_arguments(self, text: str) -> None:
        """Arguments that were read before they are told."""
        if self.name is None:
            self.held.append(text)
        else:
            self.index = self._reader.begin_call(self.name)
            self._reader.add_arguments(self.index, text)

    def set_name(self, name: str) -> None:
        self.name = name
        if self.held and self.index is None:
            self.index = self._reader.begin_call(name)
            self._reader.add_arguments(self.index, "".join(self.held))


def _read_members(reader: Reader, call: _Call, arguments: Sequence[str]) -> Validity:
    yield from _step(reader, call.take)
    yield from _space(reader, call.take)
    if reader.char == "}":
        yield from _step(reader, call.take)
        return True
    while True:
        key: list[str] = []
        if not (yield from _key(reader, _both(call.take, key.append))):
            return False
        yield from _space(reader, call.take)
        name = json.loads("".join(key).rpartition(":")[0])
        value: list[str] = []
        if name == "name" and reader.char == '"' and call.name is None:
            if not (yield from read_string(reader, _both(call.take, value.append))):
                return False
            text = json.loads("".join(value))
            if not 0 < len(text) <= MAX_NAME or not _is_encodable(text):
                return False
            call.set_name(text)
        elif name in arguments and reader.char == "{" and not call.held and call.index is None:
            if not (yield from read_value(reader, call.take_argument)):
                return False
        elif name in arguments and reader.char == '"' and not call.held and call.index is None:
            if not (yield from read_string(reader, _both(call.take, value.append))):
                return False
            call.set_arguments(_unwrapped("".join(value)))
        elif not (yield from read_value(reader, call.take)):
            return False
        yield from _space(reader, call.take)
        if reader.char == "}":
            yield from _step(reader, call.take)
            return True
        if reader.char != ",":
            return False
        yield from _step(reader, call.take)
        yield from _space(reader, call.take)


def _unwrapped(text: str) -> str:
    """The object whose text a JSON string has; where it has none, the string."""
    inner: str = json.loads(text)
    try:
        is_object = isinstance(json.loads(inner), dict) and _is_encodable(inner)
    except (ValueError, RecursionError):
        is_object = False
    return inner if is_object else text


def _both(one: Take, other: Take) -> Take:
    def take(char: str) -> None:
        one(char)
        other(char)

    return take


def _step(reader: Reader, take: Take) -> Generator[None, str | None, None]:
    assert reader.char is not None
    take(reader.char)
    yield from reader.next()


def _space(reader: Reader, take: Take) -> Generator[None, str | None, None]:
    while reader.char is not None and reader.char in " \t\r\n":
        yield from _step(reader, take)


def _key(reader: Reader, take: Take) -> Validity:
    """A key of an object and the colon behind it."""
    if reader.char != '"' or not (yield from read_string(reader, take)):
        return False
    yield from _space(reader, take)
    if reader.char != ":":
        return False
    yield from _step(reader, take)
    return True


def _is_encodable(text: str) -> bool:
    """Whether there is no half of a surrogate pair, which no response could hold."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _scalar(reader: Reader, take: Take) -> Validity:
    """A number, true, false or null."""
    text = ""
    while reader.char is not None and (reader.char in _NUMBER or reader.char.isalpha()):
        text += reader.char
        if len(text) > MAX_NAME:
            return False
        yield from _step(reader, take)
    if text in _LITERALS:
        return True
    try:
        number = json.loads(text, parse_constant=str)
        return isinstance(number, int | float) and math.isfinite(number)
    except ValueError:
        return False
