"""What an engine is asked for, and what was decided: settings, their declarations and flags."""

from jaxserve.config.engine_config import EngineConfig, Isolation

VllmConfig = EngineConfig  # vLLM's name, in annotations of scripts

__all__ = ["EngineConfig", "Isolation", "VllmConfig"]
