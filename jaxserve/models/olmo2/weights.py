"""Where the parameters of an OLMo-2 are in its checkpoint."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.models.sources import Part, Place, Source, decoder_source


def source(place: Place, config: ModelConfig) -> Source:
    """The tensors of the parameter at `place` in the module tree."""
    if place[2:-1] != ("attention", "head_norms"):
        return decoder_source(place, config)
    # a KV head's rows of a vector over all heads
    name = f"model.layers.{place[1]}.self_attn.{place[-1]}.weight"
    if place[-1] == "k_norm":
        return Source((Part(name, config.head_dim, copies=config.kv_copies),))
    return Source((Part(name, config.num_heads // config.num_kv_heads * config.head_dim),))
