"""What the config.json of a Gemma 3 says, with images or without."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.errors import UnsupportedModelError
from jaxserve.models.gemma2.config import DEFAULTS as GEMMA2
from jaxserve.models.gemma2.config import GemmaConfig, gemma_fields
from jaxserve.models.hf_fields import layered, one_of, part, positive, vocabulary_token
from jaxserve.models.rope import RopeConfig
from jaxserve.models.vision import VisionConfig

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
IMAGE_MODULES = ("vision_tower.", "multi_modal_projector.")
KINDS = ("full_attention", "sliding_attention")
# of SigLIP's tower
VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
VISION_MODELS = ("siglip_vision_model",)
IMAGE_TOKEN, IMAGE_TOKEN_NAMES = 262144, ("image_token_index", "image_token_id")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3ImageConfig(Gemma3Config):
    """The config of a Gemma 3 that reads images.

    Attributes:
        vision: of the tower.
        side: an image is a square of so many places a side.
        image_token: stands for an image in a prompt.
    """

    vision: VisionConfig
    side: int
    image_token: int

    @property
    def images(self) -> ImageFacts:
        pixels = self.vision.image_size
        return ImageFacts(
            self.image_token,
            (3, pixels, pixels),
            self.side**2,
            patches_per_row=self.vision.num_patches,
            sees_whole=True,
        )


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
        local, fields["max_position_embeddings"], fields["head_dim"], default_theta=LOCAL_THETA
    )
    _tell_unused(architecture, "attn_logit_softcapping", fields["attention_soft_cap"])
    return Gemma3Config(**fields | {"attention_soft_cap": None, "qk_norm": True}, local_rope=rope)


def read_image_config(architecture: str, config: Mapping[str, Any]) -> Gemma3Config:
    """Reads a parsed config.json of a Gemma 3 with images: the text model's is its `text_config`.

    One without `vision_config`, or with an empty one, is of the text model alone.

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
    made = replace(made, logits_soft_cap=None)
    vision = part(config, "vision_config")
    if not vision:
        return made
    one_of("vision_config.model_type", vision.get("model_type", VISION_MODELS[0]), VISION_MODELS)
    tower = VisionConfig.from_hf(vision, VISION_DEFAULTS)
    places = positive(config, "mm_tokens_per_image", 256)
    for window in filter(None, made.windows):
        if window < places:
            allowed = f"at least mm_tokens_per_image={places}: its tokens attend to a whole image"
            raise UnsupportedModelError("sliding_window", window, allowed)
    fields = {one.name: getattr(made, one.name) for one in dataclasses.fields(made)}
    return Gemma3ImageConfig(
        **fields,
        vision=tower,
        side=_side(places, tower),
        image_token=vocabulary_token(config, IMAGE_TOKEN_NAMES, IMAGE_TOKEN, made.vocab_size),
    )


def _side(places: int, tower: VisionConfig) -> int:
    """Places of a side of an image; each is the mean of a square of patches."""
    if tower.image_size % tower.patch_size:
        allowed = f"a multiple of the patch_size {tower.patch_size}"
        raise UnsupportedModelError("vision_config.image_size", tower.image_size, allowed)
    side, patches = math.isqrt(places), tower.image_size // tower.patch_size
    if side * side != places or patches % side:
        allowed = f"the square of a divisor of the {patches} patches of a side"
        raise UnsupportedModelError("mm_tokens_per_image", places, allowed)
    return side


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
