"""What the config.json of LLaVA 1.5, and of LLaVA-NeXT, says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.boundary.image_facts import ImageFacts
from jaxserve.boundary.image_tiles import Tiling
from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_fields import flag, layered, one_of, part, token_ids, vocabulary_token
from jaxserve.models.llama import LLAMA, MISTRAL
from jaxserve.models.mlp import ACTIVATIONS
from jaxserve.models.vision import VisionConfig

# the language models, and what transformers takes for keys that `text_config` leaves out
_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
TEXT_MODELS = {
    "llama": (LLAMA, {**_SIZES, "intermediate_size": 11008}),
    "mistral": (MISTRAL, {**_SIZES, "intermediate_size": 14336}),
}
# the same of a `vision_config` that is absent, and of keys that one leaves out
VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
CLIP_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
VISION_MODELS = ("clip_vision_model",)
STRATEGIES = ("default", "full")
PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
IMAGE_TOKEN_NAMES = ("image_token_index", "image_token_id")
IMAGE_TOKEN = 32000


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaConfig(ModelConfig):
    """A LLaVA's config; what `ModelConfig` has is the language model's.

    Attributes:
        vision: of the tower.
        feature_layers: layers of the tower whose outputs are projected, side by side; each the
            number of layers before it, of `vision.num_layers` at most.
        keeps_class: whether the place of the class token is kept, which comes first.
        projector_act: activation between the projector's two layers.
        projector_bias: whether these have biases.
        image_token: stands for an image in a prompt.
    """

    vision: VisionConfig
    feature_layers: tuple[int, ...]
    keeps_class: bool
    projector_act: str
    projector_bias: bool
    image_token: int

    @property
    def images(self) -> ImageFacts:
        return self._whole

    @property
    def _whole(self) -> ImageFacts:
        """Of an image that is one tile."""
        side = self.vision.image_size - self.vision.image_size % self.vision.patch_size
        if side != self.vision.image_size:
            allowed = f"a multiple of the patch_size {self.vision.patch_size}"
            raise UnsupportedModelError("vision_config.image_size", self.vision.image_size, allowed)
        patches = self.vision.num_patches
        places = patches + int(self.keeps_class)
        return ImageFacts(self.image_token, (3, side, side), places, patches_per_row=patches)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextConfig(LlavaConfig):
    """A LLaVA-NeXT's config.

    Attributes:
        sizes: (height, width) in pixels into which images are fitted.
    """

    sizes: tuple[tuple[int, int], ...]

    @property
    def images(self) -> ImageFacts:
        whole, side = self._whole, self.vision.image_size
        tiling = Tiling(self.sizes, side, side // self.vision.patch_size)
        return whole._replace(shape=(0, *whole.shape), tiling=tiling)


def read_config(architecture: str, config: Mapping[str, Any]) -> LlavaConfig:
    """Reads a parsed config.json: the language model's is its `text_config`.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    made = LlavaConfig(**_fields(architecture, config, STRATEGIES))
    made.images  # noqa: B018 (refuses sizes that do not divide)
    return made


def read_next_config(architecture: str, config: Mapping[str, Any]) -> LlavaNextConfig:
    """The same of LLaVA-NeXT. Raises UnsupportedModelError, as `read_config`."""
    fields = _fields(architecture, config, STRATEGIES[:1])
    sizes = _sizes(config.get("image_grid_pinpoints"), fields["vision"].image_size)
    made = LlavaNextConfig(**fields, sizes=sizes)
    made.images  # noqa: B018 (refuses sizes that do not divide)
    return made


def _sizes(given: Any, side: int) -> tuple[tuple[int, int], ...]:
    """Pairs of whole tiles."""
    field = "image_grid_pinpoints"
    given = PINPOINTS if given is None else given
    allowed = f"a list of [height, width], which are multiples of {side} pixels"
    try:
        sizes = tuple((int(high), int(wide)) for high, wide in given)
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(field, given, allowed) from error
    if not sizes or any(one < side or one % side for size in sizes for one in size):
        raise UnsupportedModelError(field, given, allowed)
    return sizes


def _fields(
    architecture: str, config: Mapping[str, Any], strategies: Sequence[str]
) -> dict[str, Any]:
    """The keyword arguments of `LlavaConfig`."""
    text = part(config, "text_config") or {}
    kind = one_of("text_config.model_type", text.get("model_type", "llama"), TEXT_MODELS)
    options, defaults = TEXT_MODELS[kind]
    inner = {**defaults, **{name: value for name, value in text.items() if value is not None}}
    is_tied = flag(config, "tie_word_embeddings") or flag(inner, "tie_word_embeddings")
    inner["tie_word_embeddings"] = is_tied
    vision = part(config, "vision_config")
    given = CLIP_LARGE if vision is None else vision
    one_of("vision_config.model_type", given.get("model_type", VISION_MODELS[0]), VISION_MODELS)
    tower = VisionConfig.from_hf(given, VISION_DEFAULTS)
    strategy = config.get("vision_feature_select_strategy", "default")
    fields = options.fields(architecture, layered(inner, config))
    return fields | {
        "vision": tower,
        "feature_layers": _feature_layers(config.get("vision_feature_layer", -2), tower.num_layers),
        "keeps_class": one_of("vision_feature_select_strategy", strategy, strategies) == "full",
        "projector_act": one_of(
            "projector_hidden_act", config.get("projector_hidden_act", "gelu"), ACTIVATIONS
        ),
        "projector_bias": flag(config, "multimodal_projector_bias", True),
        "image_token": vocabulary_token(
            config, IMAGE_TOKEN_NAMES, IMAGE_TOKEN, fields["vocab_size"]
        ),
    }


def _feature_layers(given: Any, num_layers: int) -> tuple[int, ...]:
    """The layers that an index, or several, of the tower's hidden states names."""
    field = "vision_feature_layer"
    states = range(num_layers + 1)  # what enters the first layer, then what each gives
    try:
        return tuple(states[one] for one in token_ids(field, given) or (given,))
    except (IndexError, TypeError) as error:
        allowed = f"indices of the {len(states)} hidden states of the tower"
        raise UnsupportedModelError(field, given, allowed) from error
