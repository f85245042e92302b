"""Mixtral: Mistral with sparse MLPs."""

from jaxserve.models.mixtral.config import read_config
from jaxserve.models.mixtral.weights import source
from jaxserve.models.qwen3_moe.model import SparseDecoder

__all__ = ["SparseDecoder", "read_config", "source"]
