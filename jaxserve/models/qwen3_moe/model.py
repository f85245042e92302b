"""Qwen3-MoE (Qwen Team, "Qwen3 Technical Report", 2025); Mixtral is one of its options."""

from __future__ import annotations

from jaxserve.models.linear import PLAIN_LINEAR, LinearForm
from jaxserve.models.mlp import MLP
from jaxserve.models.moe import MoeConfig, SparseMLP
from jaxserve.models.prenorm import PreNormBlock, PreNormDecoder


class SparseDecoder(PreNormDecoder):
    """Llama's decoder, with a sparse MLP in most layers."""

    def __init__(self, config: MoeConfig, dtype: str, form: LinearForm = PLAIN_LINEAR):
        def block(layer: int) -> PreNormBlock:
            mlp = MLP if layer in config.dense_layers else SparseMLP
            return PreNormBlock(config, dtype, form, mlp(config, dtype, form))

        super().__init__(config, dtype, form, block)
