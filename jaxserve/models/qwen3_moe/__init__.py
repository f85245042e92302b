"""Qwen3-MoE: Qwen3 with sparse MLPs."""

from jaxserve.models.qwen3_moe.config import read_config
from jaxserve.models.qwen3_moe.model import SparseDecoder
from jaxserve.models.qwen3_moe.weights import source

__all__ = ["SparseDecoder", "read_config", "source"]
