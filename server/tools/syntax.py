"""A notation of calls as data, and the reader that all notations of this kind share.

A call is a tag and an object with name and arguments, or a tag, the name, and arguments that are
JSON or tagged values.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.tools.json_text import read_calls, read_value
from server.tools.reader import Finding, Reader, Steps
from server.tools.tagged_values import MAX_HEADER, Header, Parameters, read_parameters

BRACE, LIST = "{", "["
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Syntax:
    """How a model writes calls.

    Attributes:
        begin: the tag behind which a call is written.
        around: tags that may come before and behind calls.
        header: tells a call's name; it ends at a brace, the first of arguments that are JSON, or
            at its own tag, or where the first parameter begins. None: calls are JSON objects with
            name and arguments, perhaps in a list.
        parameters: how arguments are written; None: as JSON.
        separator: between calls that are objects.
        is_bare: objects need no tag, so one with a name alone is none.
        id_size: letters and digits of a call's id, where templates refuse others.
    """

    begin: str
    around: tuple[str, ...] = ()
    header: Header | None = None
    parameters: Parameters | None = None
    separator: str = ","
    is_bare: bool = False
    id_size: int | None = None


class SyntaxParser(Reader):
    """Reads calls in one notation. Text around them is for the user.

    Args:
        syntax: the notation.
        tools: OpenAI's objects, whose schemas tell texts from other values.
    """

    def __init__(self, syntax: Syntax, tools: Sequence[Mapping[str, Any]] = ()):
        self._syntax, self._tools = syntax, tools
        self._tags = (syntax.begin, *syntax.around)
        super().__init__()

    def new_id(self) -> str:
        size = self._syntax.id_size
        if size is None:
            return super().new_id()
        return "".join(secrets.choice(_LETTERS) for _ in range(size))

    def read(self) -> Steps:
        begins = (self._syntax.begin, BRACE)
        tag = yield from self._find()
        while tag is not None:
            if tag != BRACE and (tag in begins or not self._num_calls):
                self.hold(tag)
            tag = yield from self._read_calls() if tag in begins else self._find()

    def _find(self) -> Finding:
        """Text for the user, up to a tag, or to the brace of a bare object."""
        stop = BRACE if self._syntax.is_bare else ""
        return (yield from self.until(self._tags, self.say, stop=stop))

    def _read_calls(self) -> Finding:
        """What is behind a tag; the next one."""
        self.say((yield from self.skip_space()))
        header = self._syntax.header
        if header is not None and self.char != LIST:
            tag = yield from self._read_named(header)
        else:
            tag = yield from self._read_objects()
        return tag or (yield from self._find())

    def _read_objects(self) -> Finding:
        is_list, is_bare = self._syntax.begin.endswith(LIST), self._syntax.is_bare
        if self.char == LIST and not is_bare:
            is_list = True
            self.hold(LIST)
            yield from self.next()
            self.say((yield from self.skip_space()))
        before = self._num_calls
        yield from read_calls(self, self._syntax.separator, may_have_none=not is_bare)
        if is_list and self.char == "]" and self._num_calls > before:
            yield from self.next()
        return None

    def _read_named(self, header: Header) -> Finding:
        """A name and its arguments; a tag of `_tags` that was read behind them."""
        parameters, text = self._syntax.parameters, list[str]()
        inner = () if parameters is None else (parameters.begin, parameters.call_end)
        stop = BRACE if header.end == BRACE else ""
        tags = tuple({header.end, *inner, *self._tags} - {"", stop})
        tag = yield from self.until(tags, text.append, stop=stop, most=MAX_HEADER)
        found = re.fullmatch(header.pattern, "".join(text), re.DOTALL)
        if found is None or tag not in ((header.end,) if header.end else inner):
            self.say("".join(text))
            if tag in self._tags:
                return tag
            self.say(tag if tag and tag != stop else "")
            return None
        index = self.begin_call(found["name"])
        add = partial(self.add_arguments, index)
        if parameters is None:
            yield from read_value(self, add)
            return None
        schema = self._schema(found["name"])
        first = tag if tag in inner else None
        return (yield from read_parameters(self, add, parameters, self._tags, schema, first))

    def _schema(self, name: str) -> Mapping[str, Any]:
        functions = [tool["function"] for tool in self._tools]
        found: Mapping[str, Any] = next((one for one in functions if one["name"] == name), {})
        return found.get("parameters") or {}
