"""Tags of thoughts by the names of `--reasoning-parser`, which are vLLM's."""

from __future__ import annotations

from server.reasoning.tags import Tags

REASONING_PARSERS = {
    "deepseek_r1": Tags("<think>", "</think>", starts_open=True),  # and models made from it
    "mistral": Tags("[THINK]", "[/THINK]"),  # Magistral
    "qwen3": Tags("<think>", "</think>"),
}
