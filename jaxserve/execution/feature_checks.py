"""Features that an engine cannot have as it is made: each is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.features import Feature, overrides

# hooks of what a feature does inside a layer
INSIDE_A_LAYER = ("linear", "operand", "layer")
# and inside the model, where one stage would not know of another
INSIDE_THE_MODEL = (*INSIDE_A_LAYER, "positions", "ahead", "embed", "draft")


def refuse_inside_layers(features: Sequence[Feature], cpu_offload_gb: float | None) -> None:
    """Raises ValidationError for what looks into layers, where a loop has some of them."""
    for feature in features:
        if any(overrides(feature, hook) for hook in INSIDE_A_LAYER):
            allowed = f"none with {feature.setting or feature.name}, which works inside a layer"
            raise ValidationError("cpu_offload_gb", cpu_offload_gb, allowed)


def refuse_inside_the_model(features: Sequence[Feature], asked: EngineConfig) -> None:
    """Raises ValidationError for what works inside the model, of which each stage has a part."""
    for feature in features:
        if any(overrides(feature, hook) for hook in INSIDE_THE_MODEL):
            name = feature.setting or "features"
            value = getattr(asked, name) if feature.setting else feature.name
            where = f"where pipeline_parallel_size is {asked.pipeline_parallel_size}"
            allowed = f"off {where}: it works inside the model, between its stages"
            raise ValidationError(name, value, allowed)


def the_drafting(features: Sequence[Feature]) -> Feature | None:
    """The feature that drafts, if one does; raises ValidationError where several would."""
    drafting = [feature for feature in features if feature.num_drafts]
    if len(drafting) > 1:
        names = ", ".join(feature.name for feature in drafting)
        raise ValidationError("features", names, "at most one that drafts")
    return drafting[0] if drafting else None
