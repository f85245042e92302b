"""What the config.json of Phi-3, Phi-3.5 and Phi-4-mini says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_fields import Defaults, common_fields, layered, sliding_window

DEFAULTS = Defaults(
    max_positions=4096, rms_norm_eps=1e-5, partial_rotary=True, bos_token_id=1, eos_token_id=32000
)
OLD_NAMES = ("su", "yarn")  # of longrope in early checkpoints


def read_config(architecture: str, config: Mapping[str, Any]) -> ModelConfig:
    """Reads a parsed config.json.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    renamed: dict[str, Any] = {}
    if config.get("original_max_position_embeddings") is None:
        renamed["original_max_position_embeddings"] = 4096
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in OLD_NAMES:
            renamed[name] = {**rope, "type": "longrope", "rope_type": "longrope"}
    fields = common_fields(architecture, layered(renamed, config), DEFAULTS)
    return ModelConfig(
        **fields | {"windows": (sliding_window(config, None),) * fields["num_layers"]}
    )
