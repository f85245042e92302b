"""Parsers of thoughts by the names of `--reasoning-parser`, which are vLLM's."""

from __future__ import annotations

from server.reasoning.deepseek_r1 import DeepSeekR1Parser
from server.reasoning.mistral import MistralReasoningParser
from server.reasoning.qwen3 import Qwen3Parser
from server.reasoning.tags import ReasoningParser

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "mistral": MistralReasoningParser,
    "qwen3": Qwen3Parser,
}
