"""What an engine is asked for, and what was decided: settings, their declarations and flags."""

from __future__ import annotations

from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.config.profiler_config import ProfilerConfig

VllmConfig = EngineConfig  # vLLM's name, in annotations of scripts

__all__ = ["EngineConfig", "Isolation", "ProfilerConfig", "VllmConfig"]


def __getattr__(name: str) -> None:
    """Raises ImportError with the reason for what only vLLM has, as `KVTransferConfig`."""
    if name.endswith("Config"):
        from jaxserve.config.absent_modules import refuse_config

        refuse_config(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
