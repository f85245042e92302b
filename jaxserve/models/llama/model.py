"""The Llama family of decoders; Mistral and Qwen are its options."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import PLAIN_LINEAR, LinearForm
from jaxserve.models.mlp import MLP
from jaxserve.models.prenorm import PreNormBlock, PreNormDecoder


class Llama(PreNormDecoder):
    """Grouped-query attention with rope and a gated MLP, each behind an RMS norm."""

    def __init__(self, config: ModelConfig, dtype: str, form: LinearForm = PLAIN_LINEAR):
        super().__init__(
            config,
            dtype,
            form,
            lambda layer: PreNormBlock(config, dtype, form, MLP(config, dtype, form)),
        )
