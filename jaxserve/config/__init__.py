"""What an engine is asked for, and what was decided: settings, their declarations and flags."""

from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.config.profiler_config import ProfilerConfig

VllmConfig = EngineConfig  # vLLM's name, in annotations of scripts

__all__ = ["EngineConfig", "Isolation", "ProfilerConfig", "VllmConfig"]
