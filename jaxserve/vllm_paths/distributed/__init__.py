"""What scripts do between two engines, at the path that vLLM has it."""

from jaxserve.parallel.platform import cleanup_dist_env_and_memory

__all__ = ["cleanup_dist_env_and_memory"]
