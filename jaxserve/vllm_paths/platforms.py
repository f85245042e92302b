"""The kind of device, at the path that vLLM has it."""

from jaxserve.parallel.platform import Platform, current_platform

__all__ = ["Platform", "current_platform"]
