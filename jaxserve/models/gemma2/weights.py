"""Where the parameters of a Gemma 2 or 3 are in its checkpoint."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.models.sources import Place, Source, decoder_source

NAMES: dict[Place, str] = {
    ("input_norm",): "input_layernorm",
    ("post_attention_norm",): "post_attention_layernorm",
    ("pre_feedforward_norm",): "pre_feedforward_layernorm",
    ("post_feedforward_norm",): "post_feedforward_layernorm",
    ("attention", "head_norms", "q_norm"): "self_attn.q_norm",
    ("attention", "head_norms", "k_norm"): "self_attn.k_norm",
}


def source(place: Place, config: ModelConfig) -> Source:
    """The tensors of the parameter at `place` in the module tree."""
    return decoder_source(place, config, NAMES)
