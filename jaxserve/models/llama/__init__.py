"""Llama, Mistral, Qwen2 and Qwen3: one module, whose options the config reader sets."""

from jaxserve.models.llama.config import LLAMA, MISTRAL, QWEN2, QWEN3
from jaxserve.models.llama.model import Llama
from jaxserve.models.sources import decoder_source as source

__all__ = ["LLAMA", "MISTRAL", "QWEN2", "QWEN3", "Llama", "source"]
