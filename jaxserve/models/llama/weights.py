"""Where the parameters of a Llama are in its checkpoint."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.models.sources import Place, Source, decoder_source

NAMES: dict[Place, str] = {
    ("input_norm",): "input_layernorm",
    ("post_attention_norm",): "post_attention_layernorm",
    ("attention", "q_norm"): "self_attn.q_norm",
    ("attention", "k_norm"): "self_attn.k_norm",
}


def source(place: Place, config: ModelConfig) -> Source:
    """The tensors of the parameter at `place` in the module tree."""
    return decoder_source(place, config, NAMES)
