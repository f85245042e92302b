"""Qwen2-VL and Qwen2.5-VL: Qwen2 with positions of three axes, which reads images of any size."""

from jaxserve.models.qwen2_vl.config import IMAGE_MODULES, QWEN2_5_VL, QWEN2_VL
from jaxserve.models.qwen2_vl.encoder import QwenEncoder, encoder_source
from jaxserve.models.qwen2_vl.model import Qwen2VL

__all__ = ["IMAGE_MODULES", "QWEN2_5_VL", "QWEN2_VL", "Qwen2VL", "QwenEncoder", "encoder_source"]
