"""Where the parameters of an OLMo-2 are in its checkpoint."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.models.sources import Part, Place, Source, decoder_source


def source(place: Place, config: ModelConfig) -> Source:
    """The tensors of the parameter at `place` in the module tree."""
    if place[2:-1] != ("attention", "head_norms"):
        return decoder_source(place, config)
    # a KV head's rows of a vector over all heads
    group = config.num_heads // config.num_kv_heads if place[-1] == "q_norm" else 1
    name = f"model.layers.{place[1]}.self_attn.{place[-1]}.weight"
    return Source((Part(name, group * config.head_dim),))
