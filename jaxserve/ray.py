"""Ray runs jaxserve: `import_path: jaxserve.ray:build_openai_app`, and batches. Extra: `ray`."""

from __future__ import annotations

from server.on_ray.app import build_openai_app
from server.on_ray.batch import BatchResult, run_batch
from server.on_ray.config import LLMConfig, ModelLoadingConfig

__all__ = ["BatchResult", "LLMConfig", "ModelLoadingConfig", "build_openai_app", "run_batch"]
