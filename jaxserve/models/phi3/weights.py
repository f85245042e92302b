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
        queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
        order = half_split_order(config.rope, head_dim)
        group = queries // config.num_kv_heads
        return Source(
            (
                Part(name, group, order=order),
                Part(name, head_dim, first=queries, order=order),
                Part(name, head_dim, first=queries + keys),
            )
        )
    return decoder_source(place, config)
