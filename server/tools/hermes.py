"""Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as wanted."""

from __future__ import annotations

from server.tools.json_text import read_call
from server.tools.reader import Steps, ToolParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Text around calls is for the user."""

    def read(self) -> Steps:
        while (yield from self.say_until([BEGIN])):
            space = yield from self.skip_space()
            if self.char != "{":
                self.say(BEGIN + space)
                continue
            if (yield from read_call(self)):
                yield from self.skip_space()
                missed = yield from self.expect(END)
                self.say(missed or "")
