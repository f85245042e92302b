"""Resolved configurations for tests that load no model, made without jax."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.resolved_config import (
    CacheSettings,
    ModelSettings,
    ProgramSettings,
    ResolvedConfig,
    SchedulerSettings,
)
from jaxserve.loading.generation_defaults import generation_defaults


def resolved_config(**settings: Any) -> ResolvedConfig:
    """What becomes of settings with a model of 4,096 tokens; see `resolved`."""
    return resolved(EngineConfig.from_settings(**({"model": "m"} | settings)))


def resolved(asked: EngineConfig) -> ResolvedConfig:
    """What was asked for, with small sizes where it was open."""
    asked = replace(asked, limit_mm_per_prompt=asked.max_images)
    budget = asked.max_num_batched_tokens or 512
    return ResolvedConfig(
        asked,
        ModelSettings(dtype="float32", quantization=asked.quantization or ""),
        CacheSettings(page_size=asked.block_size or 16, num_pages=asked.num_pages or 100),
        SchedulerSettings(
            max_model_len=asked.max_model_len or 4096,
            max_num_seqs=asked.max_num_seqs or 32,
            max_num_batched_tokens=budget,
            max_prefill_tokens=min(asked.prefill_chunk or budget, budget),
        ),
        ProgramSettings(
            compile_ahead=asked.compile_ahead or 2,
            compile_in_background=bool(asked.compile_in_background),
        ),
        sampling_defaults=generation_defaults(asked, Path(asked.model)),
    )
