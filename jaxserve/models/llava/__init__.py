"""LLaVA 1.5 and LLaVA-NeXT: Llama or Mistral, which reads images through CLIP's tower and a
projector."""

from jaxserve.models.llava.config import read_config, read_next_config
from jaxserve.models.llava.encoder import LlavaEncoder, LlavaNextEncoder, encoder_source

IMAGE_MODULES = ("vision_tower.", "multi_modal_projector.", "image_newline")

__all__ = [
    "IMAGE_MODULES",
    "LlavaEncoder",
    "LlavaNextEncoder",
    "encoder_source",
    "read_config",
    "read_next_config",
]
