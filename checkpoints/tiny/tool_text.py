"""How the chat template writes tools, calls and results: the text that training conversations have.

``tests/checkpoints/tiny/test_tool_text.py`` holds both to each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: name and JSON type of each; a type that ends in ``?`` need not be given.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    description: str = ""

    @property
    def line(self) -> str:
        """The tool in the list of tools: its description, and a call with types for values."""
        listed = ", ".join(f'"{name}": {kind}' for name, kind in self.parameters)
        text = f'{{"name": "{self.name}", "arguments": {{{listed}}}}}'
        return f"{self.description} {text}" if self.description else text

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's API takes it."""
        parameters = {
            "type": "object",
            "properties": {name: {"type": kind.rstrip("?")} for name, kind in self.parameters},
            "required": [name for name, kind in self.parameters if not kind.endswith("?")],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def system_text(tools: Sequence[Tool], system: str = "") -> str:
    """The system turn of a conversation with tools."""
    listing = "\n".join(("Tools:", *(tool.line for tool in tools)))
    return f"{system}\n\n{listing}" if system else listing


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in Hermes' notation."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def result_text(result: str) -> str:
    """The user turn that brings a result.

    Behind a space a word has the tokens that it has in a sentence, so that it can be copied.
    """
    return f"<tool_response> {result} </tool_response>"
