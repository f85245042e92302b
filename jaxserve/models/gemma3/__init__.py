"""Gemma 3, text: Gemma 2's blocks with norms of queries and keys, and rope by the kind of layer."""

from jaxserve.models.gemma3.config import IMAGE_MODULES, read_config, read_text_config
from jaxserve.models.gemma3.model import Gemma3
from jaxserve.models.sources import decoder_source as source

__all__ = ["IMAGE_MODULES", "Gemma3", "read_config", "read_text_config", "source"]
