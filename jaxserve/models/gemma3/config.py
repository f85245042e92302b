"""What the config.json of a Gemma 3 text model says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.gemma2.config import DEFAULTS as GEMMA2
from jaxserve.models.gemma2.config import GemmaConfig, gemma_fields
from jaxserve.models.hf_fields import layered, positive
from jaxserve.models.rope import RopeConfig

DEFAULTS = replace(GEMMA2, max_positions=131072, theta=1_000_000.0)
LOCAL_THETA = 10_000.0
KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """A Gemma 3's config, whose `rope` is that of the layers that attend to everything.

    Attributes:
        local_rope: of the layers with a sliding window.
    """

    local_rope: RopeConfig

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return self.rope, self.local_rope

    @property
    def max_context_length(self) -> int:
        """The config's own value counts the scaling of rope in."""
        return self.max_position_embeddings


def read_config(architecture: str, config: Mapping[str, Any]) -> Gemma3Config:
    """Reads a parsed config.json.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    whole, local = _ropes(config)
    pattern = positive(config, "sliding_window_pattern", 6)
    fields = gemma_fields(
        architecture, layered(whole, config), DEFAULTS, pattern=pattern, soft_caps=(None, None)
    )
    rope = RopeConfig.from_hf(
        local,
        fields["max_position_embeddings"],
        fields["head_dim"],
        default_theta=LOCAL_THETA,
    )
    return Gemma3Config(**fields, local_rope=rope)


def _ropes(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the rope of full and of sliding attention.

    transformers 5 writes one set a kind of layer into `rope_parameters`; before, `rope_scaling` was
    that of full attention and `rope_local_base_freq` the other's theta.
    """
    given = config.get("rope_parameters")
    if isinstance(given, Mapping) and any(isinstance(part, Mapping) for part in given.values()):
        for kind in given:
            if kind not in KINDS:
                raise UnsupportedModelError(
                    f"rope_parameters.{kind}", given[kind], f"one of {', '.join(KINDS)}"
                )
        whole, local = ({"rope_parameters": given.get(kind)} for kind in KINDS)
        return {**whole, "rope_scaling": None}, local
    return {}, {"rope_theta": config.get("rope_local_base_freq")}
