"""What the config.json of OLMo-2 says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_fields import Defaults, common_fields, flag, refuse_windows

DEFAULTS = Defaults(rms_norm_eps=1e-5, eos_token_id=50279)


def read_config(architecture: str, config: Mapping[str, Any]) -> ModelConfig:
    """Reads a parsed config.json.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    fields = common_fields(architecture, config, DEFAULTS)
    refuse_windows(architecture, config, fields["num_layers"])
    bias = flag(config, "attention_bias")
    return ModelConfig(**fields, qkv_bias=bias, output_bias=bias)
