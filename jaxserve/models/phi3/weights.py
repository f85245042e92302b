"""Where the parameters of a Phi-3 are in its checkpoint: queries, keys and values in one tensor."""

from __future__ import annotations

from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import half_split_order
from jaxserve.models.sources import Part, Place, Source, decoder_source


def source(place: Place, config: ModelConfig) -> Source:
    """The tensors of the parameter at `place` in the module tree."""
    prefix, module = f"model.layers.{place[1] if len(place) > 1 else ''}.", place[2:-1]
    if module == ("mlp", "gate_up"):
        name, inner = f"{prefix}mlp.gate_up_proj.weight", config.intermediate_size
        return Source((Part(name), Part(name, first=inner)), indices=2)
    if module == ("attention", "qkv"):
        name, head_dim = f"{prefix}self_attn.qkv_proj.weight", config.head_dim
        order, copies = half_split_order(config.rope, head_dim), config.kv_copies
        queries, group = config.num_heads * head_dim, config.num_heads // config.num_kv_heads
        keys = config.num_kv_heads // copies * head_dim
        return Source(
            (
                Part(name, group * head_dim, order=order),
                Part(name, head_dim, first=queries, order=order, copies=copies),
                Part(name, head_dim, first=queries + keys, copies=copies),
            )
        )
    return decoder_source(place, config)
