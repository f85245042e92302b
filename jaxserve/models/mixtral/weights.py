"""Where the parameters of a Mixtral are in its checkpoint."""

from __future__ import annotations

from jaxserve.models.moe import MoeConfig
from jaxserve.models.qwen3_moe.weights import expert_source
from jaxserve.models.sources import Place, Source, Stack, decoder_source

NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def source(place: Place, config: MoeConfig) -> Source | Stack:
    """The tensors of the parameter at `place` in the module tree."""
    if len(place) < 3 or place[2] != "mlp":
        return decoder_source(place, config)
    return expert_source(place, config, "block_sparse_moe", NAMES)
