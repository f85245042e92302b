"""What an engine is asked for, and what was decided: settings, their declarations and flags."""

from jaxserve.config.engine_config import EngineConfig, Isolation

__all__ = ["EngineConfig", "Isolation"]
