"""`EngineArgs`, at the path that vLLM has it."""

from jaxserve.config.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
