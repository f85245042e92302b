"""Llama 3: the text is `{"name": ..., "parameters": {...}}`, or several with `;` between them."""

from __future__ import annotations

from server.tools.json_text import read_calls
from server.tools.reader import Steps, ToolParser

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """What does not begin with a call is for the user, up to a tag."""

    def read(self) -> Steps:
        space = yield from self.skip_space()
        if self.char != "{":
            self.say(space)
            if (yield from self.say_until([TAG])) is None:
                return
            yield from self.skip_space()
        yield from read_calls(self, ";")
