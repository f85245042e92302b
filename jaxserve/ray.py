"""Ray Serve runs jaxserve: `import_path: jaxserve.ray:build_openai_app` (the extra `ray`)."""

from __future__ import annotations

from server.ray_app import LLMConfig, ModelLoadingConfig, build_openai_app

__all__ = ["LLMConfig", "ModelLoadingConfig", "build_openai_app"]
