"""Where the parameters of a Qwen3-MoE are in its checkpoint: a tensor an expert."""

from __future__ import annotations

from jaxserve.models.moe import MoeConfig
from jaxserve.models.sources import Place, Source, Stack, decoder_source, interleaved, whole


def source(place: Place, config: MoeConfig) -> Source | Stack:
    """The tensors of the parameter at `place` in the module tree."""
    if len(place) < 3 or place[2] != "mlp" or place[1] in config.dense_layers:
        return decoder_source(place, config)
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return expert_source(place, config, "mlp", names)


def expert_source(
    place: Place, config: MoeConfig, module: str, names: dict[str, str]
) -> Source | Stack:
    """The tensors of a parameter of a sparse MLP.

    `module` is the checkpoint's name of the MLP, `names` those of an expert's projections.
    """
    prefix = f"model.layers.{place[1]}.{module}"
    if place[3] == "router":
        return whole(f"{prefix}.gate.weight")
    parts = ("gate", "up") if place[3] == "gate_up" else ("down",)
    return Stack(
        tuple(
            interleaved(*(f"{prefix}.experts.{expert}.{names[part]}.weight" for part in parts))
            for expert in range(config.num_experts)
        )
    )
