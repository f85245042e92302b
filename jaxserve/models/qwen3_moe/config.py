"""What the config.json of Qwen3-MoE says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.hf_fields import flag, positive
from jaxserve.models.llama.config import QWEN3
from jaxserve.models.moe import MoeConfig

QWEN3_MOE = replace(QWEN3, defaults=replace(QWEN3.defaults, head_dim=None), windows="all_if_used")


def read_config(architecture: str, config: Mapping[str, Any]) -> MoeConfig:
    """Reads a parsed config.json.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    fields = QWEN3_MOE.fields(architecture, config)
    layers = range(fields["num_layers"])
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not set(dense) <= set(layers):
        raise UnsupportedModelError("mlp_only_layers", dense, "a list of layers")
    step = positive(config, "decoder_sparse_step", 1)
    return MoeConfig(
        **fields,
        **expert_fields(config, default_count=128, default_chosen=8),
        expert_size=positive(config, "moe_intermediate_size", 768),
        normalized=flag(config, "norm_topk_prob"),
        dense_layers=frozenset(dense) | {layer for layer in layers if (layer + 1) % step},
    )


def expert_fields(
    config: Mapping[str, Any], *, default_count: int, default_chosen: int
) -> dict[str, Any]:
    """How many experts there are, and how many of them a token goes to.

    Raises:
        UnsupportedModelError: more than there are.
    """
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    count = positive(config, name, default_count)
    chosen = positive(config, "num_experts_per_tok", default_chosen)
    if chosen > count:
        raise UnsupportedModelError(
            "num_experts_per_tok", chosen, f"at most {name}, which is {count}"
        )
    return {"num_experts": count, "experts_per_token": chosen}
