"""Phi-3 and Phi-4-mini: Llama's module; fused tensors in the checkpoint, longrope, part rotary."""

from jaxserve.models.llama.model import Llama
from jaxserve.models.phi3.config import read_config
from jaxserve.models.phi3.weights import source

__all__ = ["Llama", "read_config", "source"]
