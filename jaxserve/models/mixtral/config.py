"""What the config.json of Mixtral says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.models.llama.config import MISTRAL
from jaxserve.models.moe import MoeConfig
from jaxserve.models.qwen3_moe.config import expert_fields

MIXTRAL = replace(
    MISTRAL,
    defaults=replace(MISTRAL.defaults, rms_norm_eps=1e-5, theta=1_000_000.0),
    default_sliding_window=None,
)


def read_config(architecture: str, config: Mapping[str, Any]) -> MoeConfig:
    """Reads a parsed config.json.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    fields = MIXTRAL.fields(architecture, config)
    return MoeConfig(
        **fields,
        **expert_fields(config, default_count=8, default_chosen=2),
        expert_size=fields["intermediate_size"],
        normalized=True,
    )
