"""Gemma 3: Gemma 2's blocks with norms of queries and keys, two kinds of rope, and images."""

from jaxserve.models.gemma3.config import IMAGE_MODULES, read_config, read_image_config
from jaxserve.models.gemma3.encoder import GemmaEncoder, encoder_source
from jaxserve.models.gemma3.model import Gemma3
from jaxserve.models.sources import decoder_source as source

__all__ = [
    "IMAGE_MODULES",
    "Gemma3",
    "GemmaEncoder",
    "encoder_source",
    "read_config",
    "read_image_config",
    "source",
]
