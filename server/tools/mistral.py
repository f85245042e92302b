"""Mistral: `[TOOL_CALLS]` and a list of calls, or a name and its arguments."""

from __future__ import annotations

import secrets
import string
from collections.abc import Generator
from functools import partial

from server.tools.json_text import MAX_NAME, read_calls, read_value
from server.tools.reader import Steps, ToolParser

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LETTERS = string.ascii_letters + string.digits


class MistralParser(ToolParser):
    """Up to tokenizer v10 a list of objects with name and arguments, from v11 on `name{...}`.

    Its templates refuse ids that are not nine letters and digits.
    """

    @staticmethod
    def new_id() -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def read(self) -> Steps:
        while (yield from self.say_until([BEGIN])):
            yield from self.skip_space()
            if self.char == "[":
                yield from self._read_list()
            elif self.char is not None:
                yield from self._read_named()

    def _read_list(self) -> Steps:
        yield from self.next()
        yield from self.skip_space()
        if (yield from read_calls(self, ",")) and self.char == "]":
            yield from self.next()

    def _read_named(self) -> Steps:
        """A name, perhaps an id, and arguments."""
        name, marker = yield from self._read_name()
        read = name + marker
        if marker == ID:  # an id of our own is made
            own, marker = yield from self._read_name()
            read += own + marker
        space = yield from self.skip_space()
        if self.char != "{" or not name.strip():
            self.say(BEGIN + read + space)
            return
        index = self.begin_call(name.strip())
        yield from read_value(self, partial(self.add_arguments, index))

    def _read_name(self) -> Generator[None, str | None, tuple[str, str]]:
        """What comes before a brace or a marker, and that marker, which is gone behind."""
        text = ""
        while self.char is not None and self.char != "{" and len(text) <= MAX_NAME:
            text += self.char
            yield from self.next()
            for marker in (ID, ARGUMENTS):
                if text.endswith(marker):
                    return text.removesuffix(marker), marker
        return text, ""
