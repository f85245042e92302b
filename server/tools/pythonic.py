"""Llama 3.2 and 4: the text is a Python list of calls, `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import ast
import json
from typing import Any, ClassVar

from server.tools.reader import Reader, Steps

BEGIN, END = "<|python_start|>", "<|python_end|>"
MAX_CALL = 1 << 16  # characters
MAX_NESTED = 64  # brackets
_OPENING, _CLOSING = "([{", ")]}"


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
            arguments[keyword.arg] = ast.literal_eval(_JSONNames().visit(keyword.value))
        except (ValueError, TypeError, RecursionError, MemoryError):
            return None
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # bytes, sets, keys that are no text
        return None


class _JSONNames(ast.NodeTransformer):
    """Takes the names that some models write, as JSON has them, for values."""

    VALUES: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node


def _dotted(node: ast.expr) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
