"""Llama 3.2 and 4: the text is a Python list of calls, `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import json
from typing import Any

from server.tools.reader import Reader, Steps

BEGIN, END = "<|python_start|>", "<|python_end|>"
MAX_CALL = 1 << 16  # characters
MAX_NESTED = 64  # brackets
_OPENING, _CLOSING = "([{", ")]}"
_JSON_NAMES = {"true": True, "false": False, "null": None}  # some models write them


class PythonicParser(Reader):
    """Calls have names and keyword arguments that are literals. What is no such list is text."""

    def read(self) -> Steps:
        space = yield from self.skip_space()
        missed = (yield from self.expect(BEGIN)) or ""
        if missed:
            self.say(space + missed)
            return
        yield from self.skip_space()
        if self.char != "[":
            self.say(space)
            return
        raw, told = "[", False
        yield from self.next()
        while self.char is not None:
            raw += yield from self.skip_space()
            if self.char == "]" and told:
                yield from self.next()
                yield from self.skip_space()
                yield from self.expect(END)
                return
            text = yield from self._read_call()
            found = parsed_call(text)
            if found is None:
                self.say(raw + text)
                return
            index = self.begin_call(found[0])
            self.add_arguments(index, found[1])
            raw, told = "", True
            yield from self.skip_space()
            if self.char == ",":
                yield from self.next()

    def _read_call(self) -> Any:
        """Text up to the bracket that closes the first one that it opens."""
        text, depth, quote = "", 0, ""
        while self.char is not None and len(text) < MAX_CALL:
            char = self.char
            if not depth and char in "],":
                break
            text += char
            yield from self.next()
            if quote:
                if char == "\\" and self.char is not None:
                    text += self.char
                    yield from self.next()
                elif char == quote:
                    quote = ""
            elif char in "\"'":
                quote = char
            elif char in _OPENING:
                depth += 1
                if depth > MAX_NESTED:
                    break
            elif char in _CLOSING:
                depth -= 1
                if depth <= 0:
                    break
        return text


def parsed_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON, of a call in Python's notation; None: it is none.

    Nothing of it is evaluated: the arguments are literals.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(call, ast.Call) or call.args:
        return None
    name = _dotted(call.func)
    if name is None:
        return None
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        try:
            arguments[keyword.arg] = _value(keyword.value)
        except (ValueError, RecursionError):
            return None
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # bytes, infinity, keys that are no text
        return None


def _value(node: ast.expr) -> Any:
    """What a literal stands for as JSON has it, as in vLLM 0.33: tuples and sets are lists.

    Raises:
        ValueError: it is no literal.
    """
    match node:
        case ast.Constant(str(text)):  # two surrogates are a character, as in JSON; one is none
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.Constant(value):
            return value
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys, values):
            return dict(zip(map(_key, keys), map(_value, values), strict=True))
        case ast.JoinedStr(parts):  # f"text" without placeholders
            return "".join(_key(part) for part in parts)
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
            number = _value(operand)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise ValueError(f"{ast.dump(node)[:80]!r} is no literal")


def _key(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    raise ValueError("a key of a dict, or a part of an f-string, is no constant")


def _dotted(node: ast.expr) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
