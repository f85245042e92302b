"""Models: configuration, a folder of Flax NNX modules and weight map a family, weight loading."""

from jaxserve.models.config import ModelConfig, resolve_dtype
from jaxserve.models.protocol import Model
from jaxserve.models.weights import load_model

__all__ = ["Model", "ModelConfig", "load_model", "resolve_dtype"]
