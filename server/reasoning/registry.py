"""Tags of thoughts by the names of `--reasoning-parser`: vLLM's, and shorter ones."""

from __future__ import annotations

from server.reasoning.gpt_oss import HARMONY
from server.reasoning.tags import Tags

_THINK = Tags("<think>", "</think>")
_WITH_CALLS = Tags("<think>", "</think>", calls=("<tool_call>",))

REASONING_PARSERS = {
    "deepseek_r1": Tags("<think>", "</think>", starts_open=True),  # and models made from it
    "deepseek_v3": _THINK,
    "glm": _WITH_CALLS,
    "glm45": _WITH_CALLS,
    "glm47": _WITH_CALLS,
    "gpt_oss": HARMONY,
    "openai_gptoss": HARMONY,
    "granite": Tags(
        "Here is my thought process:",
        "Here is my response:",
        other_begins=("Here's my thought process:",),
        other_ends=("Here's my response:",),
    ),
    "mistral": Tags(  # Magistral
        "[THINK]", "[/THINK]", calls=("[TOOL_CALLS]",), may_come_late=True
    ),
    "qwen3": _WITH_CALLS,
}
