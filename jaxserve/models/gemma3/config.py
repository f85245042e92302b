"""What the config.json of a Gemma 3 text model says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.gemma2.config import DEFAULTS as GEMMA2
from jaxserve.models.gemma2.config import GemmaConfig, gemma_fields
from jaxserve.models.hf_fields import layered, positive
from jaxserve.models.rope import RopeConfig

logger = logging.getLogger(__name__)

DEFAULTS = replace(GEMMA2, max_positions=131072, theta=1_000_000.0)
LOCAL_THETA = 10_000.0
# what transformers takes for keys that published configs leave out of `text_config`
TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
# tensors of the encoder of images, and of what makes tokens of its output
IMAGE_MODULES = (
    "vision_tower.",
    "multi_modal_projector.",
)
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

    As in transformers, `attn_logit_softcapping` has no effect, which a log line tells.

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
    _tell_unused(architecture, "attn_logit_softcapping", fields["attention_soft_cap"])
    return Gemma3Config(**fields | {"attention_soft_cap": None}, local_rope=rope)


def read_text_config(architecture: str, config: Mapping[str, Any]) -> Gemma3Config:
    """Reads a parsed config.json of a Gemma 3 with images: the text model's is its `text_config`.

    Where transformers has fields of both, those outside say which tokens end a text and whether the
    lm head is the embedding. As there, `final_logit_softcapping` has no effect.

    Raises:
        UnsupportedModelError: as `read_config`.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError("text_config", text, "an object: the config of the text model")
    outside = {
        name: config.get(name)
        for name in ("tie_word_embeddings", "eos_token_id")
        if config.get(name) is not None
    }
    inner = {name: value for name, value in text.items() if value is not None}
    made = read_config(architecture, layered({**TEXT_DEFAULTS, **inner, **outside}, config))
    _tell_unused(architecture, "final_logit_softcapping", made.logits_soft_cap)
    return replace(made, logits_soft_cap=None)


def _tell_unused(architecture: str, field: str, value: float | None) -> None:
    if value is not None:
        told = "%s=%s has no effect on a %s, here as in transformers"
        logger.warning(told, field, value, architecture)


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
