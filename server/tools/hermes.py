"""Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as wanted."""

from server.tools.syntax import Syntax

HERMES = Syntax("<tool_call>", around=("</tool_call>",))
