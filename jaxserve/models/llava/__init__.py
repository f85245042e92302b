"""LLaVA 1.5: Llama or Mistral, which reads images through CLIP's tower and a projector."""

from jaxserve.models.llava.config import read_config
from jaxserve.models.llava.encoder import LlavaEncoder, encoder_source

__all__ = ["LlavaEncoder", "encoder_source", "read_config"]
