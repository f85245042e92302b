"""The Llama family: configuration, Flax NNX modules and weight loading."""

from jaxserve.models.config import ModelConfig, resolve_dtype
from jaxserve.models.llama import Llama
from jaxserve.models.weights import load_model

__all__ = ["Llama", "ModelConfig", "load_model", "resolve_dtype"]
