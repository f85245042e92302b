"""vLLM's `ModelRegistry`: which architectures are served."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ValidationError
from jaxserve.models.registry import FAMILIES


class ModelRegistry:
    """Names of architectures."""

    @staticmethod
    def get_supported_archs() -> set[str]:
        return {family.architecture for family in FAMILIES}

    @staticmethod
    def register_model(model_arch: str, model_cls: Any) -> None:
        """Raises ValidationError: an engine is told of a family of your own by its module."""
        allowed = "hf_overrides={'architectures': ['module:NAME']} of the engine (docs/models.md)"
        raise ValidationError("model_arch", model_arch, allowed)
