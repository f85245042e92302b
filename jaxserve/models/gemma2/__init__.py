"""Gemma 2: norms before and behind each half of a layer, bounded scores, windows by turns."""

from jaxserve.models.gemma2.config import read_config
from jaxserve.models.gemma2.model import Gemma2
from jaxserve.models.sources import decoder_source as source

__all__ = ["Gemma2", "read_config", "source"]
