"""Parsers of tool calls by the names of `--tool-call-parser`, which are vLLM's."""

from __future__ import annotations

from server.tools.hermes import HermesParser
from server.tools.llama3_json import Llama3JsonParser
from server.tools.mistral import MistralParser
from server.tools.pythonic import PythonicParser
from server.tools.reader import ToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
