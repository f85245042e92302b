"""The rules that all engines of a comparison run under, for the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rules_of(job: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The rules in words.

    Args:
        job: what every worker is given, see `adapters.Job`.
        settings: what `--settings` changes, by engine.
    """
    rules = {
        "prefix cache": "off",
        "prompts": "others in every round",
        "decoding": "greedy, end-of-sequence ignored, every request to its full length",
        "type": f"{job['dtype']}: arithmetic and KV cache (llama.cpp: float16 for 16 bits), and "
        "weights but for the engines that are named after a quantisation",
        "requests at once": f"{job['slots']} at most, fewer where the cell says so",
        "tokens of a step": f"{job['step_tokens']} at most, where the engine has such a budget "
        "(transformers' static batches have none)",
        "context": f"{job['max_model_len']} tokens",
        "threads": f"{job['threads']}, each engine on the same cores",
        "warm-up": "one request of one token, then a round of each cell that is not counted",
    }
    changed = [f"{name}: {dict(given)}" for name, given in settings.items() if given]
    rules["settings beside these"] = "; ".join(changed) or "none"
    return rules
