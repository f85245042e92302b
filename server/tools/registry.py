"""Parsers of tool calls by the names of `--tool-call-parser`: vLLM's, and shorter ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.tools import deepseek
from server.tools.glm import GLM
from server.tools.gpt_oss import HarmonyReader
from server.tools.hermes import HERMES
from server.tools.llama3_json import LLAMA3_JSON
from server.tools.mistral import MISTRAL
from server.tools.phi4_mini import PHI4_MINI
from server.tools.pythonic import PythonicParser
from server.tools.qwen3_coder import QWEN3_CODER
from server.tools.reader import Reader
from server.tools.syntax import Syntax, SyntaxParser

TOOL_PARSERS: dict[str, Syntax | type[Reader]] = {
    "deepseek_v3": deepseek.V3,
    "deepseek_v31": deepseek.V31,
    "deepseek_v32": deepseek.V32,
    "glm": GLM,
    "glm45": GLM,
    "glm47": GLM,
    "gpt_oss": HarmonyReader,
    "openai": HarmonyReader,
    "hermes": HERMES,
    "qwen3_json": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "phi4_mini": PHI4_MINI,
    "phi4_mini_json": PHI4_MINI,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
}


def tool_parser(name: str, tools: Sequence[Mapping[str, Any]] = ()) -> Reader:
    """A reader of one text.

    Args:
        name: of TOOL_PARSERS.
        tools: OpenAI's objects, whose schemas tell texts from other values.
    """
    kind = TOOL_PARSERS[name]
    return SyntaxParser(kind, tools) if isinstance(kind, Syntax) else kind()
